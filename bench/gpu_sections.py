"""The sections of `bench.gpu` that aren't about one model: answers, and several processes for gRPC.

Lives here: what is asked, in which order, and what is compared. Must not: single measurements (`gpu_steps`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from bench import gpu_models, gpu_steps
from bench.gpu_models import GpuModel
from bench.gpu_plan import FAILURES, Found, Plan, reason, say
from bench.gpu_processes import LoadGenerators, serving
from bench.scenario import Reach
from bench.stats import ratio, spread
from bench.summary import Comparison, Section
from tests import models as tiny_models
from tests.harness import ServerProcess

__all__ = ["check_answers", "is_wrong", "scale_frontends"]

_TINY = "tiny"
_SMALL = 16


def check_answers(plan: Plan, server: ServerProcess, chosen: Sequence[GpuModel], files: Mapping[str, Path]) -> Section:
    found, absent, comparisons = Found(), {}, []
    for model in chosen:
        say(f"checking {model.name}")
        try:
            for value in gpu_steps.deviations(server, model, files[model.name], seeds=range(2)):
                found.add(model.name, {"deviation": value})
        except FAILURES as error:
            absent[model.name] = reason(error)
            continue
        parts = [value / model.tolerance for value in found.of(model.name, "deviation")]
        what = f"{model.name}: largest deviation from the CPU's answers / {model.tolerance:g} of the largest value"
        comparisons.append(Comparison("", what, spread(parts), Reach(False, 1.0)))
    measurements = found.measurements({})
    return Section(
        "gpu-correct", "Answers on the device", "", plan.how, False, tuple(comparisons), measurements, absent
    )


def is_wrong(correct: Section, model: GpuModel) -> bool:
    return any(one.what.startswith(f"{model.name}:") and one.verdict != "reached" for one in correct.comparisons)


def scale_frontends(plan: Plan, folder: Path) -> Section:
    """Requests of 16 floats through more and more fronts, in turn."""
    repository = folder / "small"
    tiny_models.write(tiny_models.identity("FP32", ("batch", _SMALL)), repository / _TINY / "1" / "model.onnx")
    kind = "KIND_GPU" if plan.on_gpu else "KIND_CPU"
    (repository / _TINY / "config.pbtxt").write_text(
        f"max_batch_size: 64 dynamic_batching {{ }} instance_group {{ kind: {kind} count: 1 }}\n"
    )
    model = GpuModel(_TINY, "FP32", "FP32", (_SMALL,), _SMALL, 1, (64,), False, 0.0, 1, lambda: None)  # type: ignore[arg-type, return-value]
    request = gpu_steps.requests_of(model, gpu_models.batch_of(model, 1), "", folder)
    crowd = LoadGenerators(plan.processes, 32, 4, stream=False)
    found, absent = Found(), {}
    with ExitStack() as stack:
        try:
            plan.check()
            servers = {count: stack.enter_context(serving(repository, count)) for count in plan.fronts}
            for number in range(plan.rounds):
                plan.check()
                say(f"fronts: round {number + 1} of {plan.rounds}")
                for count in plan.fronts if number % 2 == 0 else reversed(plan.fronts):
                    sample = gpu_steps.saturation(
                        servers[count], _TINY, 1, crowd, request, plan.seconds / 2, plan.warmup_s
                    )
                    found.add(_fronts_name(count), {key: sample[key] for key in sample if key != "gpu_busy"})
        except FAILURES as error:
            absent["fronts"] = reason(error)
    alone = found.of(_fronts_name(plan.fronts[0]), "requests_per_s")
    comparisons = []
    for count in plan.fronts[1:]:
        rates = found.of(_fronts_name(count), "requests_per_s")
        if both := min(len(rates), len(alone)):
            what = f"requests/s, --frontends {count} / {plan.fronts[0]}"
            comparisons.append(Comparison(str(crowd), what, ratio(rates[:both], alone[:both]), None))
    points = dict.fromkeys(found.rounds, str(crowd))
    generator = f"{crowd.processes} of bench.load"
    title = "Requests of 16 floats through several processes for gRPC"
    measurements = found.measurements(points)
    return Section("gpu-frontends", title, generator, plan.how, False, tuple(comparisons), measurements, absent)


def _fronts_name(count: int) -> str:
    return f"paceline --frontends {count}"
