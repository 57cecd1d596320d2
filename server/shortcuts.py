"""The short way from the bytes of a request to arrays, and from results to the bytes of a response.

Lives here: what is known of a request by its head (`server.wire_request`) once one like it has been checked, and of a
response by its shapes once one like it has been made. Must not: refuse anything. What doesn't fit goes the long way,
through messages, which finds the words.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from backends.base import MISSING, Tensors
from protos.datatypes import Datatype
from protos.inference_pb2 import ModelInferResponse
from protos.tensors import TensorError, decode_raw
from protos.wire import OUTPUT_TAG, RAW_OUTPUT_TAG, RESPONSE_ID_TAG, delimited, varint
from server.parameters import RequestParameters
from server.region_tensors import Input, Place, RegionTensor, Span
from server.regions import Regions

__all__ = ["AnswerPlan", "InputPlan", "RegionInputPlan", "RequestPlan", "WireResponse"]

_MOST_BYTES = 2**31 - 1
"""What protobuf takes for a message."""


class InputPlan(NamedTuple):
    """One tensor of raw_input_contents: its place among the model's inputs, and what it is."""

    place: int
    datatype: Datatype
    shape: tuple[int, ...]
    size_bytes: int
    """-1 if the content has to be looked at, or is none."""


class RegionInputPlan(NamedTuple):
    """One tensor in a client's shared memory: its place among the model's inputs, what to call it, and what it is."""

    place: int
    what: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    where: Place


class RequestPlan(NamedTuple):
    """What all requests of one head have in common. `inputs` are in the order of the message; `region_inputs` aren't in
    it, and outputs of the indices in `targets` don't go into the response."""

    inputs: tuple[InputPlan, ...]
    region_inputs: tuple[RegionInputPlan, ...]
    targets: tuple[tuple[int, Place], ...]
    places: int
    """How many inputs the model has."""
    rows: int
    key: Hashable
    outputs: tuple[int, ...]
    parameters: RequestParameters

    # hot path: see bench/
    def read(self, data: bytes, raw: Sequence[tuple[int, int]], regions: Regions | None) -> tuple[Input, ...] | None:
        """The model's inputs, views of `data` where the datatype allows; None if they aren't what the head promised, or
        not where."""
        if len(raw) != len(self.inputs):
            return None
        arrays: list[Input] = [MISSING] * self.places
        for (place, datatype, shape, size_bytes), (start, end) in zip(self.inputs, raw, strict=True):
            if size_bytes == end - start:
                arrays[place] = np.ndarray(shape, datatype.dtype, data, start)
            elif size_bytes >= 0:
                return None
            else:
                try:
                    arrays[place] = decode_raw(data[start:end], datatype, shape)
                except TensorError:
                    return None
        for place, what, dtype, shape, where in self.region_inputs:
            region = where.find(regions) if regions is not None else None
            if region is None:
                return None
            arrays[place] = RegionTensor(what, region, where.offset, dtype, shape)
        return tuple(arrays)

    def find_targets(self, regions: Regions | None) -> Mapping[int, Span] | None:
        """Where outputs belong that don't go into the response; None if some of that is gone."""
        found = {}
        for index, where in self.targets:
            region = where.find(regions) if regions is not None else None
            if region is None:
                return None
            found[index] = Span(region, where.offset, where.byte_size)
        return found


class WireResponse(NamedTuple):
    """A serialized message in pieces, bytes and arrays, and its size."""

    pieces: Sequence[Any]
    size_bytes: int

    def SerializeToString(self) -> bytes:
        return b"".join(self.pieces)

    def in_field(self, tag: bytes, more: bytes) -> WireResponse:
        """The message that has this one, with the further fields `more`, in the field of `tag`."""
        size = varint(self.size_bytes + len(more))
        return WireResponse((tag, size, *self.pieces, more), len(tag) + len(size) + self.size_bytes + len(more))


class AnswerPlan:
    """What responses with the same outputs of the same shapes have in common."""

    __slots__ = ("_fixed_sizes", "_head", "_outputs", "_size_bytes")

    def __init__(
        self, made: ModelInferResponse, outputs: Sequence[tuple[int, Datatype, int]], elsewhere: Collection[int]
    ) -> None:
        """`made` is a response as protobuf makes it, without id and tensors; `outputs` are the places of its outputs
        among the model's, their datatypes and sizes in bytes. Those at the places `elsewhere` leave no bytes here."""
        outputs = [(place, datatype, 0 if place in elsewhere else size) for place, datatype, size in outputs]
        self._head = ModelInferResponse(
            model_name=made.model_name, model_version=made.model_version
        ).SerializeToString()
        tags = [RAW_OUTPUT_TAG + varint(size_bytes) for *_, size_bytes in outputs]
        self._size_bytes = len(self._head) + sum(map(len, tags)) + sum(size_bytes for *_, size_bytes in outputs)
        described = b"".join(delimited(OUTPUT_TAG, output.SerializeToString()) for output in made.outputs)
        self._size_bytes += len(described)
        self._fixed_sizes = all(datatype.item_bytes for _, datatype, _ in outputs)
        # What goes in front of each tensor.
        tags[:1] = [described + tag for tag in tags[:1]]
        self._outputs = [
            (place, datatype.dtype, tag, place not in elsewhere)
            for (place, datatype, _), tag in zip(outputs, tags, strict=True)
        ]

    # hot path: see bench/
    def response(self, request_id: str, results: Tensors) -> WireResponse | None:
        """The response with what is wanted of `results`, the model's outputs; None if they aren't laid out like on the
        wire, or too large for a message."""
        if not self._fixed_sizes:
            return None
        size_bytes = self._size_bytes
        pieces: list[Any] = [self._head]
        if request_id:
            field = delimited(RESPONSE_ID_TAG, request_id.encode())
            pieces.append(field)
            size_bytes += len(field)
        for place, dtype, tag, is_here in self._outputs:
            array = results[place]
            # What isn't here may be on a device, without flags.
            if array.dtype != dtype or (is_here and not array.flags.c_contiguous):
                return None
            pieces.append(tag)
            if is_here:
                pieces.append(array)
        return WireResponse(pieces, size_bytes) if size_bytes <= _MOST_BYTES else None
