"""What `bench.gpu` is to do, what it has found round by round, and why something is missing.

Lives here: these values, and how failures are worded. Must not: measure.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import grpc

from bench.scenario import Reach
from bench.stats import Sample, spread
from bench.steps import BenchError
from bench.summary import Comparison, Measurement, Section
from paceline.backends.errors import DeviceError

__all__ = ["Found", "Plan", "brief", "reason", "say"]

_SAY_ALL = (BenchError, DeviceError)
"""Errors whose texts are written for readers; those of others, such as KeyError, need the type's name."""
_BRIEF = 400

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Plan:
    """How long, how often, how many; no measurement begins after `until_s` on the monotonic clock."""

    device: str
    rounds: int
    seconds: float
    warmup_s: float
    frontends: int
    processes: int
    until_s: float
    graphs: bool = False
    quick: bool = False

    @property
    def how(self) -> str:
        times = f"{self.seconds:g} s each or half of that, {self.warmup_s:g} s of warm-up before"
        return f"rounds: {self.rounds}, {times}, on {self.device}{', with CUDA graphs' if self.graphs else ''}"

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def reach(self, bound: Reach) -> Reach | None:
        """`bound` on a GPU, else None: bounds are for GPUs only."""
        return bound if self.on_gpu else None

    def sized(self, small: T, large: T) -> T:
        """What is measured: small, if all that counts is whether everything works."""
        return small if self.quick else large

    def within(self, seconds: float) -> Plan:
        """The same, for what has no more than so much time from now on."""
        return replace(self, until_s=min(self.until_s, time.monotonic() + seconds))

    def check(self) -> None:
        """Raise BenchError if the time is up."""
        if time.monotonic() > self.until_s:
            raise BenchError("the time was up")


@dataclass(slots=True)
class Found:
    """One section's samples, round by round, by who was measured; and what is missing, by name, with the reason."""

    rounds: dict[str, list[Sample]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    def add(self, who: str, sample: Sample) -> None:
        self.rounds.setdefault(who, []).append(sample)

    def of(self, who: str, what: str) -> list[float]:
        return [sample[what] for sample in self.rounds.get(who, ()) if what in sample]

    @contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """If something fails within, `what` is absent for that reason, and the rest continues. Of several reasons, the
        first counts."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, there is one chance to measure the rest
            self.absent.setdefault(what, reason(error))
            say(f"no {what}: {brief(reason(error))}")

    def section(
        self,
        name: str,
        title: str,
        how: str,
        comparisons: tuple[Comparison, ...] = (),
        points: Mapping[str, str] | None = None,
        generator: str = "",
    ) -> Section:
        """All of it as a section; `points` are the loads, by who was measured."""
        measurements = tuple(
            Measurement(who, (points or {}).get(who, ""), {key: spread(self.of(who, key)) for key in samples[0]})
            for who, samples in self.rounds.items()
        )
        return Section(name, title, generator, how, False, comparisons, measurements, dict(self.absent))


def reason(error: Exception) -> str:
    """All that the error says, in one line."""
    if isinstance(error, grpc.RpcError):
        return f"{error.code().name}: {error.details()}"
    text = " / ".join(line.strip() for line in str(error).splitlines() if line.strip())
    if text and isinstance(error, _SAY_ALL):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def brief(text: str) -> str:
    """`text`, or only both ends if it is long: a server prints its log, cuDNN a graph of thousands of characters, and
    whoever runs this elsewhere may see no more than the last pages."""
    return text if len(text) <= _BRIEF else f"{text[: _BRIEF // 2]} [...] {text[-_BRIEF // 2 :]}"


def say(text: str) -> None:
    print(f"{time.strftime('%X')} {text}", file=sys.stderr, flush=True)
