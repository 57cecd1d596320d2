"""The model of an engine in this process that computes a job's rows.

Lives here: which models it needs, what it is called with, and what its errors mean for the rows. Must not: repeat a
call, or choose rows. Its twin on a running server is in `server_model.py`.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import grpc

from paceline.backends.base import Backend, DeviceKind
from paceline.backends.generation import OPTIONAL_OUTPUTS
from paceline.backends.lengths import Lengths
from paceline.backends.spec import Array
from paceline.clients.description import ModelDescription
from paceline.clients.errors import Internal, InvalidArgument, NotFound, ResourceExhausted
from paceline.server.bulk.values import BulkError, Parameters
from paceline.server.engine import Engine
from paceline.server.errors import ConfigError, StartError
from paceline.server.models.batch_policy import called_models
from paceline.server.models.defaults import Offline
from paceline.server.models.ensemble_config import is_ensemble, steps_of
from paceline.server.models.layout import CONFIG_FILE
from paceline.server.models.model_config import parse_config
from paceline.server.models.served_model import ServedModel

__all__ = ["EngineModel", "asked_of", "engine_model", "generates", "model_paths"]

_NO_PARAMETERS: Parameters = {}


class EngineModel:
    """`Computes` for the model `name` of `engine`, which is for offline work. `parameters` go with each call. Raises
    BulkError if it is a model whose answers aren't those to single rows."""

    def __init__(self, engine: Engine, name: str, parameters: Parameters = _NO_PARAMETERS) -> None:
        served = engine.find(name, "")
        executing = _executing(served)
        if why := _why_not(served):
            raise BulkError(f"model '{served.name}' can't compute rows: {why}")
        self._engine, self._parameters = engine, parameters
        self.description = asked_of(engine.describe(served.name), parameters)
        self.max_rows = served.max_batch_rows
        self.max_elements = served.batcher.policy.max_batch_elements
        self.batch_sizes: Sequence[int] = served.batcher.policy.batch_sizes
        self.at_once = sum(map(_calls_for, executing))
        instances = [one for each in executing for one in each.instances.runners.values()]
        self.on_cpus = all(one.device.kind is DeviceKind.CPU for one in instances)
        self.lengths = Lengths(served.spec) if served.spec.lengths else None

    async def infer(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        try:
            return await self._engine.infer(
                inputs, model=self.description.name, outputs=outputs, parameters=self._parameters
            )
        except (ValueError, TypeError) as error:
            raise InvalidArgument(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error
        except ResourceExhausted as error:  # memory: nobody else's calls are in its queue
            raise Internal(grpc.StatusCode.INTERNAL, error.message) from error


@asynccontextmanager
async def engine_model(
    path: Path,
    *,
    max_rows: int,
    offline: Offline,
    parameters: Parameters = _NO_PARAMETERS,
    execution_timeout_s: float = 0.0,
    allow_python_models: bool = False,
    backend_of: Callable[[str], Backend] | None = None,
) -> AsyncIterator[EngineModel]:
    """The model at `path` in an engine that runs as long as this does. `max_rows` is for models without a
    configuration. Raises BulkError."""
    paths = model_paths(path)
    engine = Engine(
        *paths,
        backend_of=backend_of,
        max_batch_size=max_rows,
        offline=offline,
        execution_timeout_s=execution_timeout_s,
        allow_python_models=allow_python_models,
    )
    async with AsyncExitStack() as undo:
        try:
            await undo.enter_async_context(engine)
            name = engine.models[0] if len(engine.models) == 1 else paths[0].name
            model = EngineModel(engine, name, parameters)
        except StartError as error:
            raise BulkError(str(error)) from error
        except NotFound:
            expected = f"expected one model, as in {path}/{engine.models[0]}"
            raise BulkError(f"{path}: {expected}, got a repository of {', '.join(engine.models)}") from None
        yield model


def model_paths(path: Path) -> Sequence[Path]:
    """`path`, and the folders beside it of the models that it needs, if it is an ensemble or its code calls others.
    Blocks. Raises BulkError if one is missing."""
    found = [Path(os.path.abspath(path))]
    for folder in found:
        if not (folder / CONFIG_FILE).is_file():
            continue
        try:
            config = parse_config(folder / CONFIG_FILE)
            needed = [step.model for step in steps_of(config)] if is_ensemble(config) else called_models(config)
        except ConfigError as error:
            raise BulkError(f"{folder}: {error}") from error
        for name in needed:
            other = folder.parent / name
            if name in ("", ".", "..") or "/" in name or not other.is_dir():
                raise BulkError(f"{folder}: expected a folder beside it of model '{name}', which it needs, got none")
            if other not in found:
                found.append(other)
    return found


def _why_not(served: ServedModel) -> str:
    if served.spec.sequence is not None:
        return "it remembers earlier requests of a sequence, so a row's answer isn't its own"
    if served.decoupled:
        return "it may answer a request more than once (model_transaction_policy.decoupled)"
    return ""


def generates(description: ModelDescription) -> bool:
    """Whether a row is a prompt, and its outputs what follows."""
    return {one.name for one in OPTIONAL_OUTPUTS} <= {one.name for one in description.outputs}


def asked_of(description: ModelDescription, parameters: Parameters) -> ModelDescription:
    """`description` without what a generation only has if a parameter asks for it."""
    asked = {name.removeprefix("return_") for name, value in parameters.items() if value is not False}
    left_out = {one.name for one in OPTIONAL_OUTPUTS} - asked if generates(description) else ()
    return replace(description, outputs=tuple(one for one in description.outputs if one.name not in left_out))


def _executing(served: ServedModel) -> Sequence[ServedModel]:
    """The models that execute its requests: itself, unless it is a pipeline."""
    if served.pipeline is None:
        return [served]
    return [cast("ServedModel", model) for model in served.pipeline.models if model.pipeline is None]


def _calls_for(served: ServedModel) -> int:
    """One call for each place that executes, and one for each instance that waits there, so that none is ever idle."""
    runners = served.instances.runners
    places = served.batcher.policy.max_batch_rows if served.generates is not None else 1
    return len(runners) * places + len(set(runners.values()))
