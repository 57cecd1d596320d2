"""Calls of Python models to other models: each is a request like any other.

Lives here: from a call to a request and back, what a call takes over from the requests that it is made for, and which
calls can't be answered before what waits for them ends: those of a model that calls itself while all its instances
wait, or of a cycle of several models, ensembles among them. Must not: how calls travel (`backends.model_call`), or the
way of a request. The rules: a call has no longer than those that wait for it, and is withdrawn when none of them is
left; none waits for what waits for it; whatever becomes of one, its model is told.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from time import monotonic_ns
from typing import NamedTuple, cast

from paceline.backends.model_call import ModelCall
from paceline.scheduler.policy import NEVER
from paceline.scheduler.request import AnyRequest
from paceline.scheduler.runner import AnyRunner
from paceline.server.codec.array_request import ArrayRequest
from paceline.server.models.model_instances import Caller
from paceline.server.models.model_lookup import ModelLookup
from paceline.server.models.served_model import ServedModel
from paceline.server.requests.in_flight import InFlight, failure_of
from paceline.server.requests.inference import Inference
from paceline.server.requests.inner_request import InnerRequest, array_request
from paceline.server.requests.open_flight import OpenFlight, PartialAnswer

_log = logging.getLogger("paceline.server.calls")

_PATIENCE_S = 10.0
"""Each time that this has passed, a call by a thread of the model's own is looked at as one that its execution waits
for. One that just begins may be answered when that ends, which it does by itself if it doesn't wait."""
_UNWANTED = "the call of model '{}' is withdrawn: nobody waits any more for what it was made for"
_STUCK = (
    "model '{}' can't answer this call: all its instances wait, directly or through other models, for calls that wait "
    "for this one; it needs more instances (instance_group), or code that doesn't call itself"
)


class ModelCalls:
    """Answers calls by models of `repository`, on the event loop that `start` was called on."""

    def __init__(self, repository: ModelLookup, inference: Inference) -> None:
        self._repository = repository
        self.inference = inference
        self._waits = _CallWaits()
        # What is to be done on the loop, and whether it will look; appended to on any thread.
        self._heard: deque[Callable[[], object]] = deque()
        self._looks_soon = False
        self._loop: asyncio.AbstractEventLoop

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()

    # hot path: on any thread
    def take(self, call: ModelCall) -> None:
        """`OnCall`."""
        self._do(lambda: self._begin(call))

    def _do(self, what: Callable[[], object]) -> None:
        self._heard.append(what)
        if not self._looks_soon:
            self._looks_soon = True
            with suppress(RuntimeError):  # the loop is closed, and the models' processes are about to end
                self._loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        # Cleared first: whoever appends from here on makes sure that this is called again.
        self._looks_soon = False
        while self._heard:
            try:
                self._heard.popleft()()
            except Exception:  # noqa: BLE001 - logged; other calls must go on
                _log.exception("a call of a model could not be dealt with")

    def _begin(self, call: ModelCall) -> None:
        if call.cancelled:
            return
        try:
            self._announce(call)
        except Exception as error:  # noqa: BLE001 - the caller must get an answer
            _fail(call, error)

    def _announce(self, call: ModelCall) -> None:
        model = self._repository.get(call.model, call.version)
        caller: Caller | None = call.caller
        # Who answers its requests later keeps no instance waiting.
        executing = caller.executing() if caller is not None and (call.executing or call.beside) else ()
        if call.executing:
            waiting = cast("Sequence[InFlight]", executing)
        else:
            waiting = [one.flight for one in call.open_requests if isinstance(one, OpenFlight)]
        if waiting and all(one.ended for one in waiting):
            call.fail("CANCELLED", _UNWANTED.format(call.model))
            return
        deadline_ns = max((one.deadline_ns for one in waiting), default=NEVER)
        if call.timeout_ns:
            deadline_ns = min(deadline_ns, monotonic_ns() + call.timeout_ns)
        message = array_request(
            model, call.inputs, version=call.version, outputs=call.outputs, id=call.id, parameters=call.parameters
        )
        under_way = _UnderWay(call, waiting, executing, self)
        flight = under_way.flight = InnerRequest(
            message,
            under_way.on_end,
            deadline_ns=deadline_ns,
            made_for=_made_for(waiting),
            on_next=under_way.on_next if call.takes_more else None,
        )
        flight.model = model
        if executing:
            self._waits.add(under_way)
            if model.pipeline is not None:
                self.inference.pipelines.on_step = self._on_step
            if call.beside:
                self._be_patient(under_way)
            elif self._waits.is_stuck(under_way):
                under_way.refuse()
                return
        if deadline_ns < NEVER:
            left_s = max(0, deadline_ns - monotonic_ns()) / 1e9
            under_way.timer = self._loop.call_later(left_s, under_way.on_late)
        call.taken_by(
            on_cancel=lambda: self._do(under_way.withdraw),
            on_read=lambda n: self._do(lambda: under_way.on_read(n)),
            on_call_off=lambda: self._do(under_way.on_call_off),
        )
        # Not by way of whether the server serves: what waits for this was accepted.
        self.inference.announce_to(model, flight)
        if call.cancelled:
            under_way.withdraw()

    def _on_step(self) -> None:
        """An ensemble that somebody may have called has begun a step, and is in the middle of it."""
        self.inference.pipelines.on_step = None
        self._loop.call_soon(self._look_through)

    def _look_through(self) -> None:
        calls = self._waits.of_ensembles()
        if calls:
            self.inference.pipelines.on_step = self._on_step
        for one in calls:
            if not one.call.beside and self._waits.is_stuck(one):
                one.refuse()

    def _be_patient(self, under_way: _UnderWay) -> None:
        under_way.patience = self._loop.call_later(_PATIENCE_S, self._on_long_wait, under_way)

    def _on_long_wait(self, under_way: _UnderWay) -> None:
        """A call that its execution may wait for hasn't ended for long. That may be why, or become the reason yet."""
        if self._waits.is_stuck(under_way, beside=True):
            under_way.refuse()
        else:
            self._be_patient(under_way)

    def on_end(self, ended: _UnderWay) -> None:
        """A call has ended; that may be all that the others of its execution have waited for."""
        if not ended.executing:
            return
        self._waits.discard(ended)
        for other in self._waits.of(ended.call.caller.runner, ended.executing):
            if self._waits.is_stuck(other):
                other.refuse()
                break  # that lets the execution go on


