"""Parts of the product by themselves: the queue per request, stacking and splitting against one memcpy, counting per
batch.

Lives here: loops over `scheduler.batch_queue`, `backends.batching` and `server.telemetry.model_statistics`; prints one
line of JSON. Must not: threads, event loops, gRPC. Garbage collection stays on, as it is in the product.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count, product
from typing import Any

import numpy as np

from bench.stats import spread
from paceline.backends.base import Execution
from paceline.backends.batching import split, stack
from paceline.backends.spec import ModelSpec, TensorSpec
from paceline.scheduler.batch_queue import BatchQueue
from paceline.scheduler.observer import BatchReport
from paceline.scheduler.policy import NEVER, BatchPolicy
from paceline.scheduler.request import Request
from paceline.server.telemetry.model_statistics import VersionStatistics
from paceline.server.tuning import keep_freed_memory

__all__ = ["batching_costs", "counting_costs", "queue_costs"]

DEPTHS = (10, 100_000)
LANES = (1, 1_000)
LEVELS = 3
_BATCH_ROWS = 32
_FAR_NS = 10**15
_STRETCH = 2_000
_ROWS = 64
_ROW_FLOATS = (16, 1_024, 65_536)
_COUNTED = (1, 32)

_Request = Request[None, None]


@dataclass(frozen=True, slots=True)
class _Case:
    """`depth` requests waiting in `lanes` lanes, with or without deadlines and priority levels."""

    depth: int
    lanes: int
    deadlines: bool
    levels: int

    def policy(self) -> BatchPolicy:
        return BatchPolicy(
            max_batch_rows=_BATCH_ROWS, priority_levels=self.levels, default_priority_level=min(1, self.levels)
        )

    def push(self, queue: BatchQueue[_Request], now_ns: int) -> _Request:
        deadline_ns = now_ns + _FAR_NS if self.deadlines else NEVER
        priority = 1 + now_ns % self.levels if self.levels else 0
        # Not `_Request(...)`: calling an alias takes longer.
        request: _Request = Request(None, 1, now_ns % self.lanes, now_ns, priority=priority, deadline_ns=deadline_ns)
        refusals = queue.push((request,))
        assert not refusals
        return request


def queue_costs(seconds: float) -> list[dict[str, Any]]:
    """Microseconds per request for each combination of depth, lanes, deadlines and priority levels."""
    return [
        {
            **asdict(case),
            "push_poll_leave_us": _us_per_request(_passing(case), seconds),
            "push_cancel_us": _us_per_request(_cancelling(case), seconds),
        }
        for case in (_Case(*values) for values in product(DEPTHS, LANES, (False, True), (0, LEVELS)))
    ]


def _us_per_request(requests: Iterator[None], seconds: float) -> float:
    """The median over stretches of many requests, for at least `seconds`."""
    next(requests)  # fills the queue
    until_s = time.perf_counter() + seconds
    costs: list[float] = []
    while not costs or time.perf_counter() < until_s:
        began_ns = time.perf_counter_ns()
        for _ in range(_STRETCH):
            next(requests)
        costs.append((time.perf_counter_ns() - began_ns) / _STRETCH / 1_000)
    return spread(costs).median


def _filled(case: _Case) -> tuple[BatchQueue[_Request], Iterator[int]]:
    """A queue with as many requests waiting as the case says, and the moments that follow."""
    queue: BatchQueue[_Request] = BatchQueue(case.policy())
    moments = count()
    for now_ns in moments:
        case.push(queue, now_ns)
        if queue.waiting.requests == case.depth:
            break
    queue.poll(next(moments), 0)
    return queue, moments


def _passing(case: _Case) -> Iterator[None]:
    """Each step adds one request and polls; a batch leaves whenever a batch more than the case's depth waits."""
    queue, moments = _filled(case)
    for now_ns in moments:
        case.push(queue, now_ns)
        for batch in queue.poll(now_ns, int(queue.waiting.requests > case.depth + _BATCH_ROWS)).batches:
            queue.done(batch, now_ns, 1_000_000)
        yield


def _cancelling(case: _Case) -> Iterator[None]:
    """Each step adds one request, cancels it and polls."""
    queue, moments = _filled(case)
    for now_ns in moments:
        queue.cancel(case.push(queue, now_ns))
        queue.poll(now_ns, 0)
        yield


def batching_costs(seconds: float, rows: int, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Microseconds to stack `rows`, to split them, and to copy their bytes once, by the size of a row in floats."""
    return [_batching_cost(rows, floats, seconds) for floats in sizes]


def _batching_cost(count: int, floats: int, seconds: float) -> dict[str, Any]:
    requests = [[np.random.default_rng(seed).random((1, floats), np.float32)] for seed in range(count)]
    tensor = TensorSpec("x", "FP32", (floats,))
    spec = ModelSpec((tensor,), (tensor,), batched=True)
    whole = stack(requests)
    target, rows = np.empty_like(whole[0]), [1] * count
    stack_us, split_us, memcpy_us = _interleaved_us(
        [lambda: stack(requests), lambda: split(whole, rows, spec), lambda: np.copyto(target, whole[0])], seconds
    )
    return {
        "row_bytes": 4 * floats,
        "stack_us": stack_us,
        "split_us": split_us,
        "stack_split_us": stack_us + split_us,
        "memcpy_us": memcpy_us,
    }


def counting_costs(seconds: float) -> list[dict[str, Any]]:
    """Microseconds to report and count a batch of some requests, and the requests with their times."""
    return [{"requests": requests, "count_us": _us_per_request(_counting(requests), seconds)} for requests in _COUNTED]


def _counting(requests: int) -> Iterator[None]:
    """Each step counts a batch and its requests."""
    statistics = VersionStatistics()
    execution = Execution([()] * requests, 1_000, 200_000, 1_000)
    waits_ns = [5_000 + 1_000 * number for number in range(requests)]
    while True:
        statistics.on_batch(BatchReport(requests, requests, waits_ns, 1_000, 300_000, execution, None, 0))
        for _ in range(requests):
            began_ns = time.monotonic_ns()
            statistics.on_success(time.monotonic_ns() - began_ns)
        yield


def _interleaved_us(steps: Sequence[Callable[[], Any]], seconds: float) -> list[float]:
    """The median time of each step; the steps take turns."""
    until_s = time.perf_counter() + seconds
    costs: list[list[float]] = [[] for _ in steps]
    while not costs[0] or time.perf_counter() < until_s:
        for step, mine in zip(steps, costs, strict=True):
            began_ns = time.perf_counter_ns()
            step()
            mine.append((time.perf_counter_ns() - began_ns) / 1_000)
    return [spread(mine).median for mine in costs]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.micro", description="Measure parts of paceline, as JSON.")
    parser.add_argument("parts", nargs="*", choices=["queue", "batching", "counting", []], help="by default all")
    parser.add_argument("--seconds", type=float, default=0.5, help="per number (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=_ROWS, help="to stack and split (default: %(default)s)")
    parser.add_argument("--floats", type=int, action="append", help=f"per row, repeatable (default: {_ROW_FLOATS})")
    got = parser.parse_args(arguments)
    keep_freed_memory()  # as the product has it: stacking takes new memory each time
    costs: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "queue": lambda: queue_costs(got.seconds),
        "batching": lambda: batching_costs(got.seconds, got.rows, got.floats or _ROW_FLOATS),
        "counting": lambda: counting_costs(got.seconds),
    }
    print(json.dumps({part: costs[part]() for part in got.parts or costs}), flush=True)


if __name__ == "__main__":
    main()
