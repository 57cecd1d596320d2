"""Waiting for what happens elsewhere: by polling until a condition holds, never by a fixed sleep.

Lives here: the one bounded loop that tests may wait in.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

__all__ = ["eventually", "eventually_async", "eventually_awaited"]

_PAUSE_S = 0.005


def eventually(holds: Callable[[], object], what: str, timeout_s: float = 20) -> None:
    """Return as soon as `holds()` is true; AssertionError naming `what` if it isn't within `timeout_s`."""
    until_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < until_s, f"within {timeout_s} s expected: {what}"
        time.sleep(_PAUSE_S)


async def eventually_async(holds: Callable[[], object], what: str, timeout_s: float = 20) -> None:
    """The same for tests on an event loop, which keeps running meanwhile."""
    until_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < until_s, f"within {timeout_s} s expected: {what}"
        await asyncio.sleep(_PAUSE_S)


async def eventually_awaited(holds: Callable[[], Awaitable[object]], what: str, timeout_s: float = 20) -> None:
    """The same for conditions that take a call to find out, such as what a server reports."""
    until_s = time.monotonic() + timeout_s
    while not await holds():
        assert time.monotonic() < until_s, f"within {timeout_s} s expected: {what}"
        await asyncio.sleep(_PAUSE_S)
