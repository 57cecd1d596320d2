"""Many inferences over a few streams, for the asyncio client: on the wire a message each way instead of a call each.

Lives here: which stream a request takes, which answer is whose, and what the end of a stream means. Must not live here:
channels, or the contents of requests and answers. Works with every server whose ModelStreamInfer returns ids; paceline
also withdraws requests whose callers have given up, lets answers overtake each other, and sends the status of an error.
Only the id says whose an answer is, and callers may use one twice, so on the wire each has a number in front. Requests
are sent over other streams, or as calls of their own, if their stream was refused, or if they were refused on it
because the server is stopping: the server hasn't looked at them. Only the first step of a sequence moves like that:
the others follow it on its stream, which keeps their order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any, Final

import grpc
import grpc.aio
from grpc.aio import EOF  # type: ignore[attr-defined]

from paceline.clients import errors
from paceline.clients.answers import FINAL, stream_error
from paceline.clients.base import at_once
from paceline.clients.errors import InferenceError, ResourceExhausted, Unavailable
from paceline.clients.sequences import StepTurn
from paceline.protos.inference_pb2 import ModelInferRequest, ModelInferResponse, ModelStreamInferResponse

# 64 callers of a tiny model on 2 cores: calls 3,100 requests/s, 1 stream 3,000, 4 streams 4,500, 8 5,200, 16 6,100, 32
# 6,500 (medians of four interleaved rounds). Each message on a single stream wakes both ends; several streams share
# wake-ups.
_STREAMS: Final = 16
# Requests in flight on each stream before another one is opened.
_BUSY: Final = 2
# How long no stream is opened after the server has refused one.
_REFUSED_S: Final = 1.0
# What gRPC's implementations say of a message beyond the server's limit; other streams would end the same way.
_TOO_LARGE: Final = "larger than max"
_UNORDERED: Final = "paceline_unordered"
_DEADLINE: Final = "paceline_deadline_us"
CANCEL: Final = "paceline_cancel"
ENDED: Final = "the server ended the stream"
# paceline's error for each request on a stream from when it begins to stop until it ends the stream. Behind a load
# balancer, another stream may lead to another server.
_STOPPING: Final = "the server is stopping"
# How long a stream's status may take to arrive after a write has failed because of it.
_STATUS_S: Final = 1.0


class NoStream(Exception):
    """The server has no room for a stream at present. The request is unchanged, and has `left_s` seconds of its timeout
    left; None if it has no timeout."""

    def __init__(self, left_s: float | None) -> None:
        super().__init__()
        self.left_s = left_s


class _Stopping(Exception):
    """The server has answered that it refuses the request because it is stopping; nothing more may be sent on the
    stream."""

    def __init__(self, error: InferenceError) -> None:
        super().__init__()
        self.error = error


class Streams:
    """A few streams; `open_call` opens another one when there is none, or all are busy.

    A server limits the streams of all its clients together. Requests meant for a stream that it refused are sent over
    the others.
    """

    def __init__(self, open_call: Callable[[], Any]) -> None:
        self._open_call = open_call
        self._streams: list[_Stream] = []
        # Streams on which nothing more is sent, though requests may still wait for answers there.
        self._left: list[_Stream] = []
        self._refused_until_s = 0.0

    async def infer(
        self, request: ModelInferRequest, timeout_s: float | None, turn: StepTurn | None = None
    ) -> ModelInferResponse:
        """The answer to `request`, as ModelInfer would give it; `request` is modified on the way. A step of a sequence
        comes with its `turn`.

        Raises InferenceError as a call would: DeadlineExceeded when `timeout_s` seconds have passed, and the reason why
        the stream ended, for all requests that waited on it. Raises NoStream if no stream is to be had. Cancelling
        withdraws the request.
        """
        now_s = asyncio.get_running_loop().time
        began_s, left_s = now_s(), timeout_s
        given, moved = ModelInferRequest(id=request.id, parameters=request.parameters), False
        if turn is not None and turn.stream is not None and not turn.stream.ended:
            pinned: _Stream = turn.stream
            try:
                return await pinned.infer(request, left_s, turn.sent)
            except _Stopping as stopping:
                raise stopping.error from None
        while (stream := self._stream(now_s())) is not None:
            if turn is not None:
                turn.stream = stream
            try:
                return await stream.infer(request, left_s)
            except ResourceExhausted:
                if not stream.was_refused:
                    raise
                self._refused_until_s = now_s() + _REFUSED_S
            except _Stopping as stopping:
                if stream in self._streams:
                    self._streams.remove(stream)
                    self._left = [*(one for one in self._left if not one.ended), stream]
                if moved:
                    raise stopping.error from None
                moved = True
            request.id = given.id
            request.ClearField("parameters")
            request.MergeFrom(given)
            left_s = None if timeout_s is None else max(0.0, timeout_s - (now_s() - began_s))
        raise NoStream(left_s)

    def _stream(self, now_s: float) -> _Stream | None:
        streams = self._streams = [stream for stream in self._streams if not stream.ended]
        least = min(streams, key=_Stream.requests, default=None)
        if least is not None and (least.requests() < _BUSY or len(streams) == _STREAMS):
            return least
        if now_s < self._refused_until_s:
            return least
        streams.append(_Stream(self._open_call()))
        return streams[-1]

    async def close(self) -> None:
        """End all streams; requests that still wait raise Cancelled."""
        for stream in (*self._streams, *self._left):
            await stream.close()


class _Stream:
    """One stream: a task that writes, a task that reads, and the requests that wait for answers, by id."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._ids = count(1)
        self._waiting: dict[str, asyncio.Future[ModelStreamInferResponse]] = {}
        # Requests to send, and ids of requests to cancel.
        self._unsent: asyncio.Queue[ModelInferRequest | str] = asyncio.Queue()
        self._status = StreamStatus(call)
        self._reading = self._loop.create_task(self._read())
        self._writing = self._loop.create_task(self._write())
        self.ended = False
        self.was_refused = False
        """Whether it ended before any answer, because the server had no room for it."""

    def requests(self) -> int:
        """How many requests are in flight."""
        return len(self._waiting)

    async def infer(
        self, request: ModelInferRequest, timeout_s: float | None, on_sent: Callable[[], None] | None = None
    ) -> ModelInferResponse:
        own_id, number = request.id, next(self._ids)
        # Unique on this stream, and with the caller's in it, to be found in logs and traces.
        request.id = f"{number}:{own_id}" if own_id else str(number)
        request.parameters[_UNORDERED].bool_param = True
        answer: asyncio.Future[ModelStreamInferResponse] = self._loop.create_future()
        alarm: asyncio.TimerHandle | None = None
        if timeout_s is not None:
            deadline_us = max(1, int(timeout_s * 1e6))
            # If the caller has set one too, the earlier counts, as it does beside a call's. 0 means none; a value that
            # isn't an integer, or is negative, is left for the server to refuse.
            given = request.parameters[_DEADLINE]  # which creates it if there is none
            given_us = given.int64_param or given.uint64_param
            is_number = given.WhichOneof("parameter_choice") in (None, "int64_param", "uint64_param")
            if is_number and (not given_us or given_us > deadline_us):
                given.int64_param = deadline_us
            alarm = self._loop.call_later(timeout_s, lambda: errors.fail(answer, errors.no_answer(timeout_s)))
        self._waiting[request.id] = answer
        self._unsent.put_nowait(request)
        if on_sent is not None:
            on_sent()
        try:
            message = await answer
        except asyncio.CancelledError:
            self._unsent.put_nowait(request.id)
            raise
        finally:
            del self._waiting[request.id]
            if alarm is not None:
                alarm.cancel()
        return _answer(message, own_id)

    async def close(self) -> None:
        self._call.cancel()
        await asyncio.wait((self._reading, self._writing))

    async def _write(self) -> None:
        """Write until the stream ends; `_read` notices the end."""
        with suppress(grpc.RpcError, asyncio.InvalidStateError):
            while True:
                what = await self._unsent.get()
                if isinstance(what, str):
                    what = ModelInferRequest(id=what)
                    what.parameters[CANCEL].bool_param = True
                    await self._call.write(what)
                elif what.id in self._waiting:  # else given up before its turn came
                    await self._call.write(what)
                what = ""  # which keeps no tensors alive

    async def _read(self) -> None:
        """Hand out answers until the stream ends, and then the reason to all requests that still wait."""
        reason: InferenceError = Unavailable(grpc.StatusCode.UNAVAILABLE, ENDED)
        has_answered = False
        try:
            while (message := await self._call.read()) is not EOF:
                has_answered = True
                if message is None:
                    # Not a message that can be read: nobody can tell whose answer it was.
                    reason = errors.unreadable()
                    self._call.cancel()
                    break
                answer = self._waiting.get(message.infer_response.id)
                if answer is not None and not answer.done():
                    answer.set_result(message)
        except grpc.aio.AioRpcError as error:
            status = await self._status.true(error)
            no_room = status.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE not in (status.details() or "")
            self.was_refused = not has_answered and no_room
            reason = stream_failure(status)
        except asyncio.CancelledError:
            reason = errors.closed()
        self.ended = True
        self._writing.cancel()
        for answer in self._waiting.values():
            errors.fail(answer, errors.own(reason))


