"""Requests in flight, and the kind that has its own RPC, whose coroutine waits for the answer.

Lives here: what is known about a request from its arrival until it is answered. Must not: the steps in between; those
are in `inference`, which takes them for many requests at a time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any, Protocol

import grpc

from paceline.backends.errors import WITH_STATUS, ExecutionError
from paceline.backends.open_request import OpenRequest
from paceline.backends.remote_messages import RemoteRequest
from paceline.backends.spec import Tensors
from paceline.scheduler.errors import SchedulerError, SequenceError
from paceline.scheduler.policy import NEVER
from paceline.scheduler.request import Request
from paceline.server.call_facts import PassedHeaders, TraceParent
from paceline.server.codec.answers import Envelope
from paceline.server.codec.array_request import ArrayAnswer
from paceline.server.codec.codec import AnyResponse
from paceline.server.codec.known_requests import Targets
from paceline.server.codec.parameters import RequestOptions
from paceline.server.codec.wire_request import AnyMessage
from paceline.server.errors import StepFailed, error_text, status_of
from paceline.server.memory.region_tensors import NOWHERE, Inputs
from paceline.server.models.ensemble_config import Runnable
from paceline.server.telemetry.model_statistics import FailureReason, reason_of
from paceline.server.telemetry.tracing import Answered, RequestWatch

# A deadline on the wire doesn't include the travel time of request and answer, nor how long the request waited in front
# of a server that reads no faster, and an answer sent at the last moment is computed for nobody. At ten times the load
# a model can bear, with deadlines of 1 s for batches of 80 ms (python -m bench.overload), a share of at most 10 ms let
# 0.70 of the capacity arrive in time, a twentieth 0.8, and a tenth 0.96.
_WAY_BACK = 0.1
_LONGEST_WAY_BACK_S = 0.1

Payload = Inputs | RemoteRequest | OpenRequest | Runnable
"""What a model's batcher takes: the inputs or, for another server, a decoupled model or an ensemble, also what else it
has to know."""

_log = logging.getLogger("paceline.server.inference")

_NO_FAULT_OF_THE_MODEL = frozenset(
    (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.DEADLINE_EXCEEDED)
)
"""Statuses of another server that executes the model which aren't the model's fault: the request is at fault, or its
caller's deadline was too short."""


def answer_deadline_ns(remaining_s: float, began_ns: int = 0) -> int:
    """When an answer must leave, in monotonic ns, to reach a caller that gives up `remaining_s` after `began_ns` (0:
    after now)."""
    way_back_s = min(_WAY_BACK * remaining_s, _LONGEST_WAY_BACK_S)
    return (began_ns or time.monotonic_ns()) + int((remaining_s - way_back_s) * 1e9)


Failure = tuple[grpc.StatusCode, str]
"""What a caller is told of an error: a status, and a text."""


def failure_of(error: BaseException, model: str, what: str) -> Failure:
    """The status and text that whoever has asked `model` ("": none in particular) is told of `error`. One that isn't in
    the table is logged, as a failure of `what`, with its traceback, and a lack of memory in a line."""
    status, text = status_of(error), error_text(error)
    if isinstance(error, MemoryError):
        text = f"the server is short of memory: {text or 'no room for what this request needs'}"
        _log.error("%s failed: %s", what, text)
        return grpc.StatusCode.RESOURCE_EXHAUSTED, text
    if status is None:
        _log.error("%s failed with an internal error, a bug in paceline; please report it", what, exc_info=error)
        return grpc.StatusCode.INTERNAL, f"internal error: {type(error).__name__}: {text}"
    # Errors of batches don't know the model. A step of an ensemble that has failed names it, as errors of sequences do,
    # and what has a status was said by the model, or by another server.
    if isinstance(error, SchedulerError):
        unnamed = not isinstance(error, SequenceError) and not isinstance(error.__cause__, StepFailed)
    else:
        names_it = (StepFailed, *WITH_STATUS)
        unnamed = (
            isinstance(error, ExecutionError) and not isinstance(error, names_it) and not text.startswith("model ")
        )
    return status, f"model '{model}': {text}" if model and unnamed else text


