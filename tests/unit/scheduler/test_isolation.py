"""Poisoned rows among good ones: which requests fail, and how many executions it takes to find them."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from paceline.scheduler import failures
from paceline.scheduler.errors import ExecutionFailed, QueueTimeout
from paceline.scheduler.failures import Blame, Search, Suspects, budget_for
from paceline.scheduler.observer import Drop
from paceline.scheduler.policy import BatchPolicy
from paceline.scheduler.request import Request
from tests.unit.scheduler.workbench import Bench, one_turn, submit

MS = 1_000_000


class PoisonBench(Bench):
    """Runs batches that may have poisoned requests."""

    def run_all(self, poison: str = "!") -> int:
        """Run all batches; those with a poisoned request fail. Returns how many ran."""
        runs = 0
        while self.runner.busy:
            runs += 1
            assert runs < 1_000
            if any(poison in payload for payload in self.runner.batches[-1]):
                self.runner.fail(ValueError(f"poisoned: {self.runner.batches[-1]}"))
            else:
                self.runner.finish(str.upper)
        return runs


def outcomes(futures: Sequence[Request[str, str]]) -> list[str]:
    return ["failed" if future.exception() else future.result() for future in futures]


@pytest.mark.parametrize("place", [0, 13, 31])
async def test_one_poisoned_row_among_31_good_ones_fails_alone_within_the_budget(place: int) -> None:
    bench = PoisonBench(BatchPolicy(max_batch_rows=32))
    payloads = [f"p{number}" for number in range(32)]
    payloads[place] = "bad!"
    futures = await bench.submit(*payloads)
    assert bench.run_all() == 1 + 2 * 5
    assert outcomes(futures) == ["failed" if "!" in payload else payload.upper() for payload in payloads]
    assert sum(report.failed for report in bench.seen.reports) == 1
    bench.batcher.close()


async def lines_executed_to_isolate(requests: int) -> int:
    """How many lines are executed to find that each request of a batch is poisoned."""
    bench, lines, before = PoisonBench(BatchPolicy(max_batch_rows=requests)), 0, sys.gettrace()
    futures = await bench.submit(*["!"] * requests)

    def count(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return count if frame.f_code.co_filename == failures.__file__ else None

    sys.settrace(count)
    try:
        bench.run_all()
    finally:
        sys.settrace(before)
    assert outcomes(futures) == ["failed"] * requests
    bench.batcher.close()
    return lines


async def test_each_suspect_costs_the_same() -> None:
    few, many = [await lines_executed_to_isolate(requests) for requests in (50, 200)]
    assert many < 5 * few


async def test_two_poisoned_rows_fail_alone() -> None:
    bench = PoisonBench(BatchPolicy(max_batch_rows=32))
    payloads = [f"p{number}!" if number in (3, 20) else f"p{number}" for number in range(32)]
    futures = await bench.submit(*payloads)
    bench.run_all()
    assert outcomes(futures).count("failed") == 2
    bench.batcher.close()


async def test_all_poisoned_rows_run_one_by_one_once_the_budget_is_spent() -> None:
    bench = PoisonBench(BatchPolicy(max_batch_rows=32))
    futures = await bench.submit(*[f"p{number}!" for number in range(32)])
    assert bench.run_all() <= 1 + budget_for(32) + 32
    assert outcomes(futures) == ["failed"] * 32
    assert sum(report.failed for report in bench.seen.reports) == 32
    bench.batcher.close()


@pytest.mark.parametrize("bad", [3, 6, 11, 16, 24])
async def test_good_requests_never_fail_however_many_bad_ones_share_their_batch(bad: int) -> None:
    for seed in range(20):
        bench = PoisonBench(BatchPolicy(max_batch_rows=32))
        poisoned = set(random.Random(seed).sample(range(32), bad))
        payloads = [f"p{number}!" if number in poisoned else f"p{number}" for number in range(32)]
        futures = await bench.submit(*payloads)
        assert bench.run_all() <= 1 + budget_for(32) + 32
        assert outcomes(futures) == ["failed" if "!" in payload else payload.upper() for payload in payloads]
        bench.batcher.close()


def test_budget_is_twice_what_one_culprit_takes() -> None:
    assert [budget_for(requests) for requests in (2, 3, 4, 5, 32, 33)] == [4, 8, 8, 12, 20, 24]


def test_budget_is_spent_as_long_as_it_covers_two_halves() -> None:
    requests: list[Request[str, str]] = [Request(name, 1, "k") for name in "abcde"]
    for budget in (2, 3):
        suspects = replace(Suspects.of_batch(requests), search=Search(budget))
        again = [suspects.again(Blame.REQUESTS, 5) for _ in range(2)]
        groups = [["".join(one.payload for one in group.requests) for group in groups] for groups in again]
        assert groups == [["ab", "cde"], list("abcde")]
        assert suspects.search.budget == budget - 2
    assert all(suspects.narrowed(requests[:1]).again(blame, 1) == [] for blame in Blame)


@pytest.mark.parametrize("first", ["", "!"])
async def test_bad_requests_in_every_other_place_fail_alone(first: str) -> None:
    bench = PoisonBench(BatchPolicy(max_batch_rows=32))
    payloads = [f"p{number}{first if number % 2 else '!' * (not first)}" for number in range(32)]
    futures = await bench.submit(*payloads)
    bench.run_all()
    assert outcomes(futures) == ["failed" if "!" in payload else payload.upper() for payload in payloads]
    bench.batcher.close()


async def test_isolation_fails_each_culprit_with_its_own_error() -> None:
    bench = PoisonBench(BatchPolicy(max_batch_rows=4))
    futures = await bench.submit("a", "b!", "c", "d")
    bench.run_all()
    with pytest.raises(ExecutionFailed, match=r"poisoned: \['b!'\]"):
        await futures[1]
    bench.batcher.close()


@pytest.mark.parametrize("off", ["policy", "error"])
async def test_batch_fails_as_a_whole_with_isolation_off_or_an_error_of_the_whole_session(off: str) -> None:
    bench = PoisonBench(
        BatchPolicy(max_batch_rows=4, isolate_failures=off != "policy"),
        blames=lambda error: Blame.NOBODY if isinstance(error, MemoryError) else Blame.REQUESTS,
    )
    futures = await bench.submit("a", "b")
    bench.runner.fail(MemoryError() if off == "error" else ValueError("x"))
    assert not bench.runner.busy
    assert outcomes(futures) == ["failed", "failed"]
    assert str(futures[0].exception()) in ("MemoryError", "x")
    bench.batcher.close()


async def test_isolation_leaves_out_requests_cancelled_or_expired_meanwhile() -> None:
    bench = PoisonBench(BatchPolicy(max_batch_rows=4))
    bench.clock.advance(7 * MS)
    late = submit(bench.batcher, "late", 1, "k", deadline_ns=bench.clock.now_ns() + MS)
    gone, good = await bench.submit("gone", "good")
    gone.cancel()
    bench.clock.advance(MS)
    bench.runner.fail(ValueError("x"))
    bench.run_all()
    with pytest.raises(QueueTimeout, match="after 1000 us"):
        await late
    assert await good == "GOOD"
    assert bench.runner.batches[1:] == [["good"]]
    bench.batcher.close()


async def test_drain_waits_for_the_search_for_culprits() -> None:
    bench = PoisonBench(BatchPolicy(max_batch_rows=4))
    futures = await bench.submit("a", "b!")
    drained = asyncio.create_task(bench.batcher.drain())
    bench.runner.fail(ValueError("x"))
    await one_turn()
    assert not drained.done()
    bench.run_all()
    await drained
    assert outcomes(futures) == ["A", "failed"]
    bench.batcher.close()


async def test_close_during_the_search_fails_every_request() -> None:
    bench = PoisonBench(BatchPolicy(max_batch_rows=4))
    futures = await bench.submit("a", "b", "c", "d")
    bench.runner.fail(ValueError("x"))
    bench.batcher.close()
    assert outcomes(futures) == ["failed"] * 4


async def test_request_cancelled_while_waiting_to_run_again_leaves_at_once() -> None:
    bench = PoisonBench(BatchPolicy(max_batch_rows=2))
    executes, waits = await bench.submit("a", "b")
    bench.runner.fail(ValueError("x"))
    assert bench.batcher.waiting_requests == 1
    waits.cancel()
    await one_turn()
    assert bench.batcher.waiting_requests == 0
    assert bench.seen.drops == [Drop.CANCELLED]
    assert bench.run_all() == 1
    assert await executes == "A"
    bench.batcher.close()
