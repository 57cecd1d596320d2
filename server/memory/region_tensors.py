"""Tensors that lie in clients' shared memory.

Lives here: the parameters by which a message says where a tensor lies, an input that isn't read yet, whether a model's
tensors fit there, and the writing of outputs. Must not: what holds for tensors wherever they are (`codec`), or how
memory is read and written (`regions`). Source of names and types: Triton's "shared memory" extension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from paceline.backends.base import DeviceTensor
from paceline.backends.spec import Array, ModelSpec
from paceline.protos.datatypes import Datatype, by_name
from paceline.protos.inference_pb2 import InferParameter, ModelInferRequest, ModelInferResponse
from paceline.protos.tensors import TensorError, decode_raw, element_count
from paceline.server.errors import InvalidRequest, NotSupported, RegionNotFound
from paceline.server.memory.regions import Region, Regions

REGION = "shared_memory_region"
BYTE_SIZE = "shared_memory_byte_size"
OFFSET = "shared_memory_offset"
_UINT8 = np.dtype(np.uint8)


class Place(NamedTuple):
    """Where known requests say that a tensor lies. The region is given by its name, which may come to mean
    another region, or none."""

    name: str
    offset: int
    byte_size: int

    def find(self, regions: Regions) -> Region | None:
        """The region that the name means now, if this place is in it; else None."""
        region = regions.get(self.name)
        return region if region is not None and region.byte_size - self.offset >= self.byte_size else None


@dataclass(frozen=True, slots=True)
class Span:
    """`byte_size` bytes from `offset` in a region, all of them within it."""

    region: Region
    offset: int
    byte_size: int

    @property
    def place(self) -> Place:
        return Place(self.region.name, self.offset, self.byte_size)

    def on_gpu(self, gpu: int) -> DeviceTensor | None:
        """The span as a DeviceTensor in that GPU's memory; None if it lies elsewhere."""
        begin = self.region.address_on(gpu)
        if begin is None:
            return None
        return DeviceTensor(self.region, begin + self.offset, _UINT8, (self.byte_size,))

    def read(self) -> memoryview:
        """A copy of what is there now. Blocks for the copy; raises InvalidRequest, or MemoryError."""
        data = np.empty(self.byte_size, np.uint8)
        self.region.read_into(data, self.offset)
        return data.data


def span_of(parameters: Mapping[str, InferParameter], regions: Regions) -> Span | None:
    """Where `parameters` say that their tensor lies; None if they don't. Raises InvalidRequest, RegionNotFound."""
    if REGION not in parameters:
        for key in (BYTE_SIZE, OFFSET):
            if key in parameters:
                raise InvalidRequest(f"'{key}' can not be specified without '{REGION}'")
        return None
    name = _parameter(parameters, REGION, "string_param").string_param
    if BYTE_SIZE not in parameters:
        raise InvalidRequest(f"'{BYTE_SIZE}' must be specified along with '{REGION}'")
    byte_size = _integer(parameters, BYTE_SIZE)
    offset = _integer(parameters, OFFSET) if OFFSET in parameters else 0
    region = regions.find(name)
    if not 0 <= offset < region.byte_size:
        raise InvalidRequest(
            f"Invalid offset for shared memory region: '{name}': expected 0 to {region.byte_size - 1}, got {offset}"
        )
    if not 0 <= byte_size <= region.byte_size - offset:
        raise InvalidRequest(
            f"Invalid offset + byte size for shared memory region: '{name}': expected up to {region.byte_size} bytes, "
            f"got {byte_size} from offset {offset}"
        )
    return Span(region, offset, byte_size)


def _integer(parameters: Mapping[str, InferParameter], key: str) -> int:
    given = _parameter(parameters, key, "int64_param", "uint64_param")
    return given.int64_param or given.uint64_param  # the one that isn't set is 0


def _parameter(parameters: Mapping[str, InferParameter], key: str, *kinds: str) -> InferParameter:
    kind = parameters[key].WhichOneof("parameter_choice")
    if kind not in kinds:
        raise InvalidRequest(f"'{key}': expected {' or '.join(kinds)}, got {kind or 'no value'}")
    return parameters[key]


