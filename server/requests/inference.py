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
from paceline.scheduler.pending import Pending
from paceline.server.call_facts import answer_deadline_ns
from paceline.server.codec.batch_facts import add_batch_facts, batch_facts_of
from paceline.server.codec.decoded import DecodedRequest
from paceline.server.codec.passing import NOTHING_PASSED_ON, PassedOn, passed_on_by
from paceline.server.codec.short_way import AlikeRequests
from paceline.server.codec.wire_request import WireRequest
from paceline.server.errors import ServerStopping
from paceline.server.models.repository import Repository, ServedModel
from paceline.server.requests.in_flight import InFlight, follow
from paceline.server.requests.quiet import until_quiet
from paceline.server.requests.submitting import submit, submit_alike, submit_remote
from paceline.server.telemetry.log import debugging
from paceline.server.telemetry.tracing import Tracer
from paceline.server.telemetry.watching import RequestWatch

__all__ = ["AnyPending", "Inference", "encode"]

_log = logging.getLogger("paceline.server.inference")

_REQUEST = attrgetter("request")

_MAX_MADE_BYTES = 2**17
"""If a batch's outputs have at most this many bytes, all answers are made before the first one leaves."""

AnyPending = Pending[Any, Any]
Answer = Callable[[Any, Tensors, AnyPending], None]
"""Answers a request in flight, given its results and the `Pending` that knows their facts."""


