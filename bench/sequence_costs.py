"""What the scheduler takes for a step of a sequence beyond a one-shot request; what a live sequence takes of memory.

Lives here: loops over `Batcher` and `SequenceBatcher` with an instance that answers when told to, in one thread. Must
not: models, gRPC. The two take turns, so that their difference doesn't come from the machine; garbage collection stays
on, as it is in the product.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from itertools import count, cycle, islice
from typing import Any

from bench.stats import spread
from paceline.scheduler.batcher import Batcher
from paceline.scheduler.policy import BatchPolicy, SequencePolicy
from paceline.scheduler.request import Request, SequenceStep
from paceline.scheduler.sequence_batcher import SequenceBatcher
from paceline.scheduler.testing import ManualClock, StepRunner
from paceline.scheduler.turns import ArrivalModel

__all__ = ["LIVE", "costs", "memory_bytes", "step_costs"]

LIVE = (64, 1_000, 100_000)
_ROWS = 32
_STRETCH = 50
_IDLE_NS = 10**15


class _NeverWaits(ArrivalModel):
    def patience_ns(self, waiting: int, waited_ns: int) -> int:
        return 0


class _State:
    """A step's payload, which is the state that it leaves as well: the same for all."""

    @property
    def after(self) -> object:
        return self


_STATE = _State()


class _Way:
    """A batcher with one instance. Each of `requests` is given to it in groups of `_ROWS`, and answered."""

    def __init__(self, live: int) -> None:
        clock = ManualClock(now_ns=1)
        self._runner: StepRunner[Any, None] = StepRunner(clock)
        sequences = SequencePolicy(idle_ns=_IDLE_NS, max_sequences=live) if live else None
        policy = BatchPolicy(max_batch_rows=_ROWS, sequences=sequences)
        self._live = live
        self._batcher: Any
        if live:
            self._batcher = SequenceBatcher(
                "m", lambda request, sequence: _STATE, policy, [self._runner], clock=clock, arrivals=_NeverWaits()
            )
        else:
            self._batcher = Batcher(policy, [self._runner], clock=clock, arrivals=_NeverWaits())
        self._steps: Iterator[SequenceStep | None] = cycle([None])
        self.costs_us: list[float] = []

    async def begin(self) -> None:
        """Start all sequences."""
        self._batcher.start()
        numbers = range(1, self._live + 1)
        await self._serve(SequenceStep(number, start=True) for number in numbers)
        if self._live:
            # Each step is an object of its own, as when it has come from a client.
            self._steps = (SequenceStep(number) for number in cycle(numbers))

    async def stretch(self) -> None:
        """Serve some more requests, and note what each has cost."""
        steps = list(islice(self._steps, _STRETCH * _ROWS))
        began_ns = time.perf_counter_ns()
        await self._serve(iter(steps))
        self.costs_us.append((time.perf_counter_ns() - began_ns) / len(steps) / 1_000)

    async def _serve(self, steps: Iterator[SequenceStep | None]) -> None:
        runner, submit = self._runner, self._batcher.submit
        while group := list(islice(steps, _ROWS)):
            requests = []
            for step in group:
                request: Request[Any, None] = Request(_STATE, 1, "key")
                request.step = step
                requests.append(request)
            refused = submit(requests)
            assert not refused, refused
            for _ in count():
                await asyncio.sleep(0)
                if runner.busy:
                    runner.finish(lambda payload: None)
                if all(request.ended for request in requests):
                    break

    def end(self) -> None:
        self._batcher.close()


async def _measure(live: int, seconds: float) -> dict[str, float]:
    ways = [_Way(0), _Way(live)]
    for way in ways:
        await way.begin()
    until_s = time.perf_counter() + seconds
    backwards = False
    while not ways[0].costs_us or time.perf_counter() < until_s:
        for way in reversed(ways) if backwards else ways:
            await way.stretch()
        backwards = not backwards
    for way in ways:
        way.end()
    one_shot, step = (way.costs_us for way in ways)
    beyond = spread([mine - other for mine, other in zip(step, one_shot, strict=True)]).median
    return {
        "live": live,
        "one_shot_us": spread(one_shot).median,
        "step_us": spread(step).median,
        "beyond_us": beyond,
    }


def step_costs(seconds: float, live: Sequence[int] = LIVE) -> list[dict[str, float]]:
    """Microseconds from submitting to the answer, of a request in a batch of 32 and of a step in such a batch, by the
    number of live sequences: medians, and the median of the differences."""
    return [asyncio.run(_measure(number, seconds)) for number in live]


async def _memory_bytes(live: int) -> float:
    way = _Way(live)
    gc.collect()
    tracemalloc.start()
    try:
        await way.begin()
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    way.end()
    return held / live


def memory_bytes(live: int = LIVE[-1]) -> float:
    """Bytes that the scheduler keeps for a live sequence of which nothing waits, its id included, its state not."""
    return asyncio.run(_memory_bytes(live))


def costs(seconds: float, live: Sequence[int] = LIVE) -> dict[str, Any]:
    return {"steps": step_costs(seconds, live), "sequence_bytes": memory_bytes(live[-1])}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.sequence_costs", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="per number of sequences (default: %(default)s)")
    print(json.dumps(costs(parser.parse_args(arguments).seconds)))


if __name__ == "__main__":
    main()
