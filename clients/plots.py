"""Plots as SVG that a page holds in its own text, and that page: lines, dots and bars. No outside assets, no scripts.

Lives here: drawing, pure: equal numbers give equal text. Must not: know what is drawn. Colours come from the variables
of every page's style, which has them for bright and for dark pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Final

_STYLE: Final = """
:root { --ink: #1c2430; --dim: #68727f; --rule: #d8dde3; --page: #ffffff; --shade: #f3f5f7;
  --line0: #1b6ca8; --line1: #d1495b; --line2: #2e8b57; --line3: #b8860b; --line4: #6a4c93; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --dim: #98a2ae; --rule: #39414b; --page: #14181d;
  --shade: #1d232a;
  --line0: #5aa9e6; --line1: #ff7b89; --line2: #63c58d; --line3: #e0b34a; --line4: #b79be0; } }
svg.plot { display: block; width: 100%; max-width: 46rem; height: auto; margin: 1rem 0; }
svg.plot text { font: 11px system-ui, sans-serif; fill: var(--dim); }
svg.plot text.title { font-weight: 600; fill: var(--ink); }
svg.plot .rule { stroke: var(--rule); stroke-width: 1; }
svg.plot .level { stroke: var(--dim); stroke-width: 1; stroke-dasharray: 4 3; }
svg.plot polyline { fill: none; stroke-width: 1.6; }
svg.plot .mark { fill: none; stroke: var(--ink); stroke-width: 1.4; }
@media (max-width: 40rem) { svg.plot text { font-size: 16px; } }
svg.spark { display: block; width: 100%; height: 2.75rem; }
svg.spark polyline { fill: none; stroke-width: 1.6; stroke-linecap: round; vector-effect: non-scaling-stroke; }
svg.spark path { stroke: var(--rule); vector-effect: non-scaling-stroke; }
.line0 { stroke: var(--line0); } .line1 { stroke: var(--line1); } .line2 { stroke: var(--line2); }
.line3 { stroke: var(--line3); } .line4 { stroke: var(--line4); }
"""
"""On a narrow screen, plots are half as large, and their text is larger."""

_DOCUMENT: Final = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
{head}<title>{title}</title>
<style>
body {{ margin: 2rem auto; max-width: 50rem; padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif;
  color: var(--ink); background: var(--page); }}
h1 {{ font-size: 1.5rem; }}
pre {{ overflow-x: auto; padding: 1rem; border: 1px solid var(--rule); border-radius: 6px; font-size: 13px; }}
{style}
</style>
<main>
<h1>{title}</h1>
{parts}
</main>
</html>
"""

_WIDTH, _HEIGHT = 560, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 52, 48
_LETTER = 8.5
"""As wide as a letter of a legend at most."""
_COLORS: Final = 5
_TICKS: Final = 5

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Axis:
    """What an axis says. `ticks` are its marks, by place, or None to choose them."""

    label: str
    is_log: bool = False
    ticks: Mapping[float, str] | None = None


def document(title: str, parts: Iterable[str], style: str = "", refresh_s: int | None = None) -> str:
    """A page with these `parts`, which are HTML, below its title; `style` is added to what all pages have. A browser
    renews the page after `refresh_s`."""
    head = "" if refresh_s is None else f'<meta http-equiv="refresh" content="{refresh_s}">\n'
    return _DOCUMENT.format(title=escape(title), head=head, style=_STYLE + style, parts="\n".join(parts))


Level = tuple[str, float]
"""A name, and a value of y that it has everywhere."""


def lines(
    title: str, x: Axis, y: Axis, series: Mapping[str, Sequence[Point]], band: tuple[float, float] | None = None
) -> str:
    """Lines through points, a colour for each of `series`, with their names. `band` is a stretch of x to stand out."""
    points = _drawn(series, y)
    if not points:
        return _frame(title, y, [])
    xs, ys = _scales(points, x, y)
    parts = [*_axes(x, y, xs, ys), *_legend(series)]
    if band is not None:
        begin, end = xs.place(max(band[0], xs.low)), xs.place(min(band[1], xs.high))
        parts.insert(
            0,
            f'<rect x="{begin:.1f}" y="{_TOP}" width="{max(0.0, end - begin):.1f}" '
            f'height="{_HEIGHT - _BOTTOM - _TOP}" fill="var(--line0)" opacity="0.07"/>',
        )
    for number, (name, one) in enumerate(series.items()):
        drawn = " ".join(f"{xs.place(at):.1f},{ys.place(value):.1f}" for at, value in _drawn({name: one}, y))
        parts.append(f'<polyline points="{drawn}" style="stroke: {_color(number)}"/>')
    return _frame(title, y, parts)


def dots(
    title: str,
    x: Axis,
    y: Axis,
    series: Mapping[str, Sequence[Point]],
    marked: Mapping[str, Point],
    level: Level | None = None,
) -> str:
    """A dot for each point, a colour for each of `series`. Those that are `marked` have a ring and a name of their own.
    `level` is drawn if it is among the values."""
    points = _drawn({**series, "": [*marked.values()]}, y)
    if not points:
        return _frame(title, y, [])
    xs, ys = _scales(points, x, y)
    parts = [*_axes(x, y, xs, ys), *_legend(series)]
    if level is not None and ys.low <= level[1] <= ys.high:
        at = ys.place(level[1])
        parts.append(f'<line class="level" x1="{_LEFT}" y1="{at:.1f}" x2="{_WIDTH - _RIGHT}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{_LEFT + 4}" y="{at - 4:.1f}">{escape(level[0])}</text>')
    for number, (name, one) in enumerate(series.items()):
        parts += [
            f'<circle cx="{xs.place(at):.1f}" cy="{ys.place(value):.1f}" r="3.5" fill="{_color(number)}" opacity="0.7">'
            f"<title>{escape(name)}: {at:.4g}, {value:.4g}</title></circle>"
            for at, value in _drawn({name: one}, y)
        ]
    named = list[float]()
    for name, (at, value) in marked.items():
        left, top = xs.place(at), ys.place(value)
        is_right = left > (_LEFT + _WIDTH - _RIGHT) / 2
        # Above its ring, unless another's name may be there.
        text_top = top + 20 if any(abs(one - top + 7) < 20 for one in named) else top - 7
        named.append(text_top)
        parts.append(f'<circle class="mark" cx="{left:.1f}" cy="{top:.1f}" r="7"/>')
        parts.append(
            f'<text class="title" x="{left - 11 if is_right else left + 11:.1f}" y="{text_top:.1f}" '
            f'text-anchor="{"end" if is_right else "start"}">{escape(name)}</text>'
        )
    return _frame(title, y, parts)


def bars(title: str, x: Axis, y: Axis, values: Mapping[str, float]) -> str:
    """A bar for each value, in order, with its name below."""
    if not values:
        return _frame(title, y, [])
    ys = _Scale(0.0, max(max(values.values()), 1e-12), _HEIGHT - _BOTTOM, _TOP, False)
    each = (_WIDTH - _LEFT - _RIGHT) / len(values)
    every = math.ceil(_LETTER * max(map(len, values)) / each)  # or names would overlap
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
    return _frame(title, y, parts)


def sparkline(
    title: str, says: str, x: tuple[float, float], high: float, series: Sequence[Sequence[tuple[float, float | None]]]
) -> str:
    """Small lines without axes, over `x` and from 0 to `high`, with a gap wherever a value is None; as wide as there is
    room. Who can't see it is told `title` and what it `says`."""
    width, height = 200, 40
    xs, ys = _Scale(x[0], max(x[1], x[0] + 1e-9), 0, width, False), _Scale(0.0, high or 1.0, height - 2, 2, False)
    parts = []
    for number, one in enumerate(series):
        for is_known, points in groupby(one, lambda point: point[1] is not None):
            if is_known:
                places = [f"{xs.place(at):.1f},{ys.place(value or 0.0):.1f}" for at, value in points]
                # A line of one point would not be drawn.
                drawn = " ".join(places if len(places) > 1 else places * 2)
                parts.append(f'<polyline class="line{number % _COLORS}" points="{drawn}"/>')
    return (
        f'<svg class="spark" viewBox="0 0 {width} {height}" preserveAspectRatio="none" role="img">'
        f"<title>{escape(title)}</title><desc>{escape(says)}</desc>"
        f'<path d="M0 {height - 1}H{width}"/>{"".join(parts)}</svg>'
    )


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
        if not self.is_log or sum(self.low <= at <= self.high for at in found) < 2:
            rough = (self.high - self.low) / _TICKS
            unit = 10 ** math.floor(math.log10(rough))
            step = next(unit * times for times in (1, 2, 5, 10) if unit * times >= rough)
            found = [step * number for number in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        return {
            at: f"{at:,.6g}" if abs(at) < 10_000 else f"{at / 1_000:,.6g}k"
            for at in found
            if self.low <= at <= self.high * (1 + 1e-9)
        }


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
    return parts


def _drawn(series: Mapping[str, Sequence[Point]], y: Axis) -> list[Point]:
    return [point for one in series.values() for point in one if not y.is_log or point[1] > 0]


def _scales(points: Sequence[Point], x: Axis, y: Axis) -> tuple[_Scale, _Scale]:
    return (
        _Scale.over([at for at, _ in points], x, _LEFT, _WIDTH - _RIGHT),
        _Scale.over([value for _, value in points], y, _HEIGHT - _BOTTOM, _TOP),
    )


def _color(number: int) -> str:
    return f"var(--line{number % _COLORS})"


def _legend(names: Iterable[str]) -> list[str]:
    parts, at = list[str](), 8.0
    for number, name in enumerate(names):
        parts.append(f'<rect x="{at:.0f}" y="31" width="12" height="4" fill="{_color(number)}"/>')
        parts.append(f'<text x="{at + 16:.0f}" y="37">{escape(name)}</text>')
        at += 30 + _LETTER * len(name)
    return parts


def _frame(title: str, y: Axis, parts: Sequence[str]) -> str:
    """What values are in follows the title: beside the axis, it would take the room of numbers."""
    drawn = "".join(parts) or f'<text x="{_LEFT}" y="{_HEIGHT / 2}">nothing to show</text>'
    return (
        f'<svg class="plot" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">'
        f'<text class="title" x="8" y="17">{escape(", ".join(filter(None, (title, y.label))))}</text>{drawn}</svg>'
    )
