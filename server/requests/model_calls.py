"""Calls of Python models to other models: each is a request like any other.

Lives here: from a call to a request and back, and what a call takes over from the requests that it is made for. Must
not: how calls travel (`backends.model_call`), or the way of a request. The rules: a call has no longer than those that
wait for it, and is withdrawn when none of them is left; none waits for what waits for it; whatever becomes of one, its
model is told.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic_ns
from typing import cast

from paceline.backends.model_call import ModelCall
from paceline.scheduler.policy import NEVER
from paceline.server.models.callers import Caller
from paceline.server.models.model_lookup import ModelLookup
from paceline.server.requests.call_waits import CallWaits, MadeCall
from paceline.server.requests.in_flight import AnswerInMaking, InFlight, NextAnswer
from paceline.server.requests.inference import Inference
from paceline.server.requests.inner_request import InnerRequest, array_request, status_and_text
from paceline.server.requests.open_flight import flights_of

__all__ = ["ModelCalls"]

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
        self._inference = inference
        self._waits = CallWaits()
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
        waiting = _those_waiting(call)
        if waiting and all(one.ended for one in waiting):
            call.fail("CANCELLED", _UNWANTED.format(call.model))
            return
        deadline_ns = max((one.deadline_ns for one in waiting), default=NEVER)
        if call.timeout_ns:
            deadline_ns = min(deadline_ns, monotonic_ns() + call.timeout_ns)
        under_way = _UnderWay(call, waiting, self._inference, self._on_end)
        flight = under_way.flight = InnerRequest(
            array_request(
                model, call.inputs, version=call.version, outputs=call.outputs, id=call.id, parameters=call.parameters
            ),
            under_way.on_end,
            deadline_ns=deadline_ns,
            made_for=_made_for(waiting),
            on_next=under_way.on_next if call.takes_more else None,
        )
        # Who answers its requests later keeps no instance waiting.
        if made_for := _executing(call) if call.executing or call.beside else ():
            made = under_way.made = MadeCall(call.caller, made_for, model, flight, under_way.refuse, call.beside)
            self._waits.add(made)
            if model.pipeline is not None:
                self._inference.pipelines.on_step = self._on_step
            if not call.beside and self._waits.is_stuck(made):
                under_way.refuse()
                return
            if call.beside:
                self._be_patient(under_way)
        if deadline_ns < NEVER:
            left_s = max(0, deadline_ns - monotonic_ns()) / 1e9
            under_way.timer = self._loop.call_later(left_s, under_way.on_late)
        call.taken_by(
            on_cancel=lambda: self._do(under_way.withdraw),
            on_read=lambda n: self._do(lambda: under_way.on_read(n)),
            on_call_off=lambda: self._do(under_way.on_call_off),
        )
        # Not by way of whether the server serves: what waits for this was accepted.
        self._inference.announce_to(model, flight)
        if call.cancelled:
            under_way.withdraw()

    def _on_step(self) -> None:
        """An ensemble that somebody may have called has begun a step, and is in the middle of it."""
        self._inference.pipelines.on_step = None
        self._loop.call_soon(self._look_through)

    def _look_through(self) -> None:
        calls = self._waits.of_ensembles
        if calls:
            self._inference.pipelines.on_step = self._on_step
        for made in calls:
            if not made.beside and self._waits.is_stuck(made):
                made.refuse()

    def _be_patient(self, under_way: _UnderWay) -> None:
        under_way.patience = self._loop.call_later(_PATIENCE_S, self._on_long_wait, under_way)

    def _on_long_wait(self, under_way: _UnderWay) -> None:
        """A call that its execution may wait for hasn't ended for long. That may be why, or become the reason yet."""
        assert under_way.made is not None
        if self._waits.is_stuck(under_way.made, beside=True):
            under_way.refuse()
        else:
            self._be_patient(under_way)

    def _on_end(self, made: MadeCall) -> None:
        """A call of an execution has ended; that may be all that the others have waited for."""
        self._waits.discard(made)
        for other in self._waits.others(made):
            if self._waits.is_stuck(other):
                other.refuse()
                break  # that lets the execution go on


