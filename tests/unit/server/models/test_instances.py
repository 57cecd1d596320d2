"""The threads that instances are made on, which only their callers wait for."""

from __future__ import annotations

import asyncio
import threading

import pytest

from paceline.server.models.load_queue import submit


async def test_thread_continues_silently_when_its_caller_is_cancelled() -> None:
    begun, go, threads = threading.Event(), threading.Event(), list[threading.Thread]()

    def work() -> None:
        threads.append(threading.current_thread())
        begun.set()
        assert go.wait(20)
        raise ValueError("too late")

    waiting = asyncio.wrap_future(submit(work))
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
        await asyncio.wrap_future(submit(work))
    assert await asyncio.wrap_future(submit(lambda: 5)) == 5
