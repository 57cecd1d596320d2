"""ONNX Runtime: sessions, execution providers, running.

Lives here: everything that names onnxruntime; nobody else does. Must not: reading of options (`onnx_options`),
stacking and splitting (`batching`). The rule about devices: a model runs where it was asked to or is refused. ONNX
Runtime itself falls back to the CPU with no more than a line in its log, so each session is asked afterwards what it
really got.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped,unused-ignore]

from backends.base import (
    MISSING,
    Array,
    Device,
    DeviceKind,
    Execution,
    GroupKind,
    InstanceGroup,
    ModelSource,
    ModelSpec,
    Tensors,
    TensorSpec,
)
from backends.cuda_driver import count_gpus
from backends.errors import ExecutionError, LoadError, SessionError
from backends.onnx_options import OnnxOptions, parse_options
from backends.onnx_types import check_served, is_known, tensor_spec
from backends.placement import on_cpu, on_gpus
from backends.ragged import batch_input_tensors, batch_runner
from backends.texts import decode_texts, encode_texts

__all__ = ["PROBE_MODEL", "OnnxBackend", "OnnxInstance", "OnnxModel", "session_options", "share_threads"]

_log = logging.getLogger("paceline.backends.onnx")

_CUDA = "CUDAExecutionProvider"
_CPU = "CPUExecutionProvider"
_FATAL = 4
"""Severity for ONNX Runtime's own log: its errors reach us as exceptions, and each bad row would fill the log."""

_BFLOAT16 = 16
"""`TensorProto.DataType.BFLOAT16`."""

# A whole ONNX model, one Identity over one float: what only a session can find out is known before any model is read.
PROBE_MODEL = (
    b"\x08\x08"  # ir_version 8
    b":/"  # graph, 47 bytes
    b"\n\x10\n\x01x\x12\x01y\x22\x08Identity"  # node: x -> y
    b"\x12\x01p"  # name
    b"Z\x0b\n\x01x\x12\x06\n\x04\x08\x01\x12\x00"  # input x: float, rank 0
    b"b\x0b\n\x01y\x12\x06\n\x04\x08\x01\x12\x00"  # output y, likewise
    b"B\x04\n\x00\x10\x11"  # opset 17
)

_ERROR = re.compile(r"\[ONNXRuntimeError\] : (\d+) : \w+ : (.*)", re.DOTALL)


class OnnxBackend:
    """`Backend` for `.onnx` files.

    `count_gpus` says how many GPUs there are or raises LoadError, `available_providers` what onnxruntime has built in,
    `shared_threads` whether `share_threads` was called.
    """

    def __init__(
        self,
        count_gpus: Callable[[], int] = count_gpus,
        available_providers: Callable[[], Sequence[str]] = ort.get_available_providers,
        shared_threads: bool = False,
    ) -> None:
        self._count_gpus = count_gpus
        self._available_providers = available_providers
        self._shared_threads = shared_threads

    def devices(self, groups: Sequence[InstanceGroup]) -> tuple[Device, ...]:
        """One device per instance; blocks for a second or so when it first asks the CUDA driver for GPUs.

        KIND_GPU gets GPUs or is refused; KIND_AUTO and KIND_MODEL take the CPU where no GPU is usable, and log which.
        """
        return tuple(device for group in groups or (InstanceGroup(),) for device in self._place(group))

    def open(self, source: ModelSource, device: Device) -> OnnxModel:
        options = replace(parse_options(source), shared_threads=self._shared_threads)
        path = _model_file(source)
        return OnnxModel(source.name, path, options, device, _open_session(source.name, path, options, device))

    def _place(self, group: InstanceGroup) -> list[Device]:
        if group.kind is GroupKind.CPU:
            return on_cpu(group)
        if group.kind is GroupKind.GPU:
            return on_gpus(group, self._gpus())
        try:
            gpus = self._gpus()
        except LoadError as reason:
            _log.info("%s instances run on the CPU: %s", group.kind.value, reason)
            return on_cpu(group)
        devices = on_gpus(group, gpus)
        try:
            _probe_cuda(devices[0], OnnxOptions(shared_threads=self._shared_threads))
        except LoadError as reason:
            _log.warning("%s instances run on the CPU although there is a GPU: %s", group.kind.value, reason)
            return on_cpu(group)
        indices = dict.fromkeys(device.index for device in devices)
        _log.info("%s instances run on GPU %s", group.kind.value, ", ".join(map(str, indices)))
        return devices

    def _gpus(self) -> int:
        available = self._available_providers()
        if _CUDA not in available:
            raise LoadError(
                f"this onnxruntime {ort.__version__} has no {_CUDA}, only {', '.join(available)}; "
                "the package onnxruntime-gpu has it"
            )
        return self._count_gpus()


