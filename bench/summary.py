"""What a run found, as values, from which the table, the JSON, the document and the figures are made.

Lives here: those values, their verdicts, their conversion to JSON and back. Must not: measure, format or touch files.
Everything is pure. Equal summaries give equal text, and JSON that was read gives the same text again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.scenario import Reach, ScenarioError, parse_reach
from bench.stats import Spread, spread

__all__ = ["Comparison", "Measurement", "Section", "Summary", "SummaryError", "dump", "load", "merge"]

_FORMAT = 1
_DIGITS = 6  # significant digits of numbers in JSON: far more than any measurement has
_VARIES = {"load_before", "python_step_ns"}
"""Facts of the machine that are measured, and never the same twice."""
_SPREAD = re.compile(r'\{\s*"median"[^}]*\}')  # one line each, or a file would have thousands


class SummaryError(Exception):
    """Text isn't the JSON of a summary, or summaries don't go together."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A ratio of two measurements of the same rounds, or the reason why there is none. `point` is the load."""

    point: str
    what: str
    found: Spread | None
    reach: Reach | None
    reason: str = ""

    @property
    def verdict(self) -> str:
        """Whether the bound is kept; "" if there is none."""
        if self.found is None:
            return "not measured"
        if self.reach is None:
            return ""
        return "reached" if self.reach.met(self.found.median) else "missed"


@dataclass(frozen=True, slots=True)
class Measurement:
    """What was measured of `who` under the load `point`: the rounds, by measurement, whose name has its unit."""

    who: str
    point: str
    values: Mapping[str, Spread]


@dataclass(frozen=True, slots=True)
class Section:
    """One scenario. `absent` has the reasons why some have no numbers; `plot`: a figure is to be drawn."""

    name: str
    title: str
    generator: str
    how: str
    plot: bool
    comparisons: tuple[Comparison, ...]
    measurements: tuple[Measurement, ...]
    absent: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Summary:
    """One run, or several on the same machine. `machine` is what `bench.machine.facts` gives; `date` is free text."""

    machine: Mapping[str, Any]
    sections: tuple[Section, ...]
    date: str = ""


def merge(summaries: Sequence[Summary]) -> Summary:
    """Several summaries as one; a scenario that is in more than one is taken from the last. Raises SummaryError unless
    all are from one machine with the same versions of everything: numbers of different machines don't belong in one
    table."""
    machines = [{key: value for key, value in one.machine.items() if key not in _VARIES} for one in summaries]
    for machine in machines[1:]:
        if machine != machines[0]:
            raise SummaryError(f"expected results of one machine, got {machines[0]} and {machine}")
    sections = {section.name: section for one in summaries for section in one.sections}
    ordered = tuple(sections[name] for name in sorted(sections))
    return Summary(summaries[-1].machine, ordered, next((one.date for one in reversed(summaries) if one.date), ""))


def dump(summary: Summary) -> str:
    """The summary as JSON. Medians, lowest and highest are there for readers; `load` uses the samples."""
    whole = {
        "format": _FORMAT,
        "date": summary.date,
        "machine": dict(summary.machine),
        "scenarios": {one.name: _section(one) for one in summary.sections},
    }
    return _SPREAD.sub(lambda found: " ".join(found[0].split()), json.dumps(whole, indent=1)) + "\n"


def load(text: str) -> Summary:
    """What `dump` wrote, except for digits beyond the sixth. Raises SummaryError if it is something else."""
    try:
        whole = json.loads(text)
        if whole["format"] != _FORMAT:
            raise SummaryError(f"expected results of format {_FORMAT}, got {whole['format']}")
        sections = tuple(_read_section(name, one) for name, one in whole["scenarios"].items())
        return Summary(whole["machine"], sections, whole["date"])
    except (json.JSONDecodeError, KeyError, TypeError, ValueError, ScenarioError) as error:
        raise SummaryError(f"not the results of a benchmark: {error!r}") from None


def _section(section: Section) -> dict[str, Any]:
    return {
        "title": section.title,
        "generator": section.generator,
        "how": section.how,
        "plot": section.plot,
        "ratios": [
            {
                "point": one.point,
                "what": one.what,
                "ratio": _spread(one.found) if one.found else None,
                "reach": str(one.reach) if one.reach else None,
                "verdict": one.verdict,
                "reason": one.reason,
            }
            for one in section.comparisons
        ],
        "measurements": [
            {"who": one.who, "point": one.point, "values": {name: _spread(found) for name, found in one.values.items()}}
            for one in section.measurements
        ],
        "absent": dict(section.absent),
    }


def _read_section(name: str, read: Mapping[str, Any]) -> Section:
    return Section(
        name=name,
        title=read["title"],
        generator=read["generator"],
        how=read["how"],
        plot=read["plot"],
        comparisons=tuple(_read_comparison(one) for one in read["ratios"]),
        measurements=tuple(
            Measurement(one["who"], one["point"], {key: _read_spread(found) for key, found in one["values"].items()})
            for one in read["measurements"]
        ),
        absent=read["absent"],
    )


def _read_comparison(read: Mapping[str, Any]) -> Comparison:
    return Comparison(
        point=read["point"],
        what=read["what"],
        found=_read_spread(read["ratio"]) if read["ratio"] else None,
        reach=parse_reach(read["reach"]) if read["reach"] else None,
        reason=read["reason"],
    )


def _spread(found: Spread) -> dict[str, Any]:
    samples = [_rounded(one) for one in found.samples]
    return {"median": _rounded(found.median), "low": min(samples), "high": max(samples), "samples": samples}


def _read_spread(read: Mapping[str, Any]) -> Spread:
    return spread([float(one) for one in read["samples"]])


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
