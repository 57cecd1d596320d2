"""Inference requests, from message to message, whichever RPC brought them.

Lives here: the order of the steps. Must not: checks (codec), look-ups (repository), what the batcher is told
(submitting), waiting policy (batcher), or anything that belongs to one RPC alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from itertools import islice
from operator import attrgetter
from typing import Any

from paceline.backends.shares import Share
from paceline.backends.spec import Tensors
from paceline.protos import inference_pb2 as pb
from paceline.scheduler.observer import Drop
from paceline.scheduler.request import OnAnswers
from paceline.server.call_facts import answer_deadline_ns
from paceline.server.codec.batch_facts import add_batch_facts, batch_facts_of
from paceline.server.codec.decoded import DecodedRequest
from paceline.server.codec.passing import NOTHING_PASSED_ON, PassedOn, passed_on_by
from paceline.server.codec.short_way import AlikeRequests
from paceline.server.codec.wire_request import WireRequest
from paceline.server.errors import ServerStopping
from paceline.server.models.repository import Repository, ServedModel
from paceline.server.requests.in_flight import InFlight
from paceline.server.requests.quiet import until_quiet
from paceline.server.requests.submitting import ready, ready_remote, submit
from paceline.server.telemetry.log import debugging
from paceline.server.telemetry.tracing import Tracer
from paceline.server.telemetry.watching import RequestWatch

__all__ = ["Inference", "encode"]

_log = logging.getLogger("paceline.server.inference")

_MESSAGE = attrgetter("message")

_MAX_MADE_BYTES = 2**17
"""If a batch's outputs have at most this many bytes, all answers are made before the first one leaves."""

Answer = Callable[[Any, Tensors], None]
"""Answers a request in flight, given its results."""


