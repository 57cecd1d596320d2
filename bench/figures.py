"""Figures as SVG: latency over throughput here, and what the other modules draw with.

Lives here: drawing. Must not: measure. Equal numbers give equal files: no dates, no random identifiers. matplotlib is
imported when the first figure is drawn, and not needed without one.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from bench.steps import BenchError
from bench.summary import Section

__all__ = ["COLORS", "draw_latency", "pyplot", "save"]

COLORS = ("#1b6ca8", "#d1495b", "#2e8b57", "#b8860b", "#6a4c93")
_STYLE: dict[str, Any] = {
    "svg.hashsalt": "paceline",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def draw_latency(section: Section, path: Path) -> None:
    """Latency over throughput, a line through the points of each side: the median, and dotted the 99th percentile."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    timed = [one for one in section.measurements if {"requests_per_s", "p50_ms", "p99_ms"} <= one.values.keys()]
    for color, who in zip(COLORS, dict.fromkeys(one.who for one in timed), strict=False):
        found = [one.values for one in timed if one.who == who]
        rates = [one["requests_per_s"].median for one in found]
        for measure, line, what in (("p50_ms", "o-", "median"), ("p99_ms", "o:", "p99")):
            values = [one[measure].median for one in found]
            axes.plot(rates, values, line, markersize=3, color=color, label=f"{who}, {what}")
    axes.set(xlabel="answers per second", ylabel="latency, ms", yscale="log", title=section.title)
    axes.set_xlim(left=0)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    save(figure, path)


def pyplot() -> Any:
    """matplotlib.pyplot, set up; BenchError if it isn't installed."""
    try:
        matplotlib: Any = import_module("matplotlib")
    except ImportError:
        raise BenchError("figures need matplotlib: pip install matplotlib") from None
    matplotlib.use("svg")
    matplotlib.rcParams.update(_STYLE)
    return import_module("matplotlib.pyplot")


def save(figure: Any, path: Path) -> None:
    """Write `figure` to `path` and close it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None, "Creator": None}, bbox_inches="tight")
    pyplot().close(figure)
