"""What is different for models of another server: what a request takes along, besides its tensors, and the codec of
models that don't declare these, so that each request describes its own.

Lives here: which headers and parameters keep requests apart, and what can be checked of a request nonetheless. Must
not: send anything, or guess. The rules: what is the same for a whole batch is part of its key; what may differ (traces)
is sent only if all requests of a batch agree on it. If all tensors have the same number of rows, axis 0 is taken as the
batch axis, unless the operator says otherwise (--upstream-unbatched); other requests travel alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import numpy as np

from paceline.backends.errors import ExecutionError
from paceline.backends.remote_messages import UndeclaredOutputs, UndeclaredTensor
from paceline.backends.spec import Array, ModelSpec, TensorSpec
from paceline.protos.datatypes import by_name
from paceline.protos.inference_pb2 import InferParameter, ModelInferRequest, ModelInferResponse
from paceline.protos.tensors import TensorError, encode_contents, encode_raw
from paceline.scheduler.errors import ExecutionFailed
from paceline.server.bounded_cache import BoundedCache
from paceline.server.call_facts import Headers, PassedHeaders
from paceline.server.codec.answers import Answerable
from paceline.server.codec.codec import ModelCodec
from paceline.server.codec.known_requests import Group
from paceline.server.codec.parameters import is_reserved
from paceline.server.codec.wire_request import AnyMessage, WireRequest, message_of
from paceline.server.errors import InvalidRequest, value_or_error

_OF_TENSORS_HERE = ("classification", "binary_data", "binary_data_size")
"""Parameters of tensors that take effect here and aren't passed on, like those of shared memory."""
_MAX_TENSORS = 1_024
"""The most inputs of a request, and the most outputs. A MB of them would keep the event loop busy for a second."""
_LARGEST_LAYOUT_BYTES = 16_384
"""The largest layout that is remembered; callers choose names and the number of tensors."""
_TENSOR_BYTES = 256
"""What a tensor takes in a layout, besides its name."""


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


def passed_on_by(request: AnyMessage, passed: PassedHeaders) -> PassedOn:
    """What `request` takes along; `passed` are the headers of its call."""
    is_plain = isinstance(request, WireRequest) and request.form.plain
    return PassedOn(passed.headers, passed.tracing, b"" if is_plain else _extras(message_of(request)))


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


class UndeclaredCodec:
    """Decodes and encodes whatever the protocol allows. `max_batch_rows` is the most rows of a request; 0: there are no
    rows, and each request travels alone."""

    def __init__(self, model: str, version: str, max_batch_rows: int) -> None:
        self._model = model
        self._version = version
        self._max_batch_rows = max_batch_rows
        self._codecs = BoundedCache[Hashable, tuple[ModelSpec, ModelCodec]]()

    def read(self, first: AnyMessage, more: Iterable[AnyMessage] = ()) -> Group:
        """Read the tensors of `first` alone; the result's `options.spec` describes them. Raises InvalidRequest."""
        message = message_of(first)
        if (most := max(len(message.inputs), len(message.outputs))) > _MAX_TENSORS:
            raise InvalidRequest(f"model '{self._model}': expected at most {_MAX_TENSORS} tensors, got {most}")
        batched = self._max_batch_rows > 0 and _has_rows(message)
        layout = (
            batched,
            tuple((one.name, one.datatype, len(one.shape)) for one in message.inputs),
            tuple(one.name for one in message.outputs),
        )
        spec, codec = self._codecs.get(layout) or self._learn(layout, message, batched)
        group = codec.read(message)
        # A request that travels alone has a key that no other request has.
        key = layout, group.options.key if batched else object()
        return group._replace(options=replace(group.options, key=key, spec=spec))

    def encode(self, requests: Sequence[Answerable]) -> list[ModelInferResponse | Exception]:
        """The response to each request, with all of its results. In place of one: ExecutionError for elements that no
        message can carry, or MemoryError."""
        return [value_or_error(self._message, request) for request in requests]

    def _message(self, request: Answerable) -> ModelInferResponse:
        options = request.options
        assert options is not None
        response = ModelInferResponse(model_name=self._model, model_version=self._version, id=request.message.id)
        for name, datatype, array in cast("UndeclaredOutputs", request.value):
            output = response.outputs.add(name=name, datatype=datatype, shape=array.shape)
            try:
                if options.parameters.typed_outputs:
                    output.contents.CopyFrom(encode_contents(array, by_name(datatype)))
                else:
                    response.raw_output_contents.append(encode_raw(array, by_name(datatype)))
            except TensorError as error:
                raise ExecutionError(f"model '{self._model}': output '{name}': {error}") from None
        return response

    @staticmethod
    def join(results: Sequence[UndeclaredOutputs], rows: Sequence[int]) -> UndeclaredOutputs:
        """The results of the parts of a split request as one; `rows` are those of each part. Raises ExecutionFailed if
        they don't fit together, or don't have those rows: nobody could tell whose rows are whose."""
        first = results[0]
        declared = [[(one.name, one.datatype) for one in part] for part in results]
        for other in declared:
            if other != declared[0]:
                what = f"the parts of a split request have different outputs: {declared[0]} and {other}"
                raise ExecutionFailed(what)
        for part, count in zip(results, rows, strict=True):
            for one in part:
                if one.array.shape[:1] != (count,):
                    raise ExecutionFailed(
                        f"output '{one.name}' has shape {list(one.array.shape)} for a part of a request with {count} "
                        "rows; if the model doesn't answer row by row, name it with --upstream-unbatched"
                    )
        return tuple(
            UndeclaredTensor(one.name, one.datatype, joined(number, [part[number].array for part in results]))
            for number, one in enumerate(first)
        )

    def _learn(self, layout: Hashable, message: ModelInferRequest, batched: bool) -> tuple[ModelSpec, ModelCodec]:
        lead = 1 if batched else 0
        inputs = tuple(TensorSpec(one.name, one.datatype, (-1,) * (len(one.shape) - lead)) for one in message.inputs)
        # Nothing is known about outputs but the names that are asked for.
        outputs = tuple(TensorSpec(one.name, "BYTES", ()) for one in message.outputs)
        spec = ModelSpec(inputs, outputs, batched=batched)
        codec = ModelCodec(self._model, self._version, spec, self._max_batch_rows if batched else 0)
        size_bytes = sum(_TENSOR_BYTES + len(one.name) for one in (*inputs, *outputs))
        if size_bytes <= _LARGEST_LAYOUT_BYTES:
            self._codecs.remember(layout, (spec, codec), size_bytes)
        return spec, codec


def _has_rows(message: ModelInferRequest) -> bool:
    """Whether there are tensors, and each has a first axis, all of the same size."""
    rows = {one.shape[0] if one.shape else 0 for one in message.inputs}
    return len(rows) == 1 and min(rows) > 0


def joined(number: int, parts: Sequence[Array]) -> Array:
    """The parts of output `number` as one array. Raises ExecutionFailed if they don't fit."""
    try:
        return np.concatenate(parts)
    except ValueError:
        shapes = [list(part.shape) for part in parts]
        what = f"the parts of a split request can't be joined: output {number} has shapes {shapes}"
        raise ExecutionFailed(what) from None
