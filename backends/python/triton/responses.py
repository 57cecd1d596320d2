"""Responses of Triton's Python backend, and what sends them.

Lives here: the objects that models make and use. Must not: how answers travel (`requests_worker`), or what becomes of
what `execute` returns (`model`). The rules: a request that isn't decoupled gets one response; whoever sends more than
may be sent is told so by an exception, and what was sent before stays sent.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.backends.python.loaded_model import UnfitAnswer
from paceline.backends.python.requests_worker import RequestState
from paceline.backends.python.triton.errors import TritonError, TritonModelException, error_kind
from paceline.backends.python.triton.tensors import Tensor
from paceline.backends.spec import Array

__all__ = [
    "RESPONSE_FINAL",
    "InferenceResponse",
    "InferenceResponseSender",
    "Received",
    "get_output_tensor_by_name",
    "outputs_of",
]

RESPONSE_FINAL = 1


class Received:
    """What the server has sent of a request besides its tensors, and what was sent back. Held by the request and its
    senders: once all are gone, nobody can answer. `places` are those of the wanted outputs, by name; `decoupled`: it
    may be answered more than once; `closed`: there may be no further responses."""

    __slots__ = ("closed", "decoupled", "places", "responses", "state")

    def __init__(self, state: RequestState, places: Mapping[str, int], decoupled: bool) -> None:
        self.state = state
        self.places = places
        self.decoupled = decoupled
        self.responses = 0
        self.closed = False

    def __del__(self) -> None:
        self.state.drop()


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

    __slots__ = ("_received",)

    def __init__(self, received: Received) -> None:
        self._received = received

    def is_cancelled(self) -> bool:
        return self._received.state.cancelled

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response, or with TRITONSERVER_RESPONSE_COMPLETE_FINAL the last one, or nothing but the end.

        Blocks while the caller has yet to read too many earlier ones, except on an event loop. Raises
        TritonModelException.
        """
        self._check(response, flags)
        final = flags == RESPONSE_FINAL
        received = self._received
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
        received.responses += response is not None
        received.closed = final

    def _check(self, response: InferenceResponse | None, flags: int) -> None:
        received = self._received
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
        if received.closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        if received.decoupled:
            return
        if response is not None and received.responses:
            raise TritonModelException(
                "Unable to send response. Non-decoupled model cannot send more than one response."
            )
        if response is None and not received.responses:
            raise TritonModelException(
                "Unable to send response. Non-decoupled model cannot send complete final before sending a response."
            )


# hot path: 1 us
def outputs_of(
    response: InferenceResponse, places: Mapping[str, int], *, left_out: bool
) -> tuple[tuple[int, ...], list[Array]]:
    """The places and arrays of the outputs that are wanted. Unless they may be `left_out`, raises UnfitAnswer for a
    missing one."""
    found: dict[int, Array] = {}
    for tensor in response.output_tensors():
        if (place := places.get(tensor.name())) is not None:
            found[place] = tensor.encoded()
    if len(found) < len(places) and not left_out:
        got = [tensor.name() for tensor in response.output_tensors()]
        missing = [name for name, place in places.items() if place not in found]
        raise UnfitAnswer(f"expected output '{missing[0]}' in the response, got only {got}")
    return tuple(found), list(found.values())


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """An output of a response; None if it has none of that name."""
    return next((one for one in inference_response.output_tensors() if one.name() == name), None)


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
