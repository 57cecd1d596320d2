"""The codec of models that see other tensors than their clients do: reshaped, optional and shape tensors, and those
that tell them about sequences.

Lives here: what such models need beyond `ModelCodec`, and `codec_for`, which chooses at load, so that other models
don't pay for it. Must not: checks that any model needs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple, cast

from paceline.backends.batching import Packed
from paceline.backends.open_request import Told
from paceline.backends.spec import MISSING, Array, ControlKind, ModelSpec, Shape, Tensors, TensorSpec
from paceline.protos.inference_pb2 import ModelInferRequest
from paceline.scheduler.errors import NoSequence, SchedulerError
from paceline.scheduler.request import SequenceStep
from paceline.server.codec.answers import Answerable, Envelope, Pieces
from paceline.server.codec.array_request import ArrayAnswer, NamedArray
from paceline.server.codec.classification import Labels
from paceline.server.codec.codec import AnyResponse, InputTensor, ModelCodec
from paceline.server.codec.known_requests import Group, KnownRequests, Targets
from paceline.server.codec.parameters import RequestOptions, of_those_there
from paceline.server.codec.wire_request import AnyMessage, step_in
from paceline.server.errors import InvalidRequest, ServerError
from paceline.server.memory.region_tensors import Input, Inputs
from paceline.server.memory.regions import Regions

_NO_STEP = SequenceStep(0)
_HASHED_BYTES = 16
"""Keys outlive their requests, so they have no larger contents in them."""


def codec_for(
    model: str,
    version: str,
    spec: ModelSpec,
    max_batch_rows: int,
    labels: Labels | None = None,
    regions: Regions | None = None,
) -> ModelCodec:
    """The codec of one version of a model: an `AdaptingCodec` only if `spec` asks for it."""
    adapts = any(
        tensor.reshape is not None or tensor.optional or tensor.shape_tensor for tensor in (*spec.inputs, *spec.outputs)
    )
    adapts = adapts or spec.sequence is not None
    return (AdaptingCodec if adapts else ModelCodec)(model, version, spec, max_batch_rows, labels, regions)


class AdaptingCodec(ModelCodec):
    """A codec whose `read` returns inputs in the model's shapes, MISSING standing for those left out, and whose
    `encode` takes results in the model's shapes and leaves out of the response what is MISSING in them.

    The key also contains which optional inputs were given, and shape and hash of the content of each shape tensor. If
    the model's requests are steps of sequences, they are checked to be some.
    """

    def __init__(
        self,
        model: str,
        version: str,
        spec: ModelSpec,
        max_batch_rows: int,
        labels: Labels | None = None,
        regions: Regions | None = None,
    ) -> None:
        super().__init__(model, version, spec, max_batch_rows, labels, regions)
        self._shape_tensors = [index for index, tensor in enumerate(spec.inputs) if tensor.shape_tensor]
        self._optional = [index for index, tensor in enumerate(spec.inputs) if tensor.optional]
        self._reshaped = [index for index, tensor in enumerate(spec.inputs) if tensor.reshape is not None]
        self._reshaped_outputs = [index for index, tensor in enumerate(spec.outputs) if tensor.reshape is not None]
        self._all_there = (False,) * len(self._optional)
        self._left_out = any(tensor.optional for tensor in (*spec.inputs, *spec.outputs))
        controls = spec.sequence.controls if spec.sequence is not None else ()
        self._told_id = next((one.tensor for one in controls if one.kind is ControlKind.CORRID), None)
        self._holds_apart = bool(self._optional or self._shape_tensors)
        if self._holds_apart:
            self._known = KnownRequests(spec, regions, self._apart)

    # hot path: see bench/
    def read(self, first: AnyMessage, more: Iterable[AnyMessage] = ()) -> Group:
        """As of any codec. Of a model with sequences, raises NoSequence for a request that is in none."""
        checked: list[SequenceStep] = []
        sequence = self._spec.sequence
        group = super().read(first, more if sequence is None else self._good_steps(more, checked))
        options, inputs, targets, steps = group
        if sequence is not None:
            steps = [self._step(first), *checked][: len(inputs)]
        if self._holds_apart:
            options = options.with_key((options.key, self._apart(inputs[0])))
        if self._reshaped:
            inputs = [*map(self._seen, inputs)]
        return Group(options, inputs, targets, steps)

    # hot path: see bench/
    def _step(self, request: AnyMessage) -> SequenceStep:
        """The step of a sequence that `request` is; its other parameters are checked. The checks are in Triton's order.
        Raises NoSequence, or InvalidRequest for an id that the model can't be told. Of a model that iterates, requests
        needn't be any."""
        step = step_in(request)
        if step is None or not step.id:
            assert self._spec.sequence is not None
            if self._spec.sequence.iterative:
                return _NO_STEP
            raise NoSequence(self._model)
        told = self._told_id
        if told is not None and isinstance(step.id, str) != (told.datatype == "BYTES"):
            got = "BYTES" if isinstance(step.id, str) else "UINT64"
            wanted = "string_param" if told.datatype == "BYTES" else "int64_param"
            raise InvalidRequest(
                f"sequence batching control '{told.name}' data-type is '{got}', but model '{self._model}' expects "
                f"'{told.datatype}': expected sequence_id as {wanted}, got {step.id!r}"
            )
        return step

    # hot path: see bench/
    def _good_steps(self, requests: Iterable[AnyMessage], steps: list[SequenceStep]) -> Iterator[AnyMessage]:
        """Those of `requests` before the first whose step can't be, each after its step was added to `steps`."""
        for request in requests:
            try:
                steps.append(self._step(request))
            except (SchedulerError, ServerError):
                return  # it is refused when its turn comes
            yield request

    def _parse(self, request: ModelInferRequest, given: Sequence[NamedArray] | None = None) -> Group:
        group = super()._parse(request, given)
        if self._spec.sequence is not None and group.options.rows > 1:
            raise InvalidRequest(
                f"inference request to model '{self._model}' must specify batch-size 1 due to requirements of sequence "
                f"batcher: expected 1 row, as a request is a step of one sequence, got {group.options.rows}"
            )
        return group

    def _apart(self, inputs: Inputs) -> Hashable:
        """What keeps a request with these inputs apart from others: which of them are left out, and what is in shape
        tensors."""
        if type(inputs) is Packed:  # nothing is left out
            return self._all_there, *[_of_bytes(*inputs.raw(index)) for index in self._shape_tensors]
        left_out = tuple([inputs[index] is MISSING for index in self._optional])
        return left_out, *[_of_array(cast("Array", inputs[index])) for index in self._shape_tensors]

    def _seen(self, inputs: Inputs) -> Inputs:
        """`inputs` in the model's shapes."""
        seen: list[Input] = list(inputs)
        for index in self._reshaped:
            array = seen[index]
            if array is not MISSING:
                seen[index] = array.reshape(to_model(self._spec.inputs[index], array.shape, self._lead[index]))
        return tuple(seen)

    def outputs_of(self, request: Answerable) -> ArrayAnswer:
        return super().outputs_of(self._shown(request))

    def encode(self, requests: Sequence[Answerable]) -> list[AnyResponse | Exception]:
        if self._reshaped_outputs or self._left_out:
            requests = [self._shown(request) for request in requests]
        return super().encode(requests)

    def pieces(self, request: Answerable) -> Pieces:
        return super().pieces(self._shown(request))

    def _shown(self, request: Answerable) -> Answerable:
        """The request with results as its client sees them; itself if nothing is to be changed."""
        options, results = request.options, request.value
        assert options is not None
        if self._reshaped_outputs:
            shown = list(results)
            for index in self._reshaped_outputs:
                tensor, array = self._spec.outputs[index], shown[index]
                if array is not MISSING:
                    lead = 1 if self._max_batch_rows and not tensor.shape_tensor else 0
                    shown[index] = array.reshape(to_client(tensor, array.shape, lead))
            results = Told(shown, results.parameters) if type(results) is Told else shown
        there = of_those_there(options, results)
        if results is request.value and there is options:
            return request
        return _Shown(request.message, there, results, request.targets, request.envelope)

    def _rows(self, tensors: Sequence[InputTensor], shapes: Sequence[tuple[int, ...]]) -> int:
        if not self._max_batch_rows:
            return 1
        stacked = [
            (tensor, shape)
            for tensor, shape in zip(tensors, shapes, strict=True)
            if not self._spec.inputs[self._inputs[tensor.name]].shape_tensor
        ]
        if not stacked and self._spec.sequence is not None:
            return 1  # that of its state
        if not stacked:
            raise self._invalid("expected at least one input with a leading batch dimension, got none")
        return super()._rows([tensor for tensor, _ in stacked], [shape for _, shape in stacked])