class Inference:
    """Answers inference requests while `serving`. `ready` says whether clients should send any. `tracer` may record
    their times."""

    def __init__(self, repository: Repository, tracer: Tracer | None = None) -> None:
        self._repository = repository
        self._tracer = tracer or Tracer()
        self._spans = self._tracer.spans
        self.serving = self.ready = False
        self._refused = 0

    @property
    def reads_parents(self) -> bool:
        """Whether the `parent` of a request is used; if not, nobody needs to read it."""
        return self._spans is not None

    # hot path: see bench/
    def announce(self, flight: InFlight) -> None:
        """A request has arrived. It is started when its batcher is about to decide, with others that arrived with it;
        at once if no model is found or the server doesn't serve."""
        request = flight.request
        model = self._repository.find(request.model_name, request.model_version)
        if model is None or not self.serving:
            self._start([flight])
        else:
            flight.model = model
            model.batcher.announce(self._start, flight)

    # hot path: see bench/
    def _start(self, flights: list[InFlight]) -> None:
        """Check requests that have arrived, all for one model, and hand them to its batcher. Consecutive requests that
        are alike are handed over together."""
        started = 0
        while started < len(flights):
            alike = self._alike(flights, started)
            together = flights[started : started + (len(alike.inputs) if alike is not None else 1)]
            if alike is None or not self._start_together(together, alike):
                for flight in together:
                    self._start_alone(flight)
            started += len(together)

    # hot path: see bench/
    def _start_alone(self, flight: InFlight) -> None:
        try:
            self._check_and_submit(flight)
        except Exception as error:  # noqa: BLE001 - the caller must get an answer
            self._fail(flight, error)
            if not flight.gone:
                flight.on_done()

    # hot path: see bench/
    def _alike(self, flights: list[InFlight], first: int) -> AlikeRequests | None:
        """The consecutive `flights`, from `first` on, that differ only in id, tensors and deadline, decoded. None if
        the first one is to be started by itself."""
        model = flights[first].model
        if len(flights) == 1 or model is None or model.remote or self._spans is not None or debugging.on:
            return None
        if model.codec.short_way is None or not model.batcher.takes_any_alike:
            return None
        try:
            alike: AlikeRequests | None = model.codec.short_way.decode_alike(
                map(_REQUEST, islice(flights, first, None))
            )
        except Exception:  # noqa: BLE001 - logged; each request is decoded by itself
            _log.exception("decoding requests together failed; decoding them one by one")
            return None
        return alike

    # hot path: see bench/
    def _start_together(self, together: list[InFlight], alike: AlikeRequests) -> bool:
        """Submit requests that are alike. False if each is to be started by itself; it is decoded already."""
        try:
            pendings = submit_alike(together, together[0].model, alike)
        except Exception:  # noqa: BLE001 - logged; each request is submitted by itself
            _log.exception("submitting requests together failed; submitting them one by one")
            pendings = ()
        options, inputs, targets = alike
        if not pendings:
            for flight, its_inputs, its_targets in zip(together, inputs, targets, strict=True):
                flight.decoded = DecodedRequest(its_inputs, options, its_targets)
            return False
        # The batcher has their inputs now.
        decoded, on_done = DecodedRequest((), options), self._on_done
        for flight, pending, its_targets in zip(together, pendings, targets, strict=True):
            if decoded.targets is not its_targets:
                decoded = DecodedRequest((), options, its_targets)
            flight.decoded = decoded
            flight.pending = pending
            pending.on_done, pending.subject = on_done, flight
        return True

    # hot path: see bench/
    def _check_and_submit(self, flight: InFlight) -> None:
        request = flight.request
        if self._spans is not None or debugging.on:
            flight.watch = RequestWatch(request, flight.parent, self._spans, flight.began_ns)
        model = flight.model or self._look_up(flight)
        decoded = flight.decoded = flight.decoded or model.codec.decode(request)
        if decoded.options.parameters.deadline_ns:
            own_ns = answer_deadline_ns(decoded.options.parameters.deadline_ns / 1e9, flight.began_ns)
            flight.deadline_ns = min(flight.deadline_ns, own_ns)
        if flight.watch is not None:
            flight.watch.on_taken(model.version, decoded.options.rows)
        if model.remote:
            pending = submit_remote(flight, model, decoded, passed_on_by(request, flight.passed), flight.began_ns)
        else:
            pending = submit(flight, model, decoded, flight.began_ns)
        follow(flight, pending, self._on_done)
        if flight.gone:
            self.give_up(flight)
        elif flight.cancelled:
            pending.cancel()

    # hot path: see bench/
    def take(
        self,
        flight: InFlight,
        model: ServedModel,
        decoded: DecodedRequest,
        on_done: Callable[[list[Any]], None],
        passed_on: PassedOn = NOTHING_PASSED_ON,
    ) -> None:
        """Hand a request that was looked up and checked elsewhere to its model's batcher. `on_done` is called with
        requests that are done, and has to call `conclude` for each. `passed_on` is for another server, if one executes
        the request. Raises errors that are found now."""
        flight.model, flight.decoded = model, decoded
        if self._spans is not None or debugging.on:
            request = pb.ModelInferRequest(model_name=model.name, model_version=model.version, id=flight.request.id)
            flight.watch = RequestWatch(request, flight.parent, self._spans, flight.began_ns)
            flight.watch.on_taken(model.version, decoded.options.rows)
        if not self.serving:
            refusal = self._refusal(model)
            if flight.watch is not None:
                flight.watch.on_failure(refusal)
            raise refusal
        try:
            if model.remote:
                pending = submit_remote(flight, model, decoded, passed_on, 0)
            else:
                pending = submit(flight, model, decoded, 0)
        except Exception as error:
            flight.count_failure(error)
            raise
        follow(flight, pending, on_done)

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
            pending: Any = flight.pending
            if pending is None:
                pass  # it has its answer
            elif pending.cancelled() or pending.exception() is not None:
                self.finish(flight)
            elif type(results := pending.result()) is Share and results.outputs.size_bytes <= _MAX_MADE_BYTES:
                flight.pending = None
                self._answer(flight, results, pending, encode)
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
            pending: Any = flight.pending
            if flight.gone or flight.watch is not None or type(flight.request) is not WireRequest:
                continue
            share = pending.result() if type(pending) is Pending and pending.answered else None
            if type(share) is not Share:
                continue
            if flight.decoded is not decoded or share.outputs is not outputs or flight.envelope is not envelope:
                decoded, outputs, envelope = flight.decoded, share.outputs, flight.envelope
                may = decoded.options.plain and outputs.size_bytes <= _MAX_MADE_BYTES
                answers = model.codec.short_way.answers(decoded, share, envelope) if may else None
            answer = answers.answer(flight.request.id, share.start) if answers is not None else None
            if answer is not None:
                flight.answer = answer
                answered.append(flight)
        now_ns = time.monotonic_ns()
        model.statistics.on_successes([now_ns - flight.began_ns for flight in answered])
        for flight in answered:
            flight.pending = flight.decoded = None

    def finish(self, flight: InFlight) -> None:
        """Make the answer of a request that is done, or call its `fail`."""
        self.conclude(flight, encode)

    # hot path: see bench/
    def conclude(self, flight: InFlight, answer: Answer) -> None:
        """Answer and count a request that is done. `answer` gets its results; if that raises, or there are none, the
        request's own `fail` is called."""
        pending: Any = flight.pending
        flight.pending = None
        if pending.cancelled():
            self._fail(flight, asyncio.CancelledError())
        elif (error := pending.exception()) is not None:
            self._fail(flight, error)
        elif isinstance(pending, Pending):
            self._answer(flight, pending.result(), pending, answer)
        else:
            results, last = pending.result()
            self._answer(flight, results, last, answer)

    # hot path: see bench/
    def _answer(self, flight: InFlight, results: Tensors, pending: AnyPending, answer: Answer) -> None:
        try:
            answer(flight, results, pending)
            flight.decoded = None
            model = flight.model
            if flight.watch is not None:
                flight.watch.on_success(pending.facts)
            if self._tracer.active and (facts := pending.facts) is not None:
                self._tracer.record(model.name, model.version, flight.request.id, flight.began_ns, facts)
            model.statistics.on_success(time.monotonic_ns() - flight.began_ns)
        except Exception as error:  # noqa: BLE001 - passed to the caller
            self._fail(flight, error)

    def _fail(self, flight: InFlight, error: BaseException) -> None:
        """Count the failure and call `fail`. Doesn't raise: others are owed their answers."""
        flight.decoded = flight.answer = None
        try:
            flight.count_failure(error)
        except Exception:  # noqa: BLE001 - logged
            _log.exception("a failed request could not be counted or logged")
        # A request that is gone must not hold an error that leads back to it.
        if not flight.gone:
            flight.fail(error)

    def give_up(self, flight: InFlight) -> None:
        """Nobody waits for the answer any more. If it is made already, or the request has failed, nothing is
        counted."""
        flight.gone = True
        pending, flight.pending = flight.pending, None
        if pending is not None:
            pending.cancel()
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
        name, version = flight.request.model_name, flight.request.model_version
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
def encode(flight: InFlight, results: Tensors, pending: AnyPending) -> None:
    """Make the answer of `flight`. Raises as `ModelCodec.encode`."""
    model, decoded = flight.model, flight.decoded
    answer = model.codec.encode(flight.request, decoded, results, flight.envelope)
    if decoded.options.parameters.batch_info and isinstance(answer, pb.ModelInferResponse) and pending.facts:
        add_batch_facts(answer, model.batch_id_prefix, batch_facts_of(pending.facts))
    flight.answer = answer
