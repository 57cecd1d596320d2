"""One model of `bench.gpu`: the server at saturation and at 70 % of that beside the ceiling, round by round.

Lives here: the order of the measurements, and what is compared. Must not: single measurements (`gpu_steps`). Each step
may fail without the others, and the section is there after each, as the machine may be taken away in between. At
saturation, so many clients wait for answers that several full batches wait at any time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench import gpu_models, gpu_steps
from bench.gpu_busy import why_unknown
from bench.gpu_models import GpuModel
from bench.gpu_plan import Found, Plan, say
from bench.gpu_processes import Direct, LoadGenerators, RandomLoad
from bench.ideal_queue import ideal_p99
from bench.load import GENERATOR
from bench.scenario import Reach
from bench.stats import ratio, spread
from bench.steps import BenchError
from bench.summary import Comparison, Section
from tests.harness import ServerProcess
from tests.wire import Array

__all__ = ["FIRST", "ModelRun"]

FIRST = "the first request"
_LOAD = 0.7
_MOST_LAG = 0.1
_OURS, _BOUND, _COPIES, _CALM = "paceline", "run_with_iobinding", "the same with copies", "paceline at 70 %"
_THERE, _CHANGE, _IDEAL = "paceline, images on the GPU", "a batch after a smaller one", "an ideal queue"


@dataclass(frozen=True, slots=True)
class ModelRun:
    """The measurements of `model`, which `server` serves from `file`; `folder` is for files. `found` may have the first
    request already."""

    plan: Plan
    server: ServerProcess
    model: GpuModel
    file: Path
    folder: Path
    found: Found

    def sections(self) -> Iterator[Section]:
        """The section again and again, each time with one more step in it."""
        with self.found.trying(self.model.name), ExitStack() as stack:
            self.plan.check()
            batch = gpu_steps.source(self.model)
            region = stack.enter_context(gpu_steps.region(self.server, batch)) if self.model.shared else ""
            requests, few = (self._requests(batch, rows, region) for rows in (self.model.rows, self.model.few_rows))
            full = gpu_models.batch_of(self.model, self.model.batch_rows)
            direct = stack.enter_context(Direct(self.file, full, self.plan, self.folder))
            with self.found.trying(_BOUND):
                direct.wait_ready()
            for number in range(self.plan.rounds):
                self.plan.check()
                self._round(number, requests, direct)
                yield self.section()
            with self.found.trying(_CALM):
                for number in range(self.plan.rounds):
                    self._calm(number, few)
                    yield self.section()
            if self.plan.on_gpu and self.model.shared:
                with self.found.trying(_THERE), gpu_steps.gpu_region(self.server, batch) as region:
                    self._there(self._requests(batch, self.model.rows, region))
                    yield self.section()
            if not self.plan.graphs:  # with which nothing is planned anew
                with self.found.trying(_CHANGE):
                    self._change(direct)
        if self.plan.on_gpu and self.found.of(_OURS, "rows_per_s") and not self.found.of(_OURS, "gpu_busy"):
            self.found.absent["GPU busy"] = why_unknown()
        yield self.section()

    def unmeasured(self, why: str) -> Section:
        """The section of a model that isn't measured."""
        self.found.absent.clear()
        self.found.absent[self.model.name] = why
        return self.section()

    def section(self) -> Section:
        crowd = self._crowd()
        way = "in system shared memory" if self.model.shared else "over streams"
        sizes = ", ".join(map(str, self.model.sizes))
        requests = f"requests of {self.model.rows} rows {way}, {self.model.few_rows} rows at 70 %"
        how = f"{requests}; batches of {sizes}; {self.plan.how}"
        points = {_OURS: str(crowd), _THERE: str(crowd), _CALM: "open loop", _IDEAL: "open loop"}
        name = f"gpu-{self.model.name.replace('_', '-')}"
        generator = f"{crowd.processes} of {GENERATOR}"
        return self.found.section(name, self.model.name, how, tuple(self._compared()), points, generator)

    def _crowd(self) -> LoadGenerators:
        """Enough clients for four full batches of requests at any time."""
        clients = max(1, 4 * self.model.batch_rows // self.model.rows // self.plan.processes)
        return LoadGenerators(self.plan.processes, clients, min(4, clients), stream=not self.model.shared)

    def _requests(self, batch: Array, rows: int, region: str) -> list[Path]:
        return gpu_steps.requests_of(self.model, batch, rows, region, self.folder)

    def _round(self, number: int, requests: Sequence[Path], direct: Direct) -> None:
        """Measure both sides, in reverse order every second round."""

        def product() -> None:
            with self.found.trying(_OURS):
                self.found.add(_OURS, self._saturation(requests))

        def ceiling() -> None:
            with self.found.trying(_BOUND):
                for who, sample in zip((_BOUND, _COPIES), direct.measure(self.plan.seconds / 2), strict=True):
                    self.found.add(who, sample)

        for side in (product, ceiling) if number % 2 == 0 else (ceiling, product):
            side()
        rates = [
            f"{who} {rate[-1]:,.0f}" for who in (_OURS, _BOUND, _COPIES) if (rate := self.found.of(who, "rows_per_s"))
        ]
        busy = [f"{share:.0%} busy" for share in self.found.of(_OURS, "gpu_busy")[-1:]]
        self._say(f"round {number + 1} of {self.plan.rounds}: rows/s: {', '.join([*rates, *busy])}")

    def _calm(self, number: int, requests: Sequence[Path]) -> None:
        self.plan.check()
        if not (rates := self.found.of(_OURS, "rows_per_s")):
            raise BenchError("it isn't known how much the server can do")
        plan, per_s = self.plan, _LOAD * spread(rates).median / self.model.few_rows
        before = gpu_steps.counters(self.server, self.model.name)
        load = RandomLoad(plan.processes)
        sample = load.send(self.server.target, requests, per_s, plan.seconds, plan.warmup_s, number)
        after = gpu_steps.counters(self.server, self.model.name)
        self.found.add(_CALM, {**sample, **gpu_steps.batches_between(before, after)})
        self._say(
            f"at {per_s:,.0f} requests/s: p99 {sample['p99_ms']:.2f} ms, load's lag {sample['lag_p99_ms']:.2f} ms"
        )
        if not self.found.of(_IDEAL, "p99_ms"):
            self._ideal(per_s * self.model.few_rows)

    def _ideal(self, rows_per_s: float) -> None:
        """What nothing but the queue would make of this load, for batches whose time is in proportion to their rows,
        half of it, and not at all."""
        batch_ms = self._batch_ms()
        load = rows_per_s * batch_ms / 1e3 / self.model.batch_rows
        for fixed in (0.0, 0.5, 1.0) if 0 < load < 1 else ():
            batches = ideal_p99(self.model.few_rows, self.model.sizes, load, fixed)
            self.found.add(_IDEAL, {"p99_ms": batches * batch_ms})

    def _batch_ms(self) -> float:
        """A full batch in the ceiling; 0 if that isn't known."""
        times = self.found.of(_BOUND, "batch_ms")
        return spread(times).median if times else 0.0

    def _there(self, requests: Sequence[Path]) -> None:
        self.plan.check()
        self.found.add(_THERE, self._saturation(requests))
        self._say(f"images on the GPU: rows/s: {self.found.of(_THERE, 'rows_per_s')[-1]:,.0f}")

    def _change(self, direct: Direct) -> None:
        self.plan.check()
        self.found.add(_CHANGE, direct.after_smaller(min(2.0, self.plan.seconds)))

    def _saturation(self, requests: Sequence[Path]) -> dict[str, float]:
        times = self.plan.seconds, self.plan.warmup_s
        return gpu_steps.saturation(self.server, self.model, self._crowd(), requests, *times)

    def _batches_per_s(self) -> list[float]:
        rates, rows = (self.found.of(_OURS, what) for what in ("rows_per_s", "rows_per_batch"))
        return [rate / each for rate, each in zip(rates, rows, strict=True)]

    def _say(self, text: str) -> None:
        say(f"{self.model.name}: {text}")

    def _compared(self) -> Iterator[Comparison]:
        point = str(self._crowd())
        rates = self.found.of(_OURS, "rows_per_s")
        # More than 1 is no mistake: the server copies the next batch meanwhile.
        bounds = ((_BOUND, ", which waits for each batch", self.plan.reach(Reach(True, 0.95))), (_COPIES, "", None))
        for who, waits, reach in bounds:
            others = self.found.of(who, "rows_per_s")
            if both := min(len(rates), len(others)):
                yield Comparison(point, f"rows/s / {who}{waits}", ratio(rates[:both], others[:both]), reach)
        if busy := self.found.of(_OURS, "gpu_busy"):
            share = "share of the time in which any kernel ran"
            yield Comparison(point, share, spread(busy), self.plan.reach(Reach(True, 0.9)))
        if batch_ms := self._batch_ms():
            yield from self._in_batches(batch_ms)
        if first := self.found.of(FIRST, "first_ms"):
            # Of equal ones, one in a hundred takes longer than that.
            slow, reach = self.found.of(FIRST, "p99_ms"), self.plan.reach(Reach(False, 1.0))
            yield Comparison("1 client", "first request / the 99th percentile of later ones", ratio(first, slow), reach)
            what, later = "of that, in the model / the mean of later ones", self.found.of(FIRST, "model_ms_per_batch")
            yield Comparison("1 client", what, ratio(self.found.of(FIRST, "first_model_ms"), later), None)

    def _in_batches(self, batch_ms: float) -> Iterator[Comparison]:
        """What is compared with the time of a full batch in the ceiling."""
        load, slow = "70 % of that", self.found.of(_CALM, "p99_ms")
        lag = spread(self.found.of(_CALM, "lag_p99_ms")).median / batch_ms if slow else 0.0
        known, late = self.plan.reach(Reach(False, 2.5)), ""
        if lag > _MOST_LAG:  # the latencies are the generator's
            known, late = None, f", generator too slow: lag {lag:.2f} of it"
        if filled := [per_s * batch_ms / 1e3 for per_s in self._batches_per_s()]:
            what = f"batches/s x the time of a full one in {_BOUND}"
            yield Comparison(str(self._crowd()), what, spread(filled), None)
        rows = (
            (load, f"p99 latency / a full batch{late}", slow, known),
            (load, f"p99 latency of {_IDEAL} / a full batch", self.found.of(_IDEAL, "p99_ms"), None),
            ("alone", f"{_CHANGE} / after another full one", self.found.of(_CHANGE, "batch_ms"), None),
        )
        for point, what, times_ms, reach in rows:
            if times_ms:
                yield Comparison(point, what, spread([one / batch_ms for one in times_ms]), reach)
