"""Plots as SVG that a page holds in its own text: lines and bars. No outside assets, no scripts.

Lives here: drawing, pure: equal numbers give equal text. Must not: know what is drawn. Colours come from the variables
of `STYLE`, which has them for bright and for dark pages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

__all__ = ["STYLE", "Axis", "bars", "lines"]

STYLE: Final = """
:root { --ink: #1c2430; --dim: #68727f; --rule: #d8dde3; --page: #ffffff;
  --line0: #1b6ca8; --line1: #d1495b; --line2: #2e8b57; --line3: #b8860b; --line4: #6a4c93; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --dim: #98a2ae; --rule: #39414b; --page: #14181d;
  --line0: #5aa9e6; --line1: #ff7b89; --line2: #63c58d; --line3: #e0b34a; --line4: #b79be0; } }
svg.plot { width: 100%; max-width: 46rem; height: auto; }
svg.plot text { font: 12px system-ui, sans-serif; fill: var(--dim); }
svg.plot text.title { font-weight: 600; fill: var(--ink); }
svg.plot .rule { stroke: var(--rule); stroke-width: 1; }
svg.plot polyline { fill: none; stroke-width: 1.6; }
"""

_WIDTH, _HEIGHT = 720, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 34, 44
_COLORS: Final = 5
_TICKS: Final = 5

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Axis:
    """What an axis says. `ticks` are its marks, by place, or None to choose them."""

    label: str
    is_log: bool = False
    ticks: Mapping[float, str] | None = None


def lines(
    title: str, x: Axis, y: Axis, series: Mapping[str, Sequence[Point]], band: tuple[float, float] | None = None
) -> str:
    """Lines through points, a colour for each of `series`, with their names. `band` is a stretch of x to stand out."""
    points = [point for one in series.values() for point in one if not y.is_log or point[1] > 0]
    if not points:
        return _frame(title, [])
    xs, ys = (
        _Scale.over([at for at, _ in points], x, _LEFT, _WIDTH - _RIGHT),
        _Scale.over([value for _, value in points], y, _HEIGHT - _BOTTOM, _TOP),
    )
    parts = [*_axes(x, y, xs, ys)]
    if band is not None:
        begin, end = xs.place(max(band[0], xs.low)), xs.place(min(band[1], xs.high))
        parts.insert(
            0,
            f'<rect x="{begin:.1f}" y="{_TOP}" width="{max(0.0, end - begin):.1f}" '
            f'height="{_HEIGHT - _BOTTOM - _TOP}" fill="var(--line0)" opacity="0.07"/>',
        )
    for number, (name, one) in enumerate(series.items()):
        color = f"var(--line{number % _COLORS})"
        drawn = " ".join(f"{xs.place(at):.1f},{ys.place(value):.1f}" for at, value in one if not y.is_log or value > 0)
        parts.append(f'<polyline points="{drawn}" style="stroke: {color}"/>')
        at = _WIDTH - _RIGHT - 90 * (len(series) - number)
        parts.append(f'<rect x="{at}" y="12" width="12" height="4" fill="{color}"/>')
        parts.append(f'<text x="{at + 16}" y="18">{escape(name)}</text>')
    return _frame(title, parts)


def bars(title: str, x: Axis, y: Axis, values: Mapping[str, float]) -> str:
    """A bar for each value, in order, with its name below."""
    if not values:
        return _frame(title, [])
    ys = _Scale(0.0, max(max(values.values()), 1e-12), _HEIGHT - _BOTTOM, _TOP, False)
    each = (_WIDTH - _LEFT - _RIGHT) / len(values)
    every = math.ceil(len(values) / 24)  # or names would overlap
    parts = [*_axes(x, y, None, ys)]
    for number, (name, value) in enumerate(values.items()):
        left, top = _LEFT + number * each, ys.place(value)
        what, middle, bottom = escape(name), left + each / 2, _HEIGHT - _BOTTOM
        parts.append(
            f'<rect x="{left + each * 0.1:.1f}" y="{top:.1f}" width="{each * 0.8:.1f}" height="{bottom - top:.1f}" '
            f'fill="var(--line0)"><title>{what}: {value:g}</title></rect>'
        )
        if number % every == 0:
            parts.append(f'<text x="{middle:.1f}" y="{bottom + 16}" text-anchor="middle">{what}</text>')
    return _frame(title, parts)


@dataclass(frozen=True, slots=True)
class _Scale:
    """From values between `low` and `high` to places between `start` and `end`."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool

    @classmethod
    def over(cls, values: Sequence[float], axis: Axis, start: float, end: float) -> _Scale:
        low, high = min(values), max(values)
        if axis.ticks is None and not axis.is_log:
            low = min(low, 0.0)
        if high <= low:
            high = low * 2 if low > 0 else low + 1
        return cls(low, high, start, end, axis.is_log)

    def place(self, value: float) -> float:
        low, high, at = (math.log(v) if self.is_log else v for v in (self.low, self.high, value))
        return self.start + (self.end - self.start) * (at - low) / (high - low)

    def ticks(self) -> dict[float, str]:
        if self.is_log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1, 2, 5) if len(decades) < 5 else (1,)
            found = [step * 10.0**decade for decade in decades for step in steps]
        else:
            rough = (self.high - self.low) / _TICKS
            unit = 10 ** math.floor(math.log10(rough))
            step = next(unit * times for times in (1, 2, 5, 10) if unit * times >= rough)
            found = [step * number for number in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        return {at: f"{at:,.6g}" for at in found if self.low <= at <= self.high * (1 + 1e-9)}


def _axes(x: Axis, y: Axis, xs: _Scale | None, ys: _Scale) -> list[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = [f'<line class="rule" x1="{_LEFT}" y1="{bottom}" x2="{right}" y2="{bottom}"/>']
    for value, label in (y.ticks or ys.ticks()).items():
        at = ys.place(value)
        parts.append(f'<line class="rule" x1="{_LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{escape(label)}</text>')
    for value, label in (x.ticks or xs.ticks()).items() if xs is not None else ():
        if xs is not None and xs.low <= value <= xs.high:
            at = xs.place(value)
            parts.append(f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{escape(label)}</text>')
    parts.append(f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(x.label)}</text>')
    middle = (_TOP + bottom) / 2
    parts.append(
        f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">{escape(y.label)}</text>'
    )
    return parts


def _frame(title: str, parts: Sequence[str]) -> str:
    drawn = "".join(parts) or f'<text x="{_LEFT}" y="{_HEIGHT / 2}">nothing to show</text>'
    return (
        f'<svg class="plot" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">'
        f'<text class="title" x="{_LEFT}" y="18">{escape(title)}</text>{drawn}</svg>'
    )
