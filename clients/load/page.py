"""The outcome of a load as one page, with plots and without anything from elsewhere.

Lives here: what the page shows. Must not: drawing (plots.py), figures. All text that a server or a user gave is
escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import accumulate
from typing import Final

from paceline.clients.load.histogram import Histogram
from paceline.clients.load.outcome import Outcome
from paceline.clients.load.printing import Verdict, outcome_text
from paceline.clients.load.tally import blocks
from paceline.clients.plots import Axis, bars, document, lines

_POINTS: Final = 120
_SPECTRUM: Final = (*(percent / 2 for percent in range(180)), *(100 - 10 ** (1 - step / 20) for step in range(81)))


def page(outcome: Outcome, title: str, heading: str, verdicts: Sequence[Verdict]) -> str:
    """The whole page."""
    histograms = {"latency": outcome.total.latencies}
    if outcome.has_many_answers:
        histograms |= {"first answer": outcome.total.first, "per token": outcome.total.gaps}
    parts = [_over_time(outcome, "latency"), _over_time(outcome, "throughput"), spectrum(histograms)]
    served = outcome.served
    if served is not None and served.means_ms:
        means = {name.replace("_", " "): mean for name, mean in served.means_ms.items() if mean}
        parts.append(bars("Where a request's time goes in the server", Axis("mean"), Axis("ms"), means))
    if served is not None and served.executions:
        by_rows = {str(rows): float(count) for rows, count in served.executions.items()}
        parts.append(bars("Batches by their rows", Axis("rows"), Axis(""), by_rows))
    text = escape(outcome_text(outcome, heading, verdicts))
    return document(title, [f"<pre>{text}</pre>", *parts], "pre { white-space: pre-wrap; }")


def _over_time(outcome: Outcome, what: str) -> str:
    """All slices, those of the warm-up too; the period that counts stands out."""
    measured = outcome.measured
    found = blocks(measured.slices, _POINTS)
    lengths_s = [length * measured.slice_s for length, _ in found]
    times_s = [end_s - length_s / 2 for end_s, length_s in zip(accumulate(lengths_s), lengths_s, strict=True)]
    period = measured.period
    band = (period.first * measured.slice_s, period.end * measured.slice_s)
    x = Axis("seconds since the load began")
    if what == "throughput":
        rates = [block.answered / length_s for length_s, (_, block) in zip(lengths_s, found, strict=True)]
        due = [block.due / length_s for length_s, (_, block) in zip(lengths_s, found, strict=True)]
        series = {"answers": _points(times_s, rates)} | ({"due": _points(times_s, due)} if outcome.is_open else {})
        return lines("Throughput over time", x, Axis("requests/s"), series, band)
    percentiles = {
        f"p{percent}": _points(
            times_s,
            [None if (ns := block.latencies.percentile_ns(percent)) is None else ns / 1e6 for _, block in found],
        )
        for percent in (50, 90, 99)
    }
    return lines("Latency over time, by when requests were due", x, Axis("ms"), percentiles, band)


def _points(at: Iterable[float], values: Iterable[float | None], unit: float = 1) -> list[tuple[float, float]]:
    return [(one, value / unit) for one, value in zip(at, values, strict=True) if value is not None]


def spectrum(histograms: Mapping[str, Histogram]) -> str:
    """How long the slowest share of requests took, on an axis on which each nine is as wide as the last."""
    series = {}
    for name, histogram in histograms.items():
        # Beyond that, a percentile is the slowest request.
        most = 100 - 100 / max(2, histogram.count)
        series[name] = [
            (-math.log10(1 - percent / 100), ns / 1e6)
            for percent in _SPECTRUM
            if percent <= most and (ns := histogram.percentile_ns(percent)) is not None
        ]
    ticks = {-math.log10(1 - percent / 100): f"{percent:g} %" for percent in (50, 90, 99, 99.9, 99.99, 99.999)}
    x, y = Axis("share of requests that were at most so slow", ticks=ticks), Axis("ms", is_log=True)
    return lines("Latency by percentile", x, y, series)
