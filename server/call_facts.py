"""What is known of a call besides its messages: its headers, the trace that it belongs to.

Lives here: these values. Must not: know gRPC, which `server.rpc.calls` reads them from.
"""

from __future__ import annotations

from typing import NamedTuple

Headers = tuple[tuple[str, str | bytes], ...]

TraceParent = tuple[str, str]
"""Where a request comes from, in W3C's trace context: the values of `traceparent` and `tracestate`."""


class PassedHeaders(NamedTuple):
    """Headers to send to another server: `headers` keep requests apart, `tracing` merely accompanies them."""

    headers: Headers = ()
    tracing: Headers = ()


NO_PASSED_HEADERS = PassedHeaders()
