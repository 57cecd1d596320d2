"""Reading gRPC's context: how long a caller waits, and the headers of its call.

Lives here: making the values of `server.call_facts` from a context. Must not: know any RPC.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from paceline.protos import inference_pb2 as pb
from paceline.scheduler.policy import NEVER
from paceline.server.call_facts import Headers, PassedHeaders, TraceParent, answer_deadline_ns
from paceline.server.codec.parameters import is_reserved
from paceline.server.config import Settings
from paceline.server.errors import InvalidRequest
from paceline.server.rpc.answering import Context
from paceline.server.rpc.restrictions import HEADER_PREFIX

__all__ = [
    "HeaderForwarding",
    "HeaderPassing",
    "add_headers",
    "deadline_of",
    "header",
    "header_rules",
    "traceparent_of",
]


def deadline_of(context: Context) -> int:
    """When an answer has to leave to reach the caller in time, on the monotonic clock."""
    remaining_s = context.time_remaining()
    return NEVER if remaining_s is None else answer_deadline_ns(remaining_s)


def header(context: Context, key: str) -> str:
    """The header's value, the last one if there are several, or "" if there is none."""
    return str(dict(context.invocation_metadata()).get(key, ""))


def traceparent_of(context: Context) -> TraceParent | None:
    """The values of the call's `traceparent` and `tracestate` headers, unparsed; None if there is no `traceparent`."""
    parent, states = "", []
    for key, value in context.invocation_metadata():
        if key == "traceparent":
            parent = str(value)
        elif key == "tracestate":
            states.append(str(value))
    return (parent, ",".join(states)) if parent else None


class HeaderPassing:
    """Which headers are passed on to another server: `headers`, which keep requests with different values apart, and
    `tracing`, which don't. Names are in any case."""

    def __init__(self, headers: Iterable[str], tracing: Iterable[str]) -> None:
        self._headers = frozenset(map(str.lower, headers))
        self._tracing = frozenset(map(str.lower, tracing)) - self._headers

    def passed(self, context: Context) -> PassedHeaders:
        """The headers of a call to pass on, in its order. Raises InvalidRequest for one that can't be sent; a tracing
        header that can't be sent is left out."""
        metadata = context.invocation_metadata()
        headers = _among(metadata, self._headers)
        for key, value in headers:
            if not _can_be_sent(value):
                raise InvalidRequest(f"header '{key}' can't be passed on: expected printable ASCII characters")
        return PassedHeaders(headers, tuple(one for one in _among(metadata, self._tracing) if _can_be_sent(one[1])))


def _among(metadata: Sequence[tuple[str, str | bytes]], names: frozenset[str]) -> Headers:
    return tuple((key, value) for key, value in metadata if key in names)


def _can_be_sent(value: str | bytes) -> bool:
    """Whether gRPC sends this value. It receives more than it sends, and would end the call with its own text, and
    write to stderr."""
    return isinstance(value, bytes) or (value.isascii() and value.isprintable())


class HeaderForwarding:
    """Which headers of a call become parameters of its requests: those in whose names `pattern`, a regular expression,
    is found. gRPC hands names over in lower case."""

    def __init__(self, pattern: str) -> None:
        self._pattern = re.compile(pattern)

    def headers(self, context: Context) -> dict[str, str]:
        """The headers to forward. The values of a repeated header are joined by commas, as in gRPC. Headers with bytes
        are left out, since a parameter is text, and so are credentials.

        Raises InvalidRequest for a name that is reserved for parameters: a header must not set priorities.
        """
        found: dict[str, str] = {}
        for key, value in context.invocation_metadata():
            if not isinstance(value, str) or _is_secret(key) or not self._pattern.search(key):
                continue
            if is_reserved(key):
                raise InvalidRequest(f"header '{key}' is reserved and can't be forwarded as a parameter")
            found[key] = f"{found[key]},{value}" if key in found else value
        return found


def header_rules(settings: Settings) -> tuple[HeaderForwarding | None, HeaderPassing | None]:
    """Which headers become parameters, and which are passed on to another server; None where none are."""
    pattern, upstream = settings.grpc_header_forward_pattern, settings.upstream
    return (
        HeaderForwarding(pattern) if pattern else None,
        HeaderPassing(upstream.headers, upstream.tracing_headers) if upstream else None,
    )


def _is_secret(key: str) -> bool:
    """Whether a header is for this server alone; parameters are seen by others, such as backends."""
    return key == "authorization" or key.startswith(HEADER_PREFIX)


def add_headers(request: pb.ModelInferRequest, headers: Mapping[str, str]) -> None:
    """Add `headers` to the parameters of `request`. They override existing ones: a proxy sets headers, its clients
    don't."""
    for key, value in headers.items():
        request.parameters[key].string_param = value
