"""Requests of models that get them one by one, which they may answer after the batch that they were in, and if they are
decoupled, as often as they like.

Lives here: their way from the batcher to their ends: answers are taken over from the instances' threads, made, and
handed to the caller's stream. Must not: write them, or know how a model is reached. The rules: a request ends once,
whoever ends it (its model, its batch, its caller, its deadline, the end of the model), and then its model is told and
nothing of it is kept; what the model has said of it before leaves before that.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from time import monotonic_ns
from typing import cast

from paceline.backends.errors import ExecutionError, ModelRefused
from paceline.backends.open_request import Answer, Told
from paceline.backends.spec import Tensors
from paceline.scheduler.answering import notify
from paceline.scheduler.errors import DeadlineExceeded, ExecutionFailed, QueueFull
from paceline.scheduler.observer import Drop
from paceline.scheduler.policy import NEVER
from paceline.scheduler.request import AnyRequest as Waiting
from paceline.server.codec.parameters import of_those_there
from paceline.server.errors import InvalidRequest, NotSupported, as_value
from paceline.server.models.served_model import ServedModel
from paceline.server.requests.in_flight import InFlight
from paceline.server.requests.open_flight import OpenFlight, PartialAnswer
from paceline.server.requests.pipelines import PipelineRun, Pipelines

_MOST_AT_ONCE = 256
"""Answers made in one iteration of the event loop."""

_NO_OUTPUTS: Tensors = ()
"""The result of a request whose last answer was made, or even given, before it ended."""

Conclude = Callable[[list[InFlight]], None]


class Decoupled:
    """`conclude` answers and counts requests that have ended, `conclude_made` those whose answers are made, or that
    have ended without outputs. `make` makes answers, and returns for each why it can't."""

    def __init__(
        self,
        conclude: Conclude,
        conclude_made: Conclude,
        make: Callable[[Sequence[InFlight | PartialAnswer]], Sequence[Exception | None]],
        pipelines: Pipelines,
    ) -> None:
        self._conclude = conclude
        self._conclude_made = conclude_made
        self._make = make
        self._pipelines = pipelines
        # What instances have said, and whether the loop will look at it; appended to on any thread.
        self._heard: deque[tuple[OpenFlight, Answer, bool]] = deque()
        self._looks_soon = False
        self._sequences = count(1)
        self._loop: asyncio.AbstractEventLoop

    def submit(self, flights: Sequence[InFlight]) -> Sequence[Exception | None]:
        """Hand requests that were read together to their model's batcher. Returns as `Batcher.submit`."""
        self._loop = asyncio.get_running_loop()
        model: ServedModel = flights[0].model
        assert model.open_requests is not None
        # Each request is `refused`, or goes to the batcher: now or, if it is `long`, once its text has become tokens.
        # The batcher may refuse it, too, so timers are started last.
        refused: dict[InFlight, Exception] = {}
        timed: list[OpenFlight] = []
        long: dict[InFlight, OpenFlight] = {}
        for flight in flights:
            opened = OpenFlight(flight, self.hear)
            try:
                opened.read()
                model.open_requests.add(flight)
            except (InvalidRequest, NotSupported) as error:
                refused[flight] = error
                continue
            except QueueFull as error:
                model.statistics.on_drop(Drop.FULL_REQUESTS)
                refused[flight] = error
                continue
            flight.payload = opened
            if model.iterates:
                opened.begin_sequence(next(self._sequences))
            opened.on_ended, flight.on_answers = flight.on_answers, self._on_ended
            if model.pipeline is not None:
                flight.payload = PipelineRun(self._pipelines, flight, opened.own_inputs, opened)
            if not model.for_triton:
                # Each has arrays of its own, so requests of any shapes share a batch. Models written for Triton may
                # join them themselves.
                flight.key = ()
            if opened.streams:
                flight.on_open()
            if opened.streams or model.generates is not None:
                timed.append(opened)
            if opened.wanted is not None and opened.wanted.prompt is None:
                long[flight] = opened
        put_off = refused.keys() | long.keys()
        taken = [flight for flight in flights if flight not in put_off] if put_off else flights
        for flight, refusal in zip(taken, model.batcher.submit(taken) if taken else (), strict=False):
            if refusal is not None:
                model.open_requests.discard(flight)
                refused[flight] = refusal
        for opened in timed:
            if opened.flight not in refused:
                self._start_timer(opened)
        for flight, opened in long.items():
            flight.batcher = self
            model.in_parts(asyncio.ensure_future(self._submit_later(opened)))
        return [refused.get(flight) for flight in flights] if refused else ()

    async def _submit_later(self, opened: OpenFlight) -> None:
        """Make a prompt of a long text on a thread, and hand the request to the batcher. Until then, this stands for
        that."""
        flight, model = opened.flight, opened.flight.model
        try:
            opened.wanted = await asyncio.to_thread(model.generates.with_prompt, opened.wanted)
            refusals: Sequence[Exception | None] = () if flight.ended else model.batcher.submit([flight])
        except ModelRefused as error:
            refusals = [opened.refused(error)]
        except Exception as error:  # noqa: BLE001 - the caller must get an answer
            refusals = [as_value(error)]
        for refusal in refusals:
            if refusal is not None and not flight.ended:
                flight.fail(refusal)
                notify([flight])

    def on_cancel(self, request: Waiting) -> None:
        """Learn that the caller of a request has gone, which the batcher hasn't got yet."""
        cast("InFlight", request).model.statistics.on_drop(Drop.CANCELLED)
        self._loop.call_soon(lambda: notify([request]))

    def _start_timer(self, opened: OpenFlight) -> None:
        """End a request in time that may be answered for ever, even if its caller doesn't."""
        flight = opened.flight
        if flight.deadline_ns < NEVER and not flight.ended:
            left_s = max(0, flight.deadline_ns - monotonic_ns()) / 1e9
            opened.timer = self._loop.call_later(left_s, self._on_late, flight)

    # hot path: on any thread
    def hear(self, opened: OpenFlight, answer: Answer, last: bool) -> None:
        self._heard.append((opened, answer, last))
        if not self._looks_soon:
            self._looks_soon = True
            with suppress(RuntimeError):  # the loop is closed: nobody waits for anything
                self._loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        # Cleared first: whoever appends from here on makes sure that this is called again.
        self._looks_soon = False
        # What isn't the last is made together, as far as it is of one model, before anything that follows it.
        more: list[PartialAnswer] = []
        for _ in range(min(len(self._heard), _MOST_AT_ONCE)):
            opened, answer, last = self._heard.popleft()
            flight = opened.flight
            is_more = not (last or answer is None or isinstance(answer, Exception))
            if more and not (is_more and flight.model is more[0].flight.model):
                self._hand_on(more)
                more = []
            if flight.ended:
                continue
            try:
                if is_more:
                    more.append(PartialAnswer(opened, cast("Tensors", answer)))
                elif isinstance(answer, Exception) or last:
                    self._end_or_fail(opened, answer, last=last)
            except Exception as error:  # noqa: BLE001 - the caller must get an answer
                flight.fail(error)
            if flight.ended:
                notify([flight])
        if more:
            self._hand_on(more)
        if self._heard and not self._looks_soon:
            self._looks_soon = True
            self._loop.call_soon(self._look)

    def _end_or_fail(self, opened: OpenFlight, answer: Answer, *, last: bool) -> None:
        """An error, or what ends the request."""
        flight = opened.flight
        if isinstance(answer, ExecutionError):
            failed: Exception = answer
            if not isinstance(answer, ModelRefused):
                failed = ExecutionFailed(str(answer))
                failed.__cause__ = answer
            opened.count_answer(failed)
            if last:
                flight.fail(failed)
            else:
                opened.hold()
                flight.on_more(PartialAnswer(opened, _NO_OUTPUTS), failed)
        elif answer is None:
            opened.count_answer(None, empty=True)
            flight.succeed(_NO_OUTPUTS)
        else:
            assert flight.options is not None
            flight.options = of_those_there(flight.options, answer)
            if type(answer) is Told:
                opened.count_finish(answer)
            error = None
            if opened.streams:
                # Made now, as the others are: whether it can be is counted.
                flight.value = answer
                (error,) = self._made((flight,))
                answer = _NO_OUTPUTS
            opened.count_answer(error)
            if error is None:
                flight.succeed(answer)
            else:
                flight.fail(error)

    # hot path
    def _hand_on(self, answers: Sequence[PartialAnswer]) -> None:
        """Make answers of one model that aren't the last ones, and hand them to their callers' streams."""
        for answer, error in zip(answers, self._made(answers), strict=True):
            flight = answer.flight
            if flight.ended:
                continue  # by an answer before this one that couldn't be made
            if error is None:
                answer.let_go()
                answer.opened.hold()
                try:
                    flight.on_more(answer, None)
                except Exception as failure:  # noqa: BLE001 - the caller must get an answer, and others theirs
                    error = as_value(failure)
            answer.opened.count_answer(error)
            if error is not None:
                flight.fail(error)  # it can't be sent, and what follows it makes no sense without it
                notify([flight])

    def _made(self, answers: Sequence[InFlight | PartialAnswer]) -> Sequence[Exception | None]:
        try:
            return self._make(answers)
        except Exception as failure:  # noqa: BLE001 - the callers must get an answer
            return [failure] * len(answers)

    def _on_late(self, flight: InFlight) -> None:
        # While it waits, the batcher looks after its deadline.
        if not (flight.ended or flight.waits):
            flight.fail(DeadlineExceeded("Deadline Exceeded: the model hasn't sent its last answer"))
            notify([flight])

    def _on_ended(self, flights: list[InFlight]) -> None:
        """Requests have ended, here or in the batcher, or their model wants them once more."""
        made: list[InFlight] = []
        others: list[InFlight] = []
        for flight in flights:
            if not flight.ended:
                cast("OpenFlight", flight.payload).come_back()
                continue
            opened = cast("OpenFlight | PipelineRun", flight.payload)
            if flight.model.iterates and flight.step is not None:
                flight.model.batcher.end_sequence(flight.step.id)
            if isinstance(opened, OpenFlight):
                flight.payload = opened.own_inputs
            opened.let_go()
            flight.model.open_requests.discard(flight)
            if isinstance(opened, OpenFlight) and opened.on_ended not in (None, self._conclude):
                opened.on_ended([flight])
                continue
            (made if flight.answered and flight.value is _NO_OUTPUTS else others).append(flight)
        if others:
            self._conclude(others)
        if made:
            self._conclude_made(made)
        for flight in flights:
            if flight.gone:
                flight.let_go()