class InFlight(Request[Payload, Tensors]):
    """A request in flight: what its caller sent, on top of what the batcher knows of it. Its payload are its inputs, as
    its model's instances take them. `deadline_ns` is when its answer has to leave to reach the caller in time.
    `parent` is the caller's trace. `passed` are headers for another server, if one executes the request.

    `model` is set when it is looked up. What it asks for is in `options` and `targets` from when it is read until it
    has its answer. When it has ended, `on_done` is called, unless it is `gone`: given up. By then it has an `answer`,
    or `on_failure` was called. If neither, `InferenceSteps.finish` makes the answer when it can leave, since it may be
    large.
    `counted`: its end is in the statistics. `trail` is set only if somebody wants to know about every request.
    `number` is what another process knows it by, if it is from one or for one. `within`: what was answered in its
    course, if it may be traced.
    """

    __slots__ = (
        "answer",
        "counted",
        "gone",
        "message",
        "model",
        "number",
        "options",
        "parent",
        "passed",
        "targets",
        "trail",
        "within",
    )

    envelope: Envelope | None = None
    """The message that its answer travels in, if any."""
    envelope_of_more: Envelope | None = None
    """The same for answers that aren't its last, if it `takes_more` than one."""
    takes_more = False
    made_for: InFlight | None = None
    """The request in whose course it is made, if it is from within the server and there is one."""
    takes_arrays = False
    """Whether it is from within the server, and its answers are `outputs` instead of messages."""
    outputs: ArrayAnswer

    def __init__(
        self,
        message: AnyMessage,
        deadline_ns: int,
        parent: TraceParent | None,
        passed: PassedHeaders,
        arrived_ns: int = 0,
    ) -> None:
        super().__init__((), 0, None, arrived_ns or time.monotonic_ns(), deadline_ns=deadline_ns)
        self.message = message
        self.parent = parent
        self.passed = passed
        self.model: Any = None  # a `ServedModel`; of a request in a front, none
        self.options: RequestOptions | None = None
        self.targets: Targets = NOWHERE
        self.answer: AnyResponse | None = None
        self.trail: RequestWatch | None = None
        self.within: Sequence[Answered] | None = None
        self.gone = self.counted = False
        self.number = 0

    def on_failure(self, error: BaseException) -> None:
        """The request has failed: `error` takes the place of its answer."""
        raise NotImplementedError

    def on_done(self) -> None:
        """The request has its answer, or has failed, or its answer can be made now."""
        raise NotImplementedError

    def too_large(self, answer: AnyResponse) -> Exception | None:
        """Why `answer` doesn't fit through the way to the caller; None if it does."""
        return None

    def on_open(self) -> None:
        """The request may be answered more than once, whenever its model likes."""
        raise NotImplementedError

    def on_more(self, answer: NextAnswer, error: Exception | None) -> None:
        """The request has an answer that isn't its last, or `error` in place of one. `answer.sent` is to be called when
        it has left."""
        raise NotImplementedError

    def end_of_answers(self) -> bytes:
        """The message that says no more than that there are no further answers; empty if the caller wants none."""
        raise NotImplementedError

    def let_go(self) -> None:
        """Nothing of it but its answer is needed any more, and nobody may ask for its result. Answers may be long in
        leaving, and results, facts and errors hold the tensors of a whole batch."""
        self.payload, self.value, self.targets = (), (), NOWHERE
        self.options = self.batch_facts = self._error = self.within = None

    def count_failure(self, error: BaseException) -> None:
        """Count the request as ended by `error`; log the error if the model is at fault."""
        self.counted = True
        if self.model is not None:
            self.model.statistics.on_failure(error, time.monotonic_ns() - self.arrived_ns)
            if reason_of(error) is FailureReason.BACKEND and status_of(error) not in _NO_FAULT_OF_THE_MODEL:
                # Only its text: a handler that keeps the record would keep the error, and all that its traceback leads
                # to.
                _log.error("model '%s' version %s failed: %s", self.model.name, self.model.version, error_text(error))
        if self.trail is not None:
            self.trail.on_failure(error)


class NextAnswer(Protocol):
    """An answer that isn't the last one to its request: a `PartialAnswer`, or one from another process. `failure`: the
    error in its place, for a stream to write."""

    message: AnyMessage
    failure: Failure | None
    answer: AnyResponse | None

    def sent(self, size_bytes: int) -> None:
        """It has left, with so many bytes."""


class Call(InFlight):
    """A request with its own RPC, whose coroutine awaits `response`. Its caller gives up in `remaining_s`; None: never.
    The requests of a batch are started together, and their answers are made together, so the coroutine has little left
    to do when it is woken between others of gRPC's."""

    __slots__ = ("_done", "_inference", "_problem")

    def __init__(
        self,
        inference: InferenceSteps,
        message: AnyMessage,
        remaining_s: float | None,
        parent: TraceParent | None,
        passed: PassedHeaders,
    ) -> None:
        super().__init__(message, NEVER if remaining_s is None else answer_deadline_ns(remaining_s), parent, passed)
        self._inference = inference
        self._problem: BaseException | None = None
        self._done = _Done()
        self._done.call = self

    def on_failure(self, error: BaseException) -> None:
        self._problem = error

    # hot path: see bench/
    def on_done(self) -> None:
        done = self._done
        done.call = None
        if not done.done():
            done.set_result(None)

    # hot path: see bench/
    async def response(self) -> bytes:
        """The answer as it goes on the wire. Raises the error if the request fails. Cancelling this withdraws the
        request at once."""
        self._inference.announce(self)
        try:
            await self._done
            if self.answer is None and self._problem is None:
                self._inference.finish(self)
            if self._problem is not None:
                raise self._problem
            assert self.answer is not None
            return self.answer if isinstance(self.answer, bytes) else self.answer.SerializeToString()
        except asyncio.CancelledError:
            self.give_up()
            raise
        finally:
            # Break the cycle: the error's traceback holds this frame, and this frame, through the call, would hold the
            # error and what the request used. Shared memory would stay open until the garbage collector runs.
            self._problem = None
            del self

    def give_up(self) -> None:
        """Nobody waits for the answer any more; it may just have come."""
        self._problem = self._done.call = None
        self._inference.give_up(self)


class _Done(asyncio.Future[None]):
    """Withdraws the call the moment it is cancelled; a cancelled task cancels what it awaits."""

    call: Call | None = None

    def cancel(self, msg: object = None) -> bool:
        cancelled = super().cancel(msg)
        if cancelled and self.call is not None:
            self.call.give_up()
        return cancelled


class InferenceSteps(Protocol):
    """The steps of a request: `server.requests.inference`, or a front that passes requests on to another process."""

    @property
    def reads_parents(self) -> bool: ...

    def check_serving(self) -> None: ...

    def announce(self, flight: InFlight) -> None: ...

    def finish(self, flight: InFlight) -> None: ...

    def give_up(self, flight: InFlight) -> None: ...
