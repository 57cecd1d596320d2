"""Requests of models that get them one by one, which they may answer after the batch that they were in, and if they are
decoupled, as often as they like.

Lives here: their way from the batcher to their ends: answers are taken over from the instances' threads, made, and
handed to the caller's stream. Must not: write them, or know how a model is reached. The rules: a request ends once,
whoever ends it (its model, its batch, its caller, its deadline, the end of the model), and then its model is told and
nothing of it is kept; what the model has said of it before leaves before that.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from time import monotonic_ns
from typing import cast

from paceline.backends.errors import ExecutionError, ModelRefused
from paceline.backends.open_request import Answer, Channel, OpenRequest, Told
from paceline.backends.spec import Tensors
from paceline.scheduler.answering import notify
from paceline.scheduler.errors import DeadlineExceeded, ExecutionFailed, QueueFull
from paceline.scheduler.observer import Drop
from paceline.scheduler.policy import NEVER
from paceline.scheduler.request import AnyRequest as Waiting
from paceline.scheduler.request import BatchFacts, OnAnswers, SequenceStep
from paceline.server.codec.answers import Envelope
from paceline.server.codec.array_request import ArrayAnswer
from paceline.server.codec.codec import AnyResponse
from paceline.server.codec.known_requests import Targets
from paceline.server.codec.parameters import RequestOptions, is_reserved, of_those_there
from paceline.server.codec.steps import step_in
from paceline.server.codec.wire_request import AnyRequest
from paceline.server.errors import InvalidRequest, NotSupported, as_value
from paceline.server.memory.region_tensors import RegionTensor
from paceline.server.models.served_model import ServedModel
from paceline.server.requests.in_flight import AnswerInMaking, InFlight
from paceline.server.requests.pipelines import OpenedRequest, Pipelines

__all__ = ["Decoupled", "flights_of"]

_log = logging.getLogger("paceline.server.inference")

_ANSWERS_AT_ONCE, _BYTES_AT_ONCE = 8, 2**16
"""As many answers, or bytes, have left before the model is told of it. It waits for that only while far more are on
their way."""

_MOST_HELD = 16
"""A model that wants a request once more waits while so many answers are on their way to its caller."""

_MOST_AT_ONCE = 256
"""Answers made in one iteration of the event loop."""

_NO_OUTPUTS: Tensors = ()
"""The result of a request whose last answer was given before it ended."""

Conclude = Callable[[list[InFlight]], None]


class Decoupled:
    """`conclude` answers and counts requests that have ended, `conclude_silently` those that have ended without
    outputs. `make` makes answers that aren't the last, and returns for each why it can't."""

    def __init__(
        self,
        conclude: Conclude,
        conclude_silently: Conclude,
        make: Callable[[Sequence[AnswerInMaking]], Sequence[Exception | None]],
        pipelines: Pipelines,
    ) -> None:
        self._conclude = conclude
        self._conclude_silently = conclude_silently
        self._make = make
        self._pipelines = pipelines
        # What instances have said, and whether the loop will look at it; appended to on any thread.
        self._heard: deque[tuple[_Opened, Answer, bool]] = deque()
        self._looks_soon = False
        self._sequences = count(1)
        self._loop: asyncio.AbstractEventLoop

    def submit(self, flights: Sequence[InFlight]) -> Sequence[Exception | None]:
        """Hand requests that were read together to their model's batcher. Returns as `Batcher.submit`."""
        self._loop = asyncio.get_running_loop()
        model: ServedModel = flights[0].model
        assert model.open_requests is not None
        refused: dict[InFlight, Exception] = {}
        timed: list[_Opened] = []
        long: dict[InFlight, _Opened] = {}
        for flight in flights:
            opened = _Opened(self, flight)
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
                flight.payload = self._pipelines.run_of(flight, opened.inputs, opened)
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

    async def _submit_later(self, opened: _Opened) -> None:
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

    def _start_timer(self, opened: _Opened) -> None:
        """End a request in time that may be answered for ever, even if its caller doesn't."""
        flight = opened.flight
        if flight.deadline_ns < NEVER and not flight.ended:
            left_s = max(0, flight.deadline_ns - monotonic_ns()) / 1e9
            opened.timer = self._loop.call_later(left_s, self._on_late, flight)

    # hot path: on any thread
    def hear(self, opened: _Opened, answer: Answer, *, last: bool) -> None:
        self._heard.append((opened, answer, last))
        if not self._looks_soon:
            self._looks_soon = True
            with suppress(RuntimeError):  # the loop is closed: nobody waits for anything
                self._loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        # Cleared first: whoever appends from here on makes sure that this is called again.
        self._looks_soon = False
        # What isn't the last is made together, as far as it is of one model, before anything that follows it.
        more: list[_NextAnswer] = []
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
                    more.append(_NextAnswer(opened, cast("Tensors", answer)))
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

    def _end_or_fail(self, opened: _Opened, answer: Answer, *, last: bool) -> None:
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
                flight.on_more(_NextAnswer(opened, _NO_OUTPUTS), failed)
        elif answer is None:
            opened.count_answer(None, empty=True)
            flight.succeed(_NO_OUTPUTS)
        else:
            assert flight.options is not None
            flight.options = of_those_there(flight.options, answer)
            opened.count_answer(None)
            if type(answer) is Told:
                opened.count_finish(answer)
            flight.succeed(answer)

    # hot path
    def _hand_on(self, answers: Sequence[_NextAnswer]) -> None:
        """Make answers of one model that aren't the last ones, and hand them to their callers' streams."""
        try:
            errors = self._make(answers)
        except Exception as failure:  # noqa: BLE001 - the callers must get an answer
            errors = [failure] * len(answers)
        for answer, error in zip(answers, errors, strict=True):
            flight = answer.flight
            if flight.ended:
                continue  # by an answer before this one that couldn't be made
            answer.opened.count_answer(error)
            if error is not None:
                flight.fail(error)  # it can't be sent, and what follows it makes no sense without it
                notify([flight])
            else:
                answer.let_go()
                answer.opened.hold()
                flight.on_more(answer, None)

    def _on_late(self, flight: InFlight) -> None:
        # While it waits, the batcher looks after its deadline.
        if not (flight.ended or flight.waits):
            flight.fail(DeadlineExceeded("Deadline Exceeded: the model hasn't sent its last answer"))
            notify([flight])

    def _on_ended(self, flights: list[InFlight]) -> None:
        """Requests have ended, here or in the batcher, or their model wants them once more."""
        silent: list[InFlight] = []
        others: list[InFlight] = []
        for flight in flights:
            if not flight.ended:
                cast("_Opened", flight.payload).come_back()
                continue
            opened = cast("OpenedRequest", flight.payload)
            if flight.model.iterates and flight.step is not None:
                flight.model.batcher.end_sequence(flight.step.id)
            if isinstance(opened, _Opened):
                flight.payload = opened.own_inputs
            if flight.answered and type(flight.value) is Told and flight.options is not None:
                flight.options = replace(flight.options, plain=False)
            opened.let_go()
            flight.model.open_requests.discard(flight)
            if isinstance(opened, _Opened) and opened.on_ended not in (None, self._conclude):
                opened.on_ended([flight])
                continue
            (silent if flight.answered and flight.value is _NO_OUTPUTS else others).append(flight)
        if others:
            self._conclude(others)
        if silent:
            self._conclude_silently(silent)
        for flight in flights:
            if flight.gone:
                flight.let_go()


