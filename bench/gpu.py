"""The product on a GPU: `python -m bench.gpu`, all of it in less than ten minutes.

Lives here: the command, the order of the sections, and results that are kept as they come. Must not: measure
(`gpu_steps`), repeat and compare (`gpu_sections`, `gpu_rounds`), make models (`gpu_models`) or format (`report`).
Models that answer wrongly aren't timed. With `--device cpu --quick`, the same runs on any machine with tiny models, to
check that everything works.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bench import gpu_models, gpu_steps, report, summary
from bench.gpu_kinds import generate, mix_lengths, step_sequences
from bench.gpu_models import GpuModel
from bench.gpu_plan import Found, Plan, brief, say
from bench.gpu_processes import serving
from bench.gpu_rounds import FIRST, ModelRun
from bench.gpu_sections import ANSWERS, check_answers, scale_frontends
from bench.machine import facts
from bench.summary import Section, Summary
from tests.harness import REPO, ServerProcess

__all__ = ["PARTS", "main", "run"]

_RESULTS = REPO / "bench" / "results"
_OTHERS: Mapping[str, Callable[[Plan, Path], Iterator[Section]]] = {
    "lengths": mix_lengths,
    "sequences": step_sequences,
    "generations": generate,
    "frontends": scale_frontends,
}
PARTS = ("lengths", "sequences", "generations", "models", "frontends")


def run(plan: Plan, parts: Sequence[str], chosen: Sequence[GpuModel], folder: Path) -> Iterator[Section]:
    """Sections, each as often as there is something new in it. Those that fail say why, and the rest continues."""
    for part in parts:
        yield from _serve_models(plan, chosen, folder) if part == "models" else _OTHERS[part](plan, folder)


def _serve_models(plan: Plan, chosen: Sequence[GpuModel], folder: Path) -> Iterator[Section]:
    found = Found()
    with found.trying("paceline"):
        plan.check()
        files = {}
        for model in chosen:
            say(f"making {model.name}")
            files[model] = gpu_models.write(model, folder)
            gpu_models.add(model, files[model], folder / "models", plan.device, graphs=plan.graphs)
        say("starting paceline")
        with serving(folder / "models", plan.frontends) as server:
            yield from _served(plan, server, files, folder)
    if found.absent:
        yield found.section("gpu-server", "The server of all models", plan.how)


def _served(plan: Plan, server: ServerProcess, files: Mapping[GpuModel, Path], folder: Path) -> Iterator[Section]:
    """All that is measured of a server: first its answers, then what they cost."""
    runs = [ModelRun(plan, server, model, file, folder, Found()) for model, file in files.items()]
    for one in runs:
        with one.found.trying(FIRST):
            one.found.add(FIRST, gpu_steps.first_request(server, one.model))
    right: set[str] = set()
    yield from check_answers(plan, server, files, right)
    for one in runs:
        if one.model.name in right:
            yield from one.sections()
        else:
            yield one.unmeasured(f"its answers are wrong, or there are none: see {ANSWERS}")


class Results:
    """What was found so far, in the file `out` at any time: the machine may be lent."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._found = Summary(facts(), ())

    def add(self, section: Section) -> None:
        """Add it, or replace that of the same name."""
        sections = {one.name: one for one in (*self._found.sections, section)}
        self._found = replace(self._found, sections=tuple(sections.values()))
        self._out.parent.mkdir(parents=True, exist_ok=True)
        new = self._out.with_name(f"{self._out.name}.new")
        new.write_text(summary.dump(self._found), encoding="utf-8")
        os.replace(new, self._out)

    def failures(self) -> list[str]:
        """What is missing or wrong, a line each."""
        sections = self._found.sections
        wrong = [one for found in sections if found.name == ANSWERS for one in found.comparisons]
        return [
            *(f"{one.name}: no {who}" for one in sections for who in one.absent),
            *(f"wrong: {one.what}" for one in wrong if one.verdict != "reached"),
        ]

    def show(self) -> None:
        """Print all of it, the ratios last, as whoever runs this elsewhere may see no more than the last pages."""
        sections = [
            replace(one, absent={who: brief(why) for who, why in one.absent.items()}) for one in self._found.sections
        ]
        found = replace(self._found, sections=tuple(sections))
        print(f"{report.measured(found)}\n\n{report.ratios(found)}\n\n{self._out}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    got = _parser().parse_args(arguments)
    plan = Plan(
        device=got.device,
        rounds=1 if got.quick else 3,
        seconds=0.4 if got.quick else 4.0,
        warmup_s=0.1 if got.quick else 1.0,
        frontends=1 if got.quick else got.frontends,
        processes=1 if got.quick else got.processes,
        until_s=time.monotonic() + 60 * got.minutes,
        graphs=got.graphs,
        quick=got.quick,
    )
    # Graphs change nothing about the rest.
    parts = got.only or (["models"] if got.graphs else PARTS)
    chosen = [
        one
        for one in gpu_models.chosen(got.device, gpu_models.QUICK if got.quick else gpu_models.FULL)
        if got.models in one.name
    ]
    results = Results(got.out or _RESULTS / ("gpu-quick.json" if got.quick else "gpu.json"))

    def end(number: int, frame: object) -> None:
        results.show()  # before anything is ended, which may take longer than there is
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        for section in run(plan, parts, chosen, Path(folder)):
            results.add(section)
    failures = results.failures()
    for one in failures:
        say(one)
    results.show()
    if failures:
        sys.exit(1)


def _parts(text: str) -> list[str]:
    parts = text.split(",")
    if unknown := {*parts} - {*PARTS}:
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    return parts


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description="Measure paceline on a GPU.")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="(default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="tiny models, to check that everything works")
    parser.add_argument("--models", default="", help="only models whose names contain this, such as bert or fp32")
    parser.add_argument("--only", type=_parts, metavar="PART,…", help=f"of {', '.join(PARTS)}, some, in that order")
    parser.add_argument("--frontends", type=int, default=8, help="frontends of the server (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=4, help="load generators (default: %(default)s)")
    parser.add_argument("--graphs", action="store_true", help="have the server replay CUDA graphs")
    parser.add_argument("--minutes", type=float, default=8.0, help="start nothing after these (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="the JSON of results (default: in bench/results)")
    return parser


if __name__ == "__main__":
    main()