class _Shown(NamedTuple):
    """A request to answer, `Answerable`."""

    message: AnyMessage
    options: RequestOptions
    value: Tensors
    targets: Targets
    envelope: Envelope | None


def _of_array(array: Array) -> Hashable:
    """Shape and content, or a hash of the content, which only equal contents have in common."""
    if array.dtype.hasobject:
        return array.shape, _digest(repr(array.ravel().tolist()).encode())
    return _of_bytes(array.shape, array.tobytes())


def _of_bytes(shape: Shape, content: bytes) -> Hashable:
    """The same for elements of a fixed size: contents of one shape are all hashed, or none."""
    return shape, content if len(content) <= _HASHED_BYTES else _digest(content)


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_HASHED_BYTES).digest()


def to_model(tensor: TensorSpec, shape: Shape, lead: int) -> Shape:
    """The model's shape for a client's by `reshape` in its configuration; the first `lead` axes stay as they are. Free
    dims pair up in order; loading has checked that they can."""
    return shape if tensor.reshape is None else _converted(shape, lead, tensor.dims, tensor.reshape)


def to_client(tensor: TensorSpec, shape: Shape, lead: int) -> Shape:
    """The client's shape for a model's; the first `lead` axes stay as they are. A model's scalar may have extra axes of
    size one."""
    if tensor.reshape is None:
        return shape
    return _converted(shape if tensor.reshape else shape[:lead], lead, tensor.reshape, tensor.dims)


def _converted(shape: Shape, lead: int, source: Shape, target: Shape) -> Shape:
    free = iter([size for size, dim in zip(shape[lead:], source, strict=True) if dim == -1])
    return (*shape[:lead], *(next(free) if dim == -1 else dim for dim in target))
