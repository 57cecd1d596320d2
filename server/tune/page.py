"""What tuning has found as one page, with plots and without anything from elsewhere.

Lives here: what the page shows. Must not: drawing (clients/plots.py), simulate. All text that a model or a user gave is
escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Final

from paceline.clients.load.page import spectrum
from paceline.clients.plots import Axis, Point, bars, document, dots, lines
from paceline.server.tune.choosing import Setting, Tried
from paceline.server.tune.config_file import Change, plain, plain_time
from paceline.server.tune.curve import Curve
from paceline.server.tune.measuring import Layout
from paceline.server.tune.report import PREDICTED, Tuned

__all__ = ["page"]

_STYLE: Final = """h2 { font-size: 1.1rem; margin-top: 2rem; }
.verdict { padding: 0.6rem 1rem; border-left: 4px solid var(--line1); background: var(--shade); }
.met { border-color: var(--line2); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; margin: 1rem 0; }
th, td { padding: 0.25rem 0.5rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--rule); }
th:first-child, td:first-child { text-align: left; }
th, small { color: var(--dim); }
.changes td { white-space: normal; } .changes td:first-child { overflow-wrap: anywhere; }"""


def page(tuned: Tuned, config: str) -> str:
    """The whole page. `config` is the configuration that was chosen."""
    choice = tuned.choice
    best = choice.best[0]
    histograms = {"predicted": best.found.latencies}
    if best.live is not None:
        histograms["on a server"] = best.live.latencies
    parts = [
        f'<p class="verdict{" met" * tuned.is_met}">{escape(tuned.verdict())}</p>',
        _heading("What to change"),
        _changes(tuned.changes),
        *([f"<p>Chosen, as {escape(tuned.reason())}.</p>"] if tuned.changes else ()),
        _table([row[:PREDICTED] for row in tuned.table()]),
        f"<p>{escape(tuned.caution())}</p>",
        _heading("What was tried"),
        _tried(tuned),
        *([_heading("What each change is worth"), _worth(tuned)] if tuned.set_back else ()),
        _heading("Room for more"),
        _rising(tuned),
        *([_heading("Predicted beside measured"), _measured(tuned)] if best.live is not None else ()),
        _heading("The chosen setting under this load"),
        spectrum(histograms),
        bars(
            "Batches by their rows, as predicted", Axis("rows"), Axis(""),
            {str(rows): float(number) for rows, number in best.found.batches.items()},
        ),
        _heading("What executions cost"),
        *_costs(choice.now.setting, best.setting, choice.simulated),
        _heading("config.pbtxt"),
        f"<pre>{escape(config)}</pre>",
        f"<p>Seed {tuned.seed}. {escape(_contents(tuned))}</p>",
    ]  # fmt: skip
    return document(f"Settings for {tuned.model}", parts, _STYLE)


def _heading(text: str) -> str:
    return f"<h2>{escape(text)}</h2>"


def _changes(changes: Sequence[Change]) -> str:
    if not changes:
        return "<p>Nothing: what is served now is as good.</p>"
    rows = [
        f"<tr><td>{escape(one.field)}<br/><small>{escape(one.why)}</small></td><td>{escape(one.before)}</td>"
        f"<td>{escape(one.after)}</td></tr>"
        for one in changes
    ]
    return f'<table class="changes"><tr><th>setting</th><th>now</th><th>chosen</th></tr>{"".join(rows)}</table>'


def _table(rows: Sequence[Sequence[str]]) -> str:
    """The first of `rows` is its heading."""
    heading, *others = rows
    head = "".join(f"<th>{escape(name)}</th>" for name in heading)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in others)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _layout(layout: Layout) -> str:
    threads = layout.offline.intra_op_threads
    return (
        f"{layout.instances} \u00d7 {threads or 'all'} threads" if threads or layout.instances > 1 else "as configured"
    )


def _tried(tuned: Tuned) -> str:
    """All settings. At a given rate, all that aren't too slow answer as much: what they could is what differs."""
    goal, rows = tuned.goal, tuned.goal.mean_rows

    def at(one: Tried) -> Point:
        x = one.setting.most_per_s(rows) if goal.rate else one.found.throughput
        return x, one.p99_ns / 1e6

    series: dict[str, list[Point]] = {_layout(tuned.choice.now.setting.layout): []}
    for one in tuned.choice.simulated:
        if math.isfinite(one.p99_ns):
            series.setdefault(_layout(one.setting.layout), []).append(at(one))
    marked = {"now": at(tuned.choice.now), "chosen": at(tuned.choice.best[0])}
    if tuned.choice.now.setting == tuned.choice.best[0].setting:
        marked = {"now and chosen": marked["now"]}
    marked = {name: point for name, point in marked.items() if math.isfinite(point[1])}
    x = Axis("requests/s that it could answer at most" if goal.rate else "requests/s")
    level = ("p99 asked for", goal.p99_ns / 1e6) if goal.p99_ns else None
    return dots("99th percentile of each setting", x, Axis("ms", is_log=True), series, marked, level)


