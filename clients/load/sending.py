"""One request after the other: as a call, or over a stream that carries nothing else meanwhile.

Lives here: the channel, and what counts as an answer. Must not: time, count, or build requests. Messages are bytes that
were made before, and an answer to a call stays bytes: the generator shares the machine with what it measures, and
grpc.aio alone takes ten times what the rest does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import count
from math import prod
from typing import Any, Final, Protocol

import grpc
import grpc.aio
from grpc.aio import EOF  # type: ignore[attr-defined]

from paceline.clients.aio import InferenceClient
from paceline.clients.answers import FINAL, stream_error
from paceline.clients.connection import Tls
from paceline.clients.load.tally import Reply
from paceline.clients.streams import StreamStatus
from paceline.protos import inference_pb2 as pb

METHOD: Final = "/inference.GRPCInferenceService/ModelInfer"
STREAM_METHOD: Final = "/inference.GRPCInferenceService/ModelStreamInfer"
EMPTY: Final = "EMPTY"
"""Counted for an answer without any bytes, which is what a message that gRPC couldn't write looks like."""

_DEADLINE: Final = grpc.StatusCode.DEADLINE_EXCEEDED.name
_UNAVAILABLE: Final = grpc.StatusCode.UNAVAILABLE.name
_ENDED: Final = "the server ended the stream before the last answer"


class FailedRequest(Exception):
    """A request failed; `status` is a gRPC status by name, or EMPTY, and `reason` what the server or gRPC says."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(status, reason)
        self.status = status
        self.reason = reason


class Asking(Protocol):
    """Takes one request at a time."""

    async def ask(self, message: bytes, timeout_s: float) -> Reply | None:
        """Returns when the last answer has come; what came, if there may be many. Raises FailedRequest."""


class Connection(InferenceClient):
    """A connection of its own, for messages that are bytes already."""

    def __init__(self, target: str, tls: Tls | None, token: str | None) -> None:
        # Without a pool of its own, a channel shares the connection of the first to the same server.
        options = [("grpc.use_local_subchannel_pool", 1)]
        super().__init__(target, tls=tls or False, token=token, options=options)

    async def connect(self, timeout_s: float) -> None:
        """Raises TimeoutError."""
        self._open()
        async with asyncio.timeout(timeout_s):
            await self._channel.channel_ready()

    def calls(self) -> Asking:
        """Any number of requests may be under way at a time."""
        return _Calls(self._channel.unary_unary(METHOD, None, None), self._metadata)

    def stream(self) -> Asking:
        open_call = self._channel.stream_stream(STREAM_METHOD, None, pb.ModelStreamInferResponse.FromString)
        return _Stream(lambda: open_call(metadata=self._metadata))


class _Calls:
    def __init__(self, call: Callable[..., Any], metadata: Any) -> None:
        self._call = call
        self._metadata = metadata

    async def ask(self, message: bytes, timeout_s: float) -> Reply | None:
        # hot path: see docs/guides/load.md on what a request costs
        try:
            answer = await self._call(message, timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise FailedRequest(error.code().name, error.details() or "") from None
        if not answer:
            raise FailedRequest(EMPTY, "an answer without any bytes")
        return None


class _Stream:
    """Opens its call with the first request, and again after one whose answers didn't all come."""

    def __init__(self, open_call: Callable[[], Any]) -> None:
        self._open_call = open_call
        self._call: Any = None
        self._numbers = count(1)

    async def ask(self, message: bytes, timeout_s: float) -> Reply:
        own_id = str(next(self._numbers))
        if self._call is None:
            self._call = self._open_call()
            self._status = StreamStatus(self._call)
        try:
            async with asyncio.timeout(timeout_s):
                # A message may be continued: of a field that is there twice, the last counts.
                await self._call.write(message + b"\x1a" + bytes([len(own_id)]) + own_id.encode())
                return await self._answers(own_id)
        except TimeoutError:
            self._end()
            raise FailedRequest(_DEADLINE, f"not all answers within {timeout_s:.3g} s") from None
        except grpc.aio.AioRpcError as error:
            status = await self._status.true(error)
            self._end()
            raise FailedRequest(status.code().name, status.details() or "") from None
        except asyncio.InvalidStateError:  # what a write raises once the stream has ended
            self._end()
            raise FailedRequest(_UNAVAILABLE, _ENDED) from None

    async def _answers(self, own_id: str) -> Reply:
        reply, last_ns = Reply(answers=0), 0
        while (read := await self._call.read()) is not EOF:
            now_ns = time.monotonic_ns()
            if not isinstance(read, pb.ModelStreamInferResponse):
                break
            response = read.infer_response
            if response.id not in ("", own_id):
                continue  # what came after the error of an earlier one
            if (error := stream_error(read)) is not None:
                raise FailedRequest(error.status.name, error.message)
            if response.outputs or not reply.answers:
                reply.answers += 1
                tokens = sum(prod(one.shape) for one in response.outputs if one.name == "output_ids")
                reply.tokens += tokens
                if last_ns:
                    reply.gaps_ns += [(now_ns - last_ns) // max(1, tokens)] * max(1, tokens)
                else:
                    reply.first_ns = now_ns
                last_ns = now_ns
            # Servers that don't mark the last answer give one.
            if FINAL not in response.parameters or response.parameters[FINAL].bool_param:
                return reply
        self._end()
        raise FailedRequest(_UNAVAILABLE, _ENDED)

    def _end(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._call = None


def sequence_step(sequence_id: int, *, is_first: bool, is_last: bool) -> bytes:
    """What continues a message so that it is a step of a sequence."""
    step = pb.ModelInferRequest()
    step.parameters["sequence_id"].int64_param = sequence_id
    step.parameters["sequence_start"].bool_param = is_first
    step.parameters["sequence_end"].bool_param = is_last
    return step.SerializeToString()
