"""Responses as bytes, made without message objects: what many of them have in common is made once.

A plan has the bytes that all answers share which have the same outputs of the same shapes. A batch's answers share the
batch's outputs on top of that, so that each of them is little more than slices.

Lives here: the plans, and the facts about a batch that an answer may tell. Must not: refuse anything. What isn't laid
out as on the wire, or is too large, is encoded as a message, by `server.codec.codec`, which has the error texts.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from paceline.backends.base import DeviceTensor
from paceline.backends.batching import Outputs, Share
from paceline.backends.open_request import Parameters, Told
from paceline.backends.spec import ModelSpec, Tensors
from paceline.protos.datatypes import Datatype, by_name
from paceline.protos.inference_pb2 import ModelInferResponse
from paceline.protos.tensors import element_count
from paceline.protos.wire import OUTPUT_TAG, RAW_OUTPUT_TAG, RESPONSE_ID_TAG, delimited, varint
from paceline.server.bounded_cache import BoundedCache
from paceline.server.codec.parameters import RequestOptions
from paceline.server.codec.wire_request import AnyMessage
from paceline.server.errors import GpuLost, InvalidRequest
from paceline.server.limits import LARGEST_RESPONSE_BYTES
from paceline.server.memory.region_tensors import Span, set_shared_memory_parameters

if TYPE_CHECKING:
    from paceline.scheduler.request import BatchFacts

_MAX_ID_LENGTHS = 64
"""The most lengths of ids for which a plan keeps some bytes each; callers choose ids."""


Pieces: TypeAlias = Sequence[bytes | memoryview]
"""What a message is joined of."""


class Envelope:
    """Wraps an answer in another message, as its field `tag`. The fields `more` are appended to the answer's own.
    Compared by identity: there is one for each way of wrapping."""

    __slots__ = ("more", "tag")

    def __init__(self, tag: bytes, more: bytes) -> None:
        self.tag = tag
        self.more = more

    def around(self, response: Pieces) -> bytes:
        """The wrapping message, with `response` in it."""
        return b"".join((self.tag, varint(sum(map(len, response)) + len(self.more)), *response, self.more))


class Answerable(Protocol):
    """A request with its results, `value`; those of its outputs that have `targets` belong there, by index. Its answer
    is to be in `envelope`, if that is set."""

    @property
    def message(self) -> AnyMessage: ...

    @property
    def options(self) -> RequestOptions | None: ...

    @property
    def value(self) -> Tensors: ...

    @property
    def targets(self) -> Mapping[int, Span]: ...

    @property
    def envelope(self) -> Envelope | None: ...


class AnswerPlans:
    """Makes the answers of one version of a model, which serves `spec`."""

    def __init__(self, model: str, version: str, spec: ModelSpec) -> None:
        self._model = model
        self._version = version
        self._names = [tensor.name for tensor in spec.outputs]
        self._types: list[Datatype] = [by_name(tensor.datatype) for tensor in spec.outputs]
        self._plans = BoundedCache[Hashable, _Plan]()

    # hot path: see bench/
    def pieces(self, requests: Iterable[Answerable]) -> list[Pieces]:
        """What the answer to each request is joined of; large ones are views of the outputs. Nothing where
        more than raw outputs is wanted or said by the model, and where these aren't laid out as on the wire, are too
        large for a message or for where they belong, or can't be written there."""
        made: list[Pieces] = []
        for request in requests:
            options, results, targets = request.options, request.value, request.targets
            assert options is not None
            if not options.plain or type(results) is Told:
                made.append(())
                continue
            if type(results) is not Share:
                results = Share(Outputs(results), 0, -1)
            outputs, rows = results.outputs, results.stop - results.start
            if targets:
                answers = self._of_batch(options.outputs, outputs, rows, request.envelope, targets)
            else:
                # Requests that want these outputs, and have equally large shares of the same batch, have it in common.
                kind = options.outputs, rows, request.envelope
                if kind not in outputs.notes:
                    outputs.notes[kind] = self._of_batch(options.outputs, outputs, rows, request.envelope, targets)
                answers = outputs.notes[kind]
            made.append(answers.pieces(request.message.id, results.start) if answers is not None else ())
        return made

    def _of_batch(
        self,
        wanted: tuple[int, ...],
        outputs: Outputs,
        rows: int,
        envelope: Envelope | None,
        targets: Mapping[int, Span],
    ) -> _BatchAnswers | None:
        """What makes answers with `rows` rows of `outputs` each (-1: all of them). None if that can't be done."""
        arrays = outputs.arrays
        shapes = [arrays[index].shape if rows < 0 else (rows, *arrays[index].shape[1:]) for index in wanted]
        places = [(index, one.region.name, one.offset) for index, one in targets.items() if index in wanted]
        layout = envelope, wanted, *shapes, *places
        plan = self._plans.get(layout)
        if plan is None:
            plan = _Plan(self._sample(wanted, shapes, targets), wanted, self._types, targets.keys(), envelope)
            self._plans.remember(layout, plan)
        return plan.of(outputs, targets)

    def _sample(
        self, wanted: Sequence[int], shapes: Sequence[tuple[int, ...]], targets: Mapping[int, Span]
    ) -> ModelInferResponse:
        """A response without id and tensors' bytes, as protobuf makes it."""
        made = ModelInferResponse(model_name=self._model, model_version=self._version)
        for index, shape in zip(wanted, shapes, strict=True):
            datatype = self._types[index]
            output = made.outputs.add(name=self._names[index], datatype=datatype.name, shape=shape)
            if index in targets:
                set_shared_memory_parameters(output, targets[index], element_count(shape) * datatype.item_bytes)
        return made