class _UnderWay:
    """A call whose request hasn't ended, for those `waiting`. `made`: by which execution, if by any; `on_end` is told
    when it has ended. `timer` is for its deadline, `patience` for what may wait for ever. Everything on the event
    loop."""

    __slots__ = ("_call", "_inference", "_on_end", "_unread", "_waiting", "flight", "made", "patience", "timer")

    def __init__(
        self,
        call: ModelCall,
        waiting: Sequence[InFlight],
        inference: Inference,
        on_end: Callable[[MadeCall], None],
    ) -> None:
        self._call = call
        self._waiting = waiting
        self._inference = inference
        self._on_end = on_end
        # Answers that the calling code hasn't read, with their sizes.
        self._unread: deque[tuple[NextAnswer, int]] = deque()
        self.flight: InnerRequest | None = None
        self.made: MadeCall | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.patience: asyncio.TimerHandle | None = None

    def on_end(self, flight: InnerRequest) -> None:
        self._let_go()
        if flight.error is not None:
            _fail(self._call, flight.error)
        elif flight.outputs or not self._call.takes_more:
            self._call.answer(flight.outputs, last=True)
        else:
            self._call.answer(None, last=True)

    def on_next(self, flight: InnerRequest, answer: AnswerInMaking, error: Exception | None) -> None:
        outputs = answer.outputs
        self._unread.append((answer, sum(array.nbytes for array in outputs.values())))
        if error is not None:
            _fail(self._call, error, last=False)
        else:
            self._call.answer(outputs, last=False)

    def on_read(self, answers: int) -> None:
        for _ in range(min(answers, len(self._unread))):
            answer, size_bytes = self._unread.popleft()
            answer.sent(size_bytes)

    def on_call_off(self) -> None:
        if self._waiting and all(one.ended for one in self._waiting) and self.flight is not None:
            self._call.fail("CANCELLED", _UNWANTED.format(self._call.model))
            self.withdraw()

    def on_late(self) -> None:
        name = self._call.model
        self._call.fail("DEADLINE_EXCEEDED", f"model '{name}': Deadline Exceeded: its answer to the call is late")
        self.withdraw()

    def refuse(self) -> None:
        """It can't be answered before what waits for it."""
        self._call.fail("RESOURCE_EXHAUSTED", _STUCK.format(self._call.model))
        self.withdraw()

    def withdraw(self) -> None:
        """Nobody waits for the answer any more."""
        flight = self.flight
        if flight is not None:
            self._let_go()
            self._inference.give_up(flight)

    def _let_go(self) -> None:
        self.flight, self._waiting = None, ()
        self._call.let_go()
        for timer in (self.timer, self.patience):
            if timer is not None:
                timer.cancel()
        made, self.made = self.made, None
        if made is not None:
            self._on_end(made)


def _fail(call: ModelCall, error: BaseException, *, last: bool = True) -> None:
    status, text = status_and_text(error, call.model)
    call.fail(status.name, text, last=last)


def _those_waiting(call: ModelCall) -> Sequence[InFlight]:
    """The requests that the call is made for, as far as is known."""
    if call.executing:
        return _executing(call)
    return flights_of(call.open_requests)


def _executing(call: ModelCall) -> Sequence[InFlight]:
    caller: Caller | None = call.caller
    return cast("Sequence[InFlight]", caller.executing()) if caller is not None else ()


def _made_for(waiting: Sequence[InFlight]) -> InFlight | None:
    """What traces of the call belong to: the first of the requests that has spans, or else the first."""
    watched = (one for one in waiting if one.trail is not None and one.trail.as_parent is not None)
    return next(watched, waiting[0] if waiting else None)