class OnnxModel:
    """`OpenModel` of one ONNX file.

    CPU instances share one session: its Run is thread-safe, and a session per instance would hold the weights once
    more and start one more pool of threads, all fighting for the same cores. Each GPU instance has its own, because a
    session computes on one CUDA stream, where a second instance's kernels could only queue.
    """

    def __init__(
        self, name: str, path: Path, options: OnnxOptions, device: Device, session: ort.InferenceSession
    ) -> None:
        self._name = name
        self._path = path
        self._options = options
        self._sessions = {device: session}
        self._spec = _spec_of(name, session)

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def platform(self) -> str:
        return "onnxruntime_onnx"

    def instance(self, spec: ModelSpec, device: Device) -> OnnxInstance:
        check_served(self._name, spec, self._spec)
        return OnnxInstance(self._session(device), spec, device, self._options)

    def close(self) -> None:
        self._sessions.clear()

    def _session(self, device: Device) -> ort.InferenceSession:
        """The shared session of the CPU; on a GPU the one that `open` made, once, and fresh ones from then on."""
        session = self._sessions.pop(device, None)
        if session is None:
            session = _open_session(self._name, self._path, self._options, device)
        if device.kind is DeviceKind.CPU:
            self._sessions[device] = session
        return session


class OnnxInstance:
    """`ModelInstance` over a session, which other instances may share."""

    def __init__(self, session: ort.InferenceSession, spec: ModelSpec, device: Device, options: OnnxOptions) -> None:
        self._session: ort.InferenceSession | None = session
        self._spec = spec
        self._device = device
        self._inputs = [*spec.inputs, *batch_input_tensors(spec)]
        self._input_names = [tensor.name for tensor in self._inputs]
        self._output_names = [tensor.name for tensor in spec.outputs]
        self._run_options = _run_options(options, device)
        self._run_batch = batch_runner(spec)
        self._run = self._runner()

    @property
    def device(self) -> Device:
        return self._device

    def execute(self, requests: Sequence[Tensors], padded_rows: int = 0) -> Execution:
        return self._run_batch(requests, self._run, padded_rows)

    def close(self) -> None:
        # The session goes when its last instance and the model let go; `_run` is bound to self and so must not hold it.
        self._session = None

    def _runner(self) -> Callable[[Sequence[Array]], Tensors]:
        datatypes = {tensor.datatype for tensor in (*self._inputs, *self._spec.outputs)}
        run = self._run_strings if "BYTES" in datatypes else self._run_arrays
        if "BF16" in datatypes:
            run = self._run_bound
        if not any(tensor.optional for tensor in self._inputs):
            return run
        return lambda inputs: run([None if array is MISSING else array for array in inputs])

    def _run_arrays(self, inputs: Sequence[Array | None]) -> list[Array]:
        """Outputs in memory of their own: ONNX Runtime hands over the buffers it allocated for this very run."""
        # hot path: on a CPU and 64x256 floats 4.1 us a call, with IO binding 7.0, with run_with_ort_values 32
        # (Identity, onnxruntime 1.31). IO binding pays where outputs stay on the device, and ours always leave it.
        # An input of None isn't fed: the model takes its default.
        session = self._opened()
        try:
            outputs: list[Array] = session.run(
                self._output_names, dict(zip(self._input_names, inputs, strict=True)), self._run_options
            )
        except Exception as error:  # its exceptions share no base class below this one
            raise _failure(error) from error
        return outputs

    def _run_strings(self, inputs: Sequence[Array | None]) -> list[Array]:
        outputs = self._run_arrays(self._texts(inputs))
        return self._elements(outputs)

    def _run_bound(self, inputs: Sequence[Array | None]) -> list[Array]:
        """Through OrtValues, which know BF16; numpy doesn't."""
        session = self._opened()
        binding = session.io_binding()
        try:
            for tensor, array in zip(self._inputs, inputs, strict=True):
                if array is not None:
                    binding.bind_ortvalue_input(tensor.name, _to_ortvalue(tensor, array))
            for name in self._output_names:
                binding.bind_output(name)
            session.run_with_iobinding(binding, self._run_options)
            outputs = [_from_ortvalue(value) for value in binding.get_outputs()]
        except Exception as error:  # its exceptions share no base class below this one
            raise _failure(error) from error
        return self._elements(outputs)

    def _opened(self) -> ort.InferenceSession:
        if self._session is None:
            raise ExecutionError("the instance is closed")
        return self._session

    def _texts(self, inputs: Sequence[Array | None]) -> list[Array | None]:
        """ONNX Runtime wants `str`: of `bytes` it would take the repr."""
        return [
            decode_texts(array, tensor.name) if array is not None and tensor.datatype == "BYTES" else array
            for array, tensor in zip(inputs, self._inputs, strict=True)
        ]

    def _elements(self, outputs: Sequence[Array]) -> list[Array]:
        return [encode_texts(array) if array.dtype == object else array for array in outputs]


