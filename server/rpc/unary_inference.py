"""`ModelInfer`: a request with its own call.

Lives here: what is read from the call, in a server of one process and in a front. Must not: the steps of a request,
which are in `server.requests.inference` or `server.fronts.inference`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from paceline.server.call_facts import NO_PASSED_HEADERS
from paceline.server.codec.wire_request import AnyMessage, message_of
from paceline.server.requests.in_flight import Call, InferenceSteps
from paceline.server.rpc.calls import Context, HeaderRules, add_headers, answering, traceparent_of


class UnaryInference:
    """The RPC."""

    extensions: Sequence[str] = ()

    def __init__(self, inference: InferenceSteps, rules: HeaderRules) -> None:
        self._inference = inference
        self._rules = rules

    # hot path: see bench/
    @answering
    def ModelInfer(self, request: AnyMessage, context: Context) -> Awaitable[bytes]:
        rules = self._rules
        if rules.forwards:
            request = message_of(request)
            add_headers(request, rules.forwarded(context))
        parent = traceparent_of(context) if self._inference.reads_parents else None
        passed = rules.passed(context) if rules.passes else NO_PASSED_HEADERS
        return Call(self._inference, request, context.time_remaining(), parent, passed).response()
