"""Tensors that lie in clients' shared memory.

Lives here: the parameters by which a message says where a tensor lies, and an input that isn't read yet. Must not: know
models, or how regions are read. Source of names and types: Triton's "shared memory" extension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from paceline.backends.base import DeviceTensor
from paceline.backends.spec import Array
from paceline.protos.datatypes import Datatype
from paceline.protos.inference_pb2 import InferParameter
from paceline.protos.tensors import TensorError, element_count
from paceline.server.errors import InvalidRequest
from paceline.server.memory.regions import Region, Regions

__all__ = [
    "BYTE_SIZE",
    "OFFSET",
    "REGION",
    "Input",
    "Inputs",
    "Place",
    "RegionTensor",
    "Span",
    "TargetedInputs",
    "span_of",
]

REGION = "shared_memory_region"
BYTE_SIZE = "shared_memory_byte_size"
OFFSET = "shared_memory_offset"
_UINT8 = np.dtype(np.uint8)


class Place(NamedTuple):
    """Where requests that are alike say that a tensor lies. The region is given by its name, which may come to mean
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
    """Where `parameters` say that their tensor lies; None if they don't.

    Raises InvalidRequest, RegionNotFound.
    """
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


class RegionTensor:
    """An input that is read when its batch executes: until then it costs no memory, and from then on its owner can't
    change it. Checking, splitting and queueing requests treat it like an array.

    `what` names model and input.
    """

    __slots__ = ("_offset", "dtype", "region", "shape", "what")

    def __init__(
        self, what: str, region: Region, offset: int, dtype: np.dtype[np.generic], shape: tuple[int, ...]
    ) -> None:
        self.what = what
        self.region = region
        self._offset = offset
        self.dtype = dtype
        self.shape = shape

    @classmethod
    def of_span(cls, what: str, span: Span, datatype: Datatype, shape: tuple[int, ...]) -> RegionTensor:
        """The tensor of `shape` that is all of `span`. `datatype` is of fixed size.

        Raises TensorError if the sizes differ, InvalidRequest if the memory is gone.
        """
        expected = element_count(shape) * datatype.item_bytes
        if span.byte_size != expected:
            raise TensorError(
                f"expected {expected} bytes for {datatype.name} of shape {list(shape)}, got {span.byte_size}"
            )
        span.region.check()
        return cls(what, span.region, span.offset, datatype.dtype, shape)

    @property
    def place(self) -> Place:
        return Place(self.region.name, self._offset, self.nbytes)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def reshape(self, shape: Sequence[int]) -> RegionTensor:
        """The same elements in another shape, of as many elements."""
        return RegionTensor(self.what, self.region, self._offset, self.dtype, tuple(shape))

    def __getitem__(self, rows: slice) -> RegionTensor:
        """A contiguous range of its rows."""
        start, stop, _ = rows.indices(self.shape[0])
        dims = self.shape[1:]
        offset = self._offset + start * math.prod(dims) * self.dtype.itemsize
        return RegionTensor(self.what, self.region, offset, self.dtype, (stop - start, *dims))

    def mapped_at(self, size_bytes: int) -> int | None:
        """The address of its first `size_bytes` bytes, for `copy_all`. None if there is none, or if they don't all lie
        in the region: beyond it is the server's own memory, which no mistake in checking the request may expose."""
        begin = self.region.mapped_at
        if begin is None or not 0 <= self._offset <= self.region.byte_size - size_bytes:
            return None
        return begin + self._offset

    def on_gpu(self, gpu: int) -> DeviceTensor | None:
        """The same tensor as a DeviceTensor in that GPU's memory; None if it lies elsewhere."""
        begin = self.region.address_on(gpu)
        return None if begin is None else DeviceTensor(self.region, begin + self._offset, self.dtype, self.shape)

    def read_into(self, target: Array) -> None:
        """Fill `target`, C-contiguous and of this tensor's shape and dtype, with what is there now. Blocks for the
        copy; raises InvalidRequest."""
        try:
            self.region.read_into(target, self._offset)
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
