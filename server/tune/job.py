"""Tuning a model, from its files to what was chosen.

Lives here: the order of things, and which models can be tuned. Must not: flags, words of the outcome.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from paceline.backends.base import Backend, DeviceKind
from paceline.backends.spec import Array
from paceline.clients.description import metadata_of
from paceline.clients.inputs import InputError, RandomInputs, prepare
from paceline.clients.load.mixture import MixedShape, mixed, recorded
from paceline.clients.load.recording import read_recording
from paceline.clients.options import LONGEST_S
from paceline.protos import model_config_pb2 as pb
from paceline.server.cpus import usable_cpus
from paceline.server.engine import Engine, EngineSettings
from paceline.server.errors import StartError
from paceline.server.models.batch_policy import backend_name
from paceline.server.models.defaults import ALLOW_SPINNING, INTRA, BatchDefaults, Offline
from paceline.server.models.offline import layouts, layouts_on_gpus
from paceline.server.models.served_model import ServedModel
from paceline.server.tune.choosing import Choice, Goal, Setting, Tried, choose, set_back, settings_of
from paceline.server.tune.config_file import changes_of, config_text, plain
from paceline.server.tune.contents import LoadContents, contents_of
from paceline.server.tune.live import FEWEST, Live
from paceline.server.tune.measuring import Layout, TuneError, measure, sizes_to_try
from paceline.server.tune.own_model import own_model
from paceline.server.tune.report import Tuned
from paceline.server.tune.trials import Trials
from paceline.server.tune.verifying import verified
from paceline.server.tuning import new_loop

__all__ = ["Asked", "measure_model", "tune_model"]

_log = logging.getLogger("paceline.server.tune")

_MOST_ROWS = 64
"""Of a batch that is tried, of models without a configuration."""
_DISTINCT = 256
"""How many requests shapes are drawn for, if they are drawn at random."""

_MOST_CLIENTS = 256
_SHARES_OF_MOST = (0.6, 0.3, 0.15, 0.05)
"""Of what instances can compute: rates that are tried until one can be served in time."""
_AFTER_CURVES, _AFTER_COSTS, _AFTER_CHOICE = 0.5, 0.6, 0.7
"""How much of all is done then, about."""
_ATTEMPTS, _NEARLY = 5, 0.99

Say = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Asked:
    """`shapes` are those of a request's inputs that the model leaves open, with the rows in front; `rows` are those of
    other inputs. `arrivals` are lines of a recording, of which the goal gets its rate, and its contents if it has
    shapes. `seconds`: how long the best settings are tried each, on servers; 0: they aren't. `explains`: what each
    change is worth is wanted, too. `requests`: how many are simulated with the best settings."""

    model: Path
    goal: Goal
    shapes: Mapping[str, MixedShape]
    rows: int | None = None
    arrivals: Sequence[str] | None = None
    seed: int = 0
    allow_python_models: bool = False
    seconds: float = 0.0
    explains: bool = False
    requests: int = 8_000


def tune_model(asked: Asked, say: Say, backend_of: Callable[[str], Backend] | None = None) -> tuple[Tuned, str]:
    """What was found, and the text of a configuration that has it. `say` is told what is done now, and what share of
    all is done. Raises TuneError, and InputError for inputs that can't be made up. To be called on the main thread:
    whatever ends it ends the servers that are tried."""
    name, config = own_model(asked.model)
    if config.HasField("ensemble_scheduling"):
        steps = ", ".join(dict.fromkeys(one.model_name for one in config.ensemble_scheduling.step))
        raise TuneError(f"model '{name}' can't be tuned: it is an ensemble; tune the models of its steps: {steps}")
    with asyncio.Runner(loop_factory=new_loop) as runner:
        goal, load, now, tried = runner.run(measure_model(asked, say, backend_of))
        trials = Trials(asked.model, config, load, now, asked.seed, asked.allow_python_models)
        if asked.seconds:
            own, tried = tried, []
            for number, layout in enumerate(own):
                share = _AFTER_CURVES + (_AFTER_COSTS - _AFTER_CURVES) * number / len(own)
                say(f"measuring {_what(layout.offline)} beside a load", share)
                beside = trials.beside_clients(layout, goal, asked.seconds)
                tried.append(trials.beside_rate(beside, goal, asked.seconds) if goal.rate else beside)
            now = replace(now, layout=tried[0])
        goal, choice = runner.run(_chosen(asked, goal, now, tried, say))
    if asked.seconds:
        attempts = count()

        def attempt(setting: Setting, goal: Goal) -> Live:
            share = _AFTER_CHOICE + (1 - _AFTER_CHOICE) * next(attempts) / _ATTEMPTS
            say("trying the best settings on a server", min(_NEARLY, share))
            with trials.server(setting) as server:
                return trials.load(server, goal, asked.seconds)

        choice = verified(choice, goal, attempt, FEWEST / asked.seconds if goal.rate else 0.0)
    chosen, worth = choice.best[0].setting, dict[str, Tried]()
    if asked.explains:
        say("simulating without each of the changes", _NEARLY)
        with asyncio.Runner(loop_factory=new_loop) as runner:
            worth = runner.run(set_back(chosen, now, goal, asked.seed, asked.requests))
    say("done", 1.0)
    # A text that is written anew has the fields of the model's own alone.
    lost = ["Comments of the model's own file aren't kept."] if config != pb.ModelConfig(backend=config.backend) else []
    tuned = Tuned(name, goal, choice, changes_of(config, now, chosen), asked.seed, worth)
    why = [f"Chosen, as {tuned.reason()}."] if tuned.changes else []
    heading = [f"Tuned: {tuned.verdict().removesuffix('.')}.", *why, *tuned.doubts(), *lost]
    return tuned, config_text(config, chosen, tuned.changes, heading)


async def _chosen(asked: Asked, goal: Goal, now: Setting, tried: Sequence[Layout], say: Say) -> tuple[Goal, Choice]:
    """With the goal that was meant, if as much as can be had was asked for."""
    goals = [goal]
    if goal.is_most:
        all_rows = [Setting(one, replace(now.policy, max_batch_rows=one.curve.sizes[-1])) for one in tried]
        largest = max(one.layout.instances * one.policy.max_batch_rows for one in all_rows) / goal.mean_rows
        goals = [replace(goal, clients=max(2, min(_MOST_CLIENTS, math.ceil(2 * largest))))]
        if goal.p99_ns:  # at ever lower rates, until one can be served in time: from there, ever more is tried
            most = max(one.most_per_s(goal.mean_rows) for one in all_rows)
            goals = [replace(goal, rate=share * most) for share in _SHARES_OF_MOST]
    for goal in goals:
        settings = settings_of(tried, now.policy, goal)

        def show(done: int, of: int, settings: Sequence[Setting] = settings) -> None:
            say(f"simulating {len(settings)} settings", _AFTER_COSTS + (_AFTER_CHOICE - _AFTER_COSTS) * done / of)

        choice = await choose(now, settings, goal, asked.seed, show, asked.requests)
        if choice.best[0].is_met:
            break
    return goal, choice


def _load_of(asked: Asked, served: ServedModel) -> tuple[Goal, LoadContents]:
    """The goal with what its requests have, and that by itself. Raises InputError."""
    metadata = metadata_of(served.config, [served.version])
    recording = read_recording(asked.arrivals, served.name, asked.seed) if asked.arrivals is not None else None
    rows = asked.rows or 1 if served.max_batch_rows else None
    if rows is not None and rows > served.max_batch_rows:  # before so many are made up
        raise InputError(f"the load's requests: expected a batch of 1 to {served.max_batch_rows} rows, got {rows}")
    if recording is not None and recording.has_shapes:
        if asked.shapes:
            raise InputError("--shape can't be combined with --arrivals that have shapes")
        requests = recorded(metadata, {}, recording, rows, asked.seed)
    else:
        distinct = _DISTINCT if any(one.varies for one in asked.shapes.values()) else 1
        requests = [*mixed(metadata, [{}], shapes=asked.shapes, rows=rows, distinct=distinct, seed=asked.seed)]
    arrivals = recording.arrivals() if recording is not None else None
    if arrivals is not None and not arrivals.rate:
        raise InputError("--arrivals: expected arrivals at different times")
    numbers: Sequence[int] = arrivals.contents if arrivals is not None else range(len(requests))
    order = [number % len(requests) for number in numbers]
    load = contents_of(served, requests, order)
    rate = arrivals.rate if arrivals is not None else asked.goal.rate
    if rate and 0 < asked.seconds < FEWEST / rate:
        seconds = math.ceil(FEWEST / rate)
        needed = f"--seconds {seconds}, or --no-verify" if seconds <= LONGEST_S else "--no-verify, as it is so rare"
        got = f"{plain(rate)} a second in --seconds {asked.seconds:g}"
        raise InputError(f"expected a load of {FEWEST} requests or more while it is tried, got {got}: give {needed}")
    return replace(asked.goal, contents=load.contents, recorded=arrivals, rate=rate), load


async def measure_model(
    asked: Asked, say: Say, backend_of: Callable[[str], Backend] | None
) -> tuple[Goal, LoadContents, Setting, Sequence[Layout]]:
    """The goal with what its requests have, the model as it is now, and all layouts."""
    async with _engine(asked, None, BatchDefaults().max_batch_rows, backend_of) as (_, served):
        policy, devices = served.batcher.policy, [one.device for one in {*served.instances.runners.values()}]
        goal, load = _load_of(asked, served)
    possible, config = layouts(0, usable_cpus().count), own_model(asked.model).config
    if devices[0].kind is not DeviceKind.CPU:
        possible = layouts_on_gpus(len(devices) // len({*devices}))
    if backend_name(config) == "python":  # the threads are ONNX Runtime's
        possible = [*dict.fromkeys(Offline(one.instances) for one in possible)]
    found = list[Layout]()
    for number, offline in enumerate(possible):
        say(f"measuring {_what(offline)}", _AFTER_CURVES * number / len(possible))
        try:
            layout = await _layout(asked, load, offline, backend_of)
        except TuneError as error:
            if not found:
                raise
            _log.warning("%s aren't tried: %s", _what(offline), error)  # their memory may be too small
            continue
        spins = not layout.gpus and usable_cpus().count > 1 and _spins(offline, config)
        found.append(replace(layout, spins=spins))
    return goal, load, Setting(found[0], policy), found


def _what(offline: Offline) -> str:
    threads = f", {offline.intra_op_threads} threads each" if offline.intra_op_threads else ""
    return f"{offline.instances or 'the configured'} instances{threads}"


def _spins(offline: Offline, config: pb.ModelConfig) -> bool:
    """Whether an instance has threads that wait for work by spinning, as ONNX Runtime's do unless they mustn't."""
    own = {name: config.parameters[name].string_value for name in (INTRA, ALLOW_SPINNING) if name in config.parameters}
    threads = str(offline.intra_op_threads or own.get(INTRA, 0))
    return backend_name(config) != "python" and threads != "1" and own.get(ALLOW_SPINNING) not in ("0", "false")


async def _layout(
    asked: Asked, load: LoadContents, offline: Offline, backend_of: Callable[[str], Backend] | None
) -> Layout:
    async with _engine(asked, offline, _MOST_ROWS, backend_of) as (engine, served):
        metadata, has_rows = metadata_of(served.config, [served.version]), served.max_batch_rows > 0
        without_rows = {one.name for one in served.spec.inputs if one.shape_tensor or not has_rows}

        def inputs_of(shapes: Mapping[str, tuple[int, ...]]) -> Callable[[int], Mapping[str, Array]]:
            def inputs(rows: int) -> Mapping[str, Array]:
                sized = {name: shape if name in without_rows else (rows, *shape[1:]) for name, shape in shapes.items()}
                return prepare(metadata, {}, RandomInputs(None, sized, asked.seed)).arrays

            return inputs

        least = min(one.rows for one in load.contents)
        batches = [rows for rows in sizes_to_try(max(1, served.max_batch_rows)) if rows >= least]
        by_size = {size: inputs_of(shapes) for size, shapes in load.measured.items()}
        return await measure(engine, served, by_size, load.typical_size, batches, offline)


@asynccontextmanager
async def _engine(
    asked: Asked, offline: Offline | None, most_rows: int, backend_of: Callable[[str], Backend] | None
) -> AsyncIterator[tuple[Engine, ServedModel]]:
    """The model in an engine, served as it is or for `offline` work. Raises TuneError if it can't be tuned."""
    settings: EngineSettings = {"max_batch_size": most_rows, "allow_python_models": asked.allow_python_models}
    if offline is not None:
        settings["offline"] = offline
    async with AsyncExitStack() as undo:
        try:
            engine = await undo.enter_async_context(Engine(asked.model, backend_of=backend_of, **settings))
        except StartError as error:
            raise TuneError(str(error)) from error
        served = engine.find("", "")
        if why := _why_not(served):
            raise TuneError(f"model '{served.name}' can't be tuned: {why}")
        yield engine, served


def _why_not(served: ServedModel) -> str:
    if served.spec.sequence is not None:
        return "its requests are steps of sequences, which depend on each other"
    if served.decoupled:
        return "it may answer a request more than once"
    if len({one.device.kind for one in served.instances.runners.values()}) > 1:
        return "it executes on CPUs and on GPUs, and only instances that are alike are simulated"
    return ""
