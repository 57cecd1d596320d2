"""docs/measurements.md, made from results: `python -m bench.document`.

Lives here: the document's text. Must not: measure, or judge otherwise than the scenarios do. Equal results give an
equal document; what was missed comes before what was reached.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from bench import figures, report, summary
from bench.steps import BenchError
from bench.summary import Comparison, Section, Summary, SummaryError
from tests.harness import REPO

__all__ = ["DOCUMENT", "FIGURES", "RESULTS", "main", "markdown"]

DOCUMENT = REPO / "docs" / "measurements.md"
RESULTS = REPO / "docs" / "measurements.json"
FIGURES = REPO / "docs" / "figures"

_HEAD = """# Measurements

<!-- Made by `python -m bench.document` from the JSON of the same name; changes made here are lost. -->

What these figures come to is told in [performance.md](performance.md); `bench/scenarios` defines what is measured,
[bench/README.md](../bench/README.md) how. Each ratio compares two measurements of the same round, made one after the
other on the same machine. Shown is the median of the rounds, with the lowest and the highest in brackets. Requests per
second differ from machine to machine; ratios carry over better. All requests were answered, unless a table says what
share of them was.
"""
_NO_GPU = "Nothing here was measured on a GPU: see [measurements-gpu.md](measurements-gpu.md)."
_GPU = """What the missed bounds come from, and what else was seen, is told in
[the way to the GPU](decisions/0005-the-way-to-the-gpu.md#what-an-h200-has-shown)."""
_CHAPTERS = (
    ("Missed", "missed", "Comparisons that fall short of their bound."),
    ("Reached", "reached", ""),
    ("For comparison", "", "Comparisons without a bound."),
)
_COLUMNS = ("scenario", "load", "compared", "ratio", "bound")

Row = tuple[Section, Comparison]


def markdown(found: Summary, folder: str) -> str:
    """The document. Pictures are linked as SCENARIO.svg in `folder`."""
    rows = [(section, one) for section in found.sections for one in section.comparisons]
    judged = [one for _, one in rows if one.verdict in ("reached", "missed") and one.reach]
    reached = sum(one.verdict == "reached" for one in judged)
    gpu = _GPU if found.machine.get("gpu") else _NO_GPU
    parts = [_HEAD.rstrip(), gpu, _conditions(found), f"**{reached} of {len(judged)}** bounds are reached."]
    for title, verdict, words in _CHAPTERS:
        chosen = [(section, one) for section, one in rows if one.found and one.verdict == verdict]
        parts += [f"## {title}", *([words] if words else []), _ratios(chosen)] if chosen else []
    if unknown := [(section, one) for section, one in rows if one.found is None]:
        parts += ["## Not measured", _unknown(unknown)]
    parts.append("## Scenarios")
    for section in found.sections:
        parts += _scenario(section, folder)
    return "\n\n".join(parts) + "\n"


def _conditions(found: Summary) -> str:
    lines = [*([f"Measured: {found.date}"] if found.date else []), *report.facts(found.machine)]
    return "\n".join(f"- {line}" for line in lines)


def _ratios(rows: Sequence[Row]) -> str:
    cells = [
        [f"[{section.name}](#{section.name})", one.point, one.what, *report.compared(one)] for section, one in rows
    ]
    return _table([_COLUMNS, *cells])


def _unknown(rows: Sequence[Row]) -> str:
    return _table([("scenario", "compared", "reason"), *([one.title, this.what, this.reason] for one, this in rows)])


def _scenario(section: Section, folder: str) -> Iterator[str]:
    yield f"### {section.name}"
    yield f"{section.title}: {section.how}{report.shown(section.generator)}."
    if section.measurements:
        yield _table(_without_all_answered(report.absolute(section)))
    if section.plot and section.measurements:
        yield f"![{section.title}: latency over throughput]({folder}/{section.name}.svg)"


def _without_all_answered(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """The rows without the column `answered` if there was an answer to all requests."""
    plain = {
        at for at, name in enumerate(rows[0]) if name == "answered" and {row[at] for row in rows[1:]} <= {"", "1.00"}
    }
    return [[cell for at, cell in enumerate(row) if at not in plain] for row in rows]


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = (f"| {' | '.join(' '.join(cell.replace('|', '/').split()) for cell in row)} |" for row in rows)
    return "\n".join([head, "|---" + "|---:" * (len(rows[0]) - 1) + "|", *body])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.document", description="Write docs/measurements.md, its figures and its JSON of results."
    )
    parser.add_argument(
        "results",
        nargs="*",
        type=Path,
        default=[RESULTS],
        help="JSON files of runs; of a scenario in several, the last",
    )
    parser.add_argument("--name", default="measurements", help="document name (default: %(default)s)")
    parser.add_argument("--date", help="when it was measured (default: what the results say, or nothing)")
    got = parser.parse_args(arguments)
    try:
        found = summary.merge([summary.load(path.read_text(encoding="utf-8")) for path in got.results])
        found = replace(found, date=got.date) if got.date is not None else found
        for section in found.sections:
            if section.plot and section.measurements:
                figures.draw_latency(section, FIGURES / f"{section.name}.svg")
    except (OSError, SummaryError, BenchError) as error:
        sys.exit(f"bench: {error}")
    document, results = (path.with_stem(got.name) for path in (DOCUMENT, RESULTS))
    results.write_text(summary.dump(found), encoding="utf-8")
    document.write_text(markdown(found, os.path.relpath(FIGURES, document.parent)), encoding="utf-8")
    print(f"{document}\n{results}")


if __name__ == "__main__":
    main()
