"""A request that its model has by itself, and the answers to it that aren't its last.

Lives here: such a request as instances see it, what its caller has been sent of it, and when its model is told. Must
not: make answers, end requests, or wait for anything. The rule: on the event loop alone, but for `on_answer`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic_ns
from typing import cast

from paceline.backends.errors import ModelRefused
from paceline.backends.open_request import Answer, Channel, OpenRequest, Told
from paceline.backends.spec import Tensors
from paceline.scheduler.answering import notify
from paceline.scheduler.request import BatchFacts, OnAnswers, SequenceStep
from paceline.server.codec.array_request import ArrayAnswer
from paceline.server.codec.codec import AnyResponse
from paceline.server.codec.known_requests import Targets
from paceline.server.codec.parameters import RequestOptions, is_reserved, of_those_there
from paceline.server.codec.wire_request import step_in
from paceline.server.errors import InvalidRequest, NotSupported
from paceline.server.memory.region_tensors import RegionTensor
from paceline.server.models.served_model import ServedModel
from paceline.server.requests.in_flight import Failure, InFlight

_ANSWERS_AT_ONCE, _BYTES_AT_ONCE = 8, 2**16
"""As many answers, or bytes, have left before the model is told of it. It waits for that only while far more are on
their way."""

_MOST_HELD = 16
"""A model that wants a request once more waits while so many answers are on their way to its caller."""

Hear = Callable[["OpenFlight", Answer, bool], None]
"""Takes an answer, and whether it is the last."""


class OpenFlight(OpenRequest):
    """A request in flight, as instances see it. `timer` is for its deadline. `hear` is told of its answers, on any
    thread."""

    __slots__ = (
        "_answered_ns", "_answers", "_hear", "_held", "_unsaid", "_unsaid_bytes", "_waits_for_room",
        "flight", "on_ended", "options_of_more", "own_inputs", "streams", "timer",
    )  # fmt: skip

    def __init__(self, flight: InFlight, hear: Hear) -> None:
        message, options = flight.message, flight.options
        assert options is not None
        parameters = {
            key: getattr(value, kind)
            for key, value in message.parameters.items()
            if (kind := value.WhichOneof("parameter_choice")) is not None and not is_reserved(key)
        }
        # Those that lie in clients' shared memory are read before the model gets it.
        self.own_inputs = cast("Tensors", flight.payload)
        super().__init__((), options.outputs, message.id, parameters)
        self.given = self.own_inputs
        if flight.model.for_triton:
            step = flight.step or step_in(message)
            self.step = None if step is None else (*step,)
            self.timeout_us = flight.timeout_ns // 1_000
        if flight.model.generates is not None:
            self.deadline_ns = flight.deadline_ns
            if flight.timeout_ns:
                self.ends_ns = flight.arrived_ns + flight.timeout_ns
        self._hear = hear
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
        if model.generates is None or any(isinstance(one, RegionTensor) for one in self.own_inputs):
            return
        try:
            self.wanted = model.generates.read(self.own_inputs, self.parameters)
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
        self._hear(self, answer, last)

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
        self.own_inputs = ()
        if self.step is None:  # else its instance takes it all the same
            self.given = ()
        self.wanted = None


class PartialAnswer:
    """An answer that isn't the last one to its request: `Answerable`, until its `answer` is made; if it `takes_arrays`,
    that is in `outputs`."""

    __slots__ = (
        "answer", "envelope", "failure", "flight", "message", "model", "opened", "options", "outputs", "takes_arrays",
        "value",
    )  # fmt: skip

    def __init__(self, opened: OpenFlight, outputs: Tensors) -> None:
        flight = opened.flight
        options = flight.options
        assert options is not None
        if outputs:
            options = opened.options_of_more = of_those_there(options, outputs, opened.options_of_more)
        self.opened = opened
        self.flight = flight
        self.value = outputs
        self.options: RequestOptions = options
        self.message = flight.message
        self.model: ServedModel = flight.model
        self.envelope = flight.envelope_of_more
        self.takes_arrays = flight.takes_arrays
        self.answer: AnyResponse | None = None
        self.failure: Failure | None = None
        self.outputs = ArrayAnswer()

    @property
    def facts(self) -> BatchFacts | None:
        return self.flight.facts

    @property
    def targets(self) -> Targets:
        """The request's, while it has any: an answer that nobody reads keeps nobody's memory open once it has ended."""
        return self.flight.targets

    def sent(self, size_bytes: int) -> None:
        """It has left, with so many bytes."""
        self.opened.on_sent(size_bytes)

    def let_go(self) -> None:
        """Nothing of it but what was made is needed any more."""
        self.value = ()
