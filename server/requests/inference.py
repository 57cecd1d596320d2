"""Inference requests, from message to message, whichever RPC brought them.

Requests that have arrived together are read together, submitted together, and answered together if they were in one
batch; a lone one is a group of one.

Lives here: the order of the steps, and what the batcher is told. Must not: checks (codec), look-ups (repository),
waiting policy (batcher), or anything that belongs to one RPC alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Any, cast

from paceline.backends.batching import Share
from paceline.backends.open_request import Parameters, Told
from paceline.backends.remote_messages import RemoteRequest
from paceline.backends.spec import Tensors
from paceline.protos import inference_pb2 as pb
from paceline.scheduler.batcher import Batcher
from paceline.scheduler.observer import Drop
from paceline.server.codec.answers import add_parameters, batch_parameters
from paceline.server.codec.codec import ModelCodec, memory_bytes
from paceline.server.codec.known_requests import Group
from paceline.server.codec.remote import NOTHING_PASSED_ON, PassedOn, UndeclaredCodec, passed_on_by
from paceline.server.errors import NotSupported, ServerStopping, as_value
from paceline.server.memory.region_tensors import Inputs, TargetedInputs
from paceline.server.models.model_lookup import ModelLookup
from paceline.server.models.served_model import ServedModel
from paceline.server.requests.decoupled import Decoupled
from paceline.server.requests.in_flight import InFlight, answer_deadline_ns
from paceline.server.requests.open_flight import PartialAnswer
from paceline.server.requests.parts import Parts
from paceline.server.requests.pipelines import PipelineRun, Pipelines
from paceline.server.requests.response_cache import ResponseCache
from paceline.server.telemetry.log import debugging
from paceline.server.telemetry.tracing import Answered, RequestWatch, Tracer

_log = logging.getLogger("paceline.server.inference")

_MESSAGE = attrgetter("message")

_ONE_ANSWER = "ModelInfer RPC doesn't support models with decoupled transaction policy"
"""Triton's words, which clients look for."""

_MAX_MADE_BYTES = 2**17
"""If a batch's outputs have at most this many bytes, all answers are made before the first one leaves. One of at most
this many is too large for nobody."""

MakeAnswers = Callable[[Sequence[Any]], Sequence[Exception | None]]
"""Makes the answers of requests in flight that have results. Returns for each why it has none, None if it has one."""