@dataclass(slots=True, eq=False)
class RegionTensor:
    """An input that is read when its batch executes: until then it costs no memory, and from then on its owner can't
    change it. Checking, splitting and queueing requests treat it like an array. `what` names model and input."""

    what: str
    region: Region
    offset: int
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]

    @classmethod
    def of_span(cls, what: str, span: Span, datatype: Datatype, shape: tuple[int, ...]) -> RegionTensor:
        """The tensor of `shape` that is all of `span`. `datatype` is of fixed size. Raises TensorError if the sizes
        differ, InvalidRequest if the memory is gone."""
        expected = element_count(shape) * datatype.item_bytes
        if span.byte_size != expected:
            raise TensorError(
                f"expected {expected} bytes for {datatype.name} of shape {list(shape)}, got {span.byte_size}"
            )
        span.region.check()
        return cls(what, span.region, span.offset, datatype.dtype, shape)

    @property
    def place(self) -> Place:
        return Place(self.region.name, self.offset, self.nbytes)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def reshape(self, shape: Sequence[int]) -> RegionTensor:
        """The same elements in another shape, of as many elements."""
        return RegionTensor(self.what, self.region, self.offset, self.dtype, tuple(shape))

    def __getitem__(self, rows: slice) -> RegionTensor:
        """A contiguous range of its rows."""
        start, stop, _ = rows.indices(self.shape[0])
        dims = self.shape[1:]
        offset = self.offset + start * math.prod(dims) * self.dtype.itemsize
        return RegionTensor(self.what, self.region, offset, self.dtype, (stop - start, *dims))

    def mapped_at(self, size_bytes: int) -> int | None:
        """The address of its first `size_bytes` bytes, for `copy_all`. None if there is none, or if they don't all lie
        in the region: beyond it is the server's own memory, which no mistake in checking the request may expose."""
        begin = self.region.mapped_at
        if begin is None or not 0 <= self.offset <= self.region.byte_size - size_bytes:
            return None
        return begin + self.offset

    def on_gpu(self, gpu: int) -> DeviceTensor | None:
        """The same tensor as a DeviceTensor in that GPU's memory; None if it lies elsewhere."""
        begin = self.region.address_on(gpu)
        return None if begin is None else DeviceTensor(self.region, begin + self.offset, self.dtype, self.shape)

    def read_into(self, target: Array) -> None:
        """Fill `target`, C-contiguous and of this tensor's shape and dtype, with what is there now. Blocks for the
        copy; raises InvalidRequest."""
        try:
            self.region.read_into(target, self.offset)
        except InvalidRequest as error:
            raise InvalidRequest(f"{self.what}: {error}") from None


Input = Array | RegionTensor
Inputs = Sequence[Input]
"""A request's inputs on their way to an instance."""


class TargetedInputs(tuple[Input, ...]):
    """The inputs of a request with outputs that belong in CUDA shared memory, which is written on the instance's
    thread, by the instance where it can. `targets` says, by index, which outputs belong in shared memory, and where."""

    targets: Mapping[int, Span]

    @classmethod
    def to(cls, targets: Mapping[int, Span], inputs: Inputs) -> TargetedInputs:
        made = cls(inputs)
        made.targets = targets
        return made


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
        scattered = {name for one in spec.batch_outputs for name in one.targets}
        # What each row of an output takes at least, or all of it if there are no rows; 0 if unknown.
        self._fixed_bytes = [
            0
            if one.optional or one.any_rank or one.assumed or -1 in one.dims or one.name in scattered
            else math.prod(one.dims) * by_name(one.datatype).item_bytes
            for one in spec.outputs
        ]

    def span(self, kind: str, tensor: InputTensor | RequestedOutput) -> Span | None:
        """Where an input lies, or an output belongs, if its parameters say so; else None. `kind` is `input` or
        `output`. Raises InvalidRequest, RegionNotFound, NotSupported."""
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
        before. Raises TensorError, or InvalidRequest if the memory is gone."""
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
        """Write outputs to where they belong, in order, and note in the response how many bytes they have. Raises
        InvalidRequest; if an output doesn't fit, before anything is written."""
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
