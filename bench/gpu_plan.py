"""What `bench.gpu` is to do, what it has found round by round, and why something is missing.

Lives here: these values, and how failures are worded. Must not: measure.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import grpc

from backends.errors import DeviceError
from bench.scenario import Reach
from bench.stats import Sample, spread
from bench.steps import BenchError
from bench.subjects import NotServingError
from bench.summary import Measurement, Section

__all__ = ["FAILURES", "Found", "Plan", "absent", "reason", "say"]

_END_OF_REASON = 600

FAILURES = (BenchError, NotServingError, AssertionError, DeviceError, grpc.RpcError, OSError)
"""What may fail in one section without failing the others: a server may die, and its port with it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How long, how often, how many; no measurement begins after `until_s` on the monotonic clock."""

    device: str
    rounds: int
    seconds: float
    warmup_s: float
    frontends: int
    fronts: tuple[int, ...]
    processes: int
    graphs: bool
    until_s: float

    @property
    def how(self) -> str:
        return (
            f"{self.rounds} rounds of {self.seconds:g} s each, {self.warmup_s:g} s of warm-up before, on {self.device}"
        )

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def reach(self, bound: Reach) -> Reach | None:
        """`bound` on a GPU, else None: bounds are for GPUs only."""
        return bound if self.on_gpu else None

    def check(self) -> None:
        """Raise BenchError if the time is up."""
        if time.monotonic() > self.until_s:
            raise BenchError("the time was up")


@dataclass(slots=True)
class Found:
    """One model's samples, round by round, by who was measured."""

    rounds: dict[str, list[Sample]] = field(default_factory=dict)

    def add(self, who: str, sample: Sample) -> None:
        self.rounds.setdefault(who, []).append(sample)

    def of(self, who: str, what: str) -> list[float]:
        return [sample[what] for sample in self.rounds.get(who, ()) if what in sample]

    def measurements(self, points: Mapping[str, str]) -> tuple[Measurement, ...]:
        return tuple(
            Measurement(who, points.get(who, ""), {key: spread(self.of(who, key)) for key in samples[0]})
            for who, samples in self.rounds.items()
        )


def absent(name: str, title: str, plan: Plan, reason: str) -> Section:
    return Section(name, title, "", plan.how, False, (), (), {"paceline": reason})


def reason(error: Exception) -> str:
    """The last lines of what the error says; of a long text, both ends: cuDNN prints a graph of thousands of
    characters, and whoever runs this elsewhere may see no more than the last pages."""
    text = " / ".join(str(error).strip().splitlines()[-3:]) or type(error).__name__
    return text if len(text) <= 2 * _END_OF_REASON else f"{text[:_END_OF_REASON]} [...] {text[-_END_OF_REASON:]}"


def say(text: str) -> None:
    print(f"{time.strftime('%X')} {text}", file=sys.stderr, flush=True)