class Inference:
    """Answers inference requests while `serving`. `ready` says whether clients should send any. `tracer` may record
    their times."""

    def __init__(self, repository: ModelLookup, tracer: Tracer | None = None) -> None:
        self._repository = repository
        self._tracer = tracer or Tracer()
        self._spans = self._tracer.spans
        self.reads_parents = self._spans is not None
        """Whether the `parent` of a request is used; if not, nobody needs to read it."""
        self.serving = self.ready = False
        self.refused = 0
        """Requests that arrived while it didn't serve, and calls that hadn't brought one."""
        self.pipelines = Pipelines(self.announce_to, self.give_up)
        self._decoupled = Decoupled(self._on_done, partial(self._on_done, make=_end_answers), encode, self.pipelines)
        self._response_cache = ResponseCache(self._hand_over)

    # hot path: see bench/
    def announce(self, flight: InFlight) -> None:
        """A request has arrived. It is started when its batcher is about to decide, with others that arrived with it;
        at once if no model is found or the server doesn't serve."""
        message = flight.message
        model = self._repository.served.get((message.model_name, message.model_version))
        if model is None or not self.serving:
            self._start([flight])
        else:
            self.announce_to(model, flight)

    # hot path: see bench/
    def announce_to(self, model: ServedModel, flight: InFlight) -> None:
        """The same for a model that was found already. Whether the server takes requests was asked when the one came
        that this one is a part of, if it is from within."""
        flight.model = model
        model.batcher.announce(self._start, flight)

    # hot path: see bench/
    def _start(self, flights: list[InFlight]) -> None:
        """Read requests that have arrived, all for one model, and hand them to its batcher, in groups of those that
        differ only in id, tensors and deadline. What is wrong with the first of a group ends that request alone."""
        if any(flight.ended for flight in flights):
            for flight in flights:
                if flight.ended:  # it was withdrawn before this
                    if flight.model is not None:
                        flight.model.statistics.on_drop(Drop.CANCELLED)
                    self._refuse(flight, asyncio.CancelledError())
            flights = [flight for flight in flights if not flight.ended]
        if self._spans is not None or debugging.on:
            for flight in flights:
                flight.trail = RequestWatch(flight.message, flight.parent, self._spans, flight.arrived_ns)
        # All before `index` are submitted or refused. Those before `alone_until` failed together: each is read by
        # itself, so that only those at fault are refused; some of them may have been submitted before that.
        index = alone_until = 0
        while index < len(flights):
            first, together = flights[index], flights[index : index + 1]
            if first.waits or first.ended:
                index += 1
                continue
            try:
                model = first.model or self._look_up(first)
                if model.decoupled and not first.takes_more:
                    raise NotSupported(_ONE_ANSWER)
                # What else they take along to another server may keep them apart.
                passed_on = passed_on_by(first.message, first.passed) if model.remote else NOTHING_PASSED_ON
                alone = model.remote or model.decoupled or index < alone_until
                more = () if alone else map(_MESSAGE, islice(flights, index + 1, None))
                group = model.codec.read(first.message, more)
                together = flights[index : index + len(group.inputs)]
                refusals = self._submit(together, group, passed_on)
            except Exception as error:  # noqa: BLE001 - the caller must get an answer
                if len(together) > 1:
                    _log.exception("submitting requests together failed; submitting them one by one")
                    alone_until = index + len(together)
                else:
                    self._refuse(first, error)
                    index += 1
                continue
            for flight, refusal in zip(together, refusals, strict=False):
                if refusal is not None:
                    self._refuse(flight, refusal)
            index += len(together)

    # hot path: see bench/
    def _submit(self, flights: Sequence[InFlight], group: Group, passed_on: PassedOn) -> Sequence[Exception | None]:
        """Hand `flights`, which were read as `group`, to their model's batcher or the response cache in front of it.
        Returns as `Batcher.submit`."""
        model: ServedModel = flights[0].model
        options = group.options
        parameters = options.parameters
        for flight, step in zip(flights, group.steps, strict=True) if group.steps else ():
            flight.step = step
        for flight, inputs, targets in zip(flights, group.inputs, group.targets, strict=True):
            if parameters.deadline_ns:
                own_ns = answer_deadline_ns(parameters.deadline_ns / 1e9, flight.arrived_ns)
                flight.deadline_ns = min(flight.deadline_ns, own_ns)
            if flight.trail is not None:
                flight.trail.on_taken(model.version, options.rows)
                flight.tag = flight.trail
            flight.on_answers = self._on_done
            flight.options, flight.targets = options, targets
            flight.payload, flight.rows, flight.key, flight.sizes = inputs, options.rows, options.key, options.sizes
            flight.size_bytes = options.size_bytes if options.size_bytes >= 0 else sum(map(memory_bytes, inputs))
            flight.priority, flight.timeout_ns = parameters.priority, parameters.timeout_ns
            if targets and model.writes_outputs and any(one.region.kind == "cuda" for one in targets.values()):
                # The instance's thread leaves outputs in a GPU's memory.
                flight.payload = TargetedInputs.to(targets, inputs)
            if model.remote:
                # Inputs are never in shared memory here: that and another server exclude each other.
                flight.payload = RemoteRequest(
                    cast("Tensors", inputs),
                    options.outputs,
                    flight.deadline_ns,
                    flight.message.id,
                    *passed_on,
                    spec=options.spec,
                    step=flight.step,
                )
                flight.key = options.key, passed_on.key
        if model.responses is not None:
            self._response_cache.submit(flights)
            return ()
        return self._hand_over(flights)

    # hot path
    def _hand_over(self, flights: Sequence[InFlight]) -> Sequence[Exception | None]:
        """Have `flights` executed, of one group, in which all is set. A request of more rows than a batch may have is
        executed in parts. Returns as `Batcher.submit`."""
        model: ServedModel = flights[0].model
        if model.open_requests is not None:
            return self._decoupled.submit(flights)
        if model.pipeline is not None:
            for flight in flights:
                flight.payload = PipelineRun(self.pipelines, flight, cast("Inputs", flight.payload))
        if 0 < model.max_batch_rows < flights[0].rows:
            join = model.codec.join if isinstance(model.codec, UndeclaredCodec) else None
            assert isinstance(model.batcher, Batcher)  # steps of sequences have one row
            for flight in flights:
                model.in_parts(Parts(flight, model.batcher, join).task)
            return ()
        return model.batcher.submit(flights)

    def _refuse(self, flight: InFlight, error: BaseException) -> None:
        """A request ends before it is queued; no more comes of it if its caller leaves just then."""
        flight.fail(error)
        self._fail(flight, error)
        if not flight.gone:
            flight.on_done()

    # hot path: see bench/
    def _on_done(self, flights: list[InFlight], make: MakeAnswers | None = None) -> None:
        """Submitted requests have ended. Small answers are made now, all of a batch together; large ones follow one by
        one, each when it can leave. `make` makes all of them, if it is given."""
        wanted = [flight for flight in flights if not flight.gone]
        if len(wanted) < len(flights):
            for flight in flights:
                if flight.gone:
                    flight.let_go()  # a pipeline's leads back to it
        if make is not None:
            self.conclude(wanted, make)
        else:
            self.conclude([flight for flight in wanted if not flight.answered or _is_cheap(flight)], encode)
        for flight in wanted:
            if flight.gone:  # by what was said of one before it
                flight.let_go()
                continue
            try:
                flight.on_done()
            except Exception:  # noqa: BLE001 - logged; the others of the batch are owed their answers
                _log.exception("a request's answer could not be handed on, a bug in paceline")

    def finish(self, flight: InFlight) -> None:
        """Make the answer of a request that has ended, or call its `on_failure`."""
        self.conclude((flight,), encode)

    # hot path: see bench/
    def conclude(self, flights: Sequence[InFlight], make: MakeAnswers) -> None:
        """Answer and count requests of one model that have ended. `make` gets those with results. For the others, and
        those whose answer it can't make, their own `on_failure` is called."""
        answered = [flight for flight in flights if flight.answered]
        if len(answered) < len(flights):
            for flight in flights:
                if not flight.answered:
                    self._fail(flight, asyncio.CancelledError() if flight.cancelled() else flight.exception())
        if not answered:
            return
        try:
            errors = make(answered)
        except Exception as error:  # noqa: BLE001 - the callers must get their answers
            if len(answered) > 1:
                _log.exception("answering a batch's requests together failed; answering them one by one")
                for flight in answered:
                    self.conclude((flight,), make)
                return
            errors = [as_value(error)]
        if any(errors):
            for flight, why in zip(answered, errors, strict=True):
                if why is not None:
                    self._fail(flight, why)
            answered = [flight for flight, why in zip(answered, errors, strict=True) if why is None]
            why = None  # its traceback may lead here
        for flight in answered if self._tracer.active or self._spans is not None or debugging.on else ():
            self._record(flight)
        now_ns = time.monotonic_ns()
        flights[0].model.statistics.on_success(*[now_ns - flight.arrived_ns for flight in answered])
        for flight in answered:
            flight.counted = True
            flight.let_go()

    def _record(self, flight: InFlight) -> None:
        """Tell whoever wants to know about every request that this one has its answer."""
        model = flight.model
        try:
            if flight.trail is not None:
                flight.trail.on_success(flight.facts)
            if self._tracer.active:
                name, version, began_ns = model.name, model.version, flight.arrived_ns
                one = Answered.now(name, version, flight.message.id, began_ns, flight.facts, flight.within or ())
                if (made_for := flight.made_for) is None:
                    self._tracer.record(one)
                elif not made_for.ended:
                    made_for.within = [*(made_for.within or ()), one]
        except Exception:  # noqa: BLE001 - logged; the request has its answer
            _log.exception("recording a request failed; traces and logs may lack it")

    def _fail(self, flight: InFlight, error: BaseException | None) -> None:
        """Count the failure and call `on_failure`. Doesn't raise: others are owed their answers."""
        assert error is not None
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
        self.refused += 1
        error = ServerStopping()
        if model is not None:
            model.statistics.on_drop(Drop.CLOSED)
            model.statistics.on_failure(error, 0)
        return error


