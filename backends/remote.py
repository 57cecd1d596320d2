"""Models that another server executes, over gRPC.

Lives here: channels to that server, what goes wrong on them, and the instance that sends a batch and awaits the answer.
Must not: decide which models there are, or what our clients are told. Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic_ns
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from paceline.backends.base import Device, Execution
from paceline.backends.batching import check_count
from paceline.backends.errors import UpstreamFailed, UpstreamRefused
from paceline.backends.remote_messages import (
    Headers,
    RemoteRequest,
    call_headers,
    decode_response,
    decode_undeclared,
    encode_request,
    wanted_outputs,
)
from paceline.backends.spec import ModelSpec

_SERVICE = "/inference.GRPCInferenceService/"

_MAX_METADATA_BYTES = 2**18
_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # An error's text travels in a header. gRPC drops one that is too large, along with the status, and reports UNKNOWN.
    ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
    # Otherwise channels to the same address share one connection, and one TCP window.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    # The default is two minutes: a restarting upstream is back long before.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

_AT_FAULT_AS_A_WHOLE = {
    "UNAVAILABLE",
    "RESOURCE_EXHAUSTED",
    "DEADLINE_EXCEEDED",
    "UNAUTHENTICATED",
    "PERMISSION_DENIED",
    "NOT_FOUND",
    "UNIMPLEMENTED",
    "ABORTED",
}
_TOO_LARGE = "larger than max"
"""What gRPC's implementations say, with RESOURCE_EXHAUSTED, about a message beyond the receiver's limit: a smaller
batch may pass."""

MessageT = TypeVar("MessageT", bound=Message)


@dataclass(eq=False)
class RemoteServer:
    """Connections to the server at `target`, with TLS if there are `credentials`; `options` are gRPC's, in addition to
    ours. An inference call takes at most `limit_s`; `own_headers` go with every call.

    `suspected` is set when a call finds the server gone, so that whoever watches it checks at once.
    """

    target: str
    connections: int = 1
    limit_s: float = 300.0
    credentials: grpc.ChannelCredentials | None = None
    options: Sequence[tuple[str, Any]] = ()
    own_headers: Headers = ()
    suspected: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    answered: int = field(init=False, default=0)
    """Inference calls that got any answer: a sign of life."""
    _channels: list[grpc.aio.Channel] = field(init=False, default_factory=list)
    _infer: list[Any] = field(init=False, default_factory=list)
    _retired: dict[asyncio.Task[None], grpc.aio.Channel] = field(init=False, default_factory=dict)

    def open(self) -> None:
        """Create the channels, on the running event loop; they connect when they are used."""
        new = grpc.aio.insecure_channel
        if self.credentials is not None:
            new = partial(grpc.aio.secure_channel, credentials=self.credentials)
        self._channels = [new(self.target, options=(*_OPTIONS, *self.options)) for _ in range(self.connections)]
        # Bytes in, bytes out.
        self._infer = [channel.unary_unary(f"{_SERVICE}ModelInfer", None, None) for channel in self._channels]

    def renew(self) -> None:
        """Create new channels: for as long as the system keeps trying, a quarter of an hour, a connection to a machine
        that is gone looks like one to a server that computes. Calls in flight continue on the old channels."""
        for channel in self._channels:
            task = asyncio.create_task(channel.close(self.limit_s))
            self._retired[task] = channel
            task.add_done_callback(self._retired.pop)
        self.open()

    async def close(self) -> None:
        """Close the connections; calls in flight are cancelled."""
        retired = dict(self._retired)
        for task in retired:
            task.cancel()
        await asyncio.gather(*retired, return_exceptions=True)
        for channel in (*retired.values(), *self._channels):
            await channel.close(None)

    async def ask(self, rpc: str, request: Message, answer: type[MessageT], timeout_s: float) -> MessageT:
        """Call `rpc`. Raises UpstreamFailed or UpstreamRefused."""
        call: Any = self._channels[0].unary_unary(f"{_SERVICE}{rpc}", type(request).SerializeToString, None)
        try:
            data = await call(request, timeout=timeout_s, metadata=self.own_headers or None)
            return answer.FromString(self._present(data))
        except grpc.aio.AioRpcError as error:
            raise self._failure(error) from None
        except DecodeError as error:
            raise UpstreamRefused(
                "INTERNAL", f"upstream {self.target}: the answer isn't a valid {answer.__name__}: {error}"
            ) from None

    async def infer(self, request: bytes, headers: Headers, deadline_ns: int, connection: int = 0) -> bytes:
        """Call ModelInfer, waiting until `deadline_ns` at most. Raises UpstreamFailed or UpstreamRefused."""
        left_s = max(0.0, (deadline_ns - monotonic_ns()) / 1e9)
        timeout_s = min(self.limit_s, left_s)
        try:
            answer: bytes | None = await self._infer[connection % len(self._infer)](
                request, timeout=timeout_s, metadata=(*self.own_headers, *headers) or None
            )
        except grpc.aio.AioRpcError as error:
            failure = self._failure(error)
            if failure.status == "UNAVAILABLE":
                self.suspected.set()
            elif failure.status != "DEADLINE_EXCEEDED":
                self.answered += 1
            raise failure from None
        self.answered += 1
        return self._present(answer)

    def _present(self, answer: bytes | None) -> bytes:
        """Raises UpstreamRefused for a call that succeeded without a message, which gRPC reports as None."""
        if answer is None:
            raise UpstreamRefused("INTERNAL", f"upstream {self.target}: it answered OK without a message")
        return answer

    def _failure(self, error: grpc.aio.AioRpcError) -> UpstreamFailed | UpstreamRefused:
        status, details = error.code().name, error.details() or ""
        if status == "CANCELLED":
            # Nobody here has cancelled anything: the server stopped with calls in flight.
            status, details = "UNAVAILABLE", f"the call was cancelled: {details}"
        whole = status in _AT_FAULT_AS_A_WHOLE and _TOO_LARGE not in details
        return (UpstreamFailed if whole else UpstreamRefused)(status, f"upstream {self.target}: {details or status}")


@dataclass(eq=False)
class RemoteModel:
    """One version of a model at `server`, which knows it as `name` and `version` ("": it has no versions)."""

    server: RemoteServer
    name: str
    version: str
    spec: ModelSpec
    platform: str

    def instance(self, number: int) -> RemoteInstance:
        """Instance `number` of those that each send a batch at the same time."""
        return RemoteInstance(self, number)

    def close(self) -> None:
        """The connections belong to the server, not to the model."""


class RemoteInstance:
    """Has one batch in flight at a time, without a thread: unlike a `ModelInstance`'s, its `execute` is awaited."""

    def __init__(self, model: RemoteModel, number: int) -> None:
        self._model = model
        self._connection = number
        self.device = Device()

    async def execute(self, requests: Sequence[RemoteRequest], padded_rows: int = 0) -> Execution:
        """Send `requests` as one batch and split the answer. The call's deadline is the latest among theirs.

        `padded_rows` is ignored: padding is up to the other server. Raises ExecutionError for an answer that doesn't
        fit, UpstreamRefused for an error that may be a request's fault, UpstreamFailed for others.
        """
        model, own_spec = self._model, requests[0].spec if requests else None
        spec = own_spec or model.spec
        check_count(spec, requests)
        began_ns = monotonic_ns()
        wanted = wanted_outputs(requests)
        message = encode_request(model.name, model.version, spec, requests, wanted)
        encoded_ns = monotonic_ns()
        # One connection for all steps of a sequence: if the target has several addresses, each may lead to another
        # server, and only one of them knows the sequence.
        step = requests[0].step
        connection = self._connection if step is None else hash(step[0])
        deadline_ns = max(one.deadline_ns for one in requests)
        answer = await model.server.infer(message, call_headers(requests), deadline_ns, connection)
        answered_ns = monotonic_ns()
        results: Sequence[Any] = (
            decode_response(answer, spec, requests, wanted) if own_spec is None else decode_undeclared(answer, requests)
        )
        return Execution(results, encoded_ns - began_ns, answered_ns - encoded_ns, monotonic_ns() - answered_ns)

    def close(self) -> None:
        """Nothing to release."""
