"""The asyncio client: one client serves many tasks of one event loop over one connection.

Lives here: awaiting calls of grpc.aio, and what cancellation means. What is sent and read is in calls.py and
messages.py, the blocking twin in sync.py; the two have the same methods with the same arguments.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import ModuleType, TracebackType
from typing import Any, ClassVar, Literal, Self, TypeVar

import grpc
import grpc.aio

from clients import calls
from clients.base import DEFAULT_TIMEOUT_S, BaseClient, Metadata, ReadyWait, Timeout
from clients.calls import Call, Method
from clients.coalescing import Coalescer
from clients.errors import Cancelled, DeadlineExceeded, Unavailable, rpc_failure
from clients.messages import InferResult, Inputs, ModelMetadata, Parameters, ServerMetadata, infer_request
from clients.streams import Streams, check_request
from clients.tls import Tls
from protos.inference_pb2 import ModelInferRequest

__all__ = ["InferenceClient"]

T = TypeVar("T")


class InferenceClient(BaseClient):
    """Calls a server of the Open Inference Protocol (KServe v2) over gRPC, without blocking the event loop.

    Methods, arguments and errors are those of `clients.sync.InferenceClient`, awaited. The client belongs to the loop
    in which it is first used. Cancelling the task that awaits a method cancels the call on the server too.

    With `transport="stream"`, `infer` shares a few ModelStreamInfer streams instead of making calls of its own, which
    is less work for both ends where many small requests are under way. What differs: a stream that breaks fails all who
    wait on it, a large tensor holds up those behind it, `metadata` is for the client as a whole, and of an error only
    status and message travel, from servers other than paceline the message alone (and the status is UNKNOWN). The
    server sees a `request_id` with a number before it, `7:mine`, in its logs and traces; the result has one's own.

    With `coalesce=N`, concurrent inferences that differ in their rows alone become requests of up to N rows, and each
    caller gets its rows of the answer: for models that work row by row, whose batches may have N rows. Timeouts,
    cancellation and errors stay each caller's own; `request_id` reaches the server only of requests that go alone, as
    those with `metadata` of their own do.
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
        if coalesce is not None and coalesce < 2:
            raise ValueError(f"coalesce: expected 2 rows or more in a request, or None, got {coalesce!r}")
        self._streams = Streams(self._open_stream) if transport == "stream" else None
        self._coalescer = Coalescer(self._infer, coalesce) if coalesce is not None else None

    async def __aenter__(self) -> Self:
        self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        """Runs the model and returns its outputs; arguments and refusals as in the blocking client.

        Tensors are copied in the event loop, on their way out and in. ValueError for `metadata` over streams,
        and for the parameter `paceline_cancel`.
        """
        request = infer_request(
            model,
            inputs,
            version=version,
            outputs=outputs,
            request_id=request_id,
            parameters=parameters,
            datatypes=datatypes,
        )
        if self._streams is not None:
            if metadata:
                raise ValueError("metadata: over streams it goes with all requests; give it to the client")
            check_request(request)
        if self._coalescer is not None and not metadata:
            return await self._coalescer.infer(request, self._bound_s(timeout_s))
        return await self._infer(request, self._bound_s(timeout_s), metadata)

    async def server_live(self, *, timeout_s: Timeout = ..., metadata: Metadata = ()) -> bool:
        """Whether the server says it is alive."""
        return await self._call(calls.server_live(), timeout_s, metadata)

    async def server_ready(self, *, timeout_s: Timeout = ..., metadata: Metadata = ()) -> bool:
        """Whether the server says it can take requests for its models."""
        return await self._call(calls.server_ready(), timeout_s, metadata)

    async def model_ready(
        self, model: str, version: str = "", *, timeout_s: Timeout = ..., metadata: Metadata = ()
    ) -> bool:
        """Whether the model can take requests. Servers differ for unknown models: False, or NotFound."""
        return await self._call(calls.model_ready(model, version), timeout_s, metadata)

    async def server_metadata(self, *, timeout_s: Timeout = ..., metadata: Metadata = ()) -> ServerMetadata:
        """The server's name, version and protocol extensions."""
        return await self._call(calls.server_metadata(), timeout_s, metadata)

    async def model_metadata(
        self, model: str, version: str = "", *, timeout_s: Timeout = ..., metadata: Metadata = ()
    ) -> ModelMetadata:
        """The model's versions, platform, inputs and outputs."""
        return await self._call(calls.model_metadata(model, version), timeout_s, metadata)

    async def health(self, service: str = "", *, timeout_s: Timeout = ..., metadata: Metadata = ()) -> str:
        """The status name of grpc.health.v1, such as SERVING. NotFound for a service the server doesn't know."""
        return await self._call(calls.health(service), timeout_s, metadata)

    async def wait_ready(self, timeout_s: float) -> None:
        """Returns once the server is reachable and says it is ready; DeadlineExceeded after `timeout_s` seconds."""
        now_s = asyncio.get_running_loop().time
        wait = ReadyWait(self._target, timeout_s, now_s())
        while not await self._ready_within(wait.left_s(now_s())):
            await asyncio.sleep(wait.pause_s(now_s()))

    async def close(self) -> None:
        """Ends the connection; calls still under way raise Cancelled. Closing twice does nothing."""
        channel = self._detach()
        if self._coalescer is not None:
            await self._coalescer.close()
        if self._streams is not None:
            await self._streams.close()
        if channel is not None:
            await channel.close()

    async def _infer(self, request: ModelInferRequest, timeout_s: float | None, metadata: Metadata = ()) -> InferResult:
        call = calls.infer(request)
        if self._streams is None:
            return await self._call(call, timeout_s, metadata)
        return call.read(await self._streams.infer(request, timeout_s))

    def _open_stream(self) -> Any:
        return self._open()[Method.MODEL_STREAM_INFER](metadata=self._metadata)

    async def _ready_within(self, timeout_s: float) -> bool:
        try:
            return await self._call(calls.server_ready_once_connected(), timeout_s, ())
        except (DeadlineExceeded, Unavailable):
            return False

    async def _call(self, call: Call[T], timeout_s: Timeout, metadata: Metadata) -> T:
        try:
            response = await self._start(call, timeout_s, metadata)
        except grpc.RpcError as error:
            raise rpc_failure(error) from error
        except asyncio.CancelledError as error:
            # grpc.aio reports a channel closed underneath a call as if the awaiting task had been cancelled.
            if self._closed and not _being_cancelled():
                raise Cancelled(grpc.StatusCode.CANCELLED, f"{self!r} was closed during the call") from error
            raise
        return call.read(response)


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
