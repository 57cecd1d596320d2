"""When to stop gRPC's server: once hardly any calls arrive.

Lives here: the waiting. Must not: know what is refused, or by whom.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

__all__ = ["TRY_AGAIN_MS", "until_quiet"]

TRY_AGAIN_MS = 300
"""How long a stopping server has clients wait that retry by gRPC's `retryPolicy`. With their own pauses they would use
up their attempts, of which gRPC allows five, before the server has told their connection to go. This way they use up
four at most."""

_PAUSE_S = 0.05
_LONGEST_S = 1.0


async def until_quiet(arrivals: Callable[[], int]) -> None:
    """Return when nothing has arrived for a moment, by the count that `arrivals` returns, or after a second.

    gRPC's server cancels calls that cross with its GOAWAY, or that have arrived but aren't taken up when it stops: they
    end with CANCELLED, through no fault of the caller, whose client doesn't try elsewhere. Callers that are refused
    before that come back after `TRY_AGAIN_MS`, so it is quiet soon where callers wait for answers.

    A pause that lasted much longer than it should proves nothing: what arrived meanwhile isn't counted yet.
    """
    until_s = time.monotonic() + _LONGEST_S
    first = seen = arrivals()
    quiet = 0
    while quiet < (1 if seen == first else 2) and time.monotonic() < until_s:
        before, began_s = seen, time.monotonic()
        await asyncio.sleep(_PAUSE_S)
        seen = arrivals()
        quiet = quiet + 1 if seen == before and time.monotonic() - began_s < 2 * _PAUSE_S else 0
