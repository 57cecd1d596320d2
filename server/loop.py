"""The event loop that every process of ours runs on.

Lives here: choosing it, and how threads share the interpreter with it. Must not: anything that runs there.
"""

from __future__ import annotations

import asyncio

__all__ = ["SWITCH_INTERVAL_S", "new_loop"]

# A runner that returns from native code waits this long for the event loop to release the interpreter lock. Python's
# 5 ms are as long as many a batch: with 64 clients on the benchmark's perceptron, 0.5 ms answered 13 % more requests.
SWITCH_INTERVAL_S = 0.0005


def new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not available on every platform
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
