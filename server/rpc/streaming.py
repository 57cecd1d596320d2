"""`ModelStreamInfer`: many requests and their answers over one RPC.

Lives here: which answer leaves when, how many requests a stream may have in progress, and how it ends. Must not: the
steps of a request, which are those of any other (`inference`), or what to batch: the requests of all streams and unary
calls queue together.

A stream has two sides. One reads requests and announces each; the other writes answers that are ready, and sleeps while
there are none. Each request is one object, without a task, lock or timer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
from grpc.aio import EOF  # type: ignore[attr-defined]

from paceline.protos import inference_pb2 as pb
from paceline.server.call_facts import PassedHeaders, TraceParent
from paceline.server.codec.answers import Envelope
from paceline.server.codec.parameters import CANCEL, EMPTY_FINAL, UNORDERED
from paceline.server.codec.wire_request import AnyMessage, Unread, WireRequest, message_of
from paceline.server.requests.in_flight import Failure, InferenceSteps, InFlight, NextAnswer
from paceline.server.rpc.calls import (
    Context,
    HeaderRules,
    add_headers,
    answering,
    deadline_of,
    status_and_text,
    traceparent_of,
)

FINAL = "triton_final_response"
"""Parameter of every answer: it is the last one to its request."""
STATUS = "paceline_status"
"""Parameter of an answer with an error: the status with which a call of its own would have ended."""

_ENDS_AT_ERROR = "triton_grpc_error"
_RPC = "ModelStreamInfer"

_NO_REQUEST = pb.ModelInferRequest()
"""Stands for a request that can't be read."""

_ENVELOPE = Envelope(
    bytes([pb.ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER << 3 | 2]),
    pb.ModelInferResponse(parameters={FINAL: pb.InferParameter(bool_param=True)}).SerializeToString(),
)
"""The message that every answer travels in, and the fields that every answer has."""
_ENVELOPE_OF_MORE = Envelope(
    _ENVELOPE.tag, pb.ModelInferResponse(parameters={FINAL: pb.InferParameter(bool_param=False)}).SerializeToString()
)
"""The same for answers that aren't the last to their request."""


class Streaming:
    """The RPC. A stream has at most `max_requests` requests in progress, each from when it is read until its answer is
    written; at this limit, nothing is read from the stream."""

    extensions: Sequence[str] = ()

    def __init__(self, inference: InferenceSteps, max_requests: int, rules: HeaderRules) -> None:
        self._inference = inference
        self._max_requests = max_requests
        self._rules = rules
        self._streams: set[_Stream] = set()

    @answering
    async def ModelStreamInfer(self, requests: object, context: Context) -> None:
        self._inference.check_serving()
        headers, passed = self._rules.forwarded(context), self._rules.passed(context)
        stream = _Stream(self._inference, context, self._max_requests, headers, passed)
        self._streams.add(stream)
        try:
            await stream.run()
        finally:
            self._streams.discard(stream)

    def close(self) -> None:
        """Read nothing more from any stream; each ends, with UNAVAILABLE, once its requests in progress are
        answered."""
        for stream in self._streams:
            stream.close()


class _Flight(InFlight):
    """A request, from the moment it is read until its answer is written."""

    __slots__ = ("failure", "is_ready", "stream", "unordered")

    envelope = _ENVELOPE
    envelope_of_more = _ENVELOPE_OF_MORE
    takes_more = True

    def __init__(
        self,
        stream: _Stream,
        message: AnyMessage,
        deadline_ns: int,
        parent: TraceParent | None,
        passed: PassedHeaders,
    ) -> None:
        super().__init__(message, deadline_ns, parent, passed)
        self.stream = stream
        self.unordered = self.is_ready = False
        self.failure: Failure | None = None

    def on_failure(self, error: BaseException) -> None:
        if isinstance(error, Exception):
            self.failure = status_and_text(error, self.message, _RPC)
        else:
            self.failure = grpc.StatusCode.CANCELLED, "the request was cancelled"

    def on_done(self) -> None:
        self.stream.on_done(self)

    def on_open(self) -> None:
        self.stream.leave_order(self)

    def on_more(self, answer: NextAnswer, error: Exception | None) -> None:
        if error is not None:
            answer.failure = status_and_text(error, self.message, _RPC)
        self.stream.on_more(answer)

    def end_of_answers(self) -> bytes:
        request = self.message
        if not _true(request.parameters, EMPTY_FINAL):
            return b""
        response = pb.ModelInferResponse(
            id=request.id, model_name=request.model_name, model_version=request.model_version
        )
        return _serialized(pb.ModelStreamInferResponse(infer_response=response), final=True)


