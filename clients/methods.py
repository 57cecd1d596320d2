"""The methods of both clients, written once: each is a coroutine in `clients.aio`, and blocks in `clients.sync`.

Lives here: their arguments and what they mean, what is sent, how answers are read. Must not live here: channels, or how
to wait. The rule: what is awaited here is a coroutine of `BaseClient`, which in the blocking client returns only when
it has its result, and nothing else that could wait.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from math import inf
from time import monotonic
from typing import Any, Final, TypeVar

import grpc
import numpy.typing as npt
from grpc_health.v1 import health_pb2

from paceline.clients.answers import enable_empty_final
from paceline.clients.base import BaseClient, Timeout, bounded_s, named
from paceline.clients.connection import Metadata
from paceline.clients.description import ModelDescription, described
from paceline.clients.errors import DeadlineExceeded, InferenceError, ResponseError, Unavailable, Unimplemented
from paceline.clients.generations import GenerationChunk, GenerationParameter, generation_chunk, generation_request
from paceline.clients.messages import (
    IndexEntry,
    InferResult,
    Inputs,
    ModelMetadata,
    Parameters,
    ServerMetadata,
    TensorMetadata,
    checked_text,
    infer_request,
    infer_result,
    plain_inputs,
)
from paceline.clients.sequences import SequenceId
from paceline.protos import inference_pb2 as pb
from paceline.protos.model_config_pb2 import ModelConfig

S = TypeVar("S")
Client = BaseClient[Any]

_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0


async def infer(
    self: Client,
    model: str,
    inputs: Inputs,
    *,
    version: str = "",
    outputs: Sequence[str] = (),
    request_id: str = "",
    parameters: Parameters | None = None,
    timeout_s: Timeout = ...,
    metadata: Metadata = (),
    datatypes: Mapping[str, str] | None = None,
) -> InferResult:
    """Runs the model and returns its outputs.

    Inputs, datatypes and parameters are as in `clients.messages.infer_request`, which also says what is refused with
    ValueError or TypeError before anything is sent. Python's numbers, alone or in lists, are sent in the datatypes of
    the model's inputs, or refused with ValueError if a value would be lost. For that, the first such call asks for the
    model's metadata, within the same timeout, and raises what that raises. With an empty `version`, the server chooses;
    with empty `outputs`, it returns all.

    The asyncio client copies tensors in the event loop, both when sent and when received. Over streams, it raises
    ValueError for `metadata`, and for the parameter `paceline_cancel` if it is true.
    """
    asked = {"outputs": outputs, "request_id": request_id, "parameters": parameters, "datatypes": datatypes}
    return await ask(self, model, inputs, version=version, timeout_s=timeout_s, metadata=metadata, **asked)


async def ask(
    client: Client,
    model: str,
    inputs: Inputs,
    *,
    version: str,
    timeout_s: Timeout,
    metadata: Metadata,
    turn: Any = None,
    **asked: Any,
) -> InferResult:
    """`infer`; of a step of a sequence in its turn."""
    request, timeout_s = await _request(client, model, inputs, version, timeout_s, metadata, **asked)
    try:
        return await client._infer(request, timeout_s, metadata, turn)
    except InferenceError as error:
        client._forget_datatypes(model, version, error)
        raise


async def stream_infer(
    self: Client,
    model: str,
    inputs: Inputs,
    *,
    version: str = "",
    outputs: Sequence[str] = (),
    request_id: str = "",
    parameters: Parameters | None = None,
    timeout_s: Timeout = ...,
    metadata: Metadata = (),
    datatypes: Mapping[str, str] | None = None,
) -> AsyncGenerator[InferResult, None]:
    """Runs a model that may answer any number of times, and yields each answer as it comes. Arguments are as in
    `infer`; the request is sent when the first answer is asked for.

    Works for each model of a server with ModelStreamInfer, also for those that answer once. `timeout_s` is for all
    answers together; None lets them take any time. At most one answer waits here to be asked for: behind it, gRPC makes
    the server wait. Closing the iterator cancels the request. An error among the answers ends it too: InferenceError,
    whose status other servers than paceline leave UNKNOWN. Raises Unavailable if the server ends the stream before it
    has said that there are no more answers.

    The blocking client's iterator is also closed by dropping it. That of the asyncio client, which is for `async for`,
    isn't closed at once by leaving the loop early: use `contextlib.aclosing`. Cancelling the task that awaits an answer
    cancels the request. The stream is the request's own, also with `transport="stream"`.
    """
    asked: dict[str, Any] = {"outputs": outputs, "request_id": request_id, "parameters": parameters}
    request, timeout_s = await _request(self, model, inputs, version, timeout_s, metadata, datatypes, **asked)
    enable_empty_final(request)
    try:
        async with aclosing(self._answers(request, timeout_s, metadata)) as answers:
            async for answer in answers:
                yield infer_result(answer)
    except InferenceError as error:
        self._forget_datatypes(model, version, error)
        raise


async def generate(
    self: Client,
    model: str,
    prompt: str | npt.ArrayLike,
    *,
    version: str = "",
    request_id: str = "",
    timeout_s: Timeout = ...,
    metadata: Metadata = (),
    **parameters: GenerationParameter,
) -> AsyncGenerator[GenerationChunk, None]:
    """Generates what follows `prompt`, text or token ids, and yields each token as it comes, or what the server sends
    at once. The last chunk has a `finish_reason`.

    Other keywords are parameters: `max_tokens`, `min_tokens`, `temperature`, `top_k`, `top_p`, `seed`, `stop` (text or
    several), `repetition_penalty`, `logprobs`, and whatever else the model knows. One that is named as an input of the
    model is sent as that. If the model has the input `sampling_parameters`, as that of Triton's vLLM backend, the
    others are sent there, as a JSON object; else as parameters of the request, which `priority`, `timeout` (of the
    server, in microseconds) and those that begin with `paceline_` are in any case. The first call asks for the model's
    inputs, within the same timeout. Otherwise as `stream_infer`: `timeout_s` is for the whole answer, and closing the
    iterator ends the generation.
    """
    began_s = monotonic()
    known = await self._datatypes_of(model, version, timeout_s, metadata)
    request = generation_request(prompt, parameters, known)
    left_s = self._left_s(timeout_s, monotonic() - began_s)
    given = {"version": version, "request_id": request_id, "metadata": metadata, **request._asdict()}
    async with aclosing(stream_infer(self, model, timeout_s=left_s, **given)) as results:
        async for result in results:
            yield generation_chunk(result)


def sequence(
    self: BaseClient[S],
    model: str,
    id: SequenceId | None = None,
    *,
    version: str = "",
    outputs: Sequence[str] = (),
    parameters: Parameters | None = None,
    metadata: Metadata = (),
) -> S:
    """A sequence of requests that share state in the server, as a context: `with client.sequence("m") as sequence:`
    and then `sequence.infer(inputs)` for each step, with `last=True` for the last one; `async with` and `await` for the
    asyncio client. See `InferenceSequence` and `AsyncInferenceSequence`.

    `id` is an integer or text that no other client uses at the same time; by default, the client takes a fresh
    integer. The other arguments are those of each step's `infer`. Nothing is sent before the first step.
    """
    infer = partial(ask, self, model, version=version, outputs=outputs, metadata=metadata)
    return self._new_sequence(infer, self._bound_s, next(self._sequence_ids) if id is None else id, parameters)


async def server_live(self: Client, *, timeout_s: Timeout = ..., metadata: Metadata = ()) -> bool:
    """Whether the server says it is alive."""
    live: bool = (await self._call("ServerLive", pb.ServerLiveRequest(), timeout_s, metadata)).live
    return live


async def server_ready(self: Client, *, timeout_s: Timeout = ..., metadata: Metadata = ()) -> bool:
    """Whether the server says it can take requests for its models."""
    ready: bool = (await self._call("ServerReady", pb.ServerReadyRequest(), timeout_s, metadata)).ready
    return ready


async def model_ready(
    self: Client, model: str, version: str = "", *, timeout_s: Timeout = ..., metadata: Metadata = ()
) -> bool:
    """Whether the model can take requests. For unknown models, some servers answer False, others raise NotFound."""
    request = pb.ModelReadyRequest(**named(model, version))
    ready: bool = (await self._call("ModelReady", request, timeout_s, metadata)).ready
    return ready


async def server_metadata(self: Client, *, timeout_s: Timeout = ..., metadata: Metadata = ()) -> ServerMetadata:
    """The server's name, version and protocol extensions."""
    found = await self._call("ServerMetadata", pb.ServerMetadataRequest(), timeout_s, metadata)
    return ServerMetadata(found.name, found.version, tuple(found.extensions))


