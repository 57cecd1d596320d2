"""The benchmark: `python -m bench`.

Lives here: which scenarios, how long, where results go. Must not: measure (rounds, steps) or format (report).
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from bench import figures, models, perf_analyzer, report, summary
from bench.machine import facts
from bench.report import Result, section_of
from bench.rounds import Settings, measure
from bench.scenario import Scenario, ScenarioError, load_all
from bench.steps import BenchError
from bench.summary import Section, Summary
from tests.harness import REPO

__all__ = ["FULL", "QUICK", "main", "run"]

_RESULTS = REPO / "bench" / "results"
_PROGRAMS = REPO / ".witness" / "perf_analyzer"

FULL = Settings(rounds=5, seconds=3.0, warmup_s=1.0)
QUICK = Settings(rounds=1, seconds=0.3, warmup_s=0.1, all_points=False, rivals=False)


def run(scenarios: Sequence[Scenario], settings: Settings) -> Iterator[Result]:
    """Measure one scenario after the other. Leaves no process and no file behind once it has ended or was closed."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        folder = Path(name)

        @cache
        def model_file(model: str) -> Path:
            return models.write(model, folder)

        for scenario in scenarios:
            own = folder / scenario.name
            own.mkdir()
            yield measure(scenario, settings, model_file, own)


def main(arguments: Sequence[str] | None = None) -> None:
    got = _parser().parse_args(arguments)
    # SIGTERM raises an exception, so that every process and file of ours is cleaned up.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    out: Path = got.out or _RESULTS / ("quick.json" if got.quick else "latest.json")
    try:
        broken = _measure(_chosen(got.scenarios), _settings(got), out)
    except (BenchError, ScenarioError) as error:
        sys.exit(f"bench: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    if broken:
        sys.exit("bench: " + "\n".join(broken))


def _measure(scenarios: Sequence[Scenario], settings: Settings, out: Path) -> list[str]:
    """Measure, print, write, draw; returns what should have worked and didn't. Results are written to `out` after each
    scenario, in case the rest takes too long for somebody."""
    out.parent.mkdir(parents=True, exist_ok=True)
    found, broken = Summary(facts(), ()), []
    for result in run(scenarios, settings):
        found = replace(found, sections=(*found.sections, section_of(result, settings.how)))
        out.write_text(summary.dump(found), encoding="utf-8")
        failed = {side: one for side, one in result.absent.items() if one.failed}
        broken += [f"{result.scenario.name}: {side.server}: {one.reason}" for side, one in failed.items()]
    print(f"{report.text(found)}\n\n{out}")
    for path in _draw(found.sections, out):
        print(path)
    return broken


def _draw(sections: Sequence[Section], out: Path) -> Iterator[Path]:
    drawn = [one for one in sections if one.plot and one.measurements]
    if drawn and find_spec("matplotlib") is None:
        print("no pictures: they need matplotlib: pip install matplotlib")
        return
    for section in drawn:
        path = out.with_name(f"{out.stem}-{section.name}.svg")
        figures.draw_latency(section, path)
        yield path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure paceline against its bounds.")
    parser.add_argument("scenarios", nargs="*", help="names of files in bench/scenarios (default: all)")
    parser.add_argument("--quick", action="store_true", help="check that everything works; times mean nothing")
    parser.add_argument("--rounds", type=int, help=f"repetitions of everything (default: {FULL.rounds})")
    parser.add_argument("--seconds", type=float, help=f"for each measurement (default: {FULL.seconds:g})")
    parser.add_argument("--warmup", type=float, help=f"seconds before each (default: {FULL.warmup_s:g})")
    parser.add_argument("--generator", choices=["auto", "python"], default="auto", help="auto: perf_analyzer if it can")
    parser.add_argument("--out", type=Path, help="JSON of results, pictures beside it (default: in bench/results/)")
    return parser


def _settings(got: argparse.Namespace) -> Settings:
    settings = QUICK if got.quick else FULL
    return replace(
        settings,
        rounds=got.rounds or settings.rounds,
        seconds=got.seconds or settings.seconds,
        warmup_s=settings.warmup_s if got.warmup is None else got.warmup,
        perf_analyzer=perf_analyzer.find(_PROGRAMS) if got.generator == "auto" else None,
    )


def _chosen(names: Sequence[str]) -> list[Scenario]:
    found = {one.name: one for one in load_all()}
    if unknown := set(names) - set(found):
        raise ScenarioError(f"no such scenario: {', '.join(sorted(unknown))}; there are: {', '.join(found)}")
    return [found[name] for name in names or found]


if __name__ == "__main__":
    main()
