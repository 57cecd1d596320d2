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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc

from backends.errors import DeviceError
from bench import gpu_models, gpu_steps, report, summary
from bench.gpu_models import GpuModel
from bench.gpu_steps import Direct, LoadGenerators
from bench.machine import facts
from bench.scenario import Reach
from bench.stats import Sample, ratio, spread
from bench.steps import BenchError
from bench.subjects import NotServingError
from bench.summary import Comparison, Measurement, Section, Summary
from tests import models as tiny_models
from tests.harness import REPO, ServerProcess

__all__ = ["main"]

_RESULTS = REPO / "bench" / "results"
_LOAD = 0.7
_START_S = 240.0
_TINY = "tiny"
_SMALL = 16
_END_OF_REASON = 600

_FAILURES = (BenchError, NotServingError, AssertionError, DeviceError, grpc.RpcError, OSError)
"""What may fail in one section without failing the others: a server may die, and its port with it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How long, how often, how many; no measurement begins after `until_s` on the monotonic clock."""

    device: str
    rounds: int
    seconds: float
    warmup_s: float
    frontends: int
    fronts: tuple[int, ...]
    processes: int
    graphs: bool
    until_s: float

    @property
    def how(self) -> str:
        return (
            f"{self.rounds} rounds of {self.seconds:g} s each, {self.warmup_s:g} s of warm-up before, on {self.device}"
        )

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def reach(self, bound: Reach) -> Reach | None:
        """`bound` on a GPU, else None: bounds are for GPUs only."""
        return bound if self.on_gpu else None

    def check(self) -> None:
        """Raise BenchError if the time is up."""
        if time.monotonic() > self.until_s:
            raise BenchError("the time was up")


@dataclass(slots=True)
class Found:
    """One model's samples, round by round, by who was measured."""

    rounds: dict[str, list[Sample]] = field(default_factory=dict)

    def add(self, who: str, sample: Sample) -> None:
        self.rounds.setdefault(who, []).append(sample)

    def of(self, who: str, what: str) -> list[float]:
        return [sample[what] for sample in self.rounds.get(who, ()) if what in sample]

    def measurements(self, points: Mapping[str, str]) -> tuple[Measurement, ...]:
        return tuple(
            Measurement(who, points.get(who, ""), {key: spread(self.of(who, key)) for key in samples[0]})
            for who, samples in self.rounds.items()
        )


def run(plan: Plan, chosen: Sequence[GpuModel], folder: Path) -> Iterator[Section]:
    """One section after the other. Those that fail say why, and the rest continues."""
    files = {}
    for model in chosen:
        _say(f"making {model.name}")
        files[model.name] = gpu_models.write(model, folder)
        gpu_models.add(model, files[model.name], folder / "models", plan.device, graphs=plan.graphs)
    with ExitStack() as stack:
        try:
            server = stack.enter_context(_server(folder / "models", plan.frontends))
        except AssertionError as error:
            yield _absent("gpu-correct", "Answers on the device", plan, f"paceline did not start: {_reason(error)}")
            return
        first = {model.name: _first(server, model) for model in chosen}
        correct = _correct(plan, server, chosen, files)
        yield correct
        for model in chosen:
            if why := correct.absent.get(model.name) or (_is_wrong(correct, model) and "its answers are wrong"):
                yield _absent(_name(model), _title(model), plan, why)
                continue
            yield _model(plan, server, model, files[model.name], first[model.name], folder)
    yield _fronts(plan, folder)


def _first(server: ServerProcess, model: GpuModel) -> Sample:
    """Latencies before any other request. If something is wrong with a model, the steps that follow say what."""
    try:
        first_ms, later_ms = gpu_steps.first_request(server, model)
    except grpc.RpcError:
        return {}
    return {"first_ms": first_ms, "p50_ms": later_ms}


@contextmanager
def _server(repository: Path, frontends: int) -> Iterator[ServerProcess]:
    """A server with the time that GPUs take to load and to warm up. Requests to a model that can't be loaded are
    answered with the reason, and the others serve: the machine may be lent, and starting over takes minutes."""
    server = ServerProcess(
        repository, args=["--frontends", str(frontends), "--allow-client-shm=true", "--exit-on-error=false"]
    )
    server.start()
    try:
        server.wait_ready(_START_S)
        yield server
    finally:
        if server.returncode is None:
            server.terminate()
        server.kill()


