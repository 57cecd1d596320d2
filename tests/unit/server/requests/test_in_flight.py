"""Requests in flight whose callers leave, at whatever moment."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.backends.base import Execution
from paceline.backends.errors import ExecutionError
from paceline.protos import inference_pb2 as pb
from paceline.scheduler.batcher import Batcher
from paceline.scheduler.policy import NEVER, BatchPolicy
from paceline.scheduler.request import BatchFacts
from paceline.scheduler.testing import ManualClock, StepRunner
from paceline.server.call_facts import NO_PASSED_HEADERS
from paceline.server.models.repository import Repository
from paceline.server.requests.in_flight import InFlight
from paceline.server.requests.inference import Inference
from paceline.server.requests.parts import Parts
from paceline.server.telemetry.metrics import Metrics
from paceline.server.telemetry.model_statistics import VersionStatistics
from tests.wire import rows_of_floats


@pytest.mark.parametrize("turns", range(5))
async def test_split_request_given_up_as_one_of_its_parts_fails_leaves_no_unhandled_error(turns: int) -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    inference = Inference(Repository(Metrics(), lambda name: pytest.fail("nothing is loaded here")))
    clock = ManualClock(now_ns=1)
    runner: StepRunner[Any, Any] = StepRunner(clock)
    batcher: Batcher[Any, Any] = Batcher(BatchPolicy(max_batch_rows=4, isolate_failures=False), [runner], clock=clock)
    batcher.start()
    flight = InFlight(pb.ModelInferRequest(), NEVER, None, NO_PASSED_HEADERS)
    flight.rows, flight.payload = 8, (rows_of_floats(8),)
    whole = Parts(flight, batcher).task
    while not runner.busy:
        await asyncio.sleep(0)
    runner.fail(ExecutionError("bad part"))
    for _ in range(turns):
        await asyncio.sleep(0)
    inference.give_up(flight)
    await asyncio.wait([whole])
    del whole, flight
    batcher.close()
    gc.collect()
    assert complaints == []


@pytest.mark.parametrize("fails", [False, True])
def test_request_let_go_holds_no_results_and_no_error(fails: bool) -> None:
    flight = InFlight(pb.ModelInferRequest(), NEVER, None, NO_PASSED_HEADERS)
    results, error = [rows_of_floats(2)], ExecutionError("bad")
    left = [weakref.ref(results[0]), weakref.ref(error)]
    if fails:
        flight.fail(error)
    else:
        flight.succeed(results)
    flight.batch_facts = BatchFacts(1, 2, 2, 0, 0, 0, Execution([results], 0, 0, 0))
    del results, error
    flight.let_go()
    assert [one() for one in left] == [None, None]


class Ended(InFlight):
    """A request that keeps why it has failed."""

    __slots__ = ("error",)

    error: BaseException | None

    def on_failure(self, error: BaseException) -> None:
        self.error = error


def test_answers_that_fail_together_are_made_one_by_one() -> None:
    inference = Inference(Repository(Metrics(), lambda name: pytest.fail("nothing is loaded here")))
    statistics = VersionStatistics()
    flights = [Ended(pb.ModelInferRequest(id=str(number)), NEVER, None, NO_PASSED_HEADERS) for number in range(3)]
    for flight in flights:
        flight.model, flight.error = SimpleNamespace(statistics=statistics, name="m", version="1"), None
        flight.succeed([rows_of_floats(1)])

    def answer(several: Sequence[Ended]) -> list[Exception | None]:
        if any(one.message.id == "1" for one in several):
            raise MemoryError("no room")
        for one in several:
            one.answer = b"made"
        return [None] * len(several)

    inference.conclude(flights, answer)
    assert [flight.answer for flight in flights] == [b"made", None, b"made"]
    assert [type(flight.error) for flight in flights] == [type(None), MemoryError, type(None)]
    assert (statistics.requests.count, statistics.failed) == (2, 1)
