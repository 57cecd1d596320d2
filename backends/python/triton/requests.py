"""Requests of Triton's Python backend: those that models get, and those that they make for other models.

Lives here: what they say of themselves. Must not: how they are answered (`responses`), or how they travel
(`requests_worker`, `calls`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, ClassVar, Protocol

from paceline.backends.python.triton.errors import TritonModelException
from paceline.backends.python.triton.responses import InferenceResponseSender, Ownership, Received
from paceline.backends.python.triton.tensors import Tensor

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


class Caller(Protocol):
    """Has requests executed by other models."""

    def call(self, request: InferenceRequest, decoupled: bool) -> Any: ...

    def call_async(self, request: InferenceRequest, decoupled: bool) -> Any: ...


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
        "_correlation_id", "_flags", "_id", "_inputs", "_ownership", "_parameters", "_release", "_timeout_us",
        "_trace", "_version", "_wanted", "model_name", "preferred_memory", "received",
    )  # fmt: skip

    caller: ClassVar[Caller]
    """Set before a model's file is loaded."""

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] = (),
        requested_output_names: Sequence[str] = (),
        model_name: str = "",
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(correlation_id, (int, str)):
            raise TritonModelException(f"Correlation ID must be integer or string, got {type(correlation_id).__name__}")
        self._id = request_id
        self._correlation_id = correlation_id
        self._inputs = list(inputs)
        for one in self._inputs:
            if not isinstance(one, Tensor):
                raise TritonModelException(
                    f"InferenceRequest for model '{model_name}': expected Tensors as inputs, got {type(one).__name__}"
                )
        self._wanted = tuple(requested_output_names)
        self.model_name = model_name
        self._version = model_version
        self._flags = flags
        self._timeout_us = timeout
        self.preferred_memory = preferred_memory
        self._trace = trace
        self._parameters: Mapping[str, Any] = dict(parameters or {})
        self._release = RELEASE_ALL
        self.received: Received | None = None
        self._ownership: Ownership | None = None

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
        made.model_name = model_name
        made._version = -1
        made._flags = flags
        made._timeout_us = timeout_us
        made.preferred_memory = made._trace = None
        made._parameters = parameters
        made._release = RELEASE_ALL
        made.received = received
        made._ownership = Ownership(received.state)
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

    def model_version(self) -> int:
        return self._version

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
        self._release = flags

    def release_flags(self) -> int:
        return self._release

    def get_response_sender(self) -> InferenceResponseSender:
        if self.received is None or self._ownership is None:
            raise TritonModelException("expected a request that this model got, got one that it has made")
        return self._ownership.sender(self.received)

    def exec(self, decoupled: bool = False) -> Any:
        """Have the request executed by the model that it names, and wait."""
        return self.caller.call(self, decoupled)

    def async_exec(self, decoupled: bool = False) -> Any:
        """The same, for coroutines."""
        return self.caller.call_async(self, decoupled)


def has_sent(request: InferenceRequest) -> bool:
    """Whether a response to `request` was sent by its sender."""
    return request._ownership is not None and request._ownership.has_sent


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """An input of a request; None if it has none of that name."""
    for tensor in inference_request.inputs():
        if tensor.name() == name:
            return tensor
    return None
