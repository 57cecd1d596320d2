"""Inference in a front: large tensors are decoded and encoded here, everything else is the engine's.

Lives here: what stands in for `server.requests.inference.Inference`, step by step the same. Must not: RPCs. Small
requests go unchanged to the engine, which decodes and answers similar ones together. So does whatever isn't simple (an
unknown model, a faulty request, tensors in clients' shared memory, outputs in another form than raw): the engine finds
the right words, and counts it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter
from typing import Any, cast

import grpc

from paceline.backends.spec import MISSING, Tensors
from paceline.backends.transport.link import Link
from paceline.backends.transport.parcel import Message
from paceline.protos import inference_pb2 as pb
from paceline.scheduler.answering import notify
from paceline.scheduler.errors import QueueFull
from paceline.scheduler.request import AnyRequest, Request
from paceline.server.call_facts import NO_PASSED_HEADERS
from paceline.server.codec.answers import Facts, add_batch_facts
from paceline.server.codec.codec import AnyResponse
from paceline.server.codec.parameters import NO_PARAMETERS, RequestParameters
from paceline.server.codec.remote import passed_on_by
from paceline.server.codec.wire_request import WireRequest, message_of
from paceline.server.errors import ServerError, ServerStopping
from paceline.server.fronts.protocol import MAX_WHOLE_BYTES, WHAT_IS_FULL, Aborted, Kind, LookUp, unpacked_error
from paceline.server.requests.in_flight import Failure, InFlight, answer_deadline_ns

_MAX_UNSENT_BYTES = 64 * 2**20
"""Messages that the engine doesn't take: it hangs, and new callers are better refused than kept waiting."""

_KEPT_SHARE = 4
"""One in this many bytes of the engine's memory for results may belong to answers that can't leave yet."""

_MAX_MADE_BYTES = 2**13
"""The largest answer that is made before it can leave."""

_Reply = bytes | tuple[Tensors, Facts | None]
"""What the engine sends: the answer, or outputs and the facts about the batch, from which it is made here."""

_parameter_values: Callable[[RequestParameters], tuple[Any, ...]] = attrgetter(
    *(one.name for one in fields(RequestParameters))
)


class Reply(Request[None, bytes]):
    """The reply to an RPC other than inference. `number` is what the engine knows it by."""

    __slots__ = ("number",)

    number: int


class Replies:
    """All replies that a front waits for: requests, and other RPCs."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.last_number = 0
        # By the numbers that they have.
        self._waiting: dict[int, InFlight | Reply] = {}

    def refuse_if_full(self) -> None:
        """Raise QueueFull if the engine doesn't take messages."""
        if self._link.unsent_bytes > _MAX_UNSENT_BYTES:
            raise QueueFull(
                _MAX_UNSENT_BYTES, "bytes of messages to the process with the models, which isn't reading them"
            )

    # hot path
    def expect(self, request: InFlight | Reply) -> int:
        """Wait for the reply to `request`. Returns its number, which must be sent along."""
        self.last_number = request.number = self.last_number + 1
        self._waiting[request.number] = request
        request.batcher = self
        return request.number

    # hot path
    def send_whole(self, flight: InFlight) -> None:
        """Have the engine do everything. Raises QueueFull."""
        self.refuse_if_full()
        self.expect(flight)
        self._send_whole(flight)

    def on_cancel(self, request: AnyRequest) -> None:
        """The caller of `request` has gone: the engine is told, and then its source."""
        number = cast("InFlight | Reply", request).number
        if self._waiting.pop(number, None) is not None:
            self._link.send((Kind.CANCEL, number))
        asyncio.get_running_loop().call_soon(notify, [request])

    # hot path
    def on_message(self, message: Message) -> AnyRequest | None:
        """Handle a message that brings a reply. Returns the request whose source must be told; None if nobody waits, or
        the reply is yet to come."""
        kind, number = message[:2]
        if kind == Kind.STALE:
            # The model that it was decoded for is gone, and there may be another of its name.
            if isinstance(flight := self._waiting.get(number), InFlight):
                self._send_whole(flight)
            return None
        if kind >= Kind.OPENED:
            if isinstance(flight := self._waiting.get(number), InFlight):
                self._on_next(flight, kind, message[2:])
            return None
        request: AnyRequest | None = self._waiting.pop(number, None)
        if kind == Kind.RESULT:
            # Even if nobody waits: only memory of what is unpacked is given back.
            outputs = self._link.unpack(message[2])
            if request is not None:
                if self._link.seen_bytes > self._link.size_bytes // _KEPT_SHARE:
                    # Callers that don't read would take all of it, and everybody else's answers would wait for room.
                    outputs = tuple(one if one is MISSING else one.copy() for one in outputs)
                request.succeed((outputs, message[3]))
        elif kind == Kind.PACKED:
            (data,) = self._link.unpack(message[2])
            if request is not None:
                request.succeed(data.tobytes())
        elif request is None:
            pass
        elif kind == Kind.ANSWER:
            request.succeed(message[2])
        elif kind == Kind.FAILED:
            request.fail(unpacked_error(*message[2:]))
        elif kind == Kind.ABORTED:
            request.fail(Aborted(grpc.StatusCode[message[2]], message[3]))
        return request

    def _on_next(self, flight: InFlight, kind: int, fields: Message) -> None:
        """A request may be answered more than once, or has an answer that isn't its last."""
        if kind == Kind.OPENED:
            flight.on_open()
            return
        answer = _NextAnswer(self._link, flight)
        if kind == Kind.NEXT_FAILED:
            error = unpacked_error(*fields)
            assert isinstance(error, Exception)
            flight.on_more(answer, error)
            return
        envelope = flight.envelope_of_more
        assert envelope is not None
        answer.answer = envelope.around(fields[0])
        flight.on_more(answer, None)

    # hot path
    def _send_whole(self, flight: InFlight) -> None:
        message, passed = flight.message, flight.passed
        data = message.data if isinstance(message, WireRequest) else message_of(message).SerializeToString()
        headers = None if passed is NO_PASSED_HEADERS else tuple(passed)
        times = flight.arrived_ns, flight.deadline_ns
        self._link.send((Kind.INFER, flight.number, *times, flight.parent, headers, flight.takes_more, data))


