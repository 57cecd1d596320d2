"""Requests from within the server, whose tensors are arrays: a step of an ensemble, or a model that calls another.

Lives here: what stands in the place of a message for them, and of the answer's. Must not: check anything; their model's
codec does.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from paceline.backends.open_request import Parameters
from paceline.backends.spec import Array
from paceline.protos.inference_pb2 import InferParameter, ModelInferRequest
from paceline.scheduler.request import SequenceStep

NamedArray = tuple[str, str, Array]
"""Name, datatype and array of a tensor; one of texts has `bytes` as elements."""

_NONE: Mapping[str, Any] = {}


class ArrayAnswer(dict[str, Array]):
    """Outputs by name, and the `parameters` that the model has added."""

    parameters: Parameters = {}  # noqa: RUF012 - of those to which none were added; only read


class ArrayRequest:
    """What a request from within asks of a model: it is read by the model's codec, with the same checks as a message.
    `outputs` are the names of the wanted outputs, all if there are none. `parameters` are those that a message may
    have, without those of sequences, which are in `step`. Requests of equal `signature` differ only in what their
    tensors contain, in id and step."""

    __slots__ = ("id", "inputs", "model_name", "model_version", "outputs", "parameters", "signature", "step")

    def __init__(
        self,
        model_name: str,
        model_version: str,
        inputs: Sequence[NamedArray],
        outputs: Sequence[str] = (),
        *,
        id: str = "",
        parameters: Mapping[str, InferParameter] = _NONE,
        step: SequenceStep | None = None,
    ) -> None:
        self.model_name = model_name
        self.model_version = model_version
        self.inputs = inputs
        self.outputs = outputs
        self.id = id
        self.parameters = parameters
        self.step = step
        tensors = tuple([(name, datatype, array.shape) for name, datatype, array in inputs])
        said: Hashable = ()
        if parameters:
            said = tuple(sorted((key, one.SerializeToString(deterministic=True)) for key, one in parameters.items()))
        self.signature: Hashable = tensors, tuple(outputs), said

    def message(self) -> ModelInferRequest:
        """The request as a message that lacks the contents of its tensors."""
        message = ModelInferRequest(model_name=self.model_name, model_version=self.model_version, id=self.id)
        for key, parameter in self.parameters.items():
            message.parameters[key].CopyFrom(parameter)
        for name, datatype, array in self.inputs:
            message.inputs.add(name=name, datatype=datatype, shape=array.shape)
        for name in self.outputs:
            message.outputs.add(name=name)
        return message
