"""Running a batch through a session of ONNX Runtime, which copies to and from devices by itself.

Lives here: the plain way, for any model and device. Must not: opening sessions (`sessions`), stacking and splitting
(`batching`).
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped,unused-ignore]

from paceline.backends.base import Device, DeviceKind, Execution
from paceline.backends.cuda.accelerator import Streams
from paceline.backends.errors import DeviceError, ExecutionError, UnfitOutputs
from paceline.backends.onnx.failures import device_failure, failure
from paceline.backends.onnx.options import OnnxOptions
from paceline.backends.onnx.sessions import OpenSession, run_options
from paceline.backends.ragged import batch_input_tensors, batch_runner
from paceline.backends.spec import MISSING, Array, ModelSpec, Tensors


def decode_texts(array: Array, name: str) -> Array:
    """A copy with `str` for each `bytes`, as objects: numpy's fixed-width strings drop NULs at the end of an element.
    ExecutionError naming the input `name` if one isn't UTF-8."""
    try:
        texts = [element.decode() for element in array.ravel().tolist()]
    except UnicodeDecodeError as error:
        raise ExecutionError(f"input '{name}': expected UTF-8, got {error.object!r}: {error}") from error
    return np.array(texts, object).reshape(array.shape)


def encode_texts(array: Array) -> Array:
    """A copy with UTF-8 `bytes` for each `str`."""
    return np.array([text.encode() for text in array.ravel().tolist()], object).reshape(array.shape)


Run = Callable[[Sequence[Array | None]], list[Array]]

BFLOAT16 = 16
"""`TensorProto.DataType.BFLOAT16`."""