class _UnderWay:
    """A call whose request hasn't ended, for those `waiting`; made by the execution of the requests `executing`, if by
    any. `timer` is for its deadline, `patience` for what may wait for ever. Everything on the event loop."""

    __slots__ = ("_calls", "_unread", "_waiting", "call", "executing", "flight", "patience", "timer")

    def __init__(
        self, call: ModelCall, waiting: Sequence[InFlight], executing: Sequence[AnyRequest], calls: ModelCalls
    ) -> None:
        self.call = call
        self.executing = executing
        self._waiting = waiting
        self._calls = calls
        # Answers that the calling code hasn't read, with their sizes.
        self._unread: deque[tuple[PartialAnswer, int]] = deque()
        self.flight: InnerRequest | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.patience: asyncio.TimerHandle | None = None

    def on_end(self, flight: InnerRequest) -> None:
        self._let_go()
        if flight.error is not None:
            _fail(self.call, flight.error)
        else:
            outputs = flight.outputs if flight.outputs or not self.call.takes_more else None
            self.call.answer(outputs, flight.outputs.parameters, last=True)

    def on_next(self, flight: InnerRequest, answer: PartialAnswer, error: Exception | None) -> None:
        outputs = answer.outputs
        self._unread.append((answer, sum(array.nbytes for array in outputs.values())))
        if error is not None:
            _fail(self.call, error, last=False)
        else:
            self.call.answer(outputs, outputs.parameters, last=False)

    def on_read(self, answers: int) -> None:
        for _ in range(min(answers, len(self._unread))):
            answer, size_bytes = self._unread.popleft()
            answer.sent(size_bytes)

    def on_call_off(self) -> None:
        if self._waiting and all(one.ended for one in self._waiting):
            self._withdraw("CANCELLED", _UNWANTED.format(self.call.model))

    def on_late(self) -> None:
        text = f"model '{self.call.model}': Deadline Exceeded: its answer to the call is late"
        self._withdraw("DEADLINE_EXCEEDED", text)

    def refuse(self) -> None:
        """It can't be answered before what waits for it."""
        self._withdraw("RESOURCE_EXHAUSTED", _STUCK.format(self.call.model))

    def _withdraw(self, status: str, text: str) -> None:
        if self.flight is not None:
            self.call.fail(status, text)
            self.withdraw()

    def withdraw(self) -> None:
        """Nobody waits for the answer any more."""
        flight = self.flight
        if flight is not None:
            self._let_go()
            self._calls.inference.give_up(flight)

    def _let_go(self) -> None:
        self.flight, self._waiting = None, ()
        self.call.let_go()
        for timer in (self.timer, self.patience):
            if timer is not None:
                timer.cancel()
        self._calls.on_end(self)
        self.executing = ()


