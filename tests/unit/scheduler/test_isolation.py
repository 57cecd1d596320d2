"""One poisoned row among good ones, orders of answers, and facts about batches: what callers get from the batcher."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from scheduler.errors import DeadlineUnreachable, ExecutionFailed, QueueTimeout
from scheduler.isolation import Blame, budget_for
from scheduler.observer import Drop
from scheduler.policy import BatchPolicy
from tests.unit.scheduler.workbench import Bench, one_turn

MS = 1_000_000


class SearchBench(Bench):
    """Runs what is poisoned."""

    async def measure(self, duration_ns: int) -> None:
        """Let the batcher learn what one row takes."""
        for _ in range(3):
            await self.submit("x")
            self.clock.advance(duration_ns)
            self.runner.finish(str.upper)

    def run_all(self, poison: str = "!") -> int:
        """Let batches run until none is left; one with poison in it fails. How many ran."""
        runs = 0
        while self.runner.busy:
            runs += 1
            assert runs < 1_000
            if any(poison in payload for payload in self.runner.batches[-1]):
                self.runner.fail(ValueError(f"poisoned: {self.runner.batches[-1]}"))
            else:
                self.runner.finish(str.upper)
        return runs


def outcomes(futures: Sequence[asyncio.Future[str]]) -> list[str]:
    return ["failed" if future.exception() else future.result() for future in futures]


@pytest.mark.parametrize("place", [0, 13, 31])
async def test_one_poisoned_row_among_31_good_ones_fails_alone_within_the_budget(place: int) -> None:
    bench = SearchBench(BatchPolicy(max_batch_rows=32))
    payloads = [f"p{number}" for number in range(32)]
    payloads[place] = "bad!"
    futures = await bench.submit(*payloads)
    assert bench.run_all() == 1 + 2 * 5
    assert outcomes(futures) == ["failed" if "!" in payload else payload.upper() for payload in payloads]
    assert sum(report.failed for report in bench.seen.reports) == 1
    bench.batcher.close()


async def test_two_poisoned_rows_fail_alone() -> None:
    bench = SearchBench(BatchPolicy(max_batch_rows=32))
    payloads = [f"p{number}!" if number in (3, 20) else f"p{number}" for number in range(32)]
    futures = await bench.submit(*payloads)
    bench.run_all()
    assert outcomes(futures).count("failed") == 2
    bench.batcher.close()


async def test_poison_everywhere_stops_at_the_budget_and_everybody_is_answered() -> None:
    bench = SearchBench(BatchPolicy(max_batch_rows=32))
    futures = await bench.submit(*[f"p{number}!" for number in range(32)])
    assert bench.run_all() <= 1 + budget_for(32)
    assert outcomes(futures) == ["failed"] * 32
    assert sum(report.failed for report in bench.seen.reports) == 32
    bench.batcher.close()


async def test_isolation_names_each_culprit_with_its_own_error() -> None:
    bench = SearchBench(BatchPolicy(max_batch_rows=4))
    futures = await bench.submit("a", "b!", "c", "d")
    bench.run_all()
    with pytest.raises(ExecutionFailed, match=r"poisoned: \['b!'\]"):
        await futures[1]
    bench.batcher.close()


@pytest.mark.parametrize("off", ["policy", "error"])
async def test_isolation_switched_off_or_for_an_error_of_the_whole_session_fails_all_at_once(off: str) -> None:
    bench = SearchBench(
        BatchPolicy(max_batch_rows=4, isolate_failures=off != "policy"),
        blames=lambda error: Blame.NOBODY if isinstance(error, MemoryError) else Blame.REQUESTS,
    )
    futures = await bench.submit("a", "b")
    bench.runner.fail(MemoryError() if off == "error" else ValueError("x"))
    assert not bench.runner.busy
    assert outcomes(futures) == ["failed", "failed"]
    assert str(futures[0].exception()) in ("MemoryError", "x")
    bench.batcher.close()


async def test_isolation_leaves_out_who_has_gone_or_is_late_meanwhile() -> None:
    bench = SearchBench(BatchPolicy(max_batch_rows=4))
    late = bench.batcher.submit("late", 1, "k", rpc_deadline_ns=bench.clock.now_ns() + MS)
    gone, good = await bench.submit("gone", "good")
    gone.cancel()
    bench.clock.advance(MS)
    bench.runner.fail(ValueError("x"))
    bench.run_all()
    with pytest.raises(QueueTimeout):
        await late
    assert await good == "GOOD"
    assert bench.runner.batches[1:] == [["good"]]
    bench.batcher.close()


async def test_drain_waits_for_the_search_for_culprits() -> None:
    bench = SearchBench(BatchPolicy(max_batch_rows=4))
    futures = await bench.submit("a", "b!")
    drained = asyncio.create_task(bench.batcher.drain())
    bench.runner.fail(ValueError("x"))
    await one_turn()
    assert not drained.done()
    bench.run_all()
    await drained
    assert outcomes(futures) == ["A", "failed"]
    bench.batcher.close()


async def test_close_during_the_search_answers_everybody() -> None:
    bench = SearchBench(BatchPolicy(max_batch_rows=4))
    futures = await bench.submit("a", "b", "c", "d")
    bench.runner.fail(ValueError("x"))
    bench.batcher.close()
    assert outcomes(futures) == ["failed"] * 4


async def test_preserve_ordering_with_two_instances_answers_in_order_of_arrival() -> None:
    bench = SearchBench(BatchPolicy(max_batch_rows=1, preserve_ordering=True), instances=2)
    order: list[str] = []
    futures = await bench.submit("a", "b", "c")
    for name, future in zip("abc", futures, strict=True):
        future.add_done_callback(lambda _, name=name: order.append(name))
    first, second = bench.runners
    second.finish(str.upper)
    await one_turn()
    assert not any(future.done() for future in futures[:2])
    first.finish(str.upper)
    await one_turn()
    assert order == ["a", "b"]
    (busy,) = (runner for runner in bench.runners if runner.busy)
    busy.finish(str.upper)
    await one_turn()
    assert order == ["a", "b", "c"]
    bench.batcher.close()


async def test_preserve_ordering_is_not_held_up_by_a_cancelled_or_failed_predecessor() -> None:
    bench = SearchBench(BatchPolicy(max_batch_rows=1, preserve_ordering=True), instances=3)
    gone, failed, good = await bench.submit("gone", "failed", "good")
    bench.runners[2].finish(str.upper)
    bench.runners[1].fail(ValueError("x"))
    await one_turn()
    assert not good.done()
    gone.cancel()
    await one_turn()
    assert outcomes([failed, good]) == ["failed", "GOOD"]
    bench.batcher.close()


async def test_facts_tell_batch_rows_padding_and_times() -> None:
    bench = SearchBench(BatchPolicy(max_batch_rows=4, batch_sizes=(2, 4)))
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


async def test_deadline_that_cannot_be_met_is_refused_and_counted() -> None:
    bench = SearchBench(BatchPolicy(max_batch_rows=4))
    await bench.measure(10 * MS)
    with pytest.raises(DeadlineUnreachable):
        bench.batcher.submit("b", 1, "k", rpc_deadline_ns=bench.clock.now_ns() + MS)
    assert bench.seen.count(Drop.UNREACHABLE) == 1
    bench.batcher.close()


async def test_deadline_that_cannot_be_met_any_more_is_given_up_instead_of_executed() -> None:
    bench = SearchBench(BatchPolicy(max_batch_rows=4))
    await bench.measure(10 * MS)
    await bench.submit("a")
    doomed = bench.batcher.submit("b", 1, "k", rpc_deadline_ns=bench.clock.now_ns() + 25 * MS)
    bench.clock.advance(16 * MS)
    bench.runner.finish(str.upper)
    with pytest.raises(DeadlineUnreachable):
        await doomed
    assert not bench.runner.busy
    bench.batcher.close()