class _Stream:
    """One call of the RPC."""

    def __init__(
        self,
        inference: InferenceSteps,
        context: Context,
        max_requests: int,
        headers: Mapping[str, str],
        passed: PassedHeaders,
    ) -> None:
        self._inference = inference
        self._announce = inference.announce
        self._context = context
        self._max_requests = max_requests
        self._headers = headers
        self._passed = passed
        self._deadline_ns = deadline_of(context)
        self._parent = traceparent_of(context) if inference.reads_parents else None
        self._ends_at_error = dict(context.invocation_metadata()).get(_ENDS_AT_ERROR) == "true"
        self._loop = asyncio.get_running_loop()
        # All requests in progress.
        self._flights: set[_Flight] = set()
        # Those whose answers keep the order; the first of them isn't done.
        self._ordered: deque[_Flight] = deque()
        self._ready: deque[_Flight | NextAnswer] = deque()
        self._ended = self._closed = False
        # Why reading ended early.
        self._unreadable: Failure | None = None
        # What a sleeping side waits for.
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._reading: asyncio.Task[None]

    async def run(self) -> None:
        """Answer everything. This is the task that gRPC cancels when the caller goes or the deadline passes."""
        self._reading = self._loop.create_task(self._read())
        self._reading.add_done_callback(self._on_end)
        try:
            await self._write()
        except grpc.aio.InternalError:
            # What writing raises if the caller is gone and gRPC hasn't cancelled this task yet.
            raise asyncio.CancelledError from None
        finally:
            self._reading.cancel()
            # The task keeps its exception, whose traceback leads here.
            del self._reading
            self._give_up()

    def close(self) -> None:
        """Read nothing more."""
        self._closed = True
        self._reading.cancel()

    def _give_up(self) -> None:
        """Withdraw the requests in progress, and forget them at once: they and the stream refer to each other."""
        flights, self._flights = self._flights, set()
        self._ordered.clear()
        self._ready.clear()
        for flight in flights:
            self._inference.give_up(flight)

    # hot path: see bench/
    async def _read(self) -> None:
        read = self._context.read
        while (request := await read()) is not EOF:
            self._take(request)
            del request
            if len(self._flights) >= self._max_requests:
                self._reader = self._loop.create_future()
                await self._reader

    def _on_end(self, reading: asyncio.Task[None]) -> None:
        self._ended = True
        if not reading.cancelled() and isinstance(error := reading.exception(), Exception):
            self._unreadable = status_and_text(error, None, _RPC)
        self._wake_writer()

    # hot path: see bench/
    def _take(self, request: AnyMessage | Unread) -> None:
        unordered = False
        if type(request) is not WireRequest or not request.form.plain:
            if isinstance(request, Unread):
                flight = self._flight(_NO_REQUEST)
                self._ordered.append(flight)
                self._refuse(flight, request)
                return
            if _true(request.parameters, CANCEL):
                self._take_back(request.id)
                return
            unordered = _true(request.parameters, UNORDERED)
        flight = self._flight(request)
        if unordered:
            flight.unordered = True
        else:
            self._ordered.append(flight)
        if self._headers:
            try:
                flight.message = message_of(request)
                add_headers(flight.message, self._headers)
            except Exception as error:  # noqa: BLE001 - the caller must get an answer
                self._refuse(flight, error)
                return
        self._announce(flight)

    # hot path: see bench/
    def _flight(self, request: AnyMessage) -> _Flight:
        flight = _Flight(self, request, self._deadline_ns, self._parent, self._passed)
        self._flights.add(flight)
        return flight

    def _refuse(self, flight: _Flight, error: Exception) -> None:
        flight.on_failure(error)
        self.on_done(flight)

    def _take_back(self, request_id: str) -> None:
        """Cancel the requests with this id. Looking through all of them costs nothing to those who never cancel."""
        for flight in self._flights:
            if not flight.is_ready and flight.message.id == request_id:
                flight.cancel()

    # hot path: see bench/
    def on_done(self, flight: _Flight) -> None:
        """The answer of `flight` is ready to leave, and so may be others that waited for it."""
        flight.is_ready = True
        if flight.unordered:
            self._ready.append(flight)
        else:
            self._release_ordered()
        if self._writer is not None:
            self._wake_writer()

    def _release_ordered(self) -> None:
        ordered = self._ordered
        while ordered and ordered[0].is_ready:
            self._ready.append(ordered.popleft())

    def leave_order(self, flight: _Flight) -> None:
        """Answers to `flight` leave as they come, and hold no others back."""
        if not flight.unordered:
            self._ordered.remove(flight)
            flight.unordered = True
            self._release_ordered()

    def on_more(self, answer: NextAnswer) -> None:
        """An answer is ready to leave that isn't the last to its request."""
        self._ready.append(answer)
        self._wake_writer()

    # hot path: see bench/
    async def _write(self) -> None:
        """Write answers as they become ready, until all are written or an error ends the stream."""
        write, ready = self._context.write, self._ready
        while True:
            while ready:
                flight = ready.popleft()
                answer: Any = flight.answer
                if not isinstance(answer, bytes):
                    answer = self._message(flight)
                    if answer is None:
                        return
                if answer:
                    await write(answer)
                if isinstance(flight, _Flight):
                    self._flights.remove(flight)
                else:
                    flight.sent(len(answer))
                # Keep nothing of this answer while waiting for the next one.
                del flight, answer
                if self._reader is not None:
                    self._wake_reader()
            if self._ended and not self._flights:
                break
            self._writer = self._loop.create_future()
            await self._writer
        if self._unreadable is not None:
            self._end(*self._unreadable)
        elif self._closed:
            self._end(grpc.StatusCode.UNAVAILABLE, "the server is stopping")

    def _message(self, flight: _Flight | NextAnswer) -> bytes | None:
        """What to write for a request whose answer isn't made yet or isn't bytes; None if its failure ends the
        stream."""
        final = isinstance(flight, _Flight)
        if isinstance(flight, _Flight) and flight.answer is None and flight.failure is None:
            self._inference.finish(flight)
        answer, failure = flight.answer, flight.failure
        if isinstance(answer, bytes):
            return answer
        if failure is None:
            try:
                return _serialized(pb.ModelStreamInferResponse(infer_response=answer), final=final)
            except MemoryError as error:
                failure = status_and_text(error, flight.message, _RPC)
        if self._ends_at_error:
            self._end(*failure)
            return None
        return _serialized(_failure_message(flight.message, *failure), final=final)

    def _end(self, code: grpc.StatusCode, text: str) -> None:
        self._context.set_code(code)
        self._context.set_details(text)

    def _wake_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None and not writer.done():
            writer.set_result(None)

    def _wake_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)


def _serialized(message: pb.ModelStreamInferResponse, *, final: bool) -> bytes:
    """`message`, which says whether it is the last one for its request. Raises MemoryError."""
    message.infer_response.parameters[FINAL].bool_param = final
    return message.SerializeToString()


def _failure_message(request: AnyMessage, code: grpc.StatusCode, text: str) -> pb.ModelStreamInferResponse:
    """An error as a message of the stream: its text and, for clients that look, its status and which request it is
    for."""
    message = pb.ModelStreamInferResponse(error_message=text or code.name)
    response = message.infer_response
    response.parameters[STATUS].string_param = code.name
    if request is not _NO_REQUEST:
        response.model_name, response.model_version, response.id = request.model_name, request.model_version, request.id
    return message


def _true(parameters: Mapping[str, pb.InferParameter], key: str) -> bool:
    return key in parameters and parameters[key].bool_param
