"""The asyncio client: one client serves many tasks of one event loop over one connection.

Lives here: awaiting calls of grpc.aio, and what cancellation means. What is sent and read is in base.py and
messages.py, the blocking twin in sync.py; the two have the same methods with the same arguments.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from numbers import Integral
from types import ModuleType
from typing import Any, ClassVar, Final, Literal, Self, TypeVar

import grpc
import grpc.aio
import numpy.typing as npt

from paceline.clients import base
from paceline.clients.answers import Answers
from paceline.clients.base import DEFAULT_TIMEOUT_S, BaseClient, Call, ReadyWait, Stubs, Timeout
from paceline.clients.coalescing import Coalescer
from paceline.clients.connection import Metadata, Tls
from paceline.clients.description import ModelDescription, described
from paceline.clients.errors import (
    Cancelled,
    DeadlineExceeded,
    InferenceError,
    Unavailable,
    Unimplemented,
    rpc_failure,
    unreadable,
)
from paceline.clients.generations import GenerationChunk, GenerationParameter, generation_chunk, generation_request
from paceline.clients.messages import (
    IndexEntry,
    InferResult,
    Inputs,
    ModelMetadata,
    Parameters,
    ServerMetadata,
    infer_request,
    infer_result,
    plain_inputs,
)
from paceline.clients.sequences import SEQUENCE_ID, AsyncInferenceSequence, SequenceId
from paceline.clients.streams import NoStream, Streams, Turn, all_answers, check_request
from paceline.protos.inference_pb2 import ModelInferRequest
from paceline.protos.model_config_pb2 import ModelConfig

__all__ = ["InferenceClient"]

T = TypeVar("T")

_MAX_STREAMED_BYTES: Final = 1024 * 1024
"""A larger request would hold up the messages behind it on its stream, and end the stream if it exceeds the server's
limit."""


class InferenceClient(BaseClient):
    """Calls a server of the Open Inference Protocol (KServe v2) over gRPC, without blocking the event loop.

    Methods, arguments and errors are those of `clients.sync.InferenceClient`, awaited. The client belongs to the event
    loop in which it is first used, and raises RuntimeError in another. Cancelling the task that awaits a method cancels
    the call on the server too.

    With `transport="stream"`, `infer` shares up to 16 ModelStreamInfer streams instead of making a call for each
    request, which is less work for both ends when many small requests are in flight. Requests with more than 1 MiB of
    tensors, and those for which the server has no room for a stream, are still calls; where a connection may have fewer
    than 17 calls, streams and calls wait for each other. Other differences: a stream that breaks fails all requests
    that wait on it, as does a message beyond the server's limit; `metadata` can only be given to the client as a whole;
    errors carry only status and message, and from servers other than paceline only the message (the status is UNKNOWN).
    The server sees a `request_id` with a number in front, `7:mine`, in its logs and traces; the result has the original
    one.

    With `coalesce=N`, concurrent inferences that differ only in their rows are merged into requests of up to N rows,
    and each caller gets its rows of the answer. This is for models that work row by row and whose batches may have N
    rows. Each caller keeps its own timeout, cancellation and errors. `request_id` reaches the server only from requests
    that go alone, which those with `metadata` of their own do.
    """

    _transport: ClassVar[ModuleType] = grpc.aio

    def __init__(
        self,
        target: str,
        *,
        transport: Literal["call", "stream"] = "call",
        coalesce: int | None = None,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        tls: bool | Tls = False,
        token: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        options: Sequence[tuple[str, Any]] = (),
        metadata: Metadata = (),
    ) -> None:
        super().__init__(
            target,
            timeout_s=timeout_s,
            tls=tls,
            token=token,
            credentials=credentials,
            options=options,
            metadata=metadata,
        )
        if transport not in ("call", "stream"):
            raise ValueError(f"transport: expected 'call' or 'stream', got {transport!r}")
        if coalesce is not None:
            expected = "coalesce: expected 2 rows or more in a request, a whole number, or None"
            if not isinstance(coalesce, Integral):
                raise TypeError(f"{expected}, got {coalesce!r}")
            if coalesce < 2:
                raise ValueError(f"{expected}, got {coalesce!r}")
        self._streams: Streams | None = None
        if transport == "stream":
            self._streams = Streams(lambda: self._open()["ModelStreamInfer"](metadata=self._metadata))
        self._coalescer = Coalescer(self._infer, coalesce) if coalesce is not None else None
        self._asking = asyncio.Lock()
        # The loop in which the channel was created, and in which streams and merged requests have their tasks.
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> Self:
        self._open()
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    async def infer(
        self,
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
        """Runs the model and returns its outputs; arguments and errors as in the blocking client.

        Tensors are copied in the event loop, both when sent and when received. Over streams, raises ValueError for
        `metadata`, and for the parameter `paceline_cancel` if it is true.
        """
        return await self._ask(model, inputs, version, outputs, request_id, parameters, timeout_s, metadata, datatypes)

    async def stream_infer(
        self,
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
        """Runs a model that may answer any number of times, and yields each answer as it comes; arguments and errors as
        in the blocking client, with `async for`.

        The stream is the request's own, also with `transport="stream"`. Cancelling the task that awaits an answer
        cancels the request. So does closing the iterator, which leaving `async for` early doesn't do at once: use
        `contextlib.aclosing`.
        """
        request, timeout_s = await self._request(
            model, inputs, version, outputs, request_id, parameters, timeout_s, metadata, datatypes
        )
        answers = Answers()
        try:
            stream = self._start(base.stream_infer_call(request, answers), timeout_s, metadata)
            async with aclosing(all_answers(stream, answers)) as responses:
                async for response in responses:
                    yield infer_result(response)
        except InferenceError as error:
            self._forget_datatypes(model, version, error)
            raise
        except asyncio.CancelledError as error:
            self._raise_if_closed(error)
            raise

    async def generate(
        self,
        model: str,
        prompt: str | npt.ArrayLike,
        *,
        version: str = "",
        request_id: str = "",
        timeout_s: Timeout = ...,
        metadata: Metadata = (),
        **parameters: GenerationParameter,
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Generates what follows `prompt`, and yields each token as it comes; arguments and errors as in the blocking
        client, with `async for`, and with `contextlib.aclosing` as for `stream_infer`."""
        now_s = asyncio.get_running_loop().time
        began_s = now_s()
        known = await self._datatypes_of(model, version, timeout_s, metadata)
        request = generation_request(prompt, parameters, known)
        left_s = self._left_s(timeout_s, now_s() - began_s)
        given = {"version": version, "request_id": request_id, "metadata": metadata, **request._asdict()}
        results = self.stream_infer(model, timeout_s=left_s, **given)
        async with aclosing(results):
            async for result in results:
                yield generation_chunk(result)

    def sequence(
        self,
        model: str,
        id: SequenceId | None = None,
        *,
        version: str = "",
        outputs: Sequence[str] = (),
        parameters: Parameters | None = None,
        metadata: Metadata = (),
    ) -> AsyncInferenceSequence:
        """A sequence of requests that share state in the server, as a context: `async with client.sequence("m") as
        sequence:`; arguments as in the blocking client. See `AsyncInferenceSequence`."""
        infer = partial(self._ask, model, version=version, outputs=outputs, metadata=metadata)
        return AsyncInferenceSequence(infer, self._bound_s, next(self._sequence_ids) if id is None else id, parameters)

    async def server_live(self, *, timeout_s: Timeout = ..., metadata: Metadata = ()) -> bool:
        """Whether the server says it is alive."""
        return await self._call(base.SERVER_LIVE, timeout_s, metadata)

    async def server_ready(self, *, timeout_s: Timeout = ..., metadata: Metadata = ()) -> bool:
        """Whether the server says it can take requests for its models."""
        return await self._call(base.SERVER_READY, timeout_s, metadata)

    async def model_ready(
        self, model: str, version: str = "", *, timeout_s: Timeout = ..., metadata: Metadata = ()
    ) -> bool:
        """Whether the model can take requests. For unknown models, some servers answer False, others raise NotFound."""
        return await self._call(base.model_ready_call(model, version), timeout_s, metadata)

    async def server_metadata(self, *, timeout_s: Timeout = ..., metadata: Metadata = ()) -> ServerMetadata:
        """The server's name, version and protocol extensions."""
        return await self._call(base.SERVER_METADATA, timeout_s, metadata)

    async def model_metadata(
        self, model: str, version: str = "", *, timeout_s: Timeout = ..., metadata: Metadata = ()
    ) -> ModelMetadata:
        """The model's versions, platform, inputs and outputs."""
        return await self._call(base.model_metadata_call(model, version), timeout_s, metadata)

    async def model_config(
        self, model: str, version: str = "", *, timeout_s: Timeout = ..., metadata: Metadata = ()
    ) -> ModelConfig:
        """How the model is served: Triton's message, with nothing left open. Not all servers have this extension."""
        return await self._call(base.model_config_call(model, version), timeout_s, metadata)

    async def describe(
        self, model: str, version: str = "", *, timeout_s: Timeout = ..., metadata: Metadata = ()
    ) -> ModelDescription:
        """What the model takes and returns, how it is batched, where it runs and, of a pipeline, its steps."""
        now_s = asyncio.get_running_loop().time
        began_s = now_s()
        about = await self.model_metadata(model, version, timeout_s=timeout_s, metadata=metadata)
        timeout_s = self._left_s(timeout_s, now_s() - began_s)
        try:
            config = await self.model_config(model, version, timeout_s=timeout_s, metadata=metadata)
        except Unimplemented:
            return described(about, None)
        return described(about, config)

    async def models(
        self, *, ready_only: bool = False, timeout_s: Timeout = ..., metadata: Metadata = ()
    ) -> tuple[IndexEntry, ...]:
        """The state of each version of each model, in order; with `ready_only`, of those that serve."""
        return await self._call(base.models_call(ready_only), timeout_s, metadata)

    async def repository_index(self, *, timeout_s: Timeout = ..., metadata: Metadata = ()) -> tuple[IndexEntry, ...]:
        """The same as `models`, in the server's own order."""
        return await self._call(base.REPOSITORY_INDEX, timeout_s, metadata)

    async def health(self, service: str = "", *, timeout_s: Timeout = ..., metadata: Metadata = ()) -> str:
        """The name of a grpc.health.v1 status, such as SERVING. Raises NotFound for an unknown service."""
        return await self._call(base.health_call(service), timeout_s, metadata)

    async def wait_ready(self, timeout_s: float) -> None:
        """Returns once the server is reachable and ready. Raises DeadlineExceeded after `timeout_s` seconds."""
        now_s = asyncio.get_running_loop().time
        wait = ReadyWait(self._target, timeout_s, now_s())
        while True:
            with suppress(DeadlineExceeded, Unavailable):
                if await self._call(base.SERVER_READY_ONCE_CONNECTED, wait.left_s(now_s()), ()):
                    return
            await asyncio.sleep(wait.pause_s(now_s()))

    async def close(self) -> None:
        """Ends the connection; calls still in flight raise Cancelled. Closing twice does nothing."""
        has_ended = self._loop is not None and self._loop.is_closed()
        if not self._closed and not has_ended:
            self._check_loop()
        channel = self._detach()
        if channel is None:
            return
        if self._coalescer is not None and not has_ended:
            await self._coalescer.close()
        if self._streams is not None and not has_ended:
            await self._streams.close()
        await channel.close()

    async def _datatypes_of(
        self, model: str, version: str, timeout_s: Timeout, metadata: Metadata
    ) -> Mapping[str, str]:
        """One caller asks, and all others who want to know wait for its answer, each within its own timeout."""
        known = self._datatypes.get((model, version))
        if known is not None:
            return known
        bound_s = self._bound_s(timeout_s)
        try:
            async with asyncio.timeout(bound_s), self._asking:
                known = self._datatypes.get((model, version))
                if known is None:
                    described = await self.model_metadata(model, version, timeout_s=bound_s, metadata=metadata)
                    known = self._datatypes[model, version] = {one.name: one.datatype for one in described.inputs}
                return known
        except TimeoutError:
            raise DeadlineExceeded(
                grpc.StatusCode.DEADLINE_EXCEEDED, f"model '{model}': no metadata within {bound_s:g} s"
            ) from None

    async def _ask(
        self,
        model: str,
        inputs: Inputs,
        version: str,
        outputs: Sequence[str],
        request_id: str,
        parameters: Parameters | None,
        timeout_s: Timeout,
        metadata: Metadata,
        datatypes: Mapping[str, str] | None,
        turn: Turn | None = None,
    ) -> InferResult:
        """`infer`; of a step of a sequence in its turn."""
        request, timeout_s = await self._request(
            model, inputs, version, outputs, request_id, parameters, timeout_s, metadata, datatypes
        )
        if self._streams is not None:
            if metadata:
                raise ValueError("metadata: a stream has it once for all its requests; give it to the client instead")
            check_request(request)
        bound_s = self._bound_s(timeout_s)
        try:
            # Rows of one request would be steps of one sequence.
            if self._coalescer is not None and not metadata and SEQUENCE_ID not in request.parameters:
                self._open()
                return await self._coalescer.infer(request, bound_s)
            return await self._infer(request, bound_s, metadata, turn)
        except InferenceError as error:
            self._forget_datatypes(model, version, error)
            raise

    async def _request(
        self,
        model: str,
        inputs: Inputs,
        version: str,
        outputs: Sequence[str],
        request_id: str,
        parameters: Parameters | None,
        timeout_s: Timeout,
        metadata: Metadata,
        datatypes: Mapping[str, str] | None,
    ) -> tuple[ModelInferRequest, Timeout]:
        """The request for `infer`'s arguments, and what is left of the timeout."""
        if plain := plain_inputs(inputs, datatypes):
            now_s = asyncio.get_running_loop().time
            began_s = now_s()
            known = await self._datatypes_of(model, version, timeout_s, metadata)
            datatypes = {**{name: known[name] for name in plain if name in known}, **(datatypes or {})}
            timeout_s = self._left_s(timeout_s, now_s() - began_s)
        request = infer_request(
            model,
            inputs,
            version=version,
            outputs=outputs,
            request_id=request_id,
            parameters=parameters,
            datatypes=datatypes,
        )
        return request, timeout_s

    async def _infer(
        self, request: ModelInferRequest, timeout_s: float | None, metadata: Metadata = (), turn: Turn | None = None
    ) -> InferResult:
        call = base.infer_call(request)
        left_s = timeout_s
        if self._streams is not None and sum(map(len, request.raw_input_contents)) <= _MAX_STREAMED_BYTES:
            self._open()
            try:
                return call.read(await self._streams.infer(request, timeout_s, turn))
            except NoStream as none:
                left_s = none.left_s
        if turn is not None:
            left_s = await turn.alone(left_s)
        return await self._call(call, left_s, metadata)

    def _open(self) -> Stubs:
        """As in `BaseClient`. Raises RuntimeError in an event loop other than the channel's: there gRPC would fail with
        an error of its own, or not fail and never wake the caller."""
        opened = super()._open()
        self._check_loop()
        return opened

    def _new_channel(self) -> Any:
        channel = super()._new_channel()
        self._loop = asyncio.get_running_loop()
        return channel

    def _check_loop(self) -> None:
        if self._loop is not None and self._loop is not asyncio.get_running_loop():
            raise RuntimeError(
                f"{self!r} belongs to the event loop in which it was first used, and this is another one: make a "
                "client in each loop (such as in each asyncio.run), or use clients.InferenceClient, which all threads "
                "may share"
            )

    def _raise_if_closed(self, error: asyncio.CancelledError) -> None:
        """grpc.aio reports a channel closed underneath a call as if the awaiting task had been cancelled."""
        task = asyncio.current_task()
        if self._closed and not (task is not None and task.cancelling()):
            raise Cancelled(grpc.StatusCode.CANCELLED, f"{self!r} was closed during the call") from error

    async def _call(self, call: Call[T], timeout_s: Timeout, metadata: Metadata) -> T:
        try:
            response = await self._start(call, timeout_s, metadata)
        except grpc.RpcError as error:
            raise rpc_failure(error) from error
        except asyncio.CancelledError as error:
            self._raise_if_closed(error)
            raise
        if response is None:
            raise unreadable()
        return call.read(response)
