"""Figures of the simulations, as SVG.

Lives here: what is drawn; how is in bench.figures. Must not: measure. Equal points give equal files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.batching import idle, overload, sizes
from bench.figures import COLORS, pyplot, save

__all__ = ["draw_idle", "draw_overload", "draw_sizes"]

_GREY = "#888888"


def draw_overload(points: Sequence[overload.Point], path: Path) -> None:
    """Goodput over load, deadline-aware and not."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    deadlines = sorted({one.deadline for one in points})
    for color, deadline in zip(COLORS, deadlines, strict=False):
        for aware, line in ((True, "-"), (False, ":")):
            mine = [one for one in points if one.deadline == deadline and one.aware == aware]
            label = f"deadline {deadline:g} batches" + ("" if aware else ", deadline_aware false")
            axes.plot([one.load for one in mine], [one.goodput for one in mine], line, color=color, label=label)
    top = max(one.load for one in points)
    axes.plot([0, 1, top], [0, 1, 1], "--", color=_GREY, linewidth=0.8, label="all that is possible")
    axes.set(xlabel="offered load / capacity", ylabel="answers in time / capacity", ylim=(0, 1.05), xlim=(0.4, top))
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    save(figure, path)


def draw_idle(opened: Sequence[idle.Point], closed: Sequence[idle.Point], path: Path) -> None:
    """What waiting costs where requests don't depend on answers, and what it gains where they do."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.0, 3.6))
    cost = opened[0].cost
    left_points = [one for one in opened if one.cost == cost and one.arrivals == "Poisson"]
    right_points = [one for one in closed if one.cost == cost and one.think == idle.THINK[1]]
    _relative(left, left_points, "mean_ms")
    left.set(
        xlabel="offered load / capacity", ylabel="mean latency / greedy's", title="open loop, Poisson", ylim=(0.9, 2)
    )
    _relative(right, right_points, "throughput")
    right.set(xlabel="clients", ylabel="throughput / greedy's", title="closed loop, 1 ms between answer and request")
    right.set_xscale("log", base=2)
    right.set_xticks([one.load for one in right_points if one.rule == "greedy"])
    right.xaxis.set_major_formatter("{x:g}")
    left.legend(fontsize=7, frameon=False)
    figure.tight_layout()
    save(figure, path)


def draw_sizes(cold: Sequence[sizes.Cold], cut: Sequence[sizes.Cut], path: Path) -> None:
    """A cold start with free and with padded sizes; padding up against cutting down by cost."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.0, 3.4))
    loads = sorted({one.load for one in cold})
    for place, (color, name) in enumerate(zip(COLORS, ("free", "padded"), strict=False)):
        mine = [one for one in cold if one.sizes == name]
        left.bar(
            [x + 0.4 * place for x in range(len(loads))], [one.mean_ms for one in mine], 0.38, color=color, label=name
        )
    left.set_xticks([x + 0.2 for x in range(len(loads))], [f"{load:g}" for load in loads])
    left.set(xlabel="offered load / capacity", ylabel="mean latency, ms", title="new sizes cost extra, cold start")
    left.legend(fontsize=7, frameon=False)
    for color, (by_cost, label) in zip(COLORS, ((False, "always up"), (True, "by cost")), strict=False):
        chosen = [one for one in cut if one.by_cost == by_cost]
        right.plot(
            [one.clients for one in chosen], [one.answers_per_s for one in chosen], "o-", color=color, label=label
        )
    right.set(xlabel="clients", ylabel="answers per second", title="stepped cost, sizes 8, 16, 32", ylim=(0, None))
    right.legend(fontsize=7, frameon=False)
    figure.tight_layout()
    save(figure, path)


def _relative(axes: Any, points: Sequence[idle.Point], measurement: str) -> None:
    base = {one.load: getattr(one, measurement) for one in points if one.rule == "greedy"}
    rules = list(dict.fromkeys(one.rule for one in points))
    for color, rule in zip((_GREY, *COLORS), rules, strict=False):
        mine = [one for one in points if one.rule == rule]
        values = [getattr(one, measurement) / base[one.load] for one in mine]
        axes.plot([one.load for one in mine], values, "o-", markersize=3, color=color, label=rule)