def _is_cheap(flight: InFlight) -> bool:
    results = flight.value
    return flight.takes_arrays or (type(results) is Share and results.outputs.size_bytes <= _MAX_MADE_BYTES)


def _end_answers(flights: Sequence[InFlight]) -> list[Exception | None]:
    for flight in flights:
        if flight.answer is None:
            flight.answer = flight.end_of_answers()
    return [None] * len(flights)


# hot path: see bench/
def encode(flights: Sequence[InFlight | PartialAnswer]) -> list[Exception | None]:
    """Make the answers of requests of one model that have results. Returns for each why it has none, as
    `ModelCodec.encode`, None if it has one."""
    model = flights[0].model
    errors: list[Exception | None] = []
    if any(flight.takes_arrays for flight in flights):
        for flight in flights:
            if flight.takes_arrays:
                assert isinstance(model.codec, ModelCodec)  # requests from within are for models of this server
                flight.outputs = model.codec.outputs_of(flight)
                assert flight.options is not None
                if flight.options.parameters.batch_info:
                    flight.outputs.parameters = {**flight.outputs.parameters, **_batch_info(flight)}
                errors.append(None)
            else:
                errors += encode([flight])
        return errors
    for flight, answer in zip(flights, model.codec.encode(flights), strict=True):
        if isinstance(answer, Exception):
            errors.append(answer)
            continue
        flight.answer = answer
        if isinstance(answer, pb.ModelInferResponse):
            assert flight.options is not None
            if type(flight.value) is Told:
                add_parameters(answer, flight.value.parameters)
            if flight.options.parameters.batch_info:
                add_parameters(answer, _batch_info(flight))
        elif len(answer) <= _MAX_MADE_BYTES:
            errors.append(None)
            continue
        errors.append(flight.too_large(answer) if isinstance(flight, InFlight) else None)
    return errors


def _batch_info(flight: InFlight | PartialAnswer) -> Parameters:
    """What a request that asks for it is told of its batch; of an answer that was kept, that it was."""
    if flight.facts:
        return batch_parameters(flight.model.batch_id_prefix, flight.facts)
    return {"paceline_cached": True} if flight.model.responses is not None else {}