def _to_ortvalue(tensor: TensorSpec, array: Array) -> ort.OrtValue:
    if tensor.datatype == "BF16":
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, _BFLOAT16)
    return ort.OrtValue.ortvalue_from_numpy(array)


def _from_ortvalue(value: ort.OrtValue) -> Array:
    """The value's elements in memory of our own; BF16, for which there is no numpy type to ask for, as bit patterns."""
    if value.element_type() != _BFLOAT16:
        array: Array = value.numpy()
        return array
    bits = np.empty(value.shape(), np.uint16)
    ctypes.memmove(bits.ctypes.data, value.data_ptr(), bits.nbytes)
    return bits


def _model_file(source: ModelSource) -> Path:
    """The file to read: `source.path`, or `model.onnx` in it if that is a folder, as it is with external weights."""
    path = source.path / "model.onnx" if source.path.is_dir() else source.path
    if not path.is_file():
        raise LoadError(f"model '{source.name}': no such file: '{path}'")
    if path.stat().st_size == 0:
        raise LoadError(f"model '{source.name}': the file is empty: '{path}'")
    return path


def _spec_of(name: str, session: ort.InferenceSession) -> ModelSpec:
    """Inputs that have an initializer are optional; those among them that the protocol can't carry stay unknown."""
    required = [tensor_spec(name, "input", node) for node in session.get_inputs()]
    optional = [
        replace(tensor_spec(name, "input", node), optional=True)
        for node in session.get_overridable_initializers()
        if is_known(node)
    ]
    return ModelSpec(
        inputs=(*required, *optional),
        outputs=tuple(tensor_spec(name, "output", node) for node in session.get_outputs()),
    )


def _open_session(name: str, path: Path, options: OnnxOptions, device: Device) -> ort.InferenceSession:
    try:
        return _session(str(path), session_options(options), options.cuda, device)
    except LoadError as error:
        raise LoadError(f"model '{name}': can't open '{path}': {error}") from error


def _probe_cuda(device: Device, options: OnnxOptions) -> None:
    """Find out whether a session can be had on `device`; LoadError saying why not."""
    _session(PROBE_MODEL, session_options(options), {}, device)


def _session(
    model: str | bytes, made: ort.SessionOptions, cuda: Mapping[str, str], device: Device
) -> ort.InferenceSession:
    providers: list[Any] = [_CPU]
    if device.kind is DeviceKind.GPU:
        _prepare_cuda()
        providers = [(_CUDA, {**cuda, "device_id": str(device.index)}), _CPU]
    try:
        session = ort.InferenceSession(model, made, providers=providers, enable_fallback=0)
    except Exception as error:  # its exceptions share no base class below this one
        raise LoadError(_reason(error)) from error
    if device.kind is DeviceKind.GPU and _CUDA not in session.get_providers():
        raise LoadError(f"onnxruntime couldn't use GPU {device.index}: {_why_no_cuda()}")
    return session


