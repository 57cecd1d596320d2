"""What is known of a call besides its messages: its caller's deadline, its headers, the trace that it belongs to.

Lives here: these values. Must not: know gRPC, which `server.rpc.calls` reads them from.
"""

from __future__ import annotations

import time
from typing import NamedTuple

__all__ = ["NO_PASSED_HEADERS", "Headers", "PassedHeaders", "TraceParent", "answer_deadline_ns"]

Headers = tuple[tuple[str, str | bytes], ...]

TraceParent = tuple[str, str]
"""Where a request comes from, in W3C's trace context: the values of `traceparent` and `tracestate`."""

# A deadline on the wire doesn't include the travel time of request and answer, nor how long the request waited in front
# of a server that reads no faster, and an answer sent at the last moment is computed for nobody. At ten times the load
# a model can bear, with deadlines of 1 s for batches of 80 ms (python -m bench.overload), a share of at most 10 ms let
# 0.70 of the capacity arrive in time, a twentieth 0.8, and a tenth 0.96.
_WAY_BACK = 0.1
_LONGEST_WAY_BACK_S = 0.1


def answer_deadline_ns(remaining_s: float, began_ns: int = 0) -> int:
    """When an answer must leave, in monotonic ns, to reach a caller that gives up `remaining_s` after `began_ns` (0:
    after now)."""
    way_back_s = min(_WAY_BACK * remaining_s, _LONGEST_WAY_BACK_S)
    return (began_ns or time.monotonic_ns()) + int((remaining_s - way_back_s) * 1e9)


class PassedHeaders(NamedTuple):
    """Headers to send to another server: `headers` keep requests apart, `tracing` merely accompanies them."""

    headers: Headers = ()
    tracing: Headers = ()


NO_PASSED_HEADERS = PassedHeaders()