class _NextAnswer:
    """`NextAnswer`, from the engine."""

    def __init__(self, link: Link, flight: InFlight) -> None:
        self._link = link
        self._number = flight.number
        self.message = flight.message
        self.answer: AnyResponse | None = None
        self.failure: Failure | None = None

    def sent(self, size_bytes: int) -> None:
        self._link.send((Kind.TAKEN, self._number, size_bytes))


class RemoteInference:
    """Answers inference requests; `serving`, and whether it `reads_parents`, are set as the engine says. If a request
    in flight isn't decoded, the engine makes the answer."""

    def __init__(self, link: Link, replies: Replies, models: LookUp) -> None:
        self._link = link
        self._replies = replies
        self._models = models
        self.serving = self.reads_parents = False

    # hot path: see bench/
    def announce(self, flight: InFlight) -> None:
        """A request has arrived. It is sent to the engine at once: the link gathers what it sends."""
        flight.on_answers = self._on_done
        try:
            self._submit(flight)
        except Exception as error:  # noqa: BLE001 - the caller must get an answer
            flight.counted = True
            flight.on_failure(error)
            flight.on_done()

    # hot path: see bench/
    def _submit(self, flight: InFlight) -> None:
        """Check a request and have the engine execute it. Raises QueueFull; anything else that may be wrong is for the
        engine to report."""
        request, deadline_ns = flight.message, flight.deadline_ns
        model = flight.model = self._models.models.get((request.model_name, request.model_version))
        # The engine does better with it unchanged, but for large answers, which are better made here.
        is_small = type(request) is WireRequest and len(request.data) <= MAX_WHOLE_BYTES
        if model is None or (is_small and not model.answers_large):
            self._replies.send_whole(flight)
            return
        try:
            read = model.codec.read(request)
        except (ServerError, ValueError):
            self._replies.send_whole(flight)
            return
        options = read.options
        parameters = options.parameters
        if parameters.typed_outputs or options.classes:
            self._replies.send_whole(flight)
            return
        if parameters.deadline_ns:
            deadline_ns = min(deadline_ns, answer_deadline_ns(parameters.deadline_ns / 1e9, flight.arrived_ns))
        self._replies.refuse_if_full()
        # The codec has no regions, so none of them is in clients' shared memory.
        parcel = self._link.pack(cast("Tensors", read.inputs[0]))
        if parcel is None:
            self._link.send((Kind.REFUSED, model.info.handle))
            raise QueueFull(self._link.size_bytes, WHAT_IS_FULL)
        flight.options = options
        description = (
            model.info.handle,
            request.id,
            flight.arrived_ns,
            deadline_ns,
            flight.parent,
            options.rows,
            options.key,
            options.sizes,
            options.outputs,
            None if parameters is NO_PARAMETERS else _parameter_values(parameters),
            parcel,
            tuple(passed_on_by(request, flight.passed)) if model.info.remote else None,
        )
        self._link.send((Kind.SUBMIT, self._replies.expect(flight), *description))

    # hot path: see bench/
    def _on_done(self, flights: list[InFlight]) -> None:
        """Submitted requests have ended. Small answers are made now, together with those that came with them."""
        for flight in flights:
            if flight.gone:
                continue
            reply = cast("_Reply", flight.value if flight.answered else b"")
            if isinstance(reply, bytes) or sum(one.nbytes for one in reply[0]) <= _MAX_MADE_BYTES:
                self.finish(flight)
            elif flight.model is not None:
                flight.model.answers_large = True
            flight.on_done()

    # hot path: see bench/
    def finish(self, flight: InFlight) -> None:
        """Make the answer of a request that has ended, or call its `on_failure`."""
        error: BaseException | None
        if flight.cancelled():
            error = asyncio.CancelledError()
        elif (error := flight.exception()) is None:
            try:
                flight.answer = _answer(flight, cast("_Reply", flight.value))
            except Exception as raised:  # noqa: BLE001 - passed to the caller
                error = raised
        flight.let_go()
        if error is not None:
            flight.on_failure(error)
        # An error's traceback refers to this frame if it was raised here; the frame mustn't refer back to the error.
        del error, flight

    def give_up(self, flight: InFlight) -> None:
        """Nobody waits for the answer any more."""
        flight.gone = True
        flight.cancel()

    def check_serving(self) -> None:
        """Raises ServerStopping while no requests are accepted."""
        if not self.serving:
            raise ServerStopping


# hot path: see bench/
def _answer(flight: InFlight, result: _Reply) -> AnyResponse:
    """The answer, from what the engine sent."""
    if isinstance(result, bytes):
        if not result and flight.takes_more:
            return flight.end_of_answers()
        if len(result) > MAX_WHOLE_BYTES and flight.model is not None:
            flight.model.answers_large = True
        return flight.envelope.around(result) if flight.envelope is not None else result
    outputs, facts = result
    model = flight.model
    flight.value = outputs
    made: list[AnyResponse | Exception] = model.codec.encode((flight,))
    (answer,) = made
    if isinstance(answer, Exception):
        raise answer
    if isinstance(answer, pb.ModelInferResponse) and facts is not None:
        add_batch_facts(answer, model.info.batch_id_prefix, facts)
    return answer
