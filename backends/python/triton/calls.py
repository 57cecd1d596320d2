"""Calls of other models by code written for Triton: `InferenceRequest.exec` and `async_exec`.

Lives here: from Triton's requests to calls, and from their answers to responses. Must not: how calls travel
(`calls_worker`). The rule: whatever is wrong with a call is an error in its response, as in Triton; only code that
can't have meant it gets an exception.
"""

from __future__ import annotations

from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

from paceline.backends.python.calls_worker import Answer, AsyncAnswers, Calls
from paceline.backends.python.loaded_model import CallFailed
from paceline.backends.python.triton.errors import TritonModelException, error_of
from paceline.backends.python.triton.requests import (
    SEQUENCE_END,
    SEQUENCE_START,
    InferenceRequest,
)
from paceline.backends.python.triton.responses import InferenceResponse
from paceline.backends.python.triton.tensors import Tensor

__all__ = ["TritonCalls"]


class TritonCalls:
    """`Caller`."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def call(self, request: InferenceRequest, decoupled: bool) -> InferenceResponse | Iterator[InferenceResponse]:
        answers: SimpleQueue[Answer] = SimpleQueue()
        number = self._begin(request, answers, decoupled)
        responses = _Responses(self._calls, number, answers)
        return responses if decoupled else responses.only()

    async def call_async(
        self, request: InferenceRequest, decoupled: bool
    ) -> InferenceResponse | Iterator[InferenceResponse]:
        if decoupled:
            return self.call(request, decoupled)
        answers = AsyncAnswers()
        number = self._begin(request, answers, decoupled)
        try:
            return _response((await answers.get())[0])
        finally:
            self._calls.withdraw(number)

    def _begin(self, request: InferenceRequest, answers: SimpleQueue[Answer] | AsyncAnswers, decoupled: bool) -> int:
        """Returns the call's number; 0 if it can't be made, which is the answer then."""
        if not request.model_name:
            raise TritonModelException("InferenceRequest: expected a model_name to execute it, got none")
        parameters = {**request._parameters}
        if sequence := request.correlation_id():
            parameters["sequence_id"] = sequence
            flags = request.flags()
            parameters["sequence_start"], parameters["sequence_end"] = (
                bool(flags & SEQUENCE_START),
                bool(flags & SEQUENCE_END),
            )
        if request.timeout():
            parameters["timeout"] = request.timeout()
        version = request.model_version()
        try:
            return self._calls.begin(
                request.model_name,
                {one.name(): one.encoded() for one in request.inputs()},
                answers.put,
                version=str(version) if version > 0 else "",
                outputs=request.requested_output_names(),
                request_id=request.request_id(),
                parameters=parameters,
                takes_more=decoupled,
            )
        except CallFailed as error:
            answers.put((error, True))
            return 0


class _Responses:
    """Those to one call, as they come. Dropping it withdraws the call."""

    def __init__(self, calls: Calls, number: int, answers: SimpleQueue[Answer]) -> None:
        self._calls = calls
        self._number = number
        self._answers = answers
        self._is_over = False

    def only(self) -> InferenceResponse:
        return _response(self._answers.get()[0])

    def __iter__(self) -> Iterator[InferenceResponse]:
        return self

    def __next__(self) -> InferenceResponse:
        if self._is_over:
            raise StopIteration
        answer, self._is_over = self._answers.get()
        if answer is None and self._is_over:
            raise StopIteration
        if not self._is_over:
            self._calls.read(self._number, 1)
        return _response(answer)

    def __del__(self) -> None:
        self._calls.withdraw(self._number)


def _response(answer: Any) -> InferenceResponse:
    if isinstance(answer, CallFailed):
        return InferenceResponse(error=error_of(answer.status, str(answer)))
    return InferenceResponse([Tensor.received(name, array) for name, array in (answer or {}).items()])