def _worth(tuned: Tuned) -> str:
    chosen = tuned.choice.best[0]
    rows: list[tuple[str, ...]] = [("", "p99", "beside chosen", "up to requests/s", "requests/s", "rows/batch", "busy")]
    for name, one in {"": chosen, **tuned.set_back}.items():
        found, factor = one.found, one.p99_ns / chosen.p99_ns
        rows.append(
            (
                f"{name} as now" if name else "as chosen",
                plain_time(one.p99_ns) if math.isfinite(one.p99_ns) else "-",
                f"{factor:.2f} \u00d7" if name and math.isfinite(factor) else "",
                f"{plain(one.most)}" if one.most else "-",
                f"{plain(found.throughput)}",
                f"{found.rows_per_batch:.3g}",
                f"{found.busy:.0%}",
            )
        )
    return _table(rows)


def _measured(tuned: Tuned) -> str:
    """Of what was tried with the load that was asked for, the prediction stands beside."""
    rows: list[tuple[str, ...]] = [
        ("", "load", "requests/s", "measured", "p50", "measured", "p99", "measured", "rows/batch", "measured")
    ]
    for name, one in tuned.named.items():
        if one.live is None or one.load is None:
            continue
        figures = [
            [
                f"{plain(found.throughput)}",
                *(plain_time(found.latencies.percentile_ns(share) or 0) for share in (50, 99)),
                f"{found.rows_per_batch:.3g}",
            ]
            for found in (one.found, one.live)
        ]
        predicted = figures[0] if one.load.load == tuned.goal.load else ["-"] * len(figures[0])
        pairs = [cell for pair in zip(predicted, figures[1], strict=True) for cell in pair]
        rows.append((name, f"{plain(one.load.load)}", *pairs))
    return _table(rows) + "".join(f"<p>{escape(said)}</p>" for said in tuned.apart())


def _rising(tuned: Tuned) -> str:
    series = {
        name: [(load, p99_ns / 1e6) for load, p99_ns in one.rising if math.isfinite(p99_ns)]
        for name, one in tuned.named.items()
        if one.rising
    }
    if not series:
        return "<p>Clients that wait for their answers ask for as much as there is: there is no room left.</p>"
    x = Axis("requests/s" if tuned.goal.rate else "clients")
    return lines("99th percentile as more is asked for", x, Axis("ms", is_log=True), series)


def _costs(now: Setting, chosen: Setting, simulated: Iterable[Tried]) -> list[str]:
    layouts = {_layout(one.layout): one.layout for one in (now, *(tried.setting for tried in simulated))}
    typical = {name: one.curve for name, one in layouts.items()}
    per_s = {
        name: [
            (rows, one.instances * rows * 1e9 / max(1.0, typical[name].mean_ns(rows) * (1 - one.prepared)))
            for rows in typical[name].sizes
        ]
        for name, one in layouts.items()
    }
    parts = [
        _curves("An execution by its rows", typical),
        lines("What all instances compute", _rows(typical.values()), Axis("rows/s"), per_s),
    ]
    by_size = chosen.layout.curves.by_size
    if len(by_size) > 1:
        parts.append(
            _curves("An execution by its rows and their size", {f"size {size}": one for size, one in by_size.items()})
        )
    return parts


def _curves(title: str, curves: Mapping[str, Curve]) -> str:
    series = {name: [(rows, one.mean_ns(rows) / 1e6) for rows in one.sizes] for name, one in curves.items()}
    return lines(title, _rows(curves.values()), Axis("ms", is_log=True), series)


def _rows(curves: Iterable[Curve]) -> Axis:
    return Axis(
        "rows", is_log=True, ticks={rows: str(rows) for rows in sorted({*(s for one in curves for s in one.sizes)})}
    )


def _contents(tuned: Tuned) -> str:
    rows, sizes = tuned.goal.mean_rows, [*tuned.choice.now.setting.layout.curves.by_size]
    said = f"Requests have {rows:.3g} rows" + (" on average" if rows % 1 else "") + "."
    if len(sizes) > 1:
        said += f" A row's size goes from {sizes[0]} to {sizes[-1]} elements."
    return said
