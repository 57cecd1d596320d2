"""What a decoder's encoder makes of a request, once: of texts, sounds or pictures.

Lives here: recognizing it by names, types and shapes; executing it for several requests, on a thread of its own so that
nobody has to wait for one that hangs. Must not: step the decoder.
Source of names: optimum's exporters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from threading import Lock
from time import monotonic_ns
from typing import Any

import numpy as np

from paceline.backends.errors import ExecutionError, InstanceError, OutOfMemory, UnfitOutputs
from paceline.backends.onnx.decoder_block import StepsModel
from paceline.backends.onnx.decoder_layout import DecoderLayout
from paceline.backends.spec import Array, ModelSpec, TensorSpec
from paceline.backends.worker_thread import WorkerThread

ENCODER_FILE = "encoder_model.onnx"
"""Beside the decoder's."""

_MASK, _LEFT = "attention_mask", "last_hidden_state"
_FLOATS = {"FP32": np.float32, "FP16": np.float16}
_LEAST_FULL = 0.75
"""Of texts that are filled up to the longest of them."""


@dataclass(frozen=True, slots=True)
class EncoderLayout:
    """`executed`: what is fed, all that a request has, in rows, and maybe `attention_mask`; and what is left,
    `last_hidden_state`. `source`: what a request has, without an axis of rows."""

    executed: ModelSpec
    source: TensorSpec

    @property
    def takes_tokens(self) -> bool:
        return self.source.datatype == "INT64"

    @property
    def has_mask(self) -> bool:
        return len(self.executed.inputs) > 1

    def made_up(self, vocabulary: int) -> list[Array]:
        """What two requests may have, of different lengths if there is a mask."""
        if self.takes_tokens:
            return [np.arange(1, 7) % vocabulary, np.arange(2, 6 if self.has_mask else 8) % vocabulary]
        random = np.random.default_rng(0)
        return [random.standard_normal(self.source.dims).astype(_FLOATS[self.source.datatype]) for _ in range(2)]


def find_encoder(spec: ModelSpec, said: Mapping[str, Any], decoder: DecoderLayout) -> EncoderLayout | str:
    """How a model of `spec` is the encoder of `decoder`; `said` is what files beside it say of it. A text: why it isn't
    one."""
    inputs = {one.name: one for one in spec.inputs if not one.optional}
    mask = inputs.pop(_MASK, None)
    left = next((one for one in spec.outputs if one.name == _LEFT), None)
    if len(inputs) != 1:
        return f"expected one input besides {_MASK}, got {sorted(inputs)}"
    (fed,) = inputs.values()
    if fed.datatype not in ("INT64", *_FLOATS) or fed.dims[:1] != (-1,) or len(fed.dims) < 2:
        return f"input '{fed.name}': expected INT64, FP32 or FP16 with a free first axis and others"
    if mask is not None and (mask.datatype, mask.dims, len(fed.dims)) != ("INT64", (-1, -1), 2):
        return f"input '{_MASK}': expected INT64 with two free axes, as those of the other input"
    wanted = decoder.of_source[0]
    if (
        left is None
        or left.datatype != wanted.datatype
        or len(left.dims) != 3
        or left.dims[2] not in (-1, wanted.dims[2])
    ):
        got = "none" if left is None else f"{left.datatype} {[*left.dims]}"
        return f"output '{_LEFT}': expected {wanted.datatype} {[*wanted.dims]}, as its decoder takes, got {got}"
    sizes = _sizes_said(fed.name, said)
    source = replace(fed, dims=fed.dims[1:], axis_names=fed.axis_names[1:])
    if len(sizes) == len(source.dims):
        source = replace(
            source, dims=tuple(size if dim < 0 else dim for dim, size in zip(source.dims, sizes, strict=True))
        )
    if -1 in source.dims and source.datatype != "INT64":
        return f"input '{source.name}': expected fixed sizes, or config.json to tell them, got {[*source.dims]}"
    return EncoderLayout(ModelSpec((fed, *([] if mask is None else [mask])), (left,)), source)


def _sizes_said(name: str, said: Mapping[str, Any]) -> Sequence[int]:
    """What exporters leave free although a model has one size for it. Nothing if `said` doesn't tell."""
    sizes: list[Any] = []
    if name == "pixel_values" and "image_size" in said:
        size = said["image_size"]
        sizes = [said.get("num_channels", 3), *(size if isinstance(size, list) else [size, size])]
    if name == "input_features" and {"num_mel_bins", "max_source_positions"} <= said.keys():
        # Two frames of sound become one.
        sizes = [said["num_mel_bins"], 2 * said["max_source_positions"]]
    return sizes if all(type(size) is int and size > 0 for size in sizes) else ()


