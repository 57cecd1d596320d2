"""What callers and observers get of a batch: results, an error for each request, facts, reports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from paceline.scheduler.errors import ExecutionFailed, QueueTimeout
from paceline.scheduler.observer import Drop
from paceline.scheduler.policy import BatchPolicy, QueuePolicy
from tests.unit.scheduler.workbench import Bench, nothing_to_collect, one_turn, submit

MS = 1_000_000


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench(BatchPolicy(max_batch_rows=4))
    yield bench
    bench.batcher.close()


async def test_facts_have_batch_number_rows_padding_and_times() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=4, batch_sizes=(2, 4)))
    futures = await bench.submit("a", "b", "c")
    bench.clock.advance(5)
    bench.runner.finish(str.upper)
    facts = [future.facts for future in futures]
    assert all(fact == facts[0] for fact in facts)
    assert facts[0] is not None
    assert (facts[0].number, facts[0].rows, facts[0].padded_rows) == (1, 3, 4)
    assert (facts[0].queue_ns, facts[0].compute_ns) == (0, 5)
    assert bench.runner.padded_rows == [4]
    bench.batcher.close()


async def test_facts_come_with_the_result_and_have_the_wait_of_each_request(bench: Bench) -> None:
    (first,) = await bench.submit("a")
    (second,) = await bench.submit("b")
    bench.clock.advance(7)
    (third,) = await bench.submit("c")
    assert first.facts is None
    for _ in range(2):
        bench.clock.advance(2)
        bench.runner.finish(str.upper)
        await one_turn()
    assert [one.facts.queue_ns for one in (first, second, third) if one.facts] == [0, 9, 2]


@pytest.mark.parametrize("told", [False, True])
async def test_dropped_request_leaves_no_cycle_for_the_garbage_collector(told: bool) -> None:
    bench = Bench(BatchPolicy(max_batch_rows=1, queue=QueuePolicy(default_timeout_ns=MS)))
    await bench.submit("runs")
    with nothing_to_collect():
        (late,) = await bench.submit("late")
        if told:
            late.on_answers = [late].extend
        bench.clock.advance(MS)
        assert isinstance(late.exception(), QueueTimeout)
        await one_turn()
        del late
    bench.batcher.close()


async def test_exception_in_place_of_a_result_fails_only_its_request(bench: Bench) -> None:
    futures = bench.put("a", "b", "c")
    await one_turn()
    refused = ValueError("not this one")
    bench.runner.finish(lambda payload: refused if payload == "b" else payload.upper())  # type: ignore[arg-type,return-value]
    assert await asyncio.gather(*futures, return_exceptions=True) == ["A", refused, "C"]
    assert [(one.answered, one.refused) for one in futures] == [(True, False), (False, True), (True, False)]
    assert bench.runner.batches == [["a", "b", "c"]]
    assert bench.batcher.waiting_requests == 0
    (report,) = bench.seen.reports
    assert (len(report.waits_ns), report.failed, report.cancelled) == (2, 1, 0)


async def test_each_request_of_a_failed_batch_gets_its_own_exception(bench: Bench) -> None:
    futures = bench.put("a", "b")
    await one_turn()
    for _ in range(3):
        bench.runner.fail(RuntimeError("bad weights"))
    errors = await asyncio.gather(*futures, return_exceptions=True)
    assert all(isinstance(error, ExecutionFailed) and str(error) == "bad weights" for error in errors)
    assert errors[0] is not errors[1]
    assert [report.failed for report in bench.seen.reports] == [0, 1, 1]
    again = bench.put("c")
    await one_turn()
    bench.runner.finish(str.upper)
    assert await again[0] == "C"


async def test_report_has_the_requests_of_its_batch_and_their_tags(bench: Bench) -> None:
    first = submit(bench.batcher, "a", 1, "k", tag="mine")
    second = submit(bench.batcher, "b", 2, "k")
    await one_turn()
    bench.runner.finish(str.upper)
    assert await asyncio.gather(first, second) == ["A", "B"]
    (report,) = bench.seen.reports
    assert report.number == 1
    assert [(request.tag, request.rows) for request in report.requests] == [("mine", 1), (None, 2)]


class Broken:
    """An observer whose methods raise."""

    def on_drop(self, drop: Drop) -> None:
        raise ValueError("no counter")

    def on_batch(self, report: object) -> None:
        raise ValueError("no counter")


class Unspeakable(Exception):
    """An error whose text can't be made."""

    def __str__(self) -> str:
        raise ValueError("no words")


async def test_raising_observer_loses_no_request() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=1, queue=QueuePolicy(default_timeout_ns=MS)), observer=Broken())
    (runs,) = await bench.submit("runs")
    late = await bench.submit("late", "late")
    bench.clock.advance(MS)
    bench.runner.finish(str.upper)
    assert await runs == "RUNS"
    assert all(isinstance(one.exception(), QueueTimeout) for one in late)
    bench.batcher.close()


async def test_error_whose_text_cannot_be_made_still_fails_its_request() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=1))
    (future,) = bench.put("a")
    await one_turn()
    bench.runner.fail(Unspeakable())
    with pytest.raises(ExecutionFailed, match="Unspeakable"):
        await future
    bench.batcher.close()