class Inference:
    """Answers inference requests while `serving`. `ready` says whether clients should send any. `tracer` may record
    their times."""

    def __init__(self, repository: Repository, tracer: Tracer | None = None) -> None:
        self._repository = repository
        self._tracer = tracer or Tracer()
        self._spans = self._tracer.spans
        self.reads_parents = self._spans is not None
        """Whether the `parent` of a request is used; if not, nobody needs to read it."""
        self.serving = self.ready = False
        self._refused = 0

    # hot path: see bench/
    def announce(self, flight: InFlight) -> None:
        """A request has arrived. It is started when its batcher is about to decide, with others that arrived with it;
        at once if no model is found or the server doesn't serve."""
        message = flight.message
        model = self._repository.find(message.model_name, message.model_version)
        if model is None or not self.serving:
            self._start([flight])
        else:
            flight.model = model
            model.batcher.announce(self._start, flight)

    # hot path: see bench/
    def _start(self, flights: list[InFlight]) -> None:
        """Check requests that have arrived, all for one model, and hand them to its batcher. Consecutive requests that
        differ only in id, tensors and deadline are handed over together."""
        started = 0
        while started < len(flights):
            group = flights[started : started + (self._read_group(flights, started) or 1)]
            started += len(group)
            if any(flight.ended for flight in group):
                for flight in group:
                    if flight.ended:
                        self._count_withdrawn(flight)
                group = [flight for flight in group if not flight.ended]
            if group:
                self._check_and_submit(group)

    # hot path: see bench/
    def _read_group(self, flights: list[InFlight], first: int) -> int:
        """Decode the consecutive `flights`, from `first` on, that differ only in id, tensors and deadline. Returns how
        many there are; 0 if the first one has to be read by itself."""
        model = flights[first].model
        if len(flights) == 1 or model is None or model.remote or self._spans is not None or debugging.on:
            return 0
        if model.codec.short_way is None:
            return 0
        try:
            alike: AlikeRequests | None = model.codec.short_way.decode_alike(
                map(_MESSAGE, islice(flights, first, None))
            )
        except Exception:  # noqa: BLE001 - logged; each request is decoded by itself
            _log.exception("decoding requests together failed; decoding them one by one")
            return 0
        if alike is None:
            return 0
        ready(islice(flights, first, None), model, alike.options, zip(alike.inputs, alike.targets, strict=True))
        return len(alike.inputs)

    # hot path: see bench/
    def _check_and_submit(self, group: list[InFlight]) -> None:
        """Check requests that weren't read as a group, and submit all of `group`. Those that are refused end."""
        try:
            if group[0].decoded is None:
                self._check(group[0])
            refusals = submit(group, group[0].model, self._on_done)
        except Exception as error:  # noqa: BLE001 - the caller must get an answer
            if len(group) == 1:
                self._refuse(group[0], error)
                return
            _log.exception("submitting requests together failed; submitting them one by one")
            for flight in group:
                if not (flight.waits or flight.ended):
                    self._check_and_submit([flight])
            return
        for flight, refusal in zip(group, refusals, strict=False):
            if refusal is not None:
                self._refuse(flight, refusal)

    def _refuse(self, flight: InFlight, error: BaseException) -> None:
        """A request ends before it is queued."""
        self._fail(flight, error)
        if not flight.gone:
            flight.on_done()

    # hot path: see bench/
    def _check(self, flight: InFlight) -> None:
        """Look a request's model up, and read the request as that demands. Raises what is wrong with it."""
        message = flight.message
        if self._spans is not None or debugging.on:
            flight.trail = RequestWatch(message, flight.parent, self._spans, flight.arrived_ns)
        model = flight.model or self._look_up(flight)
        decoded: DecodedRequest = model.codec.decode(message)
        if decoded.options.parameters.deadline_ns:
            own_ns = answer_deadline_ns(decoded.options.parameters.deadline_ns / 1e9, flight.arrived_ns)
            flight.deadline_ns = min(flight.deadline_ns, own_ns)
        if flight.trail is not None:
            flight.trail.on_taken(model.version, decoded.options.rows)
        if model.remote:
            ready_remote(flight, model, decoded, passed_on_by(message, flight.passed))
        else:
            ready((flight,), model, decoded.options, ((decoded.inputs, decoded.targets),))

    # hot path: see bench/
    def take(
        self,
        flight: InFlight,
        model: ServedModel,
        decoded: DecodedRequest,
        on_answers: OnAnswers,
        passed_on: PassedOn = NOTHING_PASSED_ON,
    ) -> None:
        """Hand a request that was looked up and checked elsewhere to its model's batcher. `on_answers` is called with
        requests that have ended, and has to call `conclude` for each. `passed_on` is for another server, if one
        executes the request. Raises errors that are found now."""
        flight.model = model
        if self._spans is not None or debugging.on:
            request = pb.ModelInferRequest(model_name=model.name, model_version=model.version, id=flight.message.id)
            flight.trail = RequestWatch(request, flight.parent, self._spans, flight.arrived_ns)
            flight.trail.on_taken(model.version, decoded.options.rows)
        if not self.serving:
            refusal = self._refusal(model)
            if flight.trail is not None:
                flight.trail.on_failure(refusal)
            raise refusal
        try:
            if model.remote:
                ready_remote(flight, model, decoded, passed_on)
            else:
                ready((flight,), model, decoded.options, ((decoded.inputs, decoded.targets),))
            for error in submit([flight], model, on_answers):
                if error is not None:
                    raise error
        except Exception as error:
            flight.count_failure(error)
            raise

    def _count_withdrawn(self, flight: InFlight) -> None:
        """A request was withdrawn before it was started."""
        if flight.model is not None:
            flight.model.statistics.on_drop(Drop.CANCELLED)
        self._refuse(flight, asyncio.CancelledError())

    # hot path: see bench/
    def _on_done(self, flights: list[InFlight]) -> None:
        """Submitted requests have ended. Small answers are made now, all of a batch together."""
        try:
            self._answer_alike(flights)
        except Exception:  # noqa: BLE001 - logged; those without an answer follow one by one
            _log.exception("answering a batch's requests together failed; answering them one by one")
        for flight in flights:
            if flight.gone:
                continue
            if flight.counted:
                pass  # it has its answer
            elif not flight.answered:
                self.finish(flight)
            elif type(results := flight.value) is Share and results.outputs.size_bytes <= _MAX_MADE_BYTES:
                self._answer(flight, results, encode)
            flight.on_done()

    # hot path: see bench/
    def _answer_alike(self, flights: list[InFlight]) -> None:
        """Make the answers to requests that have shares of the same batch's outputs, if these are small and the
        requests want nothing else, be it in the response or in shared memory."""
        model = flights[0].model
        if len(flights) == 1 or model.codec.short_way is None or self._tracer.active:
            return
        decoded = outputs = envelope = answers = None
        answered = []
        for flight in flights:
            if flight.gone or flight.trail is not None or type(flight.message) is not WireRequest:
                continue
            share = flight.value if flight.answered else None
            if type(share) is not Share:
                continue
            if flight.decoded is not decoded or share.outputs is not outputs or flight.envelope is not envelope:
                decoded, outputs, envelope = flight.decoded, share.outputs, flight.envelope
                assert decoded is not None
                may = decoded.options.plain and outputs.size_bytes <= _MAX_MADE_BYTES
                answers = model.codec.short_way.answers(decoded, share, envelope) if may else None
            answer = answers.answer(flight.message.id, share.start) if answers is not None else None
            if answer is not None:
                flight.answer = answer
                answered.append(flight)
        now_ns = time.monotonic_ns()
        model.statistics.on_successes([now_ns - flight.arrived_ns for flight in answered])
        for flight in answered:
            flight.counted = True
            flight.let_go()

    def finish(self, flight: InFlight) -> None:
        """Make the answer of a request that has ended, or call its `on_failure`."""
        self.conclude(flight, encode)

    # hot path: see bench/
    def conclude(self, flight: InFlight, answer: Answer) -> None:
        """Answer and count a request that has ended. `answer` gets its results; if that raises, or there are none, the
        request's own `on_failure` is called."""
        if flight.cancelled():
            self._fail(flight, asyncio.CancelledError())
        elif (error := flight.exception()) is not None:
            self._fail(flight, error)
        else:
            self._answer(flight, flight.result(), answer)

    # hot path: see bench/
    def _answer(self, flight: InFlight, results: Tensors, answer: Answer) -> None:
        try:
            answer(flight, results)
            model = flight.model
            if flight.trail is not None:
                flight.trail.on_success(flight.facts)
            if self._tracer.active and (facts := flight.facts) is not None:
                self._tracer.record(model.name, model.version, flight.message.id, flight.arrived_ns, facts)
            model.statistics.on_success(time.monotonic_ns() - flight.arrived_ns)
            flight.counted = True
            flight.let_go()
        except Exception as error:  # noqa: BLE001 - passed to the caller
            self._fail(flight, error)

    def _fail(self, flight: InFlight, error: BaseException) -> None:
        """Count the failure and call `on_failure`. Doesn't raise: others are owed their answers."""
        flight.answer = None
        flight.let_go()
        try:
            flight.count_failure(error)
        except Exception:  # noqa: BLE001 - logged
            _log.exception("a failed request could not be counted or logged")
        # A request that is gone must not hold an error that leads back to it.
        if not flight.gone:
            flight.on_failure(error)

    def give_up(self, flight: InFlight) -> None:
        """Nobody waits for the answer any more. If it is made already, or the request has failed, nothing is
        counted."""
        flight.gone = True
        flight.cancel()
        if flight.batcher is not None and not flight.counted:
            flight.count_failure(asyncio.CancelledError())

    def check_serving(self) -> None:
        """Raise ServerStopping, and count the refusal, while no requests are taken."""
        if not self.serving:
            raise self._refusal(None)

    async def refuse_until_quiet(self) -> None:
        """Refuse requests from now on. Returns when hardly any arrive, after a second at most."""
        self.serving = self.ready = False
        await until_quiet(lambda: self._refused)

    def _look_up(self, flight: InFlight) -> ServedModel:
        """The model of a request for which `announce` found none. Raises the reason if there is none."""
        name, version = flight.message.model_name, flight.message.model_version
        if not self.serving:
            raise self._refusal(self._repository.find(name, version))
        model = flight.model = self._repository.get(name, version)
        return model

    def _refusal(self, model: ServedModel | None) -> ServerStopping:
        """The error that a request, or a call that hasn't brought one yet, gets once the server stops. Counts it, also
        for `model` if there is one."""
        self._refused += 1
        error = ServerStopping()
        if model is not None:
            model.statistics.on_drop(Drop.CLOSED)
            model.statistics.on_failure(error, 0)
        return error


# hot path: see bench/
def encode(flight: InFlight, results: Tensors) -> None:
    """Make the answer of `flight`. Raises as `ModelCodec.encode`."""
    model, decoded = flight.model, flight.decoded
    assert decoded is not None
    answer = model.codec.encode(flight.message, decoded, results, flight.envelope)
    if decoded.options.parameters.batch_info and isinstance(answer, pb.ModelInferResponse) and flight.facts:
        add_batch_facts(answer, model.batch_id_prefix, batch_facts_of(flight.facts))
    flight.answer = answer
