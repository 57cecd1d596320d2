"""The threads that instances are made on, which only their callers wait for."""

from __future__ import annotations

import asyncio
import threading

import pytest

from paceline.server.models.instances import _on_a_thread


async def test_thread_continues_silently_when_its_caller_is_cancelled() -> None:
    begun, go, threads = threading.Event(), threading.Event(), list[threading.Thread]()

    def work() -> None:
        threads.append(threading.current_thread())
        begun.set()
        assert go.wait(20)
        raise ValueError("too late")

    waiting = asyncio.create_task(_on_a_thread(work))
    await asyncio.to_thread(begun.wait, 20)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    go.set()
    await asyncio.to_thread(threads[0].join, 20)
    assert not threads[0].is_alive()


async def test_what_the_thread_raises_or_returns_reaches_the_caller() -> None:
    def work() -> int:
        raise ValueError("no good")

    with pytest.raises(ValueError, match="no good"):
        await _on_a_thread(work)
    assert await _on_a_thread(lambda: 5) == 5