async def model_metadata(
    self: Client, model: str, version: str = "", *, timeout_s: Timeout = ..., metadata: Metadata = ()
) -> ModelMetadata:
    """The model's versions, platform, inputs and outputs."""
    found = await self._call("ModelMetadata", pb.ModelMetadataRequest(**named(model, version)), timeout_s, metadata)
    inputs, outputs = (
        tuple(TensorMetadata(each.name, each.datatype, tuple(each.shape)) for each in tensors)
        for tensors in (found.inputs, found.outputs)
    )
    return ModelMetadata(found.name, tuple(found.versions), found.platform, inputs, outputs, dict(found.properties))


async def model_config(
    self: Client, model: str, version: str = "", *, timeout_s: Timeout = ..., metadata: Metadata = ()
) -> ModelConfig:
    """How the model is served: Triton's message, with nothing left open. Not all servers have this extension."""
    request = pb.ModelConfigRequest(**named(model, version))
    config: ModelConfig = (await self._call("ModelConfig", request, timeout_s, metadata)).config
    return config


async def describe(
    self: Client, model: str, version: str = "", *, timeout_s: Timeout = ..., metadata: Metadata = ()
) -> ModelDescription:
    """What the model takes and returns, how it is batched, where it runs and, of a pipeline, its steps. Makes two calls
    within one timeout; of a server without ModelConfig it tells only what the first says."""
    began_s = monotonic()
    about = await model_metadata(self, model, version, timeout_s=timeout_s, metadata=metadata)
    timeout_s = self._left_s(timeout_s, monotonic() - began_s)
    try:
        config = await model_config(self, model, version, timeout_s=timeout_s, metadata=metadata)
    except Unimplemented:
        return described(about, None)
    return described(about, config)


