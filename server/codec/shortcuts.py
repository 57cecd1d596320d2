"""The short way from the bytes of a request to arrays, and from results to the bytes of a response.

Lives here: what is known of a request by its head (`server.codec.wire_request`) once one like it has been checked, and
of a response by its shapes once one like it has been made. Must not: refuse anything. What doesn't fit takes the long
way, through messages, where the error texts are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from paceline.backends.packed import PackedLayout
from paceline.backends.shares import Outputs
from paceline.backends.spec import MISSING, Tensors
from paceline.protos.datatypes import Datatype
from paceline.protos.inference_pb2 import ModelInferResponse
from paceline.protos.tensors import TensorError, decode_raw, element_count
from paceline.protos.wire import OUTPUT_TAG, RAW_OUTPUT_TAG, RESPONSE_ID_TAG, delimited, varint
from paceline.server.codec.decoded import RequestOptions
from paceline.server.errors import GpuLost, InvalidRequest
from paceline.server.limits import LARGEST_RESPONSE_BYTES
from paceline.server.memory.client_memory import NOWHERE
from paceline.server.memory.region_tensors import Input, Inputs, Place, RegionTensor, Span
from paceline.server.memory.regions import Region, Regions

__all__ = ["AnswerPlan", "BatchAnswers", "Envelope", "InputPlan", "Located", "RegionInputPlan", "RequestPlan"]

_MAX_ID_LENGTHS = 64
"""The most lengths of ids for which a plan keeps some bytes each; callers choose ids."""


class InputPlan(NamedTuple):
    """One tensor of raw_input_contents: its place among the model's inputs, and what it is."""

    place: int
    datatype: Datatype
    shape: tuple[int, ...]
    size_bytes: int
    """-1 if the content has to be checked, or there is none."""


class RegionInputPlan(NamedTuple):
    """One tensor in a client's shared memory: its place among the model's inputs, what to call it, and what it is."""

    place: int
    what: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    where: Place


class Located(NamedTuple):
    """What requests of one plan have in shared memory: inputs, in the model's order, with MISSING for all others; where
    outputs belong; and the regions that all this is in."""

    inputs: Inputs
    targets: Mapping[int, Span]
    regions: Collection[Region]


@dataclass(frozen=True, slots=True, eq=False)
class RequestPlan:
    """What all requests of one head have in common. `inputs` are in the order of the message. `region_inputs` and the
    outputs whose indices are in `targets` are in shared memory. `layout` describes the model's inputs, in its order, if
    nothing but their bytes has to be read; only then does `starts` find them. `nowhere` is what the requests have in
    shared memory if that is nothing; otherwise `locate` finds it."""

    inputs: tuple[InputPlan, ...]
    region_inputs: tuple[RegionInputPlan, ...]
    targets: tuple[tuple[int, Place], ...]
    places: int
    """How many inputs the model has."""
    options: RequestOptions
    layout: PackedLayout | None
    nowhere: Located | None

    def starts(self, raw: Sequence[tuple[int, int]]) -> tuple[int, ...] | None:
        """Where the model's inputs begin in a request whose raw_input_contents begin and end at `raw`. None if they
        have to be read one by one: there is no `layout`, or they don't have the sizes that the head promised."""
        if self.layout is None or len(raw) != len(self.inputs):
            return None
        starts = [0] * self.places
        for one, (start, end) in zip(self.inputs, raw, strict=True):
            if one.size_bytes != end - start:
                return None
            starts[one.place] = start
        return tuple(starts)

    def locate(self, regions: Regions) -> Located | None:
        """What these requests have in `regions`; None if some of it isn't there. Valid for all requests of the plan, as
        long as the names mean these regions."""
        inputs: list[Input] = [MISSING] * self.places
        targets: dict[int, Span] = {}
        used: set[Region] = set()
        for place, what, dtype, shape, where in self.region_inputs:
            if (region := where.find(regions)) is None:
                return None
            inputs[place] = RegionTensor(what, region, where.offset, dtype, shape)
            used.add(region)
        for index, where in self.targets:
            if (region := where.find(regions)) is None:
                return None
            targets[index] = Span(region, where.offset, where.byte_size)
            used.add(region)
        return Located(tuple(inputs), targets or NOWHERE, used)

    def read(self, data: bytes, raw: Sequence[tuple[int, int]], located: Inputs) -> Inputs | None:
        """The model's inputs: those of the message, views of `data` where the datatype allows, and those that were
        `located` in shared memory. None if they aren't what the head promised."""
        if len(raw) != len(self.inputs):
            return None
        if not raw:
            return located
        arrays: list[Input] = [*located]
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
        return tuple(arrays)


class Envelope:
    """Wraps an answer in another message, as its field `tag`. The fields `more` are appended to the answer's own.
    Compared by identity: there is one for each way of wrapping."""

    __slots__ = ("more", "tag")

    def __init__(self, tag: bytes, more: bytes) -> None:
        self.tag = tag
        self.more = more

    def around(self, response: bytes) -> bytes:
        """The wrapping message, with `response` in it."""
        return b"".join((self.tag, varint(len(response) + len(self.more)), response, self.more))


