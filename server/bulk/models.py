"""The model that computes a job's rows: of an engine in this process, or of a running server, over streams.

Lives here: which models are needed, what they are called with, and what their errors mean for the rows. Must not:
repeat what failed for a time, or choose rows. The rule: a row is at fault only if the model's server says so of the
request; what may be the connection's fault, or somebody else's, isn't.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import grpc
import numpy as np

from paceline.backends.base import Backend, DeviceKind
from paceline.backends.generation import OPTIONAL_OUTPUTS
from paceline.backends.lengths import Lengths
from paceline.backends.spec import Array
from paceline.clients.aio import InferenceClient
from paceline.clients.description import Batching, ModelDescription
from paceline.clients.errors import (
    ClientError,
    DeadlineExceeded,
    InferenceError,
    Internal,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from paceline.clients.messages import InferResult
from paceline.clients.options import ConnectionOptions
from paceline.clients.streams import ENDED
from paceline.server.bulk.execution import NOT_THE_ROWS
from paceline.server.bulk.settings import Parameters
from paceline.server.bulk.values import BulkError, FlagError
from paceline.server.engine import Engine
from paceline.server.errors import ConfigError, StartError
from paceline.server.models.batch_policy import called_models
from paceline.server.models.config_text import parse_config
from paceline.server.models.defaults import Offline
from paceline.server.models.ensemble_config import is_ensemble, steps_of
from paceline.server.models.layout import CONFIG_FILE
from paceline.server.models.served_model import ServedModel

__all__ = ["MOST_ROWS", "EngineModel", "ServerModel", "engine_model", "model_paths", "server_model"]

MOST_ROWS = 1_024
"""Of a call to a model that sets no limit of its own."""

_NO_PARAMETERS: Parameters = {}


class EngineModel:
    """`Computes` for the model `name` of `engine`, which is for offline work. `parameters` go with each call. Raises
    BulkError if it is a model whose answers aren't those to single rows."""

    def __init__(self, engine: Engine, name: str, parameters: Parameters = _NO_PARAMETERS) -> None:
        served = engine.find(name, "")
        executing = _executing(served)
        _check_alone(served.name, remembers=served.spec.sequence is not None, is_decoupled=served.decoupled)
        self._engine, self._parameters = engine, parameters
        self.description = _asked_of(engine.describe(served.name), parameters)
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
    configuration; if others are needed, they take at least `MOST_ROWS`. Raises BulkError."""
    paths = model_paths(path)
    engine = Engine(
        *paths,
        backend_of=backend_of,
        # What an ensemble or code asks of others has as many rows as that says, however few a call of the job has.
        max_batch_size=max_rows if len(paths) == 1 else max(max_rows, MOST_ROWS),
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
            raise FlagError(f"{path}: {expected}, got a repository of {', '.join(engine.models)}") from None
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


def _check_alone(name: str, *, remembers: bool, is_decoupled: bool) -> None:
    """Raises BulkError if the model's answers aren't those to single rows."""
    if remembers:
        raise _unable(name, "it remembers earlier requests of a sequence, so a row's answer isn't its own")
    if is_decoupled:
        raise _unable(name, "it may answer a request more than once (model_transaction_policy.decoupled)")


def _unable(name: str, why: str) -> BulkError:
    return BulkError(f"model '{name}' can't compute rows: {why}")


def _generates(description: ModelDescription) -> bool:
    """Whether a row is a prompt, and its outputs what follows."""
    return {one.name for one in OPTIONAL_OUTPUTS} <= {one.name for one in description.outputs}


def _asked_of(description: ModelDescription, parameters: Parameters) -> ModelDescription:
    """`description` without what a generation only has if a parameter asks for it."""
    asked = {name.removeprefix("return_") for name, value in parameters.items() if value is not False}
    left_out = {one.name for one in OPTIONAL_OUTPUTS} - asked if _generates(description) else ()
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


_FIRST_S = 3.0
_START_S = 60.0
"""How long a server may take to be ready when the job begins."""
_CALL_S = 600.0
"""How long a call may take. Without an end, a server whose machine is gone would never be asked again."""
_MOST_CALLS = 64
"""Of one row each: enough to fill a server's batches."""
_TOO_LARGE = ("larger than max", "one message can carry", "--max-request-elements")
"""What gRPC and servers say of a request that is too large by itself, rather than one too many."""
_LOST = "RST_STREAM"
"""In what gRPC says of a call whose connection has broken, if it doesn't say that it is unavailable."""


