"""Requests of Triton's Python backend: those that models get, and those that they make for other models.

Lives here: what they say of themselves, and those for others as calls, whose answers become responses. Must not: how
they are answered (`responses`), or how they travel (`requests_worker`, `calls_worker`). The rule: whatever is wrong
with a call is an error in its response, as in Triton; only code that can't have meant it gets an exception.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from queue import SimpleQueue
from typing import Any, ClassVar

from paceline.backends.python.calls_worker import Answer, AsyncAnswers, Calls
from paceline.backends.python.loaded_model import CallFailed
from paceline.backends.python.triton.errors import TritonModelException, error_of
from paceline.backends.python.triton.responses import InferenceResponse, InferenceResponseSender, Received
from paceline.backends.python.triton.tensors import Tensor, as_name

__all__ = [
    "RELEASE_ALL",
    "RELEASE_RESCHEDULE",
    "SEQUENCE_END",
    "SEQUENCE_START",
    "InferenceRequest",
    "InferenceTrace",
    "MemoryType",
    "PreferredMemory",
    "get_input_tensor_by_name",
]

SEQUENCE_START, SEQUENCE_END = 1, 2
RELEASE_ALL, RELEASE_RESCHEDULE = 1, 2


class MemoryType(IntEnum):
    TRITONSERVER_MEMORY_CPU = 0
    TRITONSERVER_MEMORY_GPU = 2


class PreferredMemory:
    """Where a called model's outputs should be; they are in the host's memory."""

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        self.preferred_memory_type = MemoryType(preferred_memory_type)
        self.preferred_device_id = preferred_device_id


class InferenceTrace:
    """A request's trace, of which models learn nothing here."""

    def get_context(self) -> str | None:
        return None


