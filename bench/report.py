"""From samples to ratios and tables.

Lives here: what is compared with what, and how it looks on a terminal. Must not: measure. Everything is
pure, but that `Rounds` prints what it is told.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from bench.scenario import Point, Reference, Scenario, Side
from bench.stats import Sample, Spread, ratio, spread
from bench.summary import Comparison, Measurement, Section, Summary

__all__ = [
    "Absence",
    "Result",
    "Rounds",
    "absolute",
    "compared",
    "facts",
    "measured",
    "ratios",
    "section_of",
    "series_of",
    "shown",
    "table",
    "text",
]

_MEASURES = {
    "requests_per_s": "requests/s",
    "server_cpu_us": "server's CPU time per request",
    "p50_ms": "median latency",
    "p99_ms": "p99 latency",
    "stack_split_us": "time",
}
_COLUMNS = (
    ("requests_per_s", "requests/s", 0),
    ("p50_ms", "p50 ms", 2),
    ("p90_ms", "p90 ms", 2),
    ("p99_ms", "p99 ms", 2),
    ("server_cpu_us", "CPU us/request", 0),
    ("rows_per_batch", "rows/batch", 1),
    ("input_ms_per_batch", "input ms/batch", 2),
    ("model_ms_per_batch", "model ms/batch", 2),
    ("output_ms_per_batch", "output ms/batch", 2),
    ("cores", "load's cores", 2),
    ("lag_p99_ms", "load's lag p99 ms", 2),
    ("answered", "answered", 2),
    ("rows_per_s", "rows/s", 0),
    ("texts_per_s", "texts/s", 0),
    ("steps_per_s", "steps/s", 0),
    ("tokens_per_s", "tokens/s", 0),
    ("first_p50_ms", "first token p50 ms", 2),
    ("first_p99_ms", "first token p99 ms", 2),
    ("token_p50_ms", "token p50 ms", 2),
    ("token_p99_ms", "token p99 ms", 2),
    ("gpu_busy", "GPU busy", 2),
    ("batch_ms", "batch ms", 2),
    ("first_model_ms", "first model ms", 2),
    ("first_ms", "first ms", 2),
    ("deviation", "deviation", 6),
    ("stack_us", "stack us", 1),
    ("split_us", "split us", 1),
    ("memcpy_us", "memcpy us", 1),
)

Key = TypeVar("Key")
Series = Mapping[Key, Mapping[str, Sequence[float]]]
"""Values per round, by what was measured and by measurement."""


@dataclass(frozen=True, slots=True)
class Absence:
    """Why a side has no numbers. `failed`: it should have some."""

    reason: str
    failed: bool


@dataclass(frozen=True, slots=True)
class Result:
    """The results of a scenario at the `points` that were measured."""

    scenario: Scenario
    points: tuple[Point, ...]
    generator: str
    series: Series[tuple[Side, Point]]
    absent: Mapping[Side, Absence]


def series_of(rounds: Sequence[Mapping[Key, Sample]]) -> Series[Key]:
    """Turn one mapping per round into one list per measurement; a measurement that a round lacks is left out."""
    return {
        step: {key: [one[step][key] for one in rounds] for key in sample if all(key in one[step] for one in rounds)}
        for step, sample in rounds[0].items()
    }


def section_of(result: Result, how: str) -> Section:
    """Ratios and spreads of a scenario; `how` says for how long it was measured."""
    scenario = result.scenario
    return Section(
        name=scenario.name,
        title=scenario.title,
        generator=result.generator,
        how=how,
        plot=scenario.plot,
        comparisons=tuple(
            _comparison(result, reference, point) for point in result.points for reference in scenario.references
        ),
        measurements=tuple(
            Measurement(
                who=scenario.name_of(side),
                point=str(point) if side.served else "",
                values={key: spread(values) for key, values in found.items()},
            )
            for (side, point), found in result.series.items()
        ),
        absent={scenario.name_of(side): absence.reason for side, absence in result.absent.items()},
    )


def _comparison(result: Result, reference: Reference, point: Point) -> Comparison:
    scenario, found, reason = result.scenario, None, ""
    subject, other = (result.series.get((side, point), {}) for side in (scenario.subject, reference.side))
    if subject.get(reference.measure) and all(other.get(reference.over, [0])):
        found = ratio(subject[reference.measure], other[reference.over])
    else:
        missing = [result.absent[side].reason for side in (scenario.subject, reference.side) if side in result.absent]
        reason = missing[0] if missing else "no answers to compare"
    return Comparison(
        point=str(point) if scenario.subject.served else "",
        what=f"{_MEASURES.get(reference.measure, reference.measure)} / {reference.label}",
        found=found,
        reach=reference.reach,
        reason=reason,
    )


def text(summary: Summary) -> str:
    """The report for a terminal: first ratios, which carry over to other machines; then what this machine did."""
    return f"{ratios(summary)}\n\n{measured(summary)}"


def ratios(summary: Summary) -> str:
    """What was compared, of all sections."""
    rows = [
        [section.title, one.point, one.what, *compared(one), one.verdict]
        for section in summary.sections
        for one in section.comparisons
    ]
    return "\n\n".join(["Ratios: median of the rounds (lowest - highest)", table([_HEAD, *rows])])


def measured(summary: Summary) -> str:
    """What was measured, section by section, and the machine."""
    parts = []
    for section in summary.sections:
        parts.append(f"{section.name}: {section.title}; {section.how}{shown(section.generator)}")
        parts.append(table(absolute(section)) if section.measurements else "  nothing was measured")
        parts += ["\n".join(f"  {who}: {reason}" for who, reason in section.absent.items())] if section.absent else []
    return "\n\n".join([*parts, "\n".join(facts(summary.machine))])


_HEAD = ("what", "load", "compared", "ratio", "bound", "verdict")


def compared(comparison: Comparison) -> tuple[str, str]:
    """The cells of a ratio and of its bound."""
    found = comparison.found
    return _spread(found) if found else "", str(comparison.reach) if comparison.reach else ""


def shown(generator: str) -> str:
    """The load generator as the end of a sentence; empty if there was none."""
    return f", load from {generator}" if generator else ""


def absolute(section: Section) -> list[list[str]]:
    """Medians of what was measured, one row each under a header, without columns that have no values."""
    columns = [one for one in _COLUMNS if any(one[0] in measured.values for measured in section.measurements)]
    return [["who", "load", *(title for _, title, _ in columns)], *_absolute(section, columns)]


def _absolute(section: Section, columns: Sequence[tuple[str, str, int]]) -> Iterator[list[str]]:
    for one in section.measurements:
        cells = (f"{one.values[key].median:,.{digits}f}" if key in one.values else "" for key, _, digits in columns)
        yield [one.who, one.point, *cells]


def facts(machine: Mapping[str, Any]) -> tuple[str, ...]:
    """The machine, its GPUs if it has any, and its software, a line each."""
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    python = f"Python {machine['python']}"
    if "python_step_ns" in machine:
        python += f" ({machine['python_step_ns'] / 1_000:.1f} us per step)"
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['system']}, "
        f"load average before: {machine['load_before']}",
        *([machine["gpu"]] if "gpu" in machine else []),
        f"{python}, {versions}, protobuf implementation: {machine['protobuf_implementation']}",
    )


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they must be; the first aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  " + "  ".join(_cells(row, widths)).rstrip() for row in rows)


class Rounds(list[dict[str, Any]]):
    """What a measurement on its own has found, each line of it printed as it comes."""

    def add(self, found: dict[str, Any]) -> None:
        self.append(found)
        print(json.dumps(found), flush=True)

    def medians(self, keys: Sequence[str], by: str = "") -> str:
        """Of each of `keys` that there is, apart for each value of `by`: median, lowest and highest, in Markdown."""
        lines = ["| | median | lowest | highest |", "|---|---|---|---|"]
        for part in dict.fromkeys(one.get(by, "") for one in self):
            for key in keys:
                values = [one[key] for one in self if one.get(by, "") == part and one.get(key) is not None]
                if values:
                    found = spread(values)
                    name = f"{part} {key}".strip()
                    lines.append(f"| {name} | {found.median:.3g} | {found.low:.3g} | {found.high:.3g} |")
        return "\n".join(lines)


def _cells(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    first, *others = zip(row, widths, strict=True)
    return [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]


def _spread(found: Spread) -> str:
    return f"{found.median:.2f} ({found.low:.2f} - {found.high:.2f})"
