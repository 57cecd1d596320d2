"""Responses of Triton's Python backend, and what sends them.

Lives here: the objects that models make and use. Must not: how answers travel (`requests_worker`), or what becomes of
what `execute` returns (`model`). The rules: a request that isn't decoupled gets one response; whoever sends more than
may be sent is told so by an exception, and what was sent before stays sent.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from paceline.backends.python.triton.errors import TritonError, TritonModelException, error_kind
from paceline.backends.python.triton.tensors import Tensor
from paceline.backends.spec import Array

__all__ = [
    "RESPONSE_FINAL",
    "InferenceResponse",
    "InferenceResponseSender",
    "Ownership",
    "Received",
    "State",
    "get_output_tensor_by_name",
    "outputs_of",
]

RESPONSE_FINAL = 1


class State(Protocol):
    """What is known of a request on both its model's and the server's threads."""

    @property
    def cancelled(self) -> bool: ...

    def send(
        self, places: Sequence[int], arrays: Sequence[Array], end: bool, parameters: str = "", *, waits: bool = True
    ) -> None: ...

    def say(self, error: str | None, end: bool, *kind: str, waits: bool = True) -> None: ...

    def drop(self) -> None: ...


class Received(NamedTuple):
    """What the server has sent of a request besides its tensors. `places` are those of the wanted outputs, by name;
    `decoupled`: it may be answered more than once."""

    state: State
    places: Mapping[str, int]
    decoupled: bool


class Ownership:
    """Held by a request and its sender: once both are gone, nobody can answer."""

    __slots__ = ("_sender", "_state")

    def __init__(self, state: State) -> None:
        self._state = state
        # What is known of what was sent, rather than the sender, which holds this.
        self._sender: _Sent | None = None

    def sender(self, received: Received) -> InferenceResponseSender:
        if self._sender is None:
            self._sender = _Sent()
        return InferenceResponseSender(received, self, self._sender)

    @property
    def has_sent(self) -> bool:
        return self._sender is not None and self._sender.responses > 0

    def __del__(self) -> None:
        self._state.drop()


class _Sent:
    """How many responses were sent, and whether there may be more."""

    __slots__ = ("closed", "responses")

    def __init__(self) -> None:
        self.responses = 0
        self.closed = False


class InferenceResponse:
    """Output tensors, or an error in their place; and parameters for the caller."""

    __slots__ = ("_error", "_parameters", "_tensors")

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        self._tensors = list(output_tensors)
        for one in self._tensors:
            if not isinstance(one, Tensor):
                raise TritonModelException(f"InferenceResponse: expected Tensors, got {type(one).__name__}")
        if error is not None and not isinstance(error, TritonError):
            raise TypeError(f"InferenceResponse: expected a TritonError as error, got {type(error).__name__}")
        self._error = error
        self._parameters = _as_json(parameters) if parameters else ""

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        """As JSON; empty if there are none."""
        return self._parameters


class InferenceResponseSender:
    """Answers a request, at any time and on any thread."""

    __slots__ = ("_ownership", "_received", "_sent")

    def __init__(self, received: Received, ownership: Ownership, sent: _Sent) -> None:
        self._received = received
        self._ownership = ownership
        self._sent = sent

    def is_cancelled(self) -> bool:
        return self._received.state.cancelled

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response, or with TRITONSERVER_RESPONSE_COMPLETE_FINAL the last one, or nothing but the end.

        Blocks while the caller has yet to read too many earlier ones, except on an event loop. Raises
        TritonModelException.
        """
        self._check(response, flags)
        final = flags == RESPONSE_FINAL
        received, sent = self._received, self._sent
        # The only response to a request that isn't decoupled ends it, so that its caller has it.
        ends = final or not received.decoupled
        try:
            if response is None:
                if received.decoupled:
                    received.state.say(None, True)
            else:
                waits = not _on_an_event_loop()
                if (error := response.error()) is not None:
                    received.state.say(error.message(), ends, *error_kind(error), waits=waits)
                else:
                    places, arrays = outputs_of(response, received.places, left_out=received.decoupled)
                    received.state.send(places, arrays, ends, response.parameters(), waits=waits)
        except RuntimeError as error:
            raise TritonModelException(f"Unable to send response. {error}") from None
        sent.responses += response is not None
        sent.closed = final

    def _check(self, response: InferenceResponse | None, flags: int) -> None:
        if response is not None and not isinstance(response, InferenceResponse):
            raise TritonModelException(f"send: expected an InferenceResponse, got {type(response).__name__}")
        if flags not in (0, RESPONSE_FINAL):
            raise TritonModelException(
                f"Unable to send response. Unsupported flag {flags}: expected 0 or TRITONSERVER_RESPONSE_COMPLETE_FINAL"
            )
        if response is None and not flags:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        if self._sent.closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        if self._received.decoupled:
            return
        if response is not None and self._sent.responses:
            raise TritonModelException(
                "Unable to send response. Non-decoupled model cannot send more than one response."
            )
        if response is None and not self._sent.responses:
            raise TritonModelException(
                "Unable to send response. Non-decoupled model cannot send complete final before sending a response."
            )


# hot path: 1 us
def outputs_of(
    response: InferenceResponse, places: Mapping[str, int], *, left_out: bool
) -> tuple[tuple[int, ...], list[Array]]:
    """The places and arrays of the outputs that are wanted. Unless they may be `left_out`, raises KeyError for one that
    is missing."""
    found: dict[int, Array] = {}
    for tensor in response.output_tensors():
        if (place := places.get(tensor.name())) is not None:
            found[place] = tensor.encoded()
    if len(found) < len(places) and not left_out:
        got = [tensor.name() for tensor in response.output_tensors()]
        missing = [name for name, place in places.items() if place not in found]
        raise KeyError(f"expected output '{missing[0]}' in the response, got only {got}")
    return tuple(found), list(found.values())


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """An output of a response; None if it has none of that name."""
    for tensor in inference_response.output_tensors():
        if tensor.name() == name:
            return tensor
    return None


def _on_an_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _as_json(parameters: Mapping[str, Any]) -> str:
    for key, value in parameters.items():
        if not isinstance(key, str):
            raise TritonModelException(f"parameters: expected names, got {key!r}")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise TritonModelException(f"parameters: '{key}': expected an integer of 64 bits, got {value}")
        if not isinstance(value, (bool, int, float, str)):
            raise TritonModelException(
                f"parameters: '{key}': expected a bool, int, float or str, got {type(value).__name__}"
            )
    return json.dumps(parameters)