class ServerModel:
    """`Computes` for a model that is described as `description`, which `streams` and `calls` ask: clients for streams,
    and for calls by themselves. `say` is told why a call wasn't answered, and "" once one is. The server fills rows up
    to common sizes, so rows of a call have equal shapes."""

    batch_sizes: Sequence[int] = ()
    max_elements = 0
    lengths: Lengths | None = None

    def __init__(
        self,
        description: ModelDescription,
        streams: InferenceClient,
        calls: InferenceClient,
        parameters: Parameters,
        say: Callable[[str], None] = lambda why: None,
    ) -> None:
        if not (description.inputs and description.outputs):
            raise _unable(description.name, "the server doesn't say what its inputs and outputs are")
        _check_alone(
            description.name, remembers=description.sequences is not None, is_decoupled=description.is_decoupled
        )
        # On a stream, a generation is answered token by token.
        self._streams = calls if _generates(description) else streams
        self._calls, self._parameters, self._say = calls, parameters, say
        self._have_answered = False
        self.description = _asked_of(description, parameters)
        self.max_rows = description.batching.max_rows if description.batching is not None else 0
        self.at_once = _at_once(description)
        self._datatypes = {one.name: one.datatype for one in description.inputs}
        self._bits = {one.name for one in description.outputs if one.datatype == "BF16"}

    async def infer(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        try:
            answer = await self._infer(inputs, outputs)
        except InferenceError as error:
            if error.status in NOT_THE_ROWS and error.status is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                self._say(_shortened(error.message))
            raise
        self._say("")
        return answer

    async def _infer(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        try:
            answer = await self._asked(self._streams, inputs, outputs)
            self._have_answered = True
            return answer
        except InferenceError as error:
            are_none = error.status is grpc.StatusCode.UNIMPLEMENTED or error.message == ENDED
            if not (are_none or error.status is grpc.StatusCode.UNKNOWN or _LOST in error.message):
                raise
        # Streams of other servers don't tell an error's status, which says whether the rows are at fault.
        try:
            answer = await self._asked(self._calls, inputs, outputs)
        except Internal as error:
            if _LOST not in error.message:
                raise
            raise Unavailable(grpc.StatusCode.UNAVAILABLE, error.message) from error
        # The server has no streams, or, as MLServer, others than the protocol's. Those that have answered may end, too.
        if are_none and not self._have_answered:
            self._streams = self._calls
        return answer

    async def _asked(
        self, client: InferenceClient, inputs: Mapping[str, Array], outputs: Sequence[str]
    ) -> Mapping[str, Array]:
        try:
            result = await client.infer(
                self.description.name,
                inputs,
                outputs=outputs,
                parameters=self._parameters,
                datatypes={name: self._datatypes[name] for name in inputs},
            )
        except ResourceExhausted as error:
            if any(text in error.message for text in _TOO_LARGE):
                raise Internal(grpc.StatusCode.INTERNAL, error.message) from error
            raise
        except InferenceError:
            raise
        except ClientError as error:
            raise BulkError(str(error)) from error
        except (ValueError, TypeError) as error:  # also for tensors that no message can carry
            raise InvalidArgument(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error
        rows = len(next(iter(inputs.values()))) if self.max_rows and inputs else None
        return {name: self._checked(name, result, rows) for name in outputs or result.outputs}

    def _checked(self, name: str, result: InferResult, rows: int | None) -> Array:
        array = result.outputs.get(name)
        if array is None or (rows is not None and array.shape[:1] != (rows,)):
            got = "none" if array is None else f"shape {list(array.shape)}"
            expected = "an array" if rows is None else f"{rows} rows"
            raise Internal(grpc.StatusCode.INTERNAL, f"output '{name}': expected {expected} from the server, got {got}")
        if name in self._bits:  # of which the client makes numbers, and all other models give the bits
            return (np.ascontiguousarray(array, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return array


@asynccontextmanager
async def server_model(
    target: str,
    name: str,
    *,
    access: ConnectionOptions,
    parameters: Parameters,
    batch_rows: int = 0,
    say: Callable[[str], None] = lambda why: None,
    start_s: float = _START_S,
) -> AsyncIterator[ServerModel]:
    """The model `name` of the server at `target`. `say` is told why it is waited for, and "" when it is there.
    `batch_rows`: of a call, if that is given; servers that don't tell how a model is batched get calls of one row
    otherwise. Raises BulkError."""
    tls, token = access.tls or False, access.token
    async with (
        InferenceClient(target, transport="stream", timeout_s=_CALL_S, tls=tls, token=token) as streams,
        InferenceClient(target, timeout_s=_CALL_S, tls=tls, token=token) as calls,
    ):

        def tell(why: str) -> None:
            say(f"server {target}: {why}; trying again" if why else "")

        try:
            tell(await _not_ready(calls))
            try:
                await calls.wait_ready(start_s)
            except DeadlineExceeded as error:
                # While a client waits for a connection, it isn't told why there is none.
                if why := await _not_ready(calls):
                    raise BulkError(f"--server {target}: not ready within {start_s:g} s: {why}") from error
            tell("")
            description = await calls.describe(name)
        except ClientError as error:
            raise BulkError(f"--server {target}: {error}") from error
        if not description.is_configured and _has_rows(description):
            batching = Batching(max(1, batch_rows), True, (), 0, 0, 0, ())
            description = replace(description, batching=batching)
        yield ServerModel(description, streams, calls, parameters, tell)


async def _not_ready(client: InferenceClient) -> str:
    """Why the server isn't ready; "" if it is."""
    try:
        return "" if await client.server_ready(timeout_s=_FIRST_S) else "not ready"
    except (Unavailable, DeadlineExceeded) as error:
        return _shortened(error.message)


def _shortened(message: str) -> str:
    """Without how often gRPC has tried which address."""
    return message.rpartition(": ")[2] if "last error: " in message else message


def _has_rows(description: ModelDescription) -> bool:
    """Whether all tensors may have any number of rows."""
    return all(one.shape[:1] == (-1,) for one in (*description.inputs, *description.outputs))


def _at_once(description: ModelDescription) -> int:
    """Two full calls for each instance, so that one waits while another executes; more where calls may have few rows,
    as they have no batch axis, or rows of the same shape are few."""
    instances = sum(one.count * max(1, len(one.gpus)) for one in description.instances) or 1
    batching = description.batching
    if batching is None:
        return _MOST_CALLS
    small = min(batching.max_rows, _MOST_CALLS) if batching.lengths else 1
    return 2 * instances * small
