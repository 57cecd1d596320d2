"""One scenario from beginning to end: servers up, rounds, servers down.

Lives here: which sides can be measured, which generator loads them, the order of measurements. Must not: measure
(steps) or judge (report). In a round, the sides of a scenario follow each other at each point; every other round goes
backwards, so that what warms up or wears out in the course of time affects all sides.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import models, subjects
from bench.load import GENERATOR
from bench.report import Absence, Result, series_of
from bench.scenario import RIVALS, Closed, Open, Point, Scenario, Side
from bench.stats import Sample
from bench.steps import BenchError, Load, Module, Step, region
from bench.subjects import NotInstalledError, NotServingError, Subject

__all__ = ["Settings", "measure"]


@dataclass(frozen=True, slots=True)
class Settings:
    """The number of rounds, seconds per measurement, and seconds of warm-up before each; whether all points of a sweep
    are measured or only the first and the last; whether rivals are measured; the path of perf_analyzer, None to do
    without."""

    rounds: int
    seconds: float
    warmup_s: float
    all_points: bool = True
    rivals: bool = True
    perf_analyzer: Path | None = None

    @property
    def how(self) -> str:
        """In words."""
        rounds = f"{self.rounds} round{'s' if self.rounds > 1 else ''}"
        return f"{rounds} of {self.seconds:g} s each, {self.warmup_s:g} s of warm-up before"

    def points(self, scenario: Scenario) -> tuple[Point, ...]:
        points = scenario.points
        return points if self.all_points or len(points) < 2 else (points[0], points[-1])


@dataclass(slots=True)
class _Stage:
    """What there is once all servers are up."""

    steps: dict[tuple[Side, Point], Step] = field(default_factory=dict)
    absent: dict[Side, Absence] = field(default_factory=dict)
    generator: str = ""


def measure(scenario: Scenario, settings: Settings, model_file: Callable[[str], Path], folder: Path) -> Result:
    """All rounds of a scenario; `model_file` gives a model's ONNX file, `folder` is empty and for this scenario
    only."""
    with ExitStack() as stack:
        stage = _set_up(scenario, settings, model_file, folder, stack)
        rounds: list[dict[tuple[Side, Point], Sample]] = []
        for number in range(settings.rounds):
            print(f"{scenario.name}: round {number + 1} of {settings.rounds}", file=sys.stderr, flush=True)
            rounds.append(_round(stage, settings, backwards=bool(number % 2)))
    measured = {key for key in stage.steps if key[0] not in stage.absent}
    series = series_of([{key: one[key] for key in stage.steps if key in measured} for one in rounds])
    return Result(scenario, settings.points(scenario), stage.generator, series, stage.absent)


def _round(stage: _Stage, settings: Settings, *, backwards: bool) -> dict[tuple[Side, Point], Sample]:
    found = {}
    for side, point in reversed(stage.steps) if backwards else stage.steps:
        if side in stage.absent:
            continue
        try:
            found[side, point] = stage.steps[side, point].measure(settings.seconds, settings.warmup_s)
        except BenchError as error:
            stage.absent[side] = _absence(side, f"failed with {point}: {error}")
    return found


def _set_up(
    scenario: Scenario, settings: Settings, model_file: Callable[[str], Path], folder: Path, stack: ExitStack
) -> _Stage:
    stage = _Stage()
    loads = _loads(stage, scenario, settings, model_file, folder, stack)
    stage.generator = _generator(scenario, settings, loads)
    binary = settings.perf_analyzer if stage.generator == "perf_analyzer" else None
    for point in settings.points(scenario):
        for side in scenario.sides:
            if side in loads:
                subject, requests = loads[side]
                stage.steps[side, point] = Load(
                    subject,
                    requests,
                    point,
                    side.model,
                    transport=side.transport,
                    deadline_s=scenario.deadline_s,
                    binary=binary,
                    side=side if binary else None,
                )
            elif not side.served:
                stage.steps[side, point] = Module.of(side, model_file(side.model))
    return stage


def _loads(
    stage: _Stage,
    scenario: Scenario,
    settings: Settings,
    model_file: Callable[[str], Path],
    folder: Path,
    stack: ExitStack,
) -> dict[Side, tuple[Subject, tuple[Path, ...]]]:
    """The server and the requests of each side whose server is there; other sides with a server are noted as absent."""
    servers: dict[Any, Subject | NotServingError] = {}
    loads: dict[Side, tuple[Subject, tuple[Path, ...]]] = {}
    for side in scenario.sides:
        if not side.served:
            continue
        try:
            if {side.server, side.upstream} & set(RIVALS) and not settings.rivals:
                raise NotInstalledError("left out")
            if side.process not in servers:
                servers[side.process] = _started(scenario, side, model_file, folder / f"server-{len(servers)}", stack)
            server = servers[side.process]
            if isinstance(server, NotServingError):
                raise server
            loads[side] = (server, _requests(server, side, folder / f"side-{len(loads)}", stack))
        except NotServingError as error:
            servers.setdefault(side.process, error)
            stage.absent[side] = _absence(side, str(error))
    return loads


def _absence(side: Side, reason: str) -> Absence:
    """A rival that breaks is a finding. Our own servers, the echo and the product among them, have to work."""
    return Absence(" ".join(reason.split()), failed=not {side.server, side.upstream} & set(RIVALS))


def _started(
    scenario: Scenario, side: Side, model_file: Callable[[str], Path], folder: Path, stack: ExitStack
) -> Subject:
    """The server of `side`, with the models of all sides that share it."""
    files = {one.model: model_file(one.model) for one in scenario.sides if one.process == side.process}
    folder.mkdir()
    return stack.enter_context(subjects.start(side, files, folder))


def _requests(server: Subject, side: Side, folder: Path, stack: ExitStack) -> tuple[Path, ...]:
    """The requests for `side`, one file per shape, after the server has answered each. Raises NotServingError if it
    doesn't."""
    folder.mkdir()
    model, payloads = models.MODELS[side.model], []
    for shape in side.shapes:
        output_bytes = model.output_bytes(len(models.row(shape)))
        if side.transport == "shm":
            name, output_at = stack.enter_context(region(server.target, shape, output_bytes))
            payloads.append(models.in_memory(side.model, shape, name, output_at))
        elif side.transport == "http":
            payloads.append(models.row(shape))
        else:
            payloads.append(models.request(side.model, shape))
        subjects.ask_once(server.target, side.transport, payloads[-1], output_bytes)
    paths = tuple(folder / f"{place}.request" for place in range(len(payloads)))
    for path, payload in zip(paths, payloads, strict=True):
        path.write_bytes(payload)
    return paths


def _generator(scenario: Scenario, settings: Settings, loads: Mapping[Side, tuple[Subject, tuple[Path, ...]]]) -> str:
    """The load generator, the same for all sides of a scenario, or ratios would compare generators. Over HTTP it is
    `http_load`, Python like our own over gRPC."""
    if not loads:
        return ""
    if any(isinstance(point, Open) for point in scenario.points) or any(side.transport == "http" for side in loads):
        return GENERATOR
    able = all(subjects.has_config(server.target, side.model) for side, (server, _) in loads.items())
    closed = all(isinstance(point, Closed) for point in scenario.points)
    return "perf_analyzer" if settings.perf_analyzer is not None and able and closed else GENERATOR