class Encoder:
    """An encoder on a device. `pads`: texts of different lengths are left together what they are left alone.
    `began_ns`: when the execution began that goes on now; 0 if there is none."""

    def __init__(
        self, model: StepsModel, layout: EncoderLayout, *, pads: bool = False, now_ns: Callable[[], int] = monotonic_ns
    ) -> None:
        self.began_ns = 0
        self._now_ns = now_ns
        self._model = model
        self._layout = layout
        self._pads = pads

    def encode(self, sources: Sequence[Array]) -> list[Array | ExecutionError]:
        """What is left of each, [1, length, size], or why nothing is. Executes as many together as can be. Blocks;
        raises InstanceError."""
        groups: list[list[int]] = []
        for place in sorted(range(len(sources)), key=lambda place: -sources[place].size):
            first = sources[groups[-1][0]] if groups else None
            if first is not None and self._may_share(first.shape, sources[place].shape):
                groups[-1].append(place)
            else:
                groups.append([place])
        found: dict[int, Array | ExecutionError] = {}
        for group in groups:
            found |= zip(group, self._encode([sources[place] for place in group]), strict=True)
        return [found[place] for place in range(len(sources))]

    def abandon(self) -> None:
        self._model.abandon()

    def close(self) -> None:
        self._model.close()

    def _may_share(self, longest: tuple[int, ...], shape: tuple[int, ...]) -> bool:
        return longest == shape or (self._pads and shape[0] >= _LEAST_FULL * longest[0])

    def _encode(self, sources: Sequence[Array]) -> list[Array | ExecutionError]:
        """The longest first. If that fails, halves, until it is known whose fault it is."""
        try:
            return [*self.execute(sources)]
        except ExecutionError as error:
            if isinstance(error, InstanceError) and not isinstance(error, OutOfMemory):
                raise
            if len(sources) == 1:
                return [error.with_traceback(None)]
        half = len(sources) // 2
        return [*self._encode(sources[:half]), *self._encode(sources[half:])]

    def execute(self, sources: Sequence[Array]) -> list[Array]:
        """All of them in one execution, the longest first."""
        joined = np.zeros((len(sources), *sources[0].shape), sources[0].dtype)
        for row, source in zip(joined, sources, strict=True):
            row[: len(source)] = source
        inputs = [joined]
        if self._layout.has_mask:
            lengths = np.array([[len(source)] for source in sources])
            inputs.append((np.arange(len(sources[0])) < lengths).astype(np.int64))
        self.began_ns = self._now_ns()
        try:
            (hidden,) = self._model.run(inputs)
        finally:
            self.began_ns = 0
        uneven = any(source.shape != sources[0].shape for source in sources)
        if hidden.ndim != 3 or len(hidden) != len(sources) or (uneven and hidden.shape[1] != len(sources[0])):
            raise UnfitOutputs(f"expected {_LEFT} of as many rows and tokens as its inputs, got {list(hidden.shape)}")
        ends = [len(source) if uneven else hidden.shape[1] for source in sources]
        # Copies, so that each row's memory is its own.
        return [hidden[row : row + 1, :end].copy() for row, end in enumerate(ends)]


class EncoderThread(Encoder):
    """An encoder whose caller, one at a time, stops to wait for it once it is given up."""

    def __init__(self, model: StepsModel, layout: EncoderLayout, *, pads: bool = False) -> None:
        super().__init__(model, layout, pads=pads)
        self._thread = WorkerThread()
        self._lost: Future[list[Array | ExecutionError]] = Future()
        # Nothing begins once it is given up.
        self._lock = Lock()

    def encode(self, sources: Sequence[Array]) -> list[Array | ExecutionError]:
        """As any encoder; raises also what it is given up with."""
        encode = super().encode
        with self._lock:
            done = self._lost if self._lost.done() else self._thread.submit(lambda: encode(sources))
        wait((self._lost, done), return_when=FIRST_COMPLETED)
        return (self._lost if self._lost.done() else done).result()

    def give_up(self, error: ExecutionError) -> Future[None]:
        """Nobody waits for it any more. What is returned is done when it executes nothing."""
        with self._lock:
            self._lost.set_exception(error)
            return self._thread.submit(lambda: None)

    def close(self) -> None:
        self._thread.close()
        super().close()
