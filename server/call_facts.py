"""What is known of a call besides its messages: its caller's deadline, its headers, the trace that it belongs to.

Lives here: these values. Must not: know gRPC, which `server.rpc.calls` reads them from.
"""

from __future__ import annotations

import time
from typing import NamedTuple

__all__ = ["NOTHING_SENT", "Headers", "Sent", "TraceParent", "leaves_by"]

Headers = tuple[tuple[str, str | bytes], ...]

TraceParent = tuple[str, str]
"""Where a request comes from, as W3C's trace context says it: the values of `traceparent` and `tracestate`."""

# What a deadline on the wire doesn't tell is how long request and answer travel, nor how long the request waited in
# front of a server that reads no faster, and what is answered in the nick of time is computed for nobody. At ten times
# the load a model can bear, with deadlines of 1 s for batches of 80 ms (python -m bench.overload), a share of at most
# 10 ms let 0.70 of the capacity arrive in time, a twentieth 0.8, and a tenth 0.96.
_WAY_BACK = 0.1
_LONGEST_WAY_BACK_S = 0.1


def leaves_by(remaining_s: float, began_ns: int = 0) -> int:
    """When an answer has to leave, on the monotonic clock, to a caller who gives up so long from `began_ns` (0: from
    now)."""
    way_back_s = min(_WAY_BACK * remaining_s, _LONGEST_WAY_BACK_S)
    return (began_ns or time.monotonic_ns()) + int((remaining_s - way_back_s) * 1e9)


class Sent(NamedTuple):
    """Headers of a call for another server: those that keep requests apart, and those that merely accompany them."""

    headers: Headers = ()
    tracing: Headers = ()


NOTHING_SENT = Sent()