class AnswerPlan:
    """What answers with the same outputs of the same shapes have in common, in the same `envelope` if any."""

    __slots__ = ("_envelope", "_fixed_sizes", "_head", "_outputs", "_size_bytes", "more", "starts")

    def __init__(
        self,
        made: ModelInferResponse,
        outputs: Sequence[tuple[int, Datatype]],
        elsewhere: Collection[int],
        envelope: Envelope | None,
    ) -> None:
        """`made` is a response as protobuf makes it, without id and tensors. `outputs` are the places of its outputs
        among the model's, and their datatypes. Those whose places are in `elsewhere` have no bytes in the response."""
        self._envelope = envelope
        self.more = envelope.more if envelope is not None else b""
        self._fixed_sizes = all(datatype.item_bytes for _, datatype in outputs)
        self._head = ModelInferResponse(
            model_name=made.model_name, model_version=made.model_version
        ).SerializeToString()
        self._size_bytes = len(self._head) + len(self.more)
        # Place, dtype, the bytes before it, its size in bytes, that of a row, and whether it is in the response.
        self._outputs: list[tuple[int, np.dtype[Any], bytes, int, int, bool]] = []
        # The bytes before a tensor.
        tag = b"".join(delimited(OUTPUT_TAG, output.SerializeToString()) for output in made.outputs)
        for (place, datatype), output in zip(outputs, made.outputs, strict=True):
            is_here = place not in elsewhere
            size_bytes = element_count(output.shape) * datatype.item_bytes
            row_bytes = size_bytes // output.shape[0] if size_bytes and output.shape else 0
            bytes_here = size_bytes if is_here else 0
            tag += RAW_OUTPUT_TAG + varint(bytes_here)
            self._outputs.append((place, datatype.dtype, tag, size_bytes, row_bytes, is_here))
            self._size_bytes += len(tag) + bytes_here
            tag = b""
        # The bytes before an id, by its length.
        self.starts: dict[int, bytes] = {}

    def answer(self, request_id: str, results: Tensors) -> bytes | None:
        """The answer with the wanted ones of `results`, the model's outputs. None if they aren't laid out as on the
        wire, or are too large for a message."""
        name = request_id.encode()
        start = self.starts.get(len(name)) or self.start(len(name))
        if not (start and self._fixed_sizes):
            return None
        pieces: list[Any] = [start, name]
        for place, dtype, tag, _, _, is_here in self._outputs:
            array = results[place]
            # An output that isn't here may be on a device, and then has no flags.
            if array.dtype != dtype or (is_here and not array.flags.c_contiguous):
                return None
            pieces.append(tag)
            if is_here:
                pieces.append(array)
        pieces.append(self.more)
        return b"".join(pieces)

    def of(self, outputs: Outputs, targets: Mapping[int, Span] = NOWHERE) -> BatchAnswers | None:
        """What makes the answers to requests that have the same number of rows of `outputs` each, and want them in the
        same `targets`. None if the outputs aren't laid out as on the wire, or are too large for where they belong."""
        pieces, writes = [], []
        for place, dtype, tag, size_bytes, row_bytes, is_here in self._outputs:
            data = outputs.data(place) if self._fixed_sizes else None
            if data is None or outputs.arrays[place].dtype != dtype:
                return None
            if is_here:
                pieces.append((tag, data, size_bytes, row_bytes))
                continue
            pieces.append((tag, data, 0, 0))
            if size_bytes > targets[place].byte_size:
                return None
            writes.append((targets[place], data, size_bytes, row_bytes))
        return BatchAnswers(self, pieces, writes)

    def start(self, id_bytes: int) -> bytes:
        """The bytes before an id of `id_bytes` bytes; empty if the message would be too large."""
        field = RESPONSE_ID_TAG + varint(id_bytes) if id_bytes else b""
        size_bytes = self._size_bytes + len(field) + id_bytes
        if size_bytes > LARGEST_RESPONSE_BYTES:
            return b""
        start = self._head + field
        if self._envelope is not None:
            start = self._envelope.tag + varint(size_bytes) + start
        if len(self.starts) < _MAX_ID_LENGTHS:
            self.starts[id_bytes] = start
        return start


class BatchAnswers:
    """Answers with shares of one batch's outputs, by one plan."""

    __slots__ = ("_more", "_only", "_pieces", "_plan", "_starts", "_writes")

    def __init__(
        self,
        plan: AnswerPlan,
        pieces: Sequence[tuple[bytes, memoryview, int, int]],
        writes: Sequence[tuple[Span, memoryview, int, int]],
    ) -> None:
        """`pieces`: for each output the bytes before it, the batch's bytes, and how many of these a share and a row
        have. `writes`: for each output that belongs elsewhere its span, the batch's bytes, and the same two numbers."""
        self._plan = plan
        self._starts, self._more = plan.starts, plan.more
        self._writes = writes
        self._pieces = pieces
        # Most models have one output.
        self._only = pieces[0] if len(pieces) == 1 else None

    # hot path: see bench/
    def answer(self, request_id: str, row: int) -> bytes | None:
        """As `AnswerPlan.answer`, for the share that begins at `row`. Outputs that belong elsewhere are written there;
        None also if they can't be."""
        name = request_id.encode()
        start = self._starts.get(len(name)) or self._plan.start(len(name))
        if not start or (self._writes and not self._write(row)):
            return None
        if self._only is not None:
            tag, data, size_bytes, row_bytes = self._only
            begin = row * row_bytes
            return b"".join((start, name, tag, data[begin : begin + size_bytes], self._more))
        pieces: list[bytes | memoryview] = [start, name]
        for tag, data, size_bytes, row_bytes in self._pieces:
            begin = row * row_bytes
            pieces += tag, data[begin : begin + size_bytes]
        pieces.append(self._more)
        return b"".join(pieces)

    def _write(self, row: int) -> bool:
        try:
            for span, data, size_bytes, row_bytes in self._writes:
                begin = row * row_bytes
                span.region.write(data[begin : begin + size_bytes], span.offset)
        except (InvalidRequest, GpuLost):
            return False
        return True
