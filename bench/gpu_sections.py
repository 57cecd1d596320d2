"""The sections of `bench.gpu` that aren't about one model: answers, and several processes for gRPC.

Lives here: what is asked, in which order, and what is compared. Must not: single measurements (`gpu_steps`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from bench import gpu_steps
from bench.gpu_models import GpuModel
from bench.gpu_plan import Found, Plan, say
from bench.gpu_processes import LoadGenerators, serving
from bench.load import GENERATOR
from bench.scenario import Reach
from bench.sessions import open_session
from bench.stats import ratio, spread
from bench.subjects import main_thread_cpu_s
from bench.summary import Comparison, Section
from paceline.clients.messages import infer_request
from tests import models as tiny_models
from tests.harness import ServerProcess

__all__ = ["ANSWERS", "check_answers", "scale_frontends"]

ANSWERS = "gpu-correct"
_TINY = "tiny"
_SMALL = 16
_MEASURED_FRONTS = 4
"""So many should be worth 0.8 processes each; of eight, their load leaves too few cores."""


def check_answers(
    plan: Plan, server: ServerProcess, files: Mapping[GpuModel, Path], right: set[str]
) -> Iterator[Section]:
    """Compare answers of each model with the CPU's; the section after each. Names of models that answer rightly are
    added to `right`."""
    found, comparisons = Found(), []
    for model, file in files.items():
        with found.trying(model.name):
            part = _answered(server, model, file, found) / model.tolerance
            what = f"{model.name}: largest deviation from the CPU's answers / {model.tolerance:g}"
            comparisons.append(Comparison("", what, spread([part]), Reach(False, 1.0)))
            say(f"{what}: {part:.3f}, {comparisons[-1].verdict}")
            if comparisons[-1].verdict == "reached":
                right.add(model.name)
        yield found.section(ANSWERS, "answers", plan.how, tuple(comparisons))


def _answered(server: ServerProcess, model: GpuModel, file: Path, found: Found) -> float:
    """The largest deviation of single requests, and of so many at once that they fill three batches: then they share
    batches, and both slots are used."""
    reference = open_session(file, threads=0)
    several = range(3 * model.batch_rows // model.few_rows)
    alone = [gpu_steps.deviation(server, model, reference, model.rows, [seed]) for seed in range(2)]
    found.add(f"{model.name}, {model.rows} rows alone", max(alone, key=lambda one: one["deviation"]))
    together = gpu_steps.deviation(server, model, reference, model.few_rows, several)
    found.add(f"{model.name}, {len(several)} x {model.few_rows} rows at once", together)
    return max(one["deviation"] for one in (*alone, together))


def scale_frontends(plan: Plan, folder: Path) -> Iterator[Section]:
    """Requests of 16 floats through more and more frontends, in turn; the section after each round."""
    # So many connections that each of eight listeners, to which the kernel deals them at random, has some, and twice as
    # many processes as for other loads, since here they do most of the work.
    processes = 2 * plan.processes
    crowd, found = LoadGenerators(processes, 32, 64 // processes, stream=False), Found()
    fronts = plan.sized((1, 2), (1, 2, 4, 8))
    with found.trying("frontends"), ExitStack() as stack:
        plan.check()
        repository, request = folder / "small", _tiny(folder)
        servers = {count: stack.enter_context(serving(repository, count)) for count in fronts}
        for number in range(plan.rounds):
            plan.check()
            for count in fronts if number % 2 == 0 else reversed(fronts):
                busy: list[float] = []
                server, seconds = servers[count], plan.seconds / 2

                def watch(server: ServerProcess = server, busy: list[float] = busy) -> None:
                    busy.append(_main_thread_busy(server, plan.seconds / 4))

                sample = crowd.send(server.target, [request], seconds, plan.warmup_s, watch)
                found.add(_name(count), {**sample, "engine_busy": busy[0]})
            rates = (f"{count}: {found.of(_name(count), 'requests_per_s')[-1]:,.0f}" for count in fronts)
            say(f"frontends: round {number + 1} of {plan.rounds}: requests/s: {', '.join(rates)}")
            yield _scaled(plan, crowd, fronts, found)
    yield _scaled(plan, crowd, fronts, found)


def _tiny(folder: Path) -> Path:
    """A repository, `folder`/small, with a model that returns 16 floats; a file with a request. It is on the CPU: on a
    GPU, the time of its small batches would hide what the frontends can do."""
    place = folder / "small" / _TINY
    tiny_models.write(tiny_models.identity("FP32", ("batch", _SMALL)), place / "1" / "model.onnx")
    (place / "config.pbtxt").write_text(
        "max_batch_size: 64 dynamic_batching { } instance_group { kind: KIND_CPU count: 1 }\n"
    )
    request = folder / f"{_TINY}.request"
    request.write_bytes(infer_request(_TINY, {"INPUT0": np.zeros((1, _SMALL), np.float32)}).SerializeToString())
    return request


def _scaled(plan: Plan, crowd: LoadGenerators, fronts: Sequence[int], found: Found) -> Section:
    alone = found.of(_name(fronts[0]), "requests_per_s")
    comparisons = []
    for count in fronts[1:]:
        rates = found.of(_name(count), "requests_per_s")
        if both := min(len(rates), len(alone)):
            limit = crowd.limit(found.of(_name(count), "cores"))
            what = f"requests/s, --frontends {count} / {fronts[0]}{limit}"
            bound = plan.reach(Reach(True, 0.8 * count)) if count == _MEASURED_FRONTS and not limit else None
            comparisons.append(Comparison(str(crowd), what, ratio(rates[:both], alone[:both]), bound))
            busy = spread(found.of(_name(count), "engine_busy"))
            what = f"the thread that batches, busy with --frontends {count}"
            comparisons.append(Comparison(str(crowd), what, busy, None))
    how = f"requests of 16 floats to a model on the CPU; {plan.how}"
    points, generator = dict.fromkeys(found.rounds, str(crowd)), f"{crowd.processes} of {GENERATOR}"
    return found.section("gpu-frontends", "frontends", how, tuple(comparisons), points, generator)


def _main_thread_busy(server: ServerProcess, seconds: float) -> float:
    """The share of the next `seconds` in which the main thread of the process with the models, which batches, was
    running."""
    before, began = main_thread_cpu_s(server.pid) or 0.0, time.monotonic()
    time.sleep(seconds)
    return ((main_thread_cpu_s(server.pid) or 0.0) - before) / (time.monotonic() - began)


def _name(count: int) -> str:
    return f"paceline --frontends {count}"
