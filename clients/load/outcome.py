"""What a load has shown: figures by name, intervals, doubts.

Lives here: pure arithmetic over what was measured. Must not: print. Durations are nanoseconds. Figures are of all
requests of the period. Intervals are of 95 %, from blocks of its time, see `histogram.percentile_intervals`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from paceline.clients.load.control import Served
from paceline.clients.load.histogram import Histogram, Interval, intervals, percentile_intervals
from paceline.clients.load.measuring import Measured
from paceline.clients.load.tally import Counts, blocks, merged

PERCENTS: Final = (50.0, 90.0, 95.0, 99.0, 99.9)
_BLOCKS: Final = 40
_MUCH_LAG_NS: Final = 1_000_000
_MUCH_LAG: Final = 0.1
_BUSY: Final = 0.85
_HALF_BUSY: Final = 0.5
"""From here on, requests wait for each other in the process that sends them."""


@dataclass(frozen=True)
class Outcome:
    """The figures of a load by `processes`, and what the server did meanwhile, if it tells. `is_open`: requests were
    sent when they were due, whether or not answers came. `in_sequences`: they were steps of sequences."""

    measured: Measured[Any]
    served: Served | None
    processes: int
    is_open: bool
    in_sequences: bool = False

    @cached_property
    def total(self) -> Counts:
        return merged(self.measured.counted)

    @cached_property
    def blocks(self) -> list[tuple[int, Counts]]:
        return blocks(self.measured.counted, _BLOCKS)

    @cached_property
    def latency_intervals(self) -> Mapping[float, Interval | None]:
        return percentile_intervals([block.latencies for _, block in self.blocks], PERCENTS)

    @cached_property
    def throughput_interval(self) -> Interval | None:
        slice_s = self.measured.slice_s
        return intervals([block.answered / length / slice_s for length, block in self.blocks])

    @property
    def has_many_answers(self) -> bool:
        """Whether requests were answered more than once, as generations are."""
        return self.total.gaps.count > 0

    def value(self, name: str) -> float | None:
        """The figure that an assertion calls `name`; None if there is none."""
        kind, dot, percent = name.rpartition(".p")
        if dot or (name.startswith("p") and name[1:2].isdigit()):
            histogram = {"": self.total.latencies, **self.histograms}[kind if dot else ""]
            return histogram.percentile_ns(float(percent if dot else name[1:]))
        return self._values[name]()

    @property
    def histograms(self) -> Mapping[str, Histogram]:
        """Of times other than latencies: to the first answer, from one to the next, and how late sending was."""
        return {"first": self.total.first, "token": self.total.gaps, "lag": self.total.lags}

    @property
    def _values(self) -> Mapping[str, Callable[[], float | None]]:
        total, seconds, served = self.total, self.measured.seconds, self.served
        return {
            "mean": lambda: total.latencies.mean_ns,
            "max": lambda: float(total.latencies.longest_ns) if total.latencies.count else None,
            "queue": lambda: served.means_ms["queue"] * 1e6 if served and served.means_ms else None,
            "compute": lambda: served.compute_ms * 1e6 if served and served.compute_ms is not None else None,
            "cpu": lambda: total.cpu_ns / total.due if total.due else None,
            "throughput": lambda: total.answered / seconds,
            "offered": lambda: total.due / seconds,
            "tokens": lambda: (total.tokens or total.answers) / seconds if total.answers else None,
            "rows": lambda: served.rows / seconds if served else None,
            "requests": lambda: float(total.due),
            "errors": lambda: float(total.failed),
            "error_rate": lambda: total.failed / total.due if total.due else None,
            "rows_per_batch": lambda: served.rows_per_batch if served else None,
            "stable": lambda: float(self.measured.period.is_stable is not False),
        }

    @property
    def cores(self) -> float:
        """How many cores the generator used."""
        return self.total.cpu_ns / self.measured.seconds / 1e9

    def doubts(self) -> Sequence[str]:
        """Why the figures may not be what they seem."""
        found = []
        if not self.total.due:
            found.append("no request was due in the measured time: it takes a longer one, or more requests a second")
        if self.measured.period.is_stable is False:
            found.append(
                "the windows don't agree: the load may still be growing in the server, or the machine was busy"
            )
        lag_ns, middle_ns = self.value("lag.p99"), self.value("p50")
        if lag_ns and middle_ns and lag_ns > max(_MUCH_LAG_NS, _MUCH_LAG * middle_ns):
            is_own = self.cores > _HALF_BUSY * self.processes
            why = "more --processes may help" if is_own else "the machine was busy with other work"
            found.append(f"requests were sent late, which is part of their latencies: {why}")
        if self.in_sequences and self.total.failed and self.served is not None:
            found.append("the server may also count steps that ended sequences after a failed one: no other figures do")
        if self.cores > _BUSY * self.processes:
            found.append("the generator's processes were busy all the time and may be the limit: more --processes")
        return found