class _Opened(OpenRequest):
    """A request in flight, as instances see it. `timer` is for its deadline."""

    __slots__ = (
        "_answered_ns", "_answers", "_decoupled", "_held", "_unsaid", "_unsaid_bytes", "_waits_for_room",
        "flight", "on_ended", "options_of_more", "own_inputs", "streams", "timer",
    )  # fmt: skip

    def __init__(self, decoupled: Decoupled, flight: InFlight) -> None:
        message, options = flight.message, flight.options
        assert options is not None
        parameters = {
            key: getattr(value, kind)
            for key, value in message.parameters.items()
            if (kind := value.WhichOneof("parameter_choice")) is not None and not is_reserved(key)
        }
        # Those that lie in clients' shared memory are read before the model gets it.
        self.own_inputs = cast("Tensors", flight.payload)
        super().__init__(self.own_inputs, options.outputs, message.id, parameters)
        if flight.model.for_triton:
            step = flight.step or step_in(message)
            self.step = None if step is None else (*step,)
            self.timeout_us = flight.timeout_ns // 1_000
        if flight.model.generates is not None:
            self.deadline_ns = flight.deadline_ns
            if flight.timeout_ns:
                self.ends_ns = flight.arrived_ns + flight.timeout_ns
        self._decoupled = decoupled
        self.flight = flight
        self.takes_one = not flight.takes_more
        # Whether it may be answered more than once.
        self.streams = flight.model.decoupled or (flight.model.generates is not None and flight.takes_more)
        self.timer: asyncio.TimerHandle | None = None
        self.on_ended: OnAnswers | None = None
        # Of its last answer that wasn't the last of all.
        self.options_of_more: RequestOptions | None = None
        self._unsaid = self._unsaid_bytes = 0
        self._answers = self._held = 0
        self._waits_for_room = False
        self._answered_ns = self.arrived_ns = flight.arrived_ns

    def read(self) -> None:
        """Have a prompt read. Raises InvalidRequest or NotSupported for what can't be had. What lies in clients' shared
        memory, only the instance reads."""
        model = self.flight.model
        if model.generates is None or any(isinstance(one, RegionTensor) for one in self.inputs):
            return
        try:
            self.wanted = model.generates.read(self.inputs, self.parameters)
        except ModelRefused as error:
            raise self.refused(error) from None

    def refused(self, error: ModelRefused) -> Exception:
        kind = NotSupported if error.status == "UNIMPLEMENTED" else InvalidRequest
        return kind(f"model '{self.flight.model.name}': {error}")

    def begin_sequence(self, number: int) -> None:
        """Make it the first step of a sequence of its own, the `number`th. What its caller calls that, others may, too:
        it is only for the model."""
        step = self.flight.step
        self.step = ((step.id if step is not None else 0) or number, True, False)
        self.flight.step = SequenceStep(number, start=True)

    def come_back(self) -> None:
        """Its model wants it once more: at once, or when its caller has read enough of its answers."""
        self._waits_for_room = self._held >= _MOST_HELD
        if self._waits_for_room:
            return
        flight = self.flight
        assert self.step is not None
        assert flight.step is not None
        self.step, flight.step = (self.step[0], False, False), SequenceStep(flight.step.id)
        flight.timeout_ns = 0  # it was in time
        for refusal in flight.model.batcher.submit([flight]):
            if refusal is not None:
                flight.fail(refusal)
                notify([flight])

    def open(self, channel: Channel, number: int) -> None:
        self._answered_ns = monotonic_ns()
        super().open(channel, number)

    def on_answer(self, answer: Answer, *, last: bool) -> None:
        if last:
            self._channel = None
        self._decoupled.hear(self, answer, last=last)

    def hold(self) -> None:
        """Another answer is on its way."""
        self._held += 1

    def on_sent(self, size_bytes: int) -> None:
        """An answer isn't held any more. The model is told now and then."""
        self._held -= 1
        if self._waits_for_room and not self.flight.ended:
            self.come_back()
        self._unsaid += 1
        self._unsaid_bytes += size_bytes
        if self._unsaid >= _ANSWERS_AT_ONCE or self._unsaid_bytes >= _BYTES_AT_ONCE:
            self.sent(self._unsaid)
            self._unsaid = self._unsaid_bytes = 0

    def count_answer(self, error: Exception | None, *, empty: bool = False) -> None:
        """The request has another answer, or only its end."""
        if not self.streams:
            return
        totals, now_ns = self.flight.model.statistics.answers_of(self._answers), monotonic_ns()
        kind = totals.failed if error is not None else totals.empty if empty else totals.succeeded
        kind.add(now_ns - self._answered_ns)
        if not self._answers:
            self.flight.model.statistics.first_answers.add(now_ns - self.flight.arrived_ns)
        self._answers += 1
        self._answered_ns = now_ns

    def count_finish(self, answer: Told) -> None:
        """The request has its last answer, which says why it is that."""
        generations = self.flight.model.statistics.generations
        if generations is not None:
            duration_ns = monotonic_ns() - self.flight.arrived_ns
            generations.on_finish(str(answer.parameters.get("finish_reason", "")), duration_ns)

    def let_go(self) -> None:
        """The request has ended."""
        if self.streams and self.flight.cancelled() and self._number:
            statistics = self.flight.model.statistics
            statistics.answers_of(self._answers).cancelled.add(monotonic_ns() - self._answered_ns)
        if self.timer is not None:
            self.timer.cancel()
        self.cancel()
        self.inputs = self.own_inputs = ()
        self.wanted = None


