"""From samples to ratios and tables.

Lives here: which series are compared, and how results look to people and to programs. Must not: measure. Everything is
pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.stats import Sample, Spread, ratio, spread

__all__ = ["COMPARISONS", "Comparison", "Series", "series_of", "table", "text", "whole"]

Series = Mapping[str, Mapping[str, Sequence[float]]]
"""Values round by round, by step and measurement."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """`subject` over `baseline`, both names of steps, in `measurement`."""

    title: str
    subject: str
    baseline: str
    measurement: str = "requests_per_s"


COMPARISONS = (
    Comparison("tiny model, 64 clients: throughput, product / echo", "tiny 64 product", "tiny 64 echo"),
    Comparison(
        "tiny model, 64 clients: CPU time of the server, product / echo",
        "tiny 64 product",
        "tiny 64 echo",
        "server_cpu_us",
    ),
    Comparison("tiny model, 1 client: median latency, product / echo", "tiny 1 product", "tiny 1 echo", "p50_ms"),
    Comparison("perceptron, 64 clients: rows/s, product / session.run of 64 rows", "mlp 64 product", "mlp 64 direct"),
    Comparison("perceptron, 16 clients: rows/s, product / session.run of 16 rows", "mlp 16 product", "mlp 16 direct"),
    Comparison("perceptron, 64 clients: throughput, batching on / off", "mlp 64 product", "mlp 64 unbatched"),
)

_COLUMNS = (
    ("requests_per_s", "rows/s", 0),
    ("p50_ms", "p50 ms", 2),
    ("p90_ms", "p90 ms", 2),
    ("p99_ms", "p99 ms", 2),
    ("server_cpu_us", "server CPU us", 0),
    ("cores", "load's cores", 2),
    ("rows_per_batch", "rows/batch", 1),
    ("model_ms_per_batch", "model ms/batch", 2),
)


def series_of(rounds: Sequence[Mapping[str, Sample]]) -> Series:
    """Turn one mapping per round into one list per measurement."""
    first = rounds[0]
    return {
        step: {key: [one[step][key] for one in rounds] for key in sample if all(key in one[step] for one in rounds)}
        for step, sample in first.items()
    }


def whole(series: Series, more: Mapping[str, Any]) -> dict[str, Any]:
    """The report for programs; `more` goes in as it is."""
    return {
        **more,
        "ratios": {one.title: asdict(found) for one, found in _ratios(series)},
        "measurements": {
            step: {key: asdict(spread(values)) for key, values in mine.items()} for step, mine in series.items()
        },
    }


def text(series: Series, facts: Mapping[str, Any], direct: Mapping[str, float], micro: Mapping[str, Any]) -> str:
    """The report for people: ratios first, as they carry over to other machines; then what this machine did."""
    parts = [
        "Ratios: median of the rounds (lowest - highest)",
        table([[one.title, _ratio_text(found)] for one, found in _ratios(series)]),
        _batching_line(series),
        "Absolute: medians of the rounds; clients send one row per request, each at a time",
        table([["", *(title for _, title, _ in _COLUMNS)], *_absolute(series)]),
        "session.run by rows per batch, rows/s",
        table([list(direct), [f"{value:,.0f}" for value in direct.values()]]),
        "Queue alone, us per request",
        table(_queue_rows(micro["queue"])),
        "Stacking and splitting 64 rows, us",
        table(_batching_rows(micro["batching"])),
        _facts_text(facts),
    ]
    return "\n\n".join(part for part in parts if part)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they must be; the first leans left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  " + "  ".join(_cells(row, widths)).rstrip() for row in rows)


def _cells(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    first, *others = zip(row, widths, strict=True)
    return [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]


def _ratios(series: Series) -> list[tuple[Comparison, Spread]]:
    """The comparisons whose two sides were measured."""
    found = []
    for one in COMPARISONS:
        sides = [series.get(step, {}).get(one.measurement) for step in (one.subject, one.baseline)]
        if sides[0] and sides[1]:
            found.append((one, ratio(sides[0], sides[1])))
    return found


def _ratio_text(found: Spread) -> str:
    return f"{found.median:.2f} ({found.low:.2f} - {found.high:.2f})"


def _batching_line(series: Series) -> str:
    on, off = series["mlp 64 product"], series["mlp 64 unbatched"]
    if "rows_per_batch" not in on:
        return ""
    gain = ratio(on["requests_per_s"], off["requests_per_s"]).median
    rows = spread(on["rows_per_batch"]).median
    return f"Batching on the perceptron, 64 clients: throughput {gain:.1f} x, mean batch {rows:.1f} rows"


def _absolute(series: Series) -> list[list[str]]:
    return [
        [step, *(f"{spread(mine[key]).median:,.{digits}f}" if key in mine else "" for key, _, digits in _COLUMNS)]
        for step, mine in series.items()
    ]


def _queue_rows(costs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    head = ["waiting", "lanes", "deadlines", "levels", "push+poll+leave", "push+cancel+poll"]
    return [
        head,
        *(
            [
                f"{one['depth']:,}",
                f"{one['lanes']:,}",
                "yes" if one["deadlines"] else "no",
                str(one["levels"]),
                f"{one['push_poll_leave_us']:.1f}",
                f"{one['push_cancel_us']:.1f}",
            ]
            for one in costs
        ),
    ]


def _batching_rows(costs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    head = ["bytes per row", "stack", "split", "memcpy", "(stack + split) / memcpy"]
    return [
        head,
        *(
            [
                f"{one['row_bytes']:,}",
                *(f"{one[key]:,.1f}" for key in ("stack_us", "split_us", "memcpy_us")),
                f"{(one['stack_us'] + one['split_us']) / one['memcpy_us']:.2f}",
            ]
            for one in costs
        ),
    ]


def _facts_text(facts: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    return (
        f"{facts['processor']}, {facts['cores']} cores, {facts['system']}, load {facts['load_before']} before\n"
        f"Python {facts['python']}, {versions}, protobuf runs on {facts['protobuf_implementation']}"
    )
