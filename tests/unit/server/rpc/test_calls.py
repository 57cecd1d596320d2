"""What calls bring: headers that become parameters or are passed on, traces, and how long the caller waits."""

from __future__ import annotations

import time

import pytest

from paceline.protos import inference_pb2 as pb
from paceline.scheduler.policy import NEVER
from paceline.server.call_facts import PassedHeaders
from paceline.server.errors import InvalidRequest
from paceline.server.rpc.calls import HeaderRules, add_headers, deadline_of, traceparent_of
from paceline.server.rpc.credentials import HEADER_PREFIX


class Context:
    """A call with these headers, as gRPC gives them: in lower case, values of keys ending in -bin as bytes."""

    def __init__(self, *metadata: tuple[str, str | bytes]) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return self._metadata


CALL = Context(("x-tenant", "a"), ("user-agent", "me"), ("x-more", "1"), ("x-more", "2"), ("x-data-bin", b"\xff"))


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("^x-", {"x-tenant": "a", "x-more": "1,2"}),
        ("tenant", {"x-tenant": "a"}),
        ("agent$", {"user-agent": "me"}),
        ("^(x-tenant|user-agent)$", {"x-tenant": "a", "user-agent": "me"}),
        ("X-", {}),
        ("(?i)X-TEN", {"x-tenant": "a"}),
        (".*", {"x-tenant": "a", "user-agent": "me", "x-more": "1,2"}),
        ("-bin", {}),
    ],
)
def test_forward_takes_headers_whose_names_contain_the_pattern(pattern: str, found: dict[str, str]) -> None:
    assert HeaderRules(pattern).forwarded(CALL) == found


@pytest.mark.parametrize("name", ["timeout", "priority", "sequence_id", "headers", "triton_grpc_error", "paceline_x"])
def test_forward_of_a_reserved_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        HeaderRules(".*").forwarded(Context((name, "1")))
    assert str(caught.value) == f"header '{name}' is reserved and can't be forwarded as a parameter"
    assert HeaderRules("^x-").forwarded(Context((name, "1"))) == {}


@pytest.mark.parametrize("name", ["authorization", f"{HEADER_PREFIX}inference"])
def test_forward_leaves_out_headers_only_for_this_server(name: str) -> None:
    assert HeaderRules(".*").forwarded(Context((name, "secret"), ("x-tenant", "a"))) == {"x-tenant": "a"}


def test_passed_on_headers_of_given_names_keep_the_calls_order_and_traces_are_separate() -> None:
    passing = HeaderRules("", ("X-More", "x-data-bin", "x-tenant"), ("TraceParent", "x-tenant"))
    call = Context(*CALL.invocation_metadata(), ("traceparent", "1"))
    headers = ("x-tenant", "a"), ("x-more", "1"), ("x-more", "2"), ("x-data-bin", b"\xff")
    assert passing.passed(call) == PassedHeaders(headers, (("traceparent", "1"),))


@pytest.mark.parametrize("value", ["\N{SNOWMAN}", "a\x7f", "a\nb"], ids=["not ASCII", "delete", "line"])
def test_unsendable_headers_are_refused_and_unsendable_traces_left_out(value: str) -> None:
    passing = HeaderRules("", ("x-tenant",), ("traceparent",))
    assert passing.passed(Context(("traceparent", value), ("x-tenant", "a"))) == PassedHeaders((("x-tenant", "a"),), ())
    with pytest.raises(InvalidRequest, match=r"^header 'x-tenant' can't be passed on: expected printable ASCII"):
        passing.passed(Context(("x-tenant", value)))


def test_trace_is_read_from_its_headers_whatever_is_between_them() -> None:
    states = ("tracestate", "a=1"), ("tracestate", "b=2")
    call = Context(("x-before", "no"), ("traceparent", "1"), states[0], ("x-behind", "no"), states[1])
    assert traceparent_of(call) == ("1", "a=1,b=2")
    assert traceparent_of(Context(*states)) is None


def test_add_headers_overrides_parameters_of_the_request() -> None:
    request = pb.ModelInferRequest()
    request.parameters["x-tenant"].int64_param = 7
    request.parameters["mine"].bool_param = True
    add_headers(request, {"x-tenant": "a"})
    assert request.parameters["x-tenant"] == pb.InferParameter(string_param="a")
    assert request.parameters["mine"].bool_param


class Remaining:
    """The part of gRPC's context that tells the time left."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds

    def time_remaining(self) -> float | None:
        return self._seconds


@pytest.mark.parametrize(("remaining_s", "way_back_s"), [(0.1, 0.01), (0.2, 0.02), (1_000.0, 0.1)])
def test_deadline_leaves_a_tenth_for_the_response(remaining_s: float, way_back_s: float) -> None:
    before_ns = time.monotonic_ns()
    deadline_ns = deadline_of(Remaining(remaining_s))
    left_ns = int((remaining_s - way_back_s) * 1e9)
    assert before_ns + left_ns <= deadline_ns <= time.monotonic_ns() + left_ns


def test_deadline_of_a_call_without_one_is_never() -> None:
    assert deadline_of(Remaining(None)) == NEVER