class OnnxInstance:
    """`ModelInstance` over a session that other instances may share. `run` takes arrays in the order of `input_names`
    and returns them in that of `output_names`."""

    def __init__(self, opened: OpenSession, spec: ModelSpec, device: Device, options: OnnxOptions) -> None:
        self._open: OpenSession | None = opened
        self._streams = opened.streams
        self._spec = spec
        self.device = device
        self._inputs = [*spec.inputs, *batch_input_tensors(spec)]
        self.input_names = [tensor.name for tensor in self._inputs]
        self.output_names = [tensor.name for tensor in spec.outputs]
        self._run_options = run_options(options, device)
        self._run_batch = batch_runner(spec)
        self._run = self._runner()

    def execute(self, requests: Sequence[Tensors], padded_rows: int = 0) -> Execution:
        if self._streams is not None:
            self._enter(self._streams)
        return self._run_batch(requests, self._run, padded_rows)

    def run(self, inputs: Sequence[Array]) -> Tensors:
        """The outputs for `inputs`, whatever their shapes. Blocks; raises as `execute`."""
        if self._streams is not None:
            self._enter(self._streams)
        return self._run(inputs)

    def keeping(self, kept: Sequence[Array]) -> Callable[[Sequence[Array]], Tensors]:
        """`run` with `kept` for the last inputs, contiguous arrays that the last outputs are written to: it takes and
        returns the others. On a CPU they are the same memory to the model, which may leave there what stays."""
        names, left = self.input_names[: -len(kept)], self.output_names[: -len(kept)]
        if self.device.kind is not DeviceKind.CPU:
            return lambda inputs: self._run_keeping(inputs, kept)
        session = self._opened().session
        binding = session.io_binding()
        for name, output, array in zip(
            self.input_names[len(names) :], self.output_names[len(left) :], kept, strict=True
        ):
            value = ort.OrtValue.ortvalue_from_numpy(array)
            binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output(output, value)

        def run(inputs: Sequence[Array], kept: Sequence[Array] = kept) -> Tensors:
            """Holds `kept`, of which the binding only knows the addresses."""
            try:
                for name, array in zip(names, inputs, strict=True):
                    binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
                for name in left:  # in memory of its own each time
                    binding.bind_output(name)
                session.run_with_iobinding(binding, self._run_options)
                return [value.numpy() for value in binding.get_outputs()[-len(left) :]]
            except Exception as error:  # its exceptions share no base class below this one
                raise failure(error) from error

        return run

    def abandon(self) -> None:
        # Checked between operators; other instances of the session have run options of their own.
        self._run_options.terminate = True

    def close(self) -> None:
        # The session is freed when its last instance and the model drop it; `_run` is bound to self and so must not
        # hold it.
        if self._streams is not None:
            # Freeing memory is among the calls that a capture on another thread would forbid.
            with contextlib.suppress(DeviceError):
                self._streams.accelerator.enter()
        self._open = None

    def _enter(self, streams: Streams) -> None:
        try:
            streams.accelerator.enter()
        except DeviceError as error:
            raise device_failure(error) from error

    def _run_keeping(self, inputs: Sequence[Array], kept: Sequence[Array]) -> Tensors:
        outputs = OnnxInstance.run(self, [*inputs, *kept])
        for array, output in zip(kept, outputs[-len(kept) :], strict=True):
            if array.shape != output.shape:
                raise UnfitOutputs(f"expected what it keeps in shape {list(array.shape)}, got {list(output.shape)}")
            array[:] = output
        return outputs[: -len(kept)]

    def _runner(self) -> Callable[[Sequence[Array]], Tensors]:
        datatypes = {tensor.datatype for tensor in (*self._inputs, *self._spec.outputs)}
        run = self._run_strings if "BYTES" in datatypes else self._run_arrays
        if "BF16" in datatypes:
            run = self._run_bound
        if self._streams is not None:
            run = partial(self._run_planned, run)
        if not any(tensor.optional for tensor in self._inputs):
            return run
        return lambda inputs: run([None if array is MISSING else array for array in inputs])

    def _run_planned(self, run: Run, inputs: Sequence[Array | None]) -> list[Array]:
        """`run`, but refusing what convolutions would compute wrongly. Failures are noted by rows, too: if the model is
        being tried now, its session may be staged later, where plans are keyed by rows."""
        opened = self._opened()
        plans = opened.plans
        shapes = tuple(None if array is None else array.shape for array in inputs)
        plans.check(shapes)
        try:
            with opened.executing(shapes[0][0] if shapes and shapes[0] else 0):
                outputs = run(inputs)
        except ExecutionError as error:
            plans.failed(error, shapes, *(shape[0] for shape in shapes[:1] if shape))
            raise
        plans.executed()
        return outputs

    def _run_arrays(self, inputs: Sequence[Array | None]) -> list[Array]:
        """Outputs in memory of their own: ONNX Runtime hands over the buffers that it allocated for this run."""
        # hot path: on a CPU and 64x256 floats 4.1 us a call, with IO binding 7.0, with run_with_ort_values 32
        # (Identity, onnxruntime 1.31). IO binding pays off if outputs stay on the device; ours always leave it. An
        # input of None isn't fed: the model uses its default.
        session = self._opened().session
        try:
            outputs: list[Array] = session.run(
                self.output_names, dict(zip(self.input_names, inputs, strict=True)), self._run_options
            )
        except Exception as error:  # its exceptions share no base class below this one
            raise failure(error) from error
        return outputs

    def _run_strings(self, inputs: Sequence[Array | None]) -> list[Array]:
        """ONNX Runtime needs `str`: it would use the repr of `bytes`."""
        texts = [
            decode_texts(array, tensor.name) if array is not None and tensor.datatype == "BYTES" else array
            for array, tensor in zip(inputs, self._inputs, strict=True)
        ]
        return _elements(self._run_arrays(texts))

    def _run_bound(self, inputs: Sequence[Array | None]) -> list[Array]:
        """Run with OrtValues, which support BF16; numpy doesn't."""
        session = self._opened().session
        binding = session.io_binding()
        try:
            for tensor, array in zip(self._inputs, inputs, strict=True):
                if array is None:
                    continue
                if tensor.datatype == "BF16":
                    value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, BFLOAT16)
                else:
                    value = ort.OrtValue.ortvalue_from_numpy(array)
                binding.bind_ortvalue_input(tensor.name, value)
            for name in self.output_names:
                binding.bind_output(name)
            session.run_with_iobinding(binding, self._run_options)
            outputs = [from_ortvalue(value) for value in binding.get_outputs()]
        except Exception as error:  # its exceptions share no base class below this one
            raise failure(error) from error
        return _elements(outputs)

    def _opened(self) -> OpenSession:
        if self._open is None:
            raise ExecutionError("the instance is closed")
        return self._open


def _elements(outputs: Sequence[Array]) -> list[Array]:
    return [encode_texts(array) if array.dtype == object else array for array in outputs]


def from_ortvalue(value: ort.OrtValue) -> Array:
    """The value's elements in memory of our own; BF16, which has no numpy type, as bit patterns."""
    if value.element_type() != BFLOAT16:
        array: Array = value.numpy()
        return array
    bits = np.empty(value.shape(), np.uint16)
    ctypes.memmove(bits.ctypes.data, value.data_ptr(), bits.nbytes)
    return bits
