"""Bounds that figures must keep, as `--assert` takes them: `p99<20ms`, `throughput>500`, `errors==0`.

Lives here: their grammar and whether they hold, pure. Must not: figures themselves.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

_OPERATORS: Final[Mapping[str, Callable[[float, float], bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_UNITS_NS: Final = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
_PERCENTILE: Final = re.compile(r"((?:first|token|lag)\.)?p(\d{1,2}(?:\.\d+)?|100)")
_ASSERTION: Final = re.compile(r"\s*([\w.]+?)\s*(<=|>=|==|!=|<|>)\s*([\d.]+(?:e[+-]?\d+)?)\s*(\S*)\s*")

DURATIONS: Final = ("mean", "max", "queue", "compute", "cpu")
RATES: Final = ("throughput", "offered", "tokens", "rows")
NUMBERS: Final = ("requests", "errors", "error_rate", "rows_per_batch", "stable")


class AssertionSyntaxError(ValueError):
    """Not an assertion; the message is one line, for the user."""


@dataclass(frozen=True, slots=True)
class Assertion:
    """`text` as it was written: the figure `name`, compared with `bound`, which is in nanoseconds for a duration, and a
    share for what was written in per cent."""

    text: str
    name: str
    comparison: str
    bound: float
    is_percent: bool = False

    @property
    def is_duration(self) -> bool:
        return _is_duration(self.name)

    def holds(self, value: float | None) -> bool:
        """Never for a figure that there is none of, such as a percentile without answers."""
        return value is not None and _OPERATORS[self.comparison](value, self.bound)


def parse_assertion(text: str) -> Assertion:
    """Raises AssertionSyntaxError."""
    found = _ASSERTION.fullmatch(text)
    if found is None:
        raise AssertionSyntaxError(
            f"--assert {text!r}: expected a figure, <, <=, >, >=, == or !=, and a number: p99<20ms"
        )
    name, comparison, number, unit = found.groups()
    try:
        bound = float(number)
    except ValueError:
        raise AssertionSyntaxError(f"--assert {text!r}: expected a number, got {number!r}") from None
    is_duration = _is_duration(name)
    if is_duration and unit not in _UNITS_NS:
        raise AssertionSyntaxError(f"--assert {text!r}: expected a time with its unit, us, ms or s")
    if not is_duration and name not in (*RATES, *NUMBERS):
        percentiles = "p50, p99.9, any other percentile, first.p99, token.p99, lag.p99"
        known = ", ".join((percentiles, *DURATIONS, *RATES, *NUMBERS))
        raise AssertionSyntaxError(f"--assert {text!r}: no figure {name!r}; there are {known}")
    if not is_duration and unit not in _units(name):
        raise AssertionSyntaxError(f"--assert {text!r}: {name} has no unit {unit!r}")
    scale = _UNITS_NS[unit] if is_duration else 0.01 if unit == "%" else 1
    return Assertion(text.strip(), name, comparison, bound * scale, is_percent=unit == "%")


def _is_duration(name: str) -> bool:
    return name in DURATIONS or _PERCENTILE.fullmatch(name) is not None


def _units(name: str) -> tuple[str, ...]:
    return ("", "/s") if name in RATES else ("", "%") if name == "error_rate" else ("",)