def flights_of(requests: Sequence[object]) -> list[InFlight]:
    """What those of `requests` are here that somebody has sent."""
    return [one.flight for one in requests if isinstance(one, _Opened)]


class _NextAnswer:
    """An answer that isn't the last one to its request: `Answerable`, until its `answer` is made."""

    __slots__ = ("answer", "flight", "opened", "options", "outputs", "value")

    def __init__(self, opened: _Opened, outputs: Tensors) -> None:
        self.opened = opened
        self.flight = opened.flight
        self.value = outputs
        options = self.flight.options
        assert options is not None
        if outputs:
            options = opened.options_of_more = of_those_there(options, outputs, opened.options_of_more)
        self.options: RequestOptions = replace(options, plain=False) if type(outputs) is Told else options
        self.answer: AnyResponse | None = None
        self.outputs = ArrayAnswer()

    @property
    def facts(self) -> BatchFacts | None:
        return self.flight.facts

    @property
    def message(self) -> AnyRequest:
        return self.flight.message

    @property
    def model(self) -> ServedModel:
        return cast("ServedModel", self.flight.model)

    @property
    def takes_arrays(self) -> bool:
        return self.flight.takes_arrays

    @property
    def targets(self) -> Targets:
        return self.flight.targets

    @property
    def envelope(self) -> Envelope | None:
        return self.flight.envelope_of_more

    def sent(self, size_bytes: int) -> None:
        self.opened.on_sent(size_bytes)

    def let_go(self) -> None:
        """Nothing of it but what was made is needed any more."""
        self.value = ()