class _Wait(NamedTuple):
    """What a request waits for at `model`: the end of any of the executions of `runners`, or of `all` of them; without
    any, for nothing that is known here."""

    model: ServedModel
    runners: tuple[AnyRunner, ...]
    all: bool = False

    def ends(self, stuck: set[AnyRunner]) -> bool:
        if not self.runners:
            return True
        on = (runner not in stuck for runner in self.runners)
        return all(on) if self.all else any(on)


class _CallWaits:
    """The calls under way that belong to executions, by their runners. An execution with calls under way is taken to
    wait for them, and goes on as soon as one of them is answered. What is found never changes by itself, so it is
    enough to look when a call begins, when one of several has ended, and when a step of a called ensemble begins."""

    def __init__(self) -> None:
        self._calls: dict[AnyRunner, list[_UnderWay]] = {}

    def add(self, one: _UnderWay) -> None:
        self._calls.setdefault(one.call.caller.runner, []).append(one)

    def discard(self, one: _UnderWay) -> None:
        calls = self._calls[one.call.caller.runner]
        calls.remove(one)
        if not calls:
            del self._calls[one.call.caller.runner]

    def of_ensembles(self) -> list[_UnderWay]:
        """The calls of ensembles."""
        every = [one for calls in self._calls.values() for one in calls]
        return [one for one in every if one.flight is not None and one.flight.model.pipeline is not None]

    def of(self, runner: AnyRunner, requests: Sequence[AnyRequest], *, beside: bool = False) -> list[_UnderWay]:
        """The calls of the execution of `requests`; those of earlier ones aren't waited for any more. With `beside`,
        also those of which it isn't known."""
        calls = (one for one in self._calls.get(runner, ()) if one.executing is requests)
        return [one for one in calls if beside or not one.call.beside]

    def is_stuck(self, one: _UnderWay, *, beside: bool = False) -> bool:
        """Whether it can't be answered before an execution has ended that waits for it. With `beside`, executions are
        taken to wait for those calls, too."""
        if one.flight is None:
            return False
        # All executions that it depends on are stuck until something says that they can go on.
        wanted, waits = _wait(one.flight), dict[AnyRunner, list[_Wait]]()
        unseen = [wanted]
        while unseen:
            wait = unseen.pop()
            for runner in wait.runners:
                if runner not in waits:
                    waits[runner] = self._waits_of(wait.model, runner, beside=beside)
                    unseen += waits[runner]
        stuck = {*waits}
        while free := {one for one in stuck if not waits[one] or any(wait.ends(stuck) for wait in waits[one])}:
            stuck -= free
        return not wanted.ends(stuck)

    def _waits_of(self, model: ServedModel, runner: AnyRunner, *, beside: bool) -> list[_Wait]:
        """What the execution of `runner` waits for: its calls or, of an ensemble, its steps."""
        requests = model.batcher.executing(runner)
        if model.pipeline is not None:
            return [_wait(step) for one in requests for step in one.payload.under_way]
        return [_wait(one.flight) for one in self.of(runner, requests, beside=beside) if one.flight is not None]


def _wait(flight: InnerRequest) -> _Wait:
    """What the request waits for now."""
    model: ServedModel = flight.model
    executions = {runner: model.batcher.executing(runner) for runner in model.instances.runners}
    for runner, requests in executions.items():
        if flight in requests or _precede(requests, flight):
            return _Wait(model, (runner,))
    if not all(executions.values()):
        return _Wait(model, ())  # an instance is idle, and about to take it
    return _Wait(model, (*executions,), all=model.batcher.policy.preserve_ordering)


def _precede(requests: Iterable[AnyRequest], flight: InnerRequest) -> bool:
    """Whether one of `requests` is an earlier step of its sequence."""
    step = flight.message.step if isinstance(flight.message, ArrayRequest) else None
    return step is not None and any(one.step is not None and one.step.id == step.id for one in requests)


def _fail(call: ModelCall, error: BaseException, *, last: bool = True) -> None:
    status, text = failure_of(error, call.model, f"a request to model '{call.model}'")
    call.fail(status.name, text, last=last)


def _made_for(waiting: Sequence[InFlight]) -> InFlight | None:
    """What traces of the call belong to: the first of the requests that has spans, or else the first."""
    watched = (one for one in waiting if one.trail is not None and one.trail.as_parent is not None)
    return next(watched, waiting[0] if waiting else None)
