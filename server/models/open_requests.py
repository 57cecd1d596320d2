"""The requests of a model that gets them one by one which haven't ended, and handing them to its instances.

Lives here: how many there are, waiting until there are none, and what stands between the batcher and such an instance.
Must not: answers, which are made in `server.requests.decoupled`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from paceline.backends.base import Execution, ModelInstance
from paceline.backends.open_request import AGAIN, ELSEWHERE, Answer, AnswersOpenly, OpenRequest
from paceline.backends.spec import ModelSpec, SequenceSpec, Tensors
from paceline.scheduler.answering import notify
from paceline.scheduler.errors import BatcherClosed, QueueFull
from paceline.scheduler.request import AnyRequest, SequenceStep
from paceline.scheduler.runner import ANSWERED_ELSEWHERE, NO_ANSWER
from paceline.scheduler.sequence import AnySequence
from paceline.server.memory.reading import ExecuteInputs, ExecuteOpen, reading_open
from paceline.server.models.steps import StepMaker, nobody_of


class OpenRequests:
    """At most `most` requests, each from when it is accepted until it ends. On the event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._requests: set[AnyRequest] = set()
        self._ended = asyncio.Event()

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: AnyRequest) -> None:
        """Raises QueueFull."""
        if len(self._requests) >= self._most:
            raise QueueFull(self._most, "requests that haven't ended (paceline.max_open_requests)")
        self._requests.add(request)

    def discard(self, request: AnyRequest) -> None:
        self._requests.discard(request)
        if not self._requests:
            self._ended.set()

    async def until_none(self) -> None:
        """Wait until all have ended."""
        while self._requests:
            self._ended.clear()
            await self._ended.wait()

    def close(self) -> None:
        """End those that are left with BatcherClosed."""
        for request in [*self._requests]:
            if not request.ended:
                request.fail(BatcherClosed())
                notify([request])


def handing_over(instance: ModelInstance, spec: ModelSpec) -> ExecuteInputs:
    """What a runner executes for an instance that answers openly and serves `spec`."""
    answering = cast("AnswersOpenly", instance)
    execute = reading_open(answering.execute_open)
    if spec.sequence is not None and spec.sequence.rows:
        execute = reading_open(_in_rows(answering, spec, spec.sequence))

    def hand_over(requests: Sequence[OpenRequest], padded_rows: int) -> Execution:
        done = execute(requests)
        results = [_NO_RESULT.get(id(one), one) for one in done.results]
        return replace(done, results=cast("Sequence[Tensors | Exception]", results))

    return cast("ExecuteInputs", hand_over)  # it gets what `server.requests.decoupled` has made of the inputs


_NO_RESULT = {id(ELSEWHERE): ANSWERED_ELSEWHERE, id(AGAIN): NO_ANSWER}


def _in_rows(instance: AnswersOpenly, spec: ModelSpec, sequence: SequenceSpec) -> ExecuteOpen:
    """Its `execute_open` with each step in its own row. What the model makes of rows without a step, nobody hears."""
    nobody = nobody_of(spec, sequence)

    def execute_rows(steps: Sequence[OpenRequest]) -> Execution:
        inputs = cast("Tensors", nobody(steps[0].inputs))
        last = max(one.row for one in steps)
        by_row: list[OpenRequest] = [_Nobody(inputs, steps[0].outputs) for _ in range(1 + last)]
        for step in steps:
            by_row[step.row] = step
        done = instance.execute_open(by_row)
        for one in by_row:
            if isinstance(one, _Nobody):
                one.cancel()
        return replace(done, results=[done.results[step.row] for step in steps])

    return execute_rows


class _Nobody(OpenRequest):
    """A row without a step."""

    __slots__ = ()

    def on_answer(self, answer: Answer, *, last: bool) -> None:
        pass


class OpenStepMaker:
    """Makes the steps of sequences that are requests of a model that answers openly and serves `spec`."""

    def __init__(self, spec: ModelSpec) -> None:
        self._make = StepMaker(spec)

    def __call__(self, request: AnyRequest, sequence: AnySequence) -> None:
        opened, step = request.payload, request.step
        assert step is not None
        # What the model is told of its sequence is what the caller has said, if it comes back with an id of its own.
        request.payload, request.step = opened.own_inputs, SequenceStep(*opened.step)
        made = self._make(request, sequence)
        opened.given, opened.row = made.inputs, made.row
        request.payload, request.step = opened, step
