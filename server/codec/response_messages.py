"""Responses as messages, of requests that want more than raw outputs, or of outputs that `answers` leaves.

Lives here: typed contents, classes, what goes into clients' shared memory, and the bound on what a message can carry.
Must not: what most responses are made by; that is `server.codec.answers`.
"""

from __future__ import annotations

from paceline.backends.base import DeviceTensor
from paceline.backends.errors import ExecutionError
from paceline.backends.spec import Array, ModelSpec, TensorSpec
from paceline.protos.datatypes import Datatype, by_name, datatype_of
from paceline.protos.inference_pb2 import ModelInferResponse
from paceline.protos.tensors import TensorError, encode_contents, encode_raw, raw_buffer
from paceline.protos.wire import ensure_room
from paceline.server.codec.answers import Answerable
from paceline.server.codec.classification import Labels, check_datatype, classes_of
from paceline.server.errors import AnswerTooLarge, InvalidRequest
from paceline.server.limits import LARGEST_RESPONSE_BYTES
from paceline.server.memory.region_tensors import ClientMemory, Write

_BYTES = by_name("BYTES")
_SURELY_BYTES = 2**27
"""Up to this many bytes of tensors always fit a response, whatever else is in it, and even if typed contents take ten
times what `_least_bytes` says."""
_MOST_TYPED = 8
"""How much an array takes as typed contents while they are made, by its bytes."""
_MOST_WRITTEN = 6
"""How much protobuf takes at most to write a response, by its bytes: twice as much in the message, and in the one of a
stream around it, a buffer of up to that size, and a copy."""


class ResponseMessages:
    """Makes the responses of one version of a model, which serves `spec`. `labels` are the names of its outputs'
    classes, `memory` is where clients may want outputs."""

    def __init__(
        self, model: str, version: str, spec: ModelSpec, labels: Labels, memory: ClientMemory, *, batched: bool
    ) -> None:
        self._model = model
        self._version = version
        self._spec = spec
        self._labels = labels
        self._memory = memory
        self._batched = batched
        self._types: list[Datatype] = [by_name(tensor.datatype) for tensor in spec.outputs]

    def message(self, request: Answerable) -> ModelInferResponse:
        """The response, with outputs written to where they belong. Raises as `ModelCodec.encode` says."""
        request_id, options, results, targets = request.message.id, request.options, request.value, request.targets
        assert options is not None
        response = ModelInferResponse(model_name=self._model, model_version=self._version, id=request_id)
        writes: list[Write] = []
        raw: list[bytes] = []
        left_bytes = LARGEST_RESPONSE_BYTES
        for index in options.outputs:
            tensor, array = self._spec.outputs[index], results[index]
            # Models written for Triton may give others than they declare.
            datatype = datatype_of(array.dtype, self._types[index])
            if options.classes and index in options.classes:
                array, datatype = self._classes(tensor, datatype, array, options.classes[index]), _BYTES
            output = response.outputs.add(name=tensor.name, datatype=datatype.name, shape=array.shape)
            try:
                if index in targets:
                    data = array if isinstance(array, DeviceTensor) else raw_buffer(array, datatype)
                    writes.append((output, targets[index], data))
                    if not options.parameters.typed_outputs:
                        raw.append(b"")
                elif options.parameters.typed_outputs:
                    least_bytes = _least_bytes(array, datatype)
                    left_bytes = self._left_after(left_bytes, least_bytes)
                    ensure_room(_MOST_TYPED * array.nbytes + _MOST_WRITTEN * least_bytes)
                    output.contents.CopyFrom(encode_contents(array, datatype))
                else:
                    if datatype.item_bytes:
                        self._left_after(left_bytes, array.nbytes)  # before it is copied
                    raw.append(encode_raw(array, datatype))
                    left_bytes = self._left_after(left_bytes, len(raw[-1]))
            except TensorError as error:
                raise ExecutionError(f"model '{self._model}': output '{tensor.name}': {error}") from None
        if left_bytes < LARGEST_RESPONSE_BYTES - _SURELY_BYTES:
            self._left_after(LARGEST_RESPONSE_BYTES, response.ByteSize() + sum(map(len, raw)))
        ensure_room(_MOST_WRITTEN * sum(map(len, raw)))
        response.raw_output_contents.extend(raw)
        if writes:
            self._memory.write(writes)
        return response

    def _left_after(self, left_bytes: int, size_bytes: int) -> int:
        """What is left of `left_bytes` after `size_bytes`. Raises AnswerTooLarge if there is less."""
        if size_bytes > left_bytes:
            raise AnswerTooLarge(self._model)
        return left_bytes - size_bytes

    def _classes(self, tensor: TensorSpec, datatype: Datatype, array: Array, count: int) -> Array:
        by_rows = self._batched and not tensor.shape_tensor
        try:
            check_datatype(datatype.name)
            return classes_of(array, count, self._labels.get(tensor.name, ()), by_rows=by_rows)
        except InvalidRequest as error:
            raise InvalidRequest(f"model '{self._model}': output '{tensor.name}': {error}") from None


def _least_bytes(array: Array, datatype: Datatype) -> int:
    """The least that these elements take in typed contents, where an integer takes one to ten bytes, and a text two
    besides its own. Elements that should be texts and aren't are found when they are encoded."""
    if not datatype.item_bytes:
        return sum(2 + len(one) for one in array.flat if isinstance(one, (bytes, str)))
    return array.nbytes if datatype.dtype.kind == "f" else array.size
