"""Full queues, timeouts, cancellation: `slow` takes a second for two rows, and lets two requests wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.differential.comparing import Call, answer_of
from tests.differential.messages import floats, infer
from tests.differential.pair import Both, One
from tests.differential.test_counts import counts
from tests.polling import eventually

TWO = {"INPUT0": floats(2, 3)}


@pytest.fixture(params=["triton", "here"])
def one(request: pytest.FixtureRequest, both: Both) -> One:
    """Either server."""
    found: One = getattr(both, request.param)
    return found


def send(one: One, **parameters: object) -> Any:
    stub = GRPCInferenceServiceStub(one.channel)  # type: ignore[no-untyped-call]
    return stub.ModelInfer.future(infer("slow", TWO, parameters=parameters), timeout=60)


@contextmanager
def busy(one: One, waiting: int) -> Iterator[None]:
    """Within the block, the model executes, and so many requests wait; all of them are answered at the end."""
    calls = [send(one)]
    for number in range(waiting):
        # The first one is taken from the queue before the second may be pending.
        calls.append(send(one))
        eventually(lambda number=number: pending(one) == number + 1, "a request that waits")
    yield
    for call in calls:
        call.result()


def pending(one: One) -> int:
    return counts(one, "slow")["nv_pending_request_count"]


def status(call: Any) -> str:
    error = call.exception()
    return "OK" if error is None else str(error.code().name)


def test_full_queue_refuses_while_another_level_has_room(one: One, both: Both) -> None:
    with busy(one, 2):
        refused = answer_of(one.channel, Call("", infer("slow", TWO)))
        other = send(one, priority=1)
        assert "Exceeds maximum queue size" in refused.text
        assert refused.status == ("UNAVAILABLE" if one is both.triton else "RESOURCE_EXHAUSTED")
        assert status(other) == "OK"


def test_request_waiting_longer_than_its_timeout_is_refused(one: One, both: Both) -> None:
    with busy(one, 1):
        late = send(one, timeout=1000)
        assert status(late) == ("UNAVAILABLE" if one is both.triton else "DEADLINE_EXCEEDED")
        assert "Request timeout expired" in late.exception().details()


def test_request_cancelled_while_it_waits_is_not_executed(one: One) -> None:
    before = counts(one, "slow")
    with busy(one, 1):
        call = send(one)
        eventually(lambda: pending(one) == 2, "two that wait")
        call.cancel()
    eventually(lambda: (counts(one, "slow") - before)["nv_request_failure CANCELED"] == 1, "one cancelled")
    eventually(lambda: (counts(one, "slow") - before)["executions"] == 2, "those of the two others")


def test_requests_are_answered_in_order_of_priority(one: One) -> None:
    done: list[int] = []
    with busy(one, 1):
        calls = [send(one, priority=level) for level in (3, 1)]
        for level, call in zip((3, 1), calls, strict=True):
            call.add_done_callback(lambda _, level=level: done.append(level))
        eventually(lambda: len(done) == 2, "both answers")
    assert done == [1, 3]


def test_deadline_ends_the_call(one: One) -> None:
    with busy(one, 1):
        assert answer_of(one.channel, Call("", infer("slow", TWO), timeout_s=0.2)).status == "DEADLINE_EXCEEDED"
