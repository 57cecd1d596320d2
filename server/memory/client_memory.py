"""One model's tensors in shared memory, as its codec needs them.

Lives here: which of a request's tensors are there, whether they fit, and the writing of outputs. Must not: what holds
for tensors wherever they are (`codec`), or how memory is read and written (`regions`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from paceline.backends.base import DeviceTensor
from paceline.backends.spec import ModelSpec
from paceline.protos.datatypes import Datatype, by_name
from paceline.protos.inference_pb2 import ModelInferRequest, ModelInferResponse
from paceline.protos.tensors import TensorError, decode_raw, element_count
from paceline.server.errors import InvalidRequest, NotSupported, RegionNotFound
from paceline.server.memory.region_tensors import BYTE_SIZE, OFFSET, REGION, Input, RegionTensor, Span, span_of
from paceline.server.memory.regions import Regions

__all__ = ["NOWHERE", "ClientMemory", "Write", "set_shared_memory_parameters"]

InputTensor = ModelInferRequest.InferInputTensor
RequestedOutput = ModelInferRequest.InferRequestedOutputTensor
Write = tuple[ModelInferResponse.InferOutputTensor, Span, bytes | memoryview | DeviceTensor]
"""An output of the response, where it belongs, and its raw bytes, or the DeviceTensor that is there already."""

NOWHERE: Mapping[int, Span] = {}


class ClientMemory:
    """One model's use of `regions`, which clients have registered; None if they may not register any."""

    def __init__(self, model: str, spec: ModelSpec, regions: Regions | None) -> None:
        self._model = model
        self._spec = spec
        self._regions = regions
        self._most_bytes = 0 if regions is None else regions.message_bytes
        self._most_texts = 0 if regions is None else regions.text_elements
        self._input_types: list[Datatype] = [by_name(tensor.datatype) for tensor in spec.inputs]
        self._fixed_bytes = [_fixed_bytes(spec, index) for index in range(len(spec.outputs))]

    def span(self, kind: str, tensor: InputTensor | RequestedOutput) -> Span | None:
        """Where an input lies, or an output belongs, if its parameters say so; else None. `kind` is `input` or
        `output`.

        Raises InvalidRequest, RegionNotFound, NotSupported.
        """
        if self._regions is None:
            if REGION in tensor.parameters:
                raise NotSupported(
                    f"model '{self._model}': {kind} '{tensor.name}': '{REGION}' is switched off; start the server with "
                    "--allow-client-shm=true to switch it on"
                )
            return None
        try:
            return span_of(tensor.parameters, self._regions)
        except (InvalidRequest, RegionNotFound) as error:
            raise type(error)(f"model '{self._model}': {kind} '{tensor.name}': {error}") from None

    def input(self, tensor: InputTensor, shape: tuple[int, ...], index: int, span: Span) -> Input:
        """The input that lies at `span`. It is read when the batch executes, or now if its content has to be checked
        before.

        Raises TensorError, or InvalidRequest if the memory is gone.
        """
        if tensor.HasField("contents"):
            raise TensorError(f"expected either contents or {REGION}, got both")
        datatype, spec = self._input_types[index], self._spec.inputs[index]
        if datatype.item_bytes:
            # Its size is checked before anything is read.
            unread = RegionTensor.of_span(f"model '{self._model}': input '{spec.name}'", span, datatype, shape)
            if not spec.shape_tensor and datatype.dtype.kind != "b":
                return unread
        if span.byte_size > self._most_bytes:
            raise TensorError(
                f"expected at most {self._most_bytes} bytes of {datatype.name} (--grpc-max-message-bytes), "
                f"got {span.byte_size}"
            )
        if not datatype.item_bytes and (count := element_count(shape)) > self._most_texts:
            raise TensorError(
                f"expected at most {self._most_texts} elements of BYTES (--max-request-elements), got {count}"
            )
        return decode_raw(span.read(), datatype, shape)

    def check_targets(self, targets: Mapping[int, Span], rows: int) -> None:
        """Raise InvalidRequest for memory that is gone, or certainly too small for the output of its index. Where an
        output's size is open, only the execution will tell."""
        for index, span in targets.items():
            tensor = self._spec.outputs[index]
            needed = self._fixed_bytes[index] * (1 if tensor.shape_tensor else rows)
            if needed > span.byte_size:
                raise self._too_small(tensor.name, needed, span)
            try:
                span.region.check()
            except InvalidRequest as error:
                raise self._invalid(tensor.name, str(error)) from None

    def write(self, writes: Sequence[Write]) -> None:
        """Write outputs to where they belong, in order, and note in the response how many bytes they have.

        Raises InvalidRequest; if an output doesn't fit, before anything is written.
        """
        for output, span, data in writes:
            if not isinstance(data, DeviceTensor) and len(data) > span.byte_size:
                raise self._too_small(output.name, len(data), span)
        for output, span, data in writes:
            if isinstance(data, DeviceTensor):
                set_shared_memory_parameters(output, span, data.nbytes)
                continue
            try:
                span.region.write(data, span.offset)
            except InvalidRequest as error:
                raise self._invalid(output.name, str(error)) from None
            set_shared_memory_parameters(output, span, len(data))

    def _too_small(self, output: str, needed: int, span: Span) -> InvalidRequest:
        return self._invalid(
            output, f"expected '{BYTE_SIZE}' to be at least {needed} bytes to hold the result, got {span.byte_size}"
        )

    def _invalid(self, output: str, what: str) -> InvalidRequest:
        return InvalidRequest(f"model '{self._model}': output '{output}': {what}")


def set_shared_memory_parameters(output: ModelInferResponse.InferOutputTensor, span: Span, byte_size: int) -> None:
    """Say in the response that the output's `byte_size` bytes are at `span`."""
    output.parameters[REGION].string_param = span.region.name
    output.parameters[BYTE_SIZE].int64_param = byte_size
    if span.offset:
        output.parameters[OFFSET].int64_param = span.offset


def _fixed_bytes(spec: ModelSpec, index: int) -> int:
    """The bytes that each row of an output takes at least, or all of it if there are no rows; 0 if unknown."""
    tensor = spec.outputs[index]
    scattered = any(tensor.name in one.targets for one in spec.batch_outputs)
    if tensor.optional or scattered or tensor.any_rank or tensor.assumed or -1 in tensor.dims:
        return 0
    return math.prod(tensor.dims) * by_name(tensor.datatype).item_bytes
