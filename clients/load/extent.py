"""How long to measure: until windows agree, for a fixed time, or everything, as of a recording or of a count.

Lives here: pure decisions over what each slice of time had. Must not: clocks. Warm-up isn't part of what is measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from paceline.clients.load.tally import Counts, merged

_WINDOWS: Final = 3
_SLICES_OF_A_WINDOW: Final = 10
_SLICES_OF_A_TIME: Final = 20
_FAULTS: Final = ("INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED", "UNAUTHENTICATED", "PERMISSION_DENIED")
"""Statuses that no waiting mends."""
_FEW: Final = 10


@dataclass(frozen=True, slots=True)
class Period:
    """The slices that count: from `first` to before `end`. `is_stable` is None where nobody asked for it."""

    first: int
    end: int
    is_stable: bool | None = None


class Extent(Protocol):
    """How long to measure, in slices of `slice_s` seconds."""

    @property
    def slice_s(self) -> float: ...

    def marks(self, slice_number: int) -> bool:
        """Whether a period may begin or end where this slice begins."""

    def period(self, slices: Sequence[Counts], is_over: bool) -> Period | None:
        """What to report of these slices; None to go on. `is_over`: no more will come."""


@dataclass(frozen=True, slots=True)
class UntilStable:
    """Windows of `window_s`, until three in a row agree; at most `most` of them, and then the last three count."""

    warmup_s: float
    window_s: float
    tolerance: float
    most: int

    @property
    def slice_s(self) -> float:
        return self.window_s / _SLICES_OF_A_WINDOW

    def marks(self, slice_number: int) -> bool:
        after = slice_number - self._warmup
        return after >= 0 and after % _SLICES_OF_A_WINDOW == 0

    def period(self, slices: Sequence[Counts], is_over: bool) -> Period | None:
        whole = (len(slices) - self._warmup) // _SLICES_OF_A_WINDOW
        end = self._warmup + whole * _SLICES_OF_A_WINDOW
        if whole >= _WINDOWS:
            first = end - _WINDOWS * _SLICES_OF_A_WINDOW
            windows = [merged(slices[at : at + _SLICES_OF_A_WINDOW]) for at in range(first, end, _SLICES_OF_A_WINDOW)]
            is_stable = agree(windows, self.tolerance)
            if is_stable or whole >= self.most or is_over:
                return Period(first, end, is_stable)
        return Period(min(self._warmup, len(slices)), len(slices), False) if is_over else None

    @property
    def _warmup(self) -> int:
        return math.ceil(self.warmup_s / self.slice_s)


@dataclass(frozen=True, slots=True)
class FixedTime:
    """`seconds` after the warm-up; as often as it takes for `least` requests to end, but `most` times at most."""

    warmup_s: float
    seconds: float
    least: int = 0
    most: int = 1

    @property
    def slice_s(self) -> float:
        return self.seconds / _SLICES_OF_A_TIME

    def marks(self, slice_number: int) -> bool:
        times, rest = divmod(slice_number - self._warmup, _SLICES_OF_A_TIME)
        return not rest and 0 <= times <= self.most

    def period(self, slices: Sequence[Counts], is_over: bool) -> Period | None:
        times = max(0, min(self.most, (len(slices) - self._warmup) // _SLICES_OF_A_TIME))
        end = self._warmup + times * _SLICES_OF_A_TIME
        ended = sum(one.answered + one.failed for one in slices[self._warmup : end])
        if times and (times == self.most or ended >= self.least):
            return Period(self._warmup, end)
        return Period(min(self._warmup, len(slices)), len(slices)) if is_over else None

    @property
    def _warmup(self) -> int:
        return math.ceil(self.warmup_s / self.slice_s)


@dataclass(frozen=True, slots=True)
class Everything:
    """All requests; whoever sends ends by itself."""

    slice_s: float = 0.1

    def marks(self, slice_number: int) -> bool:
        return slice_number == 0

    def period(self, slices: Sequence[Counts], is_over: bool) -> Period | None:
        return Period(0, len(slices)) if is_over else None


def is_vain(slices: Sequence[Counts], slice_s: float, messages: int) -> bool:
    """Whether a second or more had nothing but errors of one status that no waiting mends, of a load that goes round in
    so many messages: fewer errors don't show it, as others have other contents."""
    if len(slices) * slice_s < 1 or any(one.latencies.count for one in slices):
        return False
    total = merged(slices)
    return total.failed >= max(_FEW, messages) and any([*total.errors] == [status] for status in _FAULTS)


def agree(windows: Sequence[Counts], tolerance: float) -> bool:
    """Whether throughput and mean latency of each window are within `tolerance` (a share) of the mean of all."""
    figures: list[Callable[[Counts], float | None]] = [
        lambda window: float(window.answered),
        lambda window: window.latencies.mean_ns,
    ]
    for figure in figures:
        values = [value for window in windows if (value := figure(window))]
        if len(values) < len(windows):
            return False
        mean = sum(values) / len(values)
        if any(abs(value - mean) > tolerance * mean for value in values):
            return False
    return True