class StreamStatus:
    """The status with which the server, or the connection, has ended a stream."""

    def __init__(self, call: Any) -> None:
        self._status: asyncio.Future[grpc.aio.AioRpcError] = asyncio.get_running_loop().create_future()
        call.add_done_callback(self._note)

    def _note(self, call: Any) -> None:
        """Keep the status that the call has now: a write that fails because the stream has ended may replace it."""
        code, details, trailing = map(at_once, (call.code(), call.details(), call.trailing_metadata()))
        status = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details, "")
        if not self._status.done() and not _of_a_write(status):
            self._status.set_result(status)

    async def true(self, error: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
        """The status; `error` may only report a failed write."""
        if not _of_a_write(error):
            return error
        try:
            return await asyncio.wait_for(self._status, _STATUS_S)
        except TimeoutError:
            return error


def _of_a_write(error: grpc.aio.AioRpcError) -> bool:
    """Whether grpc.aio made this status up because it couldn't write (https://github.com/grpc/grpc/issues/36066)."""
    return error.code() is grpc.StatusCode.INTERNAL and error.details() == "Internal error from Core"


def stream_failure(status: grpc.aio.AioRpcError) -> InferenceError:
    """The error of those who wait for answers on a stream that has ended with `status`."""
    reason = errors.rpc_failure(status)
    if _of_a_write(status):
        reason = Unavailable(grpc.StatusCode.UNAVAILABLE, "the stream ended while a request was being sent")
    reason.__cause__ = status
    return reason


def _answer(message: ModelStreamInferResponse, request_id: str) -> ModelInferResponse:
    """The answer as ModelInfer would give it to the request that its caller calls `request_id`. Raises the error that
    it carries."""
    error = stream_error(message)
    if error is not None:
        raise _Stopping(error) if error.message == _STOPPING and isinstance(error, Unavailable) else error
    response = message.infer_response
    response.id = request_id
    response.parameters.pop(FINAL, None)
    return response
