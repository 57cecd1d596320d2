"""One model of `bench.gpu`: the server at saturation and at 70 % of that beside the ceiling, round by round.

Lives here: the order of the measurements, and what is compared. Must not: single measurements (`gpu_steps`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from bench import gpu_models, gpu_steps
from bench.gpu_models import GpuModel
from bench.gpu_plan import FAILURES, Found, Plan, reason, say
from bench.gpu_processes import Direct, LoadGenerators
from bench.scenario import Reach
from bench.stats import Sample, ratio, spread
from bench.summary import Comparison, Section
from tests.harness import ServerProcess

__all__ = ["measure", "name_of", "title_of"]

_LOAD = 0.7


def measure(plan: Plan, server: ServerProcess, model: GpuModel, file: Path, first: Sample, folder: Path) -> Section:
    """Throughput at saturation beside the ceiling, the GPU's time, latencies at 70 % of the load, the first request."""
    ours, bound, copies, calm = "paceline", "run_with_iobinding", "the same with copies", "paceline at 70 %"
    there = "paceline, images on the GPU"
    found, absent = Found(), {}
    crowd = _crowd(plan, model)
    batch = gpu_models.batch_of(model, model.rows)
    try:
        with ExitStack() as stack:
            name = stack.enter_context(gpu_steps.region(server, batch)) if model.shared else ""
            request = gpu_steps.requests_of(model, batch, name, folder)
            full = gpu_models.batch_of(model, model.batch_rows)
            direct = stack.enter_context(Direct(file, full, plan.device, folder))
            for number in range(plan.rounds):
                plan.check()
                say(f"{model.name}: round {number + 1} of {plan.rounds}")
                _round(plan, server, model, crowd, request, direct, found, (ours, bound, copies), number)
            plan.check()
            say(f"{model.name}: at {_LOAD:.0%} of the load")
            per_s = _LOAD * spread(found.of(ours, "requests_per_s")).median
            found.add(calm, gpu_steps.latency_at(server, request, per_s, 2 * plan.seconds, plan.warmup_s))
            if plan.on_gpu and model.shared:
                plan.check()
                say(f"{model.name}: from memory on the GPU")
                name = stack.enter_context(gpu_steps.gpu_region(server, batch))
                request = gpu_steps.requests_of(model, batch, name, folder)
                times = plan.seconds, plan.warmup_s
                found.add(there, gpu_steps.saturation(server, model.name, model.rows, crowd, request, *times))
    except FAILURES as error:
        absent[model.name] = reason(error)
    if plan.on_gpu and found.of(ours, "rows_per_s") and not found.of(ours, "gpu_busy"):
        absent["GPU busy"] = gpu_steps.why_not_busy()
    if first:
        found.add("the first request", first)
    points = {ours: str(crowd), there: str(crowd), calm: "open loop"}
    comparisons = tuple(_compare(plan, found, (ours, bound, copies, calm), str(crowd)))
    measurements = found.measurements(points)
    generator = f"{crowd.processes} of bench.load"
    return Section(name_of(model), title_of(model), generator, plan.how, False, comparisons, measurements, absent)


def _round(
    plan: Plan,
    server: ServerProcess,
    model: GpuModel,
    crowd: LoadGenerators,
    request: Path,
    direct: Direct,
    found: Found,
    names: tuple[str, str, str],
    number: int,
) -> None:
    """Measure both sides, in reverse order every second round."""

    def product() -> None:
        found.add(
            names[0],
            gpu_steps.saturation(server, model.name, model.rows, crowd, request, plan.seconds, plan.warmup_s),
        )

    def ceiling() -> None:
        for who, sample in zip(names[1:], direct.measure(plan.seconds / 2), strict=True):
            found.add(who, sample)

    for side in (product, ceiling) if number % 2 == 0 else (ceiling, product):
        side()
    rates = ", ".join(f"{who} {rate[-1]:,.0f}" for who in names if (rate := found.of(who, "rows_per_s")))
    busy = [f"{share:.0%} busy" for share in found.of(names[0], "gpu_busy")[-1:]]
    say(", ".join([f"{model.name}: rows/s: {rates}", *busy]))


def _compare(plan: Plan, found: Found, names: tuple[str, str, str, str], point: str) -> Iterator[Comparison]:
    ours, bound, copies, calm = names
    rates = found.of(ours, "rows_per_s")
    for who, reach in ((bound, plan.reach(Reach(True, 0.9))), (copies, None)):
        others = found.of(who, "rows_per_s")
        both = min(len(rates), len(others))
        if both:
            yield Comparison(point, f"rows/s / {who} of full batches", ratio(rates[:both], others[:both]), reach)
    if busy := found.of(ours, "gpu_busy"):
        yield Comparison(point, "share of the time that the GPU computed", spread(busy), plan.reach(Reach(True, 0.9)))
    if (slow := found.of(calm, "p99_ms")) and (batch_ms := found.of(bound, "batch_ms")):
        times = [slow[0] / spread(batch_ms).median]
        yield Comparison(
            f"{_LOAD:.0%} of that", "p99 latency / a full batch", spread(times), plan.reach(Reach(False, 2.5))
        )
    if after := found.of(bound, "after_smaller_ms"):
        times = ratio(after, found.of(bound, "batch_ms"))
        yield Comparison("alone", "a full batch after one of half the rows / after another full one", times, None)
    if first := found.of("the first request", "first_ms"):
        times = ratio(first, found.of("the first request", "p50_ms"))
        yield Comparison("1 client", "first request / the median of later ones", times, None)


def _crowd(plan: Plan, model: GpuModel) -> LoadGenerators:
    """Enough clients for four full batches of requests at any time."""
    clients = max(1, 4 * model.batch_rows // model.rows // plan.processes)
    return LoadGenerators(plan.processes, clients, min(4, clients), stream=not model.shared)


def name_of(model: GpuModel) -> str:
    return f"gpu-{model.name.replace('_', '-')}"


def title_of(model: GpuModel) -> str:
    way = "in system shared memory" if model.shared else "over streams"
    return f"{model.name}, requests of {model.rows} rows {way}, batches of up to {model.batch_rows}"