class _Plan:
    """What answers with the same outputs of the same shapes have in common, in the same `envelope` if any."""

    __slots__ = ("_envelope", "_fixed_sizes", "_outputs", "_prefix", "_size_bytes", "more", "starts")

    def __init__(
        self,
        made: ModelInferResponse,
        wanted: Sequence[int],
        types: Sequence[Datatype],
        elsewhere: Collection[int],
        envelope: Envelope | None,
    ) -> None:
        """`made` is a response as protobuf makes it, with the outputs `wanted`, but without id and tensors' bytes.
        `types` are those of all outputs. Those in `elsewhere` have no bytes in the response."""
        self._envelope = envelope
        self.more = envelope.more if envelope is not None else b""
        self._fixed_sizes = all(types[index].item_bytes for index in wanted)
        self._prefix = ModelInferResponse(
            model_name=made.model_name, model_version=made.model_version
        ).SerializeToString()
        self._size_bytes = len(self._prefix) + len(self.more)
        # Index, dtype, the bytes before it, its size in bytes, that of a row, and whether it is in the response.
        self._outputs: list[tuple[int, np.dtype[Any], bytes, int, int, bool]] = []
        # The bytes before a tensor.
        tag = b"".join(delimited(OUTPUT_TAG, output.SerializeToString()) for output in made.outputs)
        for index, output in zip(wanted, made.outputs, strict=True):
            is_here = index not in elsewhere
            size_bytes = element_count(output.shape) * types[index].item_bytes
            row_bytes = size_bytes // output.shape[0] if size_bytes and output.shape else 0
            bytes_here = size_bytes if is_here else 0
            tag += RAW_OUTPUT_TAG + varint(bytes_here)
            self._outputs.append((index, types[index].dtype, tag, size_bytes, row_bytes, is_here))
            self._size_bytes += len(tag) + bytes_here
            tag = b""
        # The bytes before an id, by its length.
        self.starts: dict[int, bytes] = {}

    def of(self, outputs: Outputs, targets: Mapping[int, Span]) -> _BatchAnswers | None:
        """What makes the answers to requests that have the same number of rows of `outputs` each, and want them in the
        same `targets`. None if the outputs aren't laid out as on the wire, or are too large for where they belong."""
        if not self._fixed_sizes:
            return None
        pieces: list[tuple[bytes, bytes | memoryview, int, int]] = []
        writes: list[tuple[Span, memoryview, int, int]] = []
        for index, dtype, tag, size_bytes, row_bytes, is_here in self._outputs:
            array = outputs.arrays[index]
            if array.dtype != dtype:
                return None
            if not is_here and isinstance(array, DeviceTensor):
                pieces.append((tag, b"", 0, 0))  # the instance's thread has put it where it belongs
                continue
            if (data := outputs.data(index)) is None:
                return None
            if is_here:
                pieces.append((tag, data, size_bytes, row_bytes))
                continue
            pieces.append((tag, b"", 0, 0))
            if size_bytes > targets[index].byte_size:
                return None
            writes.append((targets[index], data, size_bytes, row_bytes))
        return _BatchAnswers(self, pieces, writes)

    def start(self, id_bytes: int) -> bytes:
        """The bytes before an id of `id_bytes` bytes; empty if the message would be too large."""
        field = RESPONSE_ID_TAG + varint(id_bytes) if id_bytes else b""
        size_bytes = self._size_bytes + len(field) + id_bytes
        if size_bytes > LARGEST_RESPONSE_BYTES:
            return b""
        start = self._prefix + field
        if self._envelope is not None:
            start = self._envelope.tag + varint(size_bytes) + start
        if len(self.starts) < _MAX_ID_LENGTHS:
            self.starts[id_bytes] = start
        return start


