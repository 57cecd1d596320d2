"""The product on a GPU: `python -m bench.gpu`, all of it in less than ten minutes.

Lives here: what is measured in which order, by the clock, and which bounds apply. Must not: measure (`gpu_steps`), make
models (`gpu_models`) or format (`report`). Models that answer wrongly aren't timed. With `--device cpu --quick`, the
same runs on any machine with tiny models, to check that everything works.

The load is a closed loop, with so many clients that several full batches wait at any time. Images are in shared memory
and texts are sent over streams, by several processes of `bench.load`: a single one would saturate a core before the GPU
is saturated.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import grpc

from bench import gpu_models, gpu_steps, report, summary
from bench.gpu_models import GpuModel
from bench.gpu_plan import Plan, absent, reason, say
from bench.gpu_processes import serving
from bench.gpu_rounds import measure, name_of, title_of
from bench.gpu_sections import check_answers, is_wrong, scale_frontends
from bench.machine import facts
from bench.stats import Sample
from bench.summary import Section, Summary
from tests.harness import REPO, ServerProcess

__all__ = ["main"]

_RESULTS = REPO / "bench" / "results"


def run(plan: Plan, chosen: Sequence[GpuModel], folder: Path) -> Iterator[Section]:
    """One section after the other. Those that fail say why, and the rest continues."""
    files = {}
    for model in chosen:
        say(f"making {model.name}")
        files[model.name] = gpu_models.write(model, folder)
        gpu_models.add(model, files[model.name], folder / "models", plan.device, graphs=plan.graphs)
    with ExitStack() as stack:
        try:
            server = stack.enter_context(serving(folder / "models", plan.frontends))
        except AssertionError as error:
            yield absent("gpu-correct", "Answers on the device", plan, f"paceline did not start: {reason(error)}")
            return
        first = {model.name: _first(server, model) for model in chosen}
        correct = check_answers(plan, server, chosen, files)
        yield correct
        for model in chosen:
            if why := correct.absent.get(model.name) or (is_wrong(correct, model) and "its answers are wrong"):
                yield absent(name_of(model), title_of(model), plan, why)
                continue
            yield measure(plan, server, model, files[model.name], first[model.name], folder)
    yield scale_frontends(plan, folder)


def _first(server: ServerProcess, model: GpuModel) -> Sample:
    """Latencies before any other request. If something is wrong with a model, the steps that follow say what."""
    try:
        first_ms, later_ms = gpu_steps.first_request(server, model)
    except grpc.RpcError:
        return {}
    return {"first_ms": first_ms, "p50_ms": later_ms}


def main(arguments: Sequence[str] | None = None) -> None:
    got = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    plan = Plan(
        device=got.device,
        rounds=1 if got.quick else 3,
        seconds=0.4 if got.quick else 4.0,
        warmup_s=0.1 if got.quick else 1.0,
        frontends=1 if got.quick else got.frontends,
        fronts=(1, 2) if got.quick else (1, 2, 4, 8),
        processes=1 if got.quick else got.processes,
        graphs=got.graphs,
        until_s=time.monotonic() + 60 * got.minutes,
    )
    chosen = [one for one in gpu_models.chosen(got.device, got.quick) if got.models in one.name]
    out: Path = got.out or _RESULTS / ("gpu-quick.json" if got.quick else "gpu.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    found = Summary(facts(), ())
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        for section in run(plan, chosen, Path(folder)):
            found = replace(found, sections=(*found.sections, section))
            out.write_text(summary.dump(found), encoding="utf-8")  # at once: the machine may be lent
            for one in section.comparisons:
                say(f"{section.name}: {one.what}: {one.found.median if one.found else 0:.2f} {one.verdict}")
            for who, why in section.absent.items():
                say(f"{section.name}: no {who}: {why}")
    print(f"{report.text(found)}\n\n{out}")
    wrong = [f"{one.name}: {why}" for one in found.sections for why in one.absent.values()]
    wrong += [one.what for section in found.sections[:1] for one in section.comparisons if one.verdict != "reached"]
    if wrong:
        sys.exit("bench: " + "\n".join(wrong))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description="Measure paceline on a GPU.")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="(default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="tiny models, to check that everything works")
    parser.add_argument("--models", default="", help="only models whose names contain this, such as bert or fp32")
    parser.add_argument("--frontends", type=int, default=8, help="frontends of the server (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=4, help="load generators (default: %(default)s)")
    parser.add_argument("--graphs", action="store_true", help="have the server replay CUDA graphs")
    parser.add_argument("--minutes", type=float, default=8.0, help="start nothing after these (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="the JSON of results (default: in bench/results)")
    return parser


if __name__ == "__main__":
    main()