class InferenceRequest:
    """A request that the model got (`received`), or makes for another model."""

    __slots__ = (
        "_correlation_id", "_flags", "_id", "_inputs", "_model_name", "_parameters", "_timeout_us", "_trace",
        "_version", "_wanted", "received", "release",
    )  # fmt: skip

    calls: ClassVar[Calls]
    """Set before a model's file is loaded."""

    def __init__(
        self,
        request_id: str | bytes = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] | None = None,
        requested_output_names: Sequence[str | bytes] | None = None,
        model_name: str | bytes | None = None,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        if inputs is None or requested_output_names is None or model_name is None:
            given = {"inputs": inputs, "requested_output_names": requested_output_names, "model_name": model_name}
            missing = " and ".join(name for name, value in given.items() if value is None)
            raise TypeError(f"InferenceRequest: expected {', '.join(given)}, got no {missing}")
        if not isinstance(correlation_id, (int, str)):
            raise TritonModelException(f"Correlation ID must be integer or string, got {type(correlation_id).__name__}")
        self._id = as_name("InferenceRequest", request_id)
        self._correlation_id = correlation_id
        self._model_name = as_name("InferenceRequest", model_name)
        self._inputs = list(inputs)
        for one in self._inputs:
            if not isinstance(one, Tensor):
                what = f"InferenceRequest for model '{self._model_name}'"
                raise TritonModelException(f"{what}: expected Tensors as inputs, got {type(one).__name__}")
        self._wanted = tuple(as_name("InferenceRequest", one) for one in requested_output_names)
        self._version = model_version
        self._flags = flags
        self._timeout_us = timeout
        self._trace = trace
        self._parameters: Mapping[str, Any] = dict(parameters or {})
        self.release = RELEASE_ALL
        self.received: Received | None = None

    # hot path: 2 us
    @classmethod
    def of_server(
        cls,
        received: Received,
        inputs: list[Tensor],
        request_id: str,
        parameters: Mapping[str, Any],
        correlation_id: int | str,
        flags: int,
        timeout_us: int,
        model_name: str,
    ) -> InferenceRequest:
        made = cls.__new__(cls)
        made._id = request_id
        made._correlation_id = correlation_id
        made._inputs = inputs
        made._wanted = tuple(received.places)
        made._model_name = model_name
        made._version = -1
        made._flags = flags
        made._timeout_us = timeout_us
        made._trace = None
        made._parameters = parameters
        made.release = RELEASE_ALL
        made.received = received
        return made

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def request_id(self) -> str:
        return self._id

    def correlation_id(self) -> int | str:
        """The id of its sequence; 0 if it is in none."""
        return self._correlation_id

    def requested_output_names(self) -> list[str]:
        """The outputs that its caller wants, which are all unless it says so."""
        return list(self._wanted)

    def flags(self) -> int:
        return self._flags

    def set_flags(self, flags: int) -> None:
        self._flags = flags

    def timeout(self) -> int:
        """In microseconds; 0 if it has none."""
        return self._timeout_us

    def parameters(self) -> str:
        """What else its caller has sent, as JSON."""
        return json.dumps(self._parameters)

    def trace(self) -> InferenceTrace:
        return self._trace or InferenceTrace()

    def is_cancelled(self) -> bool:
        """Whether nobody waits for an answer any more."""
        return self.received is not None and self.received.state.cancelled

    def set_release_flags(self, flags: int) -> None:
        """With TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, the request comes back to the model in a later batch."""
        if flags not in (RELEASE_ALL, RELEASE_RESCHEDULE):
            raise TritonModelException(
                f"set_release_flags: expected TRITONSERVER_REQUEST_RELEASE_ALL or _RESCHEDULE, got {flags}"
            )
        self.release = flags

    def get_response_sender(self) -> InferenceResponseSender:
        if self.received is None:
            raise TritonModelException("expected a request that this model got, got one that it has made")
        return InferenceResponseSender(self.received)

    def exec(self, decoupled: bool = False) -> InferenceResponse | Iterator[InferenceResponse]:
        """Have the request executed by the model that it names, and wait."""
        answers: SimpleQueue[Answer] = SimpleQueue()
        responses = _Responses(self.calls, self._begin(answers, decoupled), answers)
        return responses if decoupled else responses.only()

    async def async_exec(self, decoupled: bool = False) -> InferenceResponse | Iterator[InferenceResponse]:
        """The same, for coroutines. Reading the responses blocks, so their iterator comes with the first of them."""
        if decoupled:
            awaited = _AwaitedAnswers()
            responses = _Responses(self.calls, self._begin(awaited, decoupled), awaited)
            await awaited.has_come.wait()
            return responses
        answers = AsyncAnswers()
        number = self._begin(answers, decoupled)
        try:
            return _response((await answers.get())[0])
        finally:
            self.calls.withdraw(number)

    def _begin(self, answers: SimpleQueue[Answer] | AsyncAnswers, decoupled: bool) -> int:
        """Returns the call's number; 0 if it can't be made, which is the answer then."""
        parameters = {**self._parameters}
        if self._correlation_id:
            parameters["sequence_id"] = self._correlation_id
            parameters["sequence_start"] = bool(self._flags & SEQUENCE_START)
            parameters["sequence_end"] = bool(self._flags & SEQUENCE_END)
        if self._timeout_us:
            parameters["timeout"] = self._timeout_us
        try:
            return self.calls.begin(
                self._model_name,
                {one.name(): one.encoded() for one in self._inputs},
                answers.put,
                version=str(self._version) if self._version > 0 else "",
                outputs=self.requested_output_names(),
                request_id=self._id,
                parameters=parameters,
                takes_more=decoupled,
            )
        except CallFailed as error:
            answers.put((error, True))
            return 0


class _AwaitedAnswers(SimpleQueue[Answer]):
    """Answers from another thread, for whose first a coroutine waits."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.has_come = asyncio.Event()

    def put(self, answer: Answer, block: bool = True, timeout: float | None = None) -> None:
        super().put(answer, block, timeout)
        with suppress(RuntimeError):  # the loop is closed, and nobody waits
            self._loop.call_soon_threadsafe(self.has_come.set)


class _Responses:
    """Those to one call, as they come; the last may be empty. Dropping it withdraws the call."""

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
        if not self._is_over:
            self._calls.read(self._number, 1)
        return _response(answer)

    def cancel(self) -> None:
        """Withdraw the call. Responses that have come can still be read, and an error ends them."""
        self._calls.withdraw(self._number)
        self._answers.put((CallFailed("CANCELLED", "the call was cancelled"), True))

    def __del__(self) -> None:
        self._calls.withdraw(self._number)


def _response(answer: Any) -> InferenceResponse:
    if isinstance(answer, CallFailed):
        return InferenceResponse(error=error_of(answer.status, str(answer)))
    if answer is None:
        return InferenceResponse()
    return InferenceResponse([Tensor.received(*one) for one in answer.items()], parameters=answer.parameters)


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """An input of a request; None if it has none of that name."""
    return next((one for one in inference_request.inputs() if one.name() == name), None)
