"""The asyncio client: one client serves many tasks of one event loop over one connection.

Lives here: awaiting calls of grpc.aio, and what cancellation means. What the methods take, send and read is in
methods.py, for this client and its blocking twin in sync.py.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from numbers import Integral
from types import ModuleType
from typing import Any, ClassVar, Final, Literal, Self

import grpc
import grpc.aio
from grpc.aio import EOF  # type: ignore[attr-defined]

from paceline.clients import methods
from paceline.clients.answers import Answers
from paceline.clients.base import DEFAULT_TIMEOUT_S, BaseClient, Stubs, Timeout
from paceline.clients.coalescing import Coalescer
from paceline.clients.connection import Metadata, Tls
from paceline.clients.errors import Cancelled, DeadlineExceeded, rpc_failure, unreadable
from paceline.clients.messages import InferResult, infer_result
from paceline.clients.sequences import SEQUENCE_ID, AsyncInferenceSequence, StepTurn
from paceline.clients.streams import CANCEL, NoStream, Streams, StreamStatus, stream_failure
from paceline.protos.inference_pb2 import ModelInferRequest, ModelInferResponse

_MAX_STREAMED_BYTES: Final = 1024 * 1024
"""A larger request would hold up the messages behind it on its stream, and end the stream if it exceeds the server's
limit."""


class InferenceClient(BaseClient[AsyncInferenceSequence]):
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
    _new_sequence = AsyncInferenceSequence

    infer = methods.infer
    stream_infer = methods.stream_infer
    generate = methods.generate
    sequence = methods.sequence
    server_live = methods.server_live
    server_ready = methods.server_ready
    model_ready = methods.model_ready
    server_metadata = methods.server_metadata
    model_metadata = methods.model_metadata
    model_config = methods.model_config
    describe = methods.describe
    models = methods.models
    repository_index = methods.repository_index
    health = methods.health
    wait_ready = methods.wait_ready

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
        self._coalescer = Coalescer(self._send, coalesce) if coalesce is not None else None
        self._asking: defaultdict[tuple[str, str], asyncio.Lock] = defaultdict(asyncio.Lock)
        # The loop in which the channel was created, and in which streams and merged requests have their tasks.
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> Self:
        self._open()
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

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
        """One caller asks, and all others who want to know the same wait for its answer, within their own timeouts."""
        known = self._datatypes.get((model, version))
        if known is not None:
            return known
        bound_s = self._bound_s(timeout_s)
        try:
            async with asyncio.timeout(bound_s), self._asking[model, version]:
                return await super()._datatypes_of(model, version, bound_s, metadata)
        except TimeoutError:
            raise DeadlineExceeded(
                grpc.StatusCode.DEADLINE_EXCEEDED, f"model '{model}': no metadata within {bound_s:g} s"
            ) from None

    async def _infer(
        self, request: ModelInferRequest, timeout_s: Timeout, metadata: Metadata, turn: StepTurn | None
    ) -> InferResult:
        if self._streams is not None:
            if metadata:
                raise ValueError("metadata: a stream has it once for all its requests; give it to the client instead")
            # A stream would take it for a cancellation, and never answer.
            if CANCEL in request.parameters and request.parameters[CANCEL].bool_param:
                why = "reserved for the client; to cancel a request, cancel the task that awaits it"
                raise ValueError(f"parameter {CANCEL!r}: {why}")
        bound_s = self._bound_s(timeout_s)
        # Rows of one request would be steps of one sequence.
        if self._coalescer is None or metadata or SEQUENCE_ID in request.parameters:
            return await self._send(request, bound_s, metadata, turn)
        self._open()
        return await self._coalescer.infer(request, bound_s)

    async def _send(
        self, request: ModelInferRequest, timeout_s: float | None, metadata: Metadata = (), turn: StepTurn | None = None
    ) -> InferResult:
        """One request, over a stream or as a call."""
        left_s = timeout_s
        if self._streams is not None and sum(map(len, request.raw_input_contents)) <= _MAX_STREAMED_BYTES:
            self._open()
            try:
                return infer_result(await self._streams.infer(request, timeout_s, turn))
            except NoStream as none:
                left_s = none.left_s
        if turn is not None:
            left_s = await turn.alone(left_s)
        return infer_result(await self._call("ModelInfer", request, left_s, metadata))

    async def _answers(
        self, request: ModelInferRequest, timeout_s: Timeout, metadata: Metadata
    ) -> AsyncGenerator[ModelInferResponse, None]:
        """Each is read when it is asked for, so gRPC's flow control stops the server of a slow reader."""
        call = self._start("ModelStreamInfer", iter((request,)), timeout_s, metadata)
        answers, status = Answers(), StreamStatus(call)
        try:
            while (message := await call.read()) is not EOF:
                if message is None:
                    raise unreadable()
                if (answer := answers.read(message)) is not None:
                    yield answer
            answers.end()
        except grpc.aio.AioRpcError as error:
            reason = stream_failure(await status.true(error))
            raise reason from reason.__cause__
        except asyncio.CancelledError as error:
            self._raise_if_closed(error)
            raise
        finally:
            call.cancel()

    async def _sleep(self, pause_s: float) -> None:
        await asyncio.sleep(pause_s)

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

    async def _call(
        self, method: str, request: object, timeout_s: Timeout, metadata: Metadata, wait_for_ready: bool | None = None
    ) -> Any:
        try:
            response = await self._start(method, request, timeout_s, metadata, wait_for_ready)
        except grpc.RpcError as error:
            raise rpc_failure(error) from error
        except asyncio.CancelledError as error:
            self._raise_if_closed(error)
            raise
        if response is None:
            raise unreadable()
        return response