async def models(
    self: Client, *, ready_only: bool = False, timeout_s: Timeout = ..., metadata: Metadata = ()
) -> tuple[IndexEntry, ...]:
    """The state of each version of each model, in order; with `ready_only`, of those that serve. Not all servers have
    this extension of Triton's."""
    entries = await _index(self, ready_only, timeout_s, metadata)
    return tuple(sorted(entries, key=lambda entry: (entry.name, len(entry.version), entry.version)))


async def repository_index(
    self: Client, *, timeout_s: Timeout = ..., metadata: Metadata = ()
) -> tuple[IndexEntry, ...]:
    """The same as `models`, in the server's own order."""
    return await _index(self, False, timeout_s, metadata)


async def _index(client: Client, ready_only: bool, timeout_s: Timeout, metadata: Metadata) -> tuple[IndexEntry, ...]:
    request = pb.RepositoryIndexRequest(ready=ready_only)
    found = await client._call("RepositoryIndex", request, timeout_s, metadata)
    return tuple(IndexEntry(each.name, each.version, each.state, each.reason) for each in found.models)


async def health(self: Client, service: str = "", *, timeout_s: Timeout = ..., metadata: Metadata = ()) -> str:
    """The name of a grpc.health.v1 status, such as SERVING; an empty service means the whole server. Raises NotFound
    for an unknown service."""
    request = health_pb2.HealthCheckRequest(service=checked_text("service", service))
    status = (await self._call("Check", request, timeout_s, metadata)).status
    try:
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(status))
    except ValueError as error:
        raise ResponseError(f"the health service answered with an unknown status: {status}") from error


async def wait_ready(self: Client, timeout_s: float) -> None:
    """Returns once the server is reachable and ready. Raises DeadlineExceeded after `timeout_s` seconds.

    Asks again after UNAVAILABLE, DEADLINE_EXCEEDED and "not ready", with pauses of 50 ms to 1 s; other errors are
    raised.
    """
    bound_s, pause_s = bounded_s(timeout_s), _FIRST_PAUSE_S
    until_s = inf if bound_s is None else monotonic() + bound_s
    while True:
        with suppress(DeadlineExceeded, Unavailable):
            left_s = until_s - monotonic()
            if (await self._call("ServerReady", pb.ServerReadyRequest(), left_s, (), wait_for_ready=True)).ready:
                return
        if (left_s := until_s - monotonic()) <= 0:
            text = f"{self._target} was not ready within {timeout_s:g} s"
            raise DeadlineExceeded(grpc.StatusCode.DEADLINE_EXCEEDED, text)
        await self._sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


async def _request(
    client: Client,
    model: str,
    inputs: Inputs,
    version: str,
    timeout_s: Timeout,
    metadata: Metadata,
    datatypes: Mapping[str, str] | None,
    **more: Any,
) -> tuple[pb.ModelInferRequest, Timeout]:
    """The request for `infer`'s arguments, and what is left of the timeout."""
    if plain := plain_inputs(inputs, datatypes):
        began_s = monotonic()
        known = await client._datatypes_of(model, version, timeout_s, metadata)
        datatypes = {**{name: known[name] for name in plain if name in known}, **(datatypes or {})}
        timeout_s = client._left_s(timeout_s, monotonic() - began_s)
    return infer_request(model, inputs, version=version, datatypes=datatypes, **more), timeout_s