def _correct(plan: Plan, server: ServerProcess, chosen: Sequence[GpuModel], files: Mapping[str, Path]) -> Section:
    found, absent, comparisons = Found(), {}, []
    for model in chosen:
        _say(f"checking {model.name}")
        try:
            for value in gpu_steps.deviations(server, model, files[model.name], seeds=range(2)):
                found.add(model.name, {"deviation": value})
        except _FAILURES as error:
            absent[model.name] = _reason(error)
            continue
        parts = [value / model.tolerance for value in found.of(model.name, "deviation")]
        what = f"{model.name}: largest deviation from the CPU's answers / {model.tolerance:g} of the largest value"
        comparisons.append(Comparison("", what, spread(parts), Reach(False, 1.0)))
    measurements = found.measurements({})
    return Section(
        "gpu-correct", "Answers on the device", "", plan.how, False, tuple(comparisons), measurements, absent
    )


def _is_wrong(correct: Section, model: GpuModel) -> bool:
    return any(one.what.startswith(f"{model.name}:") and one.verdict != "reached" for one in correct.comparisons)


def _model(plan: Plan, server: ServerProcess, model: GpuModel, file: Path, first: Sample, folder: Path) -> Section:
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
                _say(f"{model.name}: round {number + 1} of {plan.rounds}")
                _round(plan, server, model, crowd, request, direct, found, (ours, bound, copies), number)
            plan.check()
            _say(f"{model.name}: at {_LOAD:.0%} of the load")
            per_s = _LOAD * spread(found.of(ours, "requests_per_s")).median
            found.add(calm, gpu_steps.latency_at(server, request, per_s, 2 * plan.seconds, plan.warmup_s))
            if plan.on_gpu and model.shared:
                plan.check()
                _say(f"{model.name}: from memory on the GPU")
                name = stack.enter_context(gpu_steps.gpu_region(server, batch))
                request = gpu_steps.requests_of(model, batch, name, folder)
                times = plan.seconds, plan.warmup_s
                found.add(there, gpu_steps.saturation(server, model.name, model.rows, crowd, request, *times))
    except _FAILURES as error:
        absent[model.name] = _reason(error)
    if plan.on_gpu and found.of(ours, "rows_per_s") and not found.of(ours, "gpu_busy"):
        absent["GPU busy"] = gpu_steps.why_not_busy()
    if first:
        found.add("the first request", first)
    points = {ours: str(crowd), there: str(crowd), calm: "open loop"}
    comparisons = tuple(_compare(plan, found, (ours, bound, copies, calm), str(crowd)))
    measurements = found.measurements(points)
    generator = f"{crowd.processes} of bench.load"
    return Section(_name(model), _title(model), generator, plan.how, False, comparisons, measurements, absent)


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
    _say(", ".join([f"{model.name}: rows/s: {rates}", *busy]))


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


def _fronts(plan: Plan, folder: Path) -> Section:
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
            servers = {count: stack.enter_context(_server(repository, count)) for count in plan.fronts}
            for number in range(plan.rounds):
                plan.check()
                _say(f"fronts: round {number + 1} of {plan.rounds}")
                for count in plan.fronts if number % 2 == 0 else reversed(plan.fronts):
                    sample = gpu_steps.saturation(
                        servers[count], _TINY, 1, crowd, request, plan.seconds / 2, plan.warmup_s
                    )
                    found.add(_fronts_name(count), {key: sample[key] for key in sample if key != "gpu_busy"})
        except _FAILURES as error:
            absent["fronts"] = _reason(error)
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


def _crowd(plan: Plan, model: GpuModel) -> LoadGenerators:
    """Enough clients for four full batches of requests at any time."""
    clients = max(1, 4 * model.batch_rows // model.rows // plan.processes)
    return LoadGenerators(plan.processes, clients, min(4, clients), stream=not model.shared)


def _fronts_name(count: int) -> str:
    return f"paceline --frontends {count}"


def _name(model: GpuModel) -> str:
    return f"gpu-{model.name.replace('_', '-')}"


def _title(model: GpuModel) -> str:
    way = "in system shared memory" if model.shared else "over streams"
    return f"{model.name}, requests of {model.rows} rows {way}, batches of up to {model.batch_rows}"


def _absent(name: str, title: str, plan: Plan, reason: str) -> Section:
    return Section(name, title, "", plan.how, False, (), (), {"paceline": reason})


def _reason(error: Exception) -> str:
    """The last lines of what the error says; of a long text, both ends: cuDNN prints a graph of thousands of
    characters, and whoever runs this elsewhere may see no more than the last pages."""
    text = " / ".join(str(error).strip().splitlines()[-3:]) or type(error).__name__
    return text if len(text) <= 2 * _END_OF_REASON else f"{text[:_END_OF_REASON]} [...] {text[-_END_OF_REASON:]}"


def _say(text: str) -> None:
    print(f"{time.strftime('%X')} {text}", file=sys.stderr, flush=True)


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
                _say(f"{section.name}: {one.what}: {one.found.median if one.found else 0:.2f} {one.verdict}")
            for who, why in section.absent.items():
                _say(f"{section.name}: no {who}: {why}")
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