class _BatchAnswers:
    """Answers with shares of one batch's outputs, by one plan."""

    __slots__ = ("_more", "_only", "_pieces", "_plan", "_starts", "_writes")

    def __init__(
        self,
        plan: _Plan,
        pieces: Sequence[tuple[bytes, bytes | memoryview, int, int]],
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
    def pieces(self, request_id: str, row: int) -> Pieces:
        """The answer with the share that begins at `row`. Outputs that belong elsewhere are written there; nothing if
        they can't be, or if the message would be too large."""
        name = request_id.encode()
        start = self._starts.get(len(name)) or self._plan.start(len(name))
        if not start or (self._writes and not self._write(row)):
            return ()
        if self._only is not None:
            tag, data, size_bytes, row_bytes = self._only
            begin = row * row_bytes
            return start, name, tag, data[begin : begin + size_bytes], self._more
        pieces: list[bytes | memoryview] = [start, name]
        for tag, data, size_bytes, row_bytes in self._pieces:
            begin = row * row_bytes
            pieces += tag, data[begin : begin + size_bytes]
        pieces.append(self._more)
        return pieces

    def _write(self, row: int) -> bool:
        try:
            for span, data, size_bytes, row_bytes in self._writes:
                begin = row * row_bytes
                span.region.write(data[begin : begin + size_bytes], span.offset)
        except (InvalidRequest, GpuLost):
            return False
        return True


def add_parameters(response: ModelInferResponse, parameters: Parameters) -> None:
    """Put what a model says of its answer into the parameters of `response`."""
    for key, value in parameters.items():
        parameter = response.parameters[key]
        if isinstance(value, bool):
            parameter.bool_param = value
        elif isinstance(value, int):
            parameter.int64_param = value
        elif isinstance(value, float):
            parameter.double_param = value
        else:
            parameter.string_param = value


def batch_parameters(batch_id_prefix: str, facts: BatchFacts) -> Parameters:
    """What a request may learn of its batch, as parameters of its answer."""
    found: dict[str, bool | int | float | str] = {
        "paceline_batch_id": f"{batch_id_prefix}-{facts.number}",
        "paceline_batch_rows": facts.rows,
        "paceline_batch_padded_rows": facts.padded_rows,
        "paceline_queue_us": facts.queue_ns // 1_000,
        "paceline_compute_us": facts.compute_ns // 1_000,
    }
    if facts.sizes:
        found["paceline_batch_padded_sizes"] = ",".join(map(str, facts.sizes))
    return found
