"""Stepping a decoder on a device, in whose memory its keys and values stay.

Lives here: `DeviceSteps`, which executes, and `Kept`, what it leaves there. Must not: which rows these are, or what is
fed. The rules: what isn't the first output comes to the host only where the device lacks memory for a copy; copies are
queued on the session's stream, and done before the model runs, or when an error is raised. Until then what they copy is
held, and where to, as memory that is given back may be another session's next.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Self

import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped,unused-ignore]

from paceline.backends.base import Device
from paceline.backends.cuda.accelerator import Streams
from paceline.backends.errors import DeviceError, ExecutionError
from paceline.backends.onnx.failures import device_failure, failure
from paceline.backends.onnx.instance import OnnxInstance
from paceline.backends.onnx.options import OnnxOptions
from paceline.backends.onnx.sessions import OpenSession
from paceline.backends.spec import Array, ModelSpec

_DTYPES: Mapping[str, np.dtype[Any]] = {"tensor(float)": np.dtype(np.float32), "tensor(float16)": np.dtype(np.float16)}


@contextmanager
def _queueing(streams: Streams) -> Iterator[None]:
    """Within, work may be queued. If that fails, nothing of it is left under way."""
    try:
        streams.accelerator.enter()
        yield
    except BaseException as error:
        with suppress(DeviceError):
            streams.compute.synchronize()
        if isinstance(error, DeviceError):
            raise device_failure(error) from error
        if isinstance(error, ExecutionError) or not isinstance(error, Exception):
            raise
        raise failure(error) from error  # ONNX Runtime's share no base class below Exception


class Kept:
    """A tensor in the device's memory, [rows, ..., length, size]; `value` is ONNX Runtime's. `copied`: what is copied
    before the model runs, and where to, of all tensors of that model."""

    __slots__ = ("_copied", "_streams", "dtype", "shape", "value")

    def __init__(self, value: Any, streams: Streams, copied: list[Any]) -> None:
        self.value = value
        self.shape: tuple[int, ...] = tuple(value.shape())
        self.dtype = _DTYPES[value.data_type()]
        self._streams = streams
        self._copied = copied

    def numpy(self) -> Array:
        """A copy on the host. Raises ExecutionError."""
        with _queueing(self._streams):
            self._streams.compute.synchronize()
            array: Array = self.value.numpy()
            return array

    def joined(self, parts: Sequence[tuple[Self, int, int]], longest: int, *, at_right: bool) -> Self:
        """The rows of `parts`, from where and to where they are in which, as `decoder_block` joins arrays. Raises
        ExecutionError, OutOfMemory if there is none for them."""
        rows = sum(end - first for _, first, end in parts)
        shape = (rows, *self.shape[1:-2], longest, self.shape[-1])
        with _queueing(self._streams):
            value = ort.OrtValue.ortvalue_from_shape_and_type(shape, self.dtype, *self._streams.accelerator.ort_device)
            made, at = type(self)(value, self._streams, self._copied), 0
            made._clear(0, rows)
            for one, first, end in parts:
                made._copy(at, one, first, end - first, min(longest, one.shape[-2]), at_right=at_right)
                at += end - first
        return made

    def put(self, place: int, other: Self, at: int, length: int, *, at_right: bool) -> None:
        """Replace a row by that of another, which has so much. Raises ExecutionError."""
        with _queueing(self._streams):
            self._clear(place, 1)
            self._copy(place, other, at, 1, length, at_right=at_right)

    def _clear(self, place: int, rows: int) -> None:
        """What is masked must be finite all the same: it is multiplied by 0."""
        row_bytes = self._row_bytes
        if rows * row_bytes:
            self._streams.compute.clear(self.value.data_ptr() + place * row_bytes, rows * row_bytes)

    def _copy(self, place: int, other: Self, at: int, rows: int, length: int, *, at_right: bool) -> None:
        """All heads of all these rows at once, as they are equally far apart."""
        each = self.shape[-1] * self.dtype.itemsize
        pitches = [one.shape[-2] * each for one in (self, other)]
        places = [place * self._row_bytes, at * other._row_bytes]
        if at_right:
            places = [one + pitch - length * each for one, pitch in zip(places, pitches, strict=True)]
        if rows and length:
            target, source = (one.value.data_ptr() + begin for one, begin in zip((self, other), places, strict=True))
            count = rows * math.prod(self.shape[1:-2])
            self._copied += (self.value, other.value)
            self._streams.compute.copy_lines(target, pitches[0], source, pitches[1], length * each, count)

    @property
    def _row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize


class DeviceSteps(OnnxInstance):
    """`StepsModel` over a session on a device: `run` takes arrays of the host, and what it has left before."""

    def __init__(self, opened: OpenSession, spec: ModelSpec, device: Device, options: OnnxOptions) -> None:
        super().__init__(opened, spec, device, options)
        self._copied = list[Any]()

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        streams = self._streams
        assert streams is not None
        with _queueing(streams):
            streams.compute.synchronize()
            self._copied.clear()
            return self._run_planned(lambda inputs: self._run_kept(inputs, streams), inputs)

    def _run_kept(self, inputs: Sequence[Array | Kept | None], streams: Streams) -> list[Any]:
        session = self._opened().session
        try:
            binding = session.io_binding()
            for name, one in zip(self.input_names, inputs, strict=True):
                if isinstance(one, Kept):
                    binding.bind_ortvalue_input(name, one.value)
                else:
                    binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(one))
            binding.bind_output(self.output_names[0])
            for name in self.output_names[1:]:
                binding.bind_output(name, *streams.accelerator.ort_device)
            session.run_with_iobinding(binding, self._run_options)
            first, *kept = binding.get_outputs()
            return [first.numpy(), *(Kept(one, streams, self._copied) for one in kept)]
        except Exception as error:  # its exceptions share no base class below this one
            raise failure(error) from error
