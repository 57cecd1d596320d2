"""The models that compute a job's rows: one of an engine in this process, or of a running server.

Lives here: what they are called with, and what their errors mean for the rows. Must not: repeat a call, or choose rows.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import cast

import grpc

from paceline.backends.base import Backend, DeviceKind
from paceline.backends.lengths import Lengths
from paceline.backends.spec import Array
from paceline.clients.errors import Internal, InvalidArgument, ResourceExhausted
from paceline.server.bulk.values import BulkError, Parameters
from paceline.server.engine import Engine
from paceline.server.errors import StartError
from paceline.server.models.defaults import Offline
from paceline.server.models.served_model import ServedModel

__all__ = ["EngineModel", "engine_model"]

_NO_PARAMETERS: Parameters = {}


class EngineModel:
    """`Computes` for the model `name` of `engine`, which is for offline work. `parameters` go with each call. Raises
    BulkError if it is a model whose answers aren't those to single rows."""

    def __init__(self, engine: Engine, name: str = "", parameters: Parameters = _NO_PARAMETERS) -> None:
        served = engine.find(name, "")
        executing = _executing(served)
        if why := _why_not(served):
            raise BulkError(f"model '{served.name}' can't compute rows: {why}")
        self._engine, self._parameters = engine, parameters
        self.description = engine.describe(served.name)
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
    path: str | os.PathLike[str],
    name: str = "",
    *,
    max_rows: int,
    offline: Offline,
    parameters: Parameters = _NO_PARAMETERS,
    execution_timeout_s: float = 0.0,
    allow_python_models: bool = False,
    backend_of: Callable[[str], Backend] | None = None,
) -> AsyncIterator[EngineModel]:
    """The model of `path` in an engine that runs as long as this does. `max_rows` is for models without a
    configuration. Raises BulkError."""
    engine = Engine(
        path,
        backend_of=backend_of,
        max_batch_size=max_rows,
        offline=offline,
        execution_timeout_s=execution_timeout_s,
        allow_python_models=allow_python_models,
    )
    try:
        await engine.__aenter__()
    except StartError as error:
        raise BulkError(str(error)) from error
    try:
        yield EngineModel(engine, name, parameters)
    finally:
        await engine.__aexit__(None, None, None)


def _why_not(served: ServedModel) -> str:
    if served.spec.sequence is not None:
        return "it remembers earlier requests of a sequence, so a row's answer isn't its own"
    if served.decoupled:
        return "it may answer a request more than once (model_transaction_policy.decoupled)"
    return ""


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
