"""What a request takes along to another server, besides its tensors: headers, parameters, its id.

Lives here: which of these keep requests apart. Must not: send anything, or import what only the process with the models
needs. The rule: what is the same for a whole batch is part of its key; what may differ (traces) is sent only if all
requests of a batch agree on it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple

from paceline.protos.inference_pb2 import InferParameter, ModelInferRequest
from paceline.server.call_facts import Headers, PassedHeaders
from paceline.server.codec.parameters import is_reserved
from paceline.server.codec.wire_request import AnyRequest, WireRequest, message_of

__all__ = ["NOTHING_PASSED_ON", "PassedOn", "passed_on_by"]

_OF_TENSORS_HERE = ("classification", "binary_data", "binary_data_size")
"""Parameters of tensors that take effect here and aren't passed on, like those of shared memory."""


class PassedOn(NamedTuple):
    """What travels besides tensors and id, as `RemoteRequest` has it."""

    headers: Headers = ()
    tracing: Headers = ()
    extras: bytes = b""

    @property
    def key(self) -> Hashable:
        """What requests must have in common to share a batch there."""
        return self.headers, self.extras


NOTHING_PASSED_ON = PassedOn()


def passed_on_by(request: AnyRequest, passed: PassedHeaders) -> PassedOn:
    """What `request` takes along; `passed` are the headers of its call."""
    return PassedOn(passed.headers, passed.tracing, b"" if _is_plain(request) else _extras(message_of(request)))


def _is_plain(request: AnyRequest) -> bool:
    """Whether there are no parameters, of the request or of its tensors."""
    if isinstance(request, WireRequest):
        return request.form.plain
    message = message_of(request)
    return (
        not message.parameters
        and not any(one.parameters for one in message.inputs)
        and not any(one.parameters for one in message.outputs)
    )


def _extras(request: ModelInferRequest) -> bytes:
    """The parameters that mean nothing here, in the form of `RemoteRequest.extras`."""
    extras = ModelInferRequest()
    for key, parameter in request.parameters.items():
        if not is_reserved(key):
            extras.parameters[key].CopyFrom(parameter)
    for one in request.inputs:
        if own := _of_tensor(one.parameters):
            extras.inputs.add(name=one.name, parameters=own)
    for output in request.outputs:
        if own := _of_tensor(output.parameters):
            extras.outputs.add(name=output.name, parameters=own)
    # Equal parameters have to be equal bytes.
    return extras.SerializeToString(deterministic=True)


def _of_tensor(parameters: Mapping[str, InferParameter]) -> dict[str, InferParameter]:
    return {
        key: parameter
        for key, parameter in parameters.items()
        if key not in _OF_TENSORS_HERE and not key.startswith("shared_memory_")
    }
