"""The codec of models that see other tensors than their clients do: reshaped, optional and shape tensors.

Lives here: what such models need beyond `ModelCodec`, and `codec_for`, which chooses at load, so that other models
don't pay for it. Must not: checks that any model needs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

from paceline.backends.spec import MISSING, Array, ModelSpec, Tensors, TensorSpec
from paceline.server.codec.answers import Answerable, Envelope
from paceline.server.codec.classification import Labels
from paceline.server.codec.codec import AnyResponse, InputTensor, ModelCodec
from paceline.server.codec.known_requests import Group, Targets
from paceline.server.codec.parameters import RequestOptions
from paceline.server.codec.wire_request import AnyRequest
from paceline.server.memory.regions import Regions

__all__ = ["AdaptingCodec", "codec_for", "to_client", "to_model"]

Shape = tuple[int, ...]


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
    return (AdaptingCodec if adapts else ModelCodec)(model, version, spec, max_batch_rows, labels, regions)


class AdaptingCodec(ModelCodec):
    """A codec whose `read` returns inputs in the model's shapes, MISSING standing for those left out, and whose
    `encode` takes results in the model's shapes and leaves out of the response what is MISSING in them.

    The key also contains which optional inputs were given, and shape and hash of the content of each shape tensor.
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

    def read(self, first: AnyRequest, more: Iterable[AnyRequest] = ()) -> Group:
        """Reads `first` alone: what is in its tensors may keep it apart from others."""
        group = super().read(first)
        inputs = list(group.inputs[0])
        key = (
            group.options.key,
            tuple(inputs[index] is MISSING for index in self._optional),
            tuple(_content(cast("Array", inputs[index])) for index in self._shape_tensors),
        )
        for index in self._reshaped:
            array = inputs[index]
            if array is not MISSING:
                inputs[index] = array.reshape(to_model(self._spec.inputs[index], array.shape, self._lead[index]))
        return Group.of_one(replace(group.options, key=key), tuple(inputs), group.targets[0])

    def encode(self, requests: Sequence[Answerable]) -> list[AnyResponse | Exception]:
        return super().encode([self._shown(request) for request in requests])

    def _shown(self, request: Answerable) -> _Shown:
        """The request with results as its client sees them."""
        options, shown = request.options, list(request.value)
        assert options is not None
        for index in self._reshaped_outputs:
            tensor, array = self._spec.outputs[index], shown[index]
            if array is not MISSING:
                lead = 1 if self._max_batch_rows and not tensor.shape_tensor else 0
                shown[index] = array.reshape(to_client(tensor, array.shape, lead))
        there = tuple(index for index in options.outputs if shown[index] is not MISSING)
        return _Shown(request.message, replace(options, outputs=there), shown, request.targets, request.envelope)

    def _rows(self, tensors: Sequence[InputTensor], shapes: Sequence[tuple[int, ...]]) -> int:
        if not self._max_batch_rows:
            return 1
        stacked = [
            (tensor, shape)
            for tensor, shape in zip(tensors, shapes, strict=True)
            if not self._spec.inputs[self._inputs[tensor.name]].shape_tensor
        ]
        if not stacked:
            raise self._invalid("expected at least one input with a leading batch dimension, got none")
        return super()._rows([tensor for tensor, _ in stacked], [shape for _, shape in stacked])


class _Shown(NamedTuple):
    """A request to answer, `Answerable`."""

    message: AnyRequest
    options: RequestOptions
    value: Tensors
    targets: Targets
    envelope: Envelope | None


def _content(array: Array) -> Hashable:
    """Shape and hash of the content, which only equal contents have in common. Small, since keys outlive their
    requests."""
    content = repr(array.ravel().tolist()).encode() if array.dtype.hasobject else array.tobytes()
    return array.shape, hashlib.blake2b(content, digest_size=16).digest()


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
