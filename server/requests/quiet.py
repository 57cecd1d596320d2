"""When to have gRPC's server stop: once calls have ceased.

Lives here: the waiting. Must not: know what is refused, or by whom.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

__all__ = ["TRY_AGAIN_MS", "until_quiet"]

TRY_AGAIN_MS = 300
"""What a server that stops says to clients that try again by gRPC's `retryPolicy`. With pauses of their own they
would spend their attempts, of which gRPC allows five, before it has told their connection to go. So they spend four at
most."""

_PAUSE_S = 0.05
_LONGEST_S = 1.0


async def until_quiet(arrivals: Callable[[], int]) -> None:
    """Return when nothing has arrived for a moment, going by the count of what has, or after a second.

    gRPC's server cancels what crosses with its GOAWAY, or has arrived and isn't taken up when it stops: CANCELLED, for
    no doing of the caller's, whose client doesn't try elsewhere. Those who are refused before that come again after
    `TRY_AGAIN_MS`, so that it is quiet soon where callers wait for answers.

    A pause that lasted much longer than it should says nothing: what has arrived meanwhile isn't counted yet.
    """
    until_s = time.monotonic() + _LONGEST_S
    first = seen = arrivals()
    quiet = 0
    while quiet < (1 if seen == first else 2) and time.monotonic() < until_s:
        before, began_s = seen, time.monotonic()
        await asyncio.sleep(_PAUSE_S)
        seen = arrivals()
        quiet = quiet + 1 if seen == before and time.monotonic() - began_s < 2 * _PAUSE_S else 0