def _prepare_cuda() -> None:
    """Make the CUDA libraries of PyPI's nvidia packages known: they lie where the loader doesn't look."""
    # Its complaints are repeated by what fails next, and there as an error that says what for.
    ort.set_default_logger_severity(_FATAL)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        ort.preload_dlls()
    for line in said.getvalue().splitlines():
        _log.debug("onnxruntime: %s", line)


def _why_no_cuda() -> str:
    """What ONNX Runtime told only its log: as a rule that a library which its CUDA provider needs is missing."""
    provider = Path(ort.__file__).with_name("capi") / "libonnxruntime_providers_cuda.so"
    try:
        ctypes.CDLL(str(provider))
    except OSError as error:
        return f"{error}; the extra 'cuda' of this package installs CUDA and cuDNN"
    return "its CUDA provider didn't start, although its libraries are there; is the driver recent enough for them?"


def share_threads(intra_op: int, inter_op: int) -> None:
    """`registry.share_threads`."""
    if not hasattr(ort, "set_global_thread_pool_sizes"):
        raise LoadError(f"this onnxruntime {ort.__version__} can't share threads between models: it is too old")
    try:
        ort.set_global_thread_pool_sizes(intra_op, inter_op)
    except Exception as error:  # its exceptions share no base class below this one
        raise LoadError(_reason(error)) from error


def session_options(options: OnnxOptions) -> ort.SessionOptions:
    """`options` in ONNX Runtime's own form. Loads libraries of operators; LoadError for one that can't be."""
    made = ort.SessionOptions()
    made.log_severity_level = _FATAL
    made.graph_optimization_level = getattr(ort.GraphOptimizationLevel, options.graph_level.value)
    made.intra_op_num_threads = options.intra_op_threads
    made.inter_op_num_threads = options.inter_op_threads
    made.execution_mode = ort.ExecutionMode.ORT_PARALLEL if options.parallel else ort.ExecutionMode.ORT_SEQUENTIAL
    made.enable_cpu_mem_arena = options.cpu_mem_arena
    made.enable_mem_pattern = options.mem_pattern
    if options.shared_threads:
        made.use_per_session_threads = False
    for key, value in options.session_entries.items():
        made.add_session_config_entry(key, value)
    for library in options.op_libraries:
        try:
            made.register_custom_ops_library(str(library))
        except Exception as error:  # its exceptions share no base class below this one
            raise LoadError(f"operator library '{library}': {_reason(error)}") from error
    return made


def _run_options(options: OnnxOptions, device: Device) -> ort.RunOptions | None:
    # A run fails over an arena that its session doesn't have, and other instances may well be on the other GPUs named.
    own = {"cpu:0"} if device.kind is DeviceKind.CPU else {"cpu:0", f"gpu:{device.index}"}
    arenas = [arena for arena in options.shrink_arenas if arena in own]
    if not arenas:
        return None
    made = ort.RunOptions()
    made.log_severity_level = _FATAL
    made.add_run_config_entry("memory.enable_memory_arena_shrinkage", ";".join(arenas))
    return made


# What ONNX Runtime says when the session is at fault, not the tensors; it has no code of its own for that.
_SESSION_FAULT = re.compile(r"bad.?alloc|[Ff]ailed to allocate|out of memory|(CUDA|CUDNN|CUBLAS) failure|device lost")


def _failure(error: Exception) -> ExecutionError:
    reason = _reason(error)
    if isinstance(error, MemoryError) or _SESSION_FAULT.search(reason):
        return SessionError(reason)
    return ExecutionError(reason)


def _reason(error: Exception) -> str:
    """One line, in the words that Triton's users know: `onnx runtime error 2: …`."""
    match = _ERROR.fullmatch(str(error))
    code, text = (f" {match[1]}", match[2]) if match else ("", str(error))
    return f"onnx runtime error{code}: {' '.join(text.split())}"
