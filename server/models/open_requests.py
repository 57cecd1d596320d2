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
from paceline.backends.open_request import AGAIN, ELSEWHERE, AnswersOpenly, OpenRequest
from paceline.backends.spec import ModelSpec, Tensors
from paceline.scheduler.answering import notify
from paceline.scheduler.errors import BatcherClosed, QueueFull
from paceline.scheduler.request import AnyRequest
from paceline.scheduler.runner import ANSWERED_ELSEWHERE, NO_ANSWER
from paceline.scheduler.sequence import AnySequence
from paceline.server.memory.reading import ExecuteInputs, reading_open
from paceline.server.models.steps import StepMaker

__all__ = ["OpenRequests", "OpenStepMaker", "handing_over"]


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


def handing_over(instance: ModelInstance) -> ExecuteInputs:
    """What a runner executes for an instance that answers openly."""
    execute = reading_open(cast("AnswersOpenly", instance))

    def hand_over(requests: Sequence[OpenRequest], padded_rows: int) -> Execution:
        done = execute(requests)
        results = [_NO_RESULT.get(id(one), one) for one in done.results]
        return replace(done, results=cast("Sequence[Tensors | Exception]", results))

    return cast("ExecuteInputs", hand_over)  # it gets what `server.requests.decoupled` has made of the inputs


_NO_RESULT = {id(ELSEWHERE): ANSWERED_ELSEWHERE, id(AGAIN): NO_ANSWER}


class OpenStepMaker:
    """Makes the steps of sequences that are requests of a model that answers openly and serves `spec`."""

    def __init__(self, spec: ModelSpec) -> None:
        self._make = StepMaker(spec)

    def __call__(self, request: AnyRequest, sequence: AnySequence) -> None:
        opened = request.payload
        request.payload = opened.own_inputs
        opened.inputs = self._make(request, sequence).inputs
        request.payload = opened
