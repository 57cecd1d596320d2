"""ONNX Runtime's sessions: how they are opened, and with which options.

Lives here: execution providers, session and run options. Must not: reading options (`options`) or errors (`failures`),
running (`instance`, `staged`). The rule about devices: a model runs where it was asked to or is refused. ONNX Runtime
falls back to the CPU with no more than a line in its log, so each session is asked afterwards which providers it really
got.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import io
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import onnxruntime as ort  # type: ignore[import-untyped,unused-ignore]

from paceline.backends.base import Device, DeviceKind
from paceline.backends.cuda.accelerator import CudaAccelerator, Streams, open_streams
from paceline.backends.cuda.long_calls import captures
from paceline.backends.errors import DeviceError, LoadError
from paceline.backends.installed import how_to_install
from paceline.backends.onnx.failures import Plans, reason_of
from paceline.backends.onnx.model_files import Facts, ModelFiles, read_model_files
from paceline.backends.onnx.options import OnnxOptions, without_graphs
from paceline.backends.onnx.providers import (
    check_taken,
    missing_library,
    prepare_accelerator,
    provider_of,
    ready_accelerator,
)

_log = logging.getLogger("paceline.backends.onnx")

CUDA = "CUDAExecutionProvider"
_CPU = "CPUExecutionProvider"
_FATAL = 4
"""Severity for ONNX Runtime's own log: its errors reach us as exceptions, and each bad row would fill the log."""
_ERROR = 3
"""For the log of what belongs to no session, beside a GPU. Why cuDNN refused is only there, not in the exception."""

_CUDNN = "libcudnn.so.9"
_LIBRARIES = ("cudart", "nvrtc", "cublasLt", "cublas", "curand", "cufft", "cudnn")

NO_GRAPH = -1
"""The graph id that means neither capture nor replay."""

_SHRINKAGE = "memory.enable_memory_arena_shrinkage"
_GRAPH_ID = "gpu_graph_id"
_UNSYNCHRONIZED = "disable_synchronize_execution_providers"

_NOT_CAPTURED = re.compile(r"(graph capture|CUDA [Gg]raph) feature")
"""What ONNX Runtime says about a model that it can't capture because of control flow, copies between host and device,
or nodes of another provider."""

_CAPTURES_SINCE = (1, 31)
"""Graphs of earlier versions may read host memory that is gone when they are replayed, as that of GatherND
(github.com/microsoft/onnxruntime/pull/32120): wrong answers, without an error."""

_OF_DRIVER = re.compile(r"undefined symbol: cu[A-Z]")
"""A function of the driver that the provider is linked to. Names in CUDA's libraries continue with a lower-case
letter."""

# A complete ONNX model, one Identity over one float: it shows what only a session can, before any model is read.
PROBE_MODEL = (
    b"\x08\x08"  # ir_version 8
    b":/"  # graph, 47 bytes
    b"\n\x10\n\x01x\x12\x01y\x22\x08Identity"  # node: x -> y
    b"\x12\x01p"  # name
    b"Z\x0b\n\x01x\x12\x06\n\x04\x08\x01\x12\x00"  # input x: float, rank 0
    b"b\x0b\n\x01y\x12\x06\n\x04\x08\x01\x12\x00"  # output y, likewise
    b"B\x04\n\x00\x10\x11"  # opset 17
)


_MAX_SIZES = 1024
"""Per session and thread. After so many, no kernels are likely to be left that weren't loaded."""
_NOTHING = nullcontext()


class _Warm(threading.local):
    """What the current thread has executed: with graphs, ONNX Runtime has handles for each."""

    def __init__(self) -> None:
        self.rows: set[int] = set()


class OpenSession:
    """A session. `streams` are those of its device, on one of which it computes; they must outlive it, so whoever holds
    the session or anything bound to it holds this object. `graphs`: it captures what runs under a graph id. `plans` is
    for those who execute the session, one at a time. `facts` are those of the files that it was made of."""

    __slots__ = ("_warm", "facts", "graphs", "plans", "session", "streams")

    def __init__(
        self,
        session: ort.InferenceSession,
        streams: Streams | None,
        graphs: bool = False,
        facts: Facts | None = None,
    ) -> None:
        self.session = session
        self.facts = facts or Facts()
        self.streams = streams
        self.graphs = graphs
        self.plans = Plans()
        self._warm = _Warm()

    # hot path: 0.3 us
    def executing(self, rows: int) -> AbstractContextManager[None]:
        """To be executed within, on a device: a batch of `rows` rows. Blocks during captures if this thread hasn't
        executed such a batch, which makes the libraries create their handles and load kernels."""
        warm = self._warm.rows
        return _NOTHING if rows in warm or len(warm) >= _MAX_SIZES else self._warming(rows)

    @contextmanager
    def _warming(self, rows: int) -> Iterator[None]:
        with captures.synchronizing():
            yield
        self._warm.rows.add(rows)

    def __del__(self) -> None:
        if self.streams is None:
            return
        accelerator = self.streams.accelerator
        try:
            # Nobody says which thread this runs on, and ONNX Runtime releases a session on the thread's device.
            with captures.synchronizing(), accelerator.current():
                # Destroying a session waits as well, but holding the GIL, and for ever if the device hangs.
                accelerator.synchronize()
                # While nothing is captured, and before its streams: left alone, attributes go in an arbitrary order.
                del self.session
        except DeviceError:
            # The device is lost, or a capture is in progress after all. Destroying the session's graphs could end the
            # process, as ONNX Runtime throws in a destructor: it is kept for ever.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.session))


def open_session(
    name: str, path: Path, options: OnnxOptions, device: Device, accelerator: CudaAccelerator | None = None
) -> OpenSession:
    """The model in `path` on `device`, computing on a stream of its own from `accelerator`, if there is one.

    Without graphs if the model can't be captured. Blocks; raises LoadError.
    """
    try:
        options = ready_accelerator(name, path, options, device)
        files = read_model_files(path)
        if provider_of(options, device) is not None:
            # These compile the model, and look for its weights by the path that it came from.
            files = ModelFiles(str(path), files.facts)
        streams = open_streams(accelerator) if accelerator is not None else None
        # The CUDA provider can't capture what TensorRT computes, which has graphs of its own.
        graphs = streams is not None and options.cuda_graphs and options.tensorrt is None
        if graphs and tuple(map(int, ort.__version__.split(".")[:2])) < _CAPTURES_SINCE:
            text = "model '%s' runs without CUDA graphs: those of onnxruntime %s may be wrong, those of 1.31 aren't"
            _log.warning(text, name, ort.__version__)
            graphs = False
        if graphs:
            try:
                session = _session(files, options, device, streams)
            except LoadError as error:
                if not _NOT_CAPTURED.search(str(error)):
                    raise
                _log.warning("model '%s' runs without CUDA graphs: %s", name, error)
            else:
                return OpenSession(session, streams, graphs, files.facts)
        session = _session(files, without_graphs(options), device, streams)
        return OpenSession(session, streams, facts=files.facts)
    except (DeviceError, LoadError) as error:
        raise LoadError(f"model '{name}': can't open '{path}': {error}") from error


def memory_names(session: ort.InferenceSession) -> tuple[dict[str, str], dict[str, str]]:
    """The memory, by ONNX Runtime's name, that the model reads each input from and writes each output to.

    Raises whatever ONNX Runtime does; AttributeError if it is too old to tell.
    """
    sides = (
        (session.get_inputs(), session.get_input_memory_infos()),
        (session.get_outputs(), session.get_output_memory_infos()),
    )
    inputs, outputs = ({node.name: info.name for node, info in zip(*one, strict=True)} for one in sides)
    return inputs, outputs


def probe_cuda(device: Device, options: OnnxOptions) -> None:
    """Check that a session can be opened on `device`; LoadError with the reason if not."""
    _session(ModelFiles(PROBE_MODEL), options, device)


def _session(
    files: ModelFiles, options: OnnxOptions, device: Device, streams: Streams | None = None
) -> ort.InferenceSession:
    made = session_options(options)
    if files.weights:
        # Copied from there before the session is open.
        names, contents = list(files.weights), list(files.weights.values())
        made.add_external_initializers_from_files_in_memory(names, contents, list(map(len, contents)))
    providers: list[Any] = [_CPU]
    stream: dict[str, str] = {}
    if device.kind is DeviceKind.GPU:
        prepare_cuda()
        stream = {"user_compute_stream": str(streams.compute.handle)} if streams is not None else {}
        providers = [(CUDA, {**options.cuda, **stream, "device_id": str(device.index)}), _CPU]
    provider = provider_of(options, device)
    if provider is not None:
        prepare_accelerator(provider[0])
        providers = [(provider[0], {**provider[1], **stream}), *providers]
    try:
        session = ort.InferenceSession(files.model, made, providers=providers, enable_fallback=0)
    except Exception as error:  # its exceptions share no base class below this one
        missing = missing_library(provider[0]) if provider is not None else ""
        raise LoadError(missing or reason_of(error)) from error
    if provider is not None:
        check_taken(session, provider[0])
    if device.kind is DeviceKind.GPU and CUDA not in session.get_providers():
        raise LoadError(f"onnxruntime couldn't use GPU {device.index}: {_why_no_cuda()}")
    if device.kind is DeviceKind.GPU:
        ort.set_default_logger_severity(_ERROR)
    return session


_stdout = threading.Lock()  # one per process: of two concurrent redirections, the first would restore it too early


def prepare_cuda(
    preload: Callable[..., object] = ort.preload_dlls, load: Callable[[str], object] = ctypes.CDLL
) -> None:
    """Load the CUDA libraries of PyPI's nvidia packages, which are where the dynamic loader doesn't look. `preload`
    looks for them only beside onnxruntime, but in an environment on top of another one they are elsewhere. What it
    doesn't find it takes from the system, which may have another release, or half of one; so `load` opens the packages'
    libraries first."""
    _silence()
    output = io.StringIO()
    with _stdout, contextlib.redirect_stdout(output):
        for library in _libraries_of_packages():
            try:
                load(str(library))
            except OSError as error:
                output.write(f"{error}\n")
        preload()
    for line in output.getvalue().splitlines():
        _log.debug("onnxruntime: %s", line)
    _look_for_cudnn()


@functools.cache
def _silence() -> None:
    """Have ONNX Runtime log nothing until a session has opened on a GPU. Which library is missing is in our errors, in
    better words."""
    ort.set_default_logger_severity(_FATAL)


def _libraries_of_packages() -> Sequence[Path]:
    """Those that ONNX Runtime may need, each after its own dependencies."""
    found = importlib.util.find_spec("nvidia")
    places = found.submodule_search_locations or () if found else ()
    return [
        library
        for name in _LIBRARIES
        for place in places
        for library in sorted(Path(place).glob(f"*/lib/lib{name}.so.*"))
    ]


@functools.cache
def _look_for_cudnn() -> None:
    """Log a warning if cuDNN is missing: sessions open without it, and models with convolutions fail when they
    execute."""
    try:
        ctypes.CDLL(_CUDNN)
    except OSError as error:
        _log.warning("no cuDNN: %s; models with convolutions need it: %s", error, how_to_install("cuda"))


def _why_no_cuda(load: Callable[[str], object] = ctypes.CDLL) -> str:
    """What ONNX Runtime only logged: as a rule, that a library which its CUDA provider needs is missing."""
    provider = Path(ort.__file__).with_name("capi") / "libonnxruntime_providers_cuda.so"
    try:
        load(str(provider))
    except OSError as error:
        if _OF_DRIVER.search(str(error)):
            return f"{error}; the NVIDIA driver is too old for it"
        return f"{error}; to install CUDA and cuDNN: {how_to_install('cuda')}"
    return "its CUDA provider didn't start, although its libraries are there; is the driver recent enough for them?"


def share_threads(intra_op: int, inter_op: int) -> None:
    """`registry.share_threads`."""
    if not hasattr(ort, "set_global_thread_pool_sizes"):  # as in onnxruntime-openvino, which is older
        raise LoadError(f"this onnxruntime {ort.__version__} can't share threads between models: it is too old")
    try:
        ort.set_global_thread_pool_sizes(intra_op, inter_op)
    except Exception as error:  # its exceptions share no base class below this one
        raise LoadError(reason_of(error)) from error


def session_options(options: OnnxOptions) -> ort.SessionOptions:
    """`options` in ONNX Runtime's own form. Loads operator libraries; LoadError if one can't be loaded."""
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
            raise LoadError(f"operator library '{library}': {reason_of(error)}") from error
    return made


def run_options(options: OnnxOptions, device: Device) -> ort.RunOptions:
    """Options for a plain run of a session on `device`."""
    # Plain runs bring new buffers each time, which a graph can't use.
    return _run_options({_SHRINKAGE: _own_arenas(options, device), _GRAPH_ID: _graph_id(options, NO_GRAPH)})


def staged_run_options(options: OnnxOptions, device: Device, graph: int | None) -> ort.RunOptions:
    """Options for a run whose caller waits for the device itself. `graph` is the graph to capture or replay, NO_GRAPH
    for none, None if the session doesn't know graphs."""
    arenas = None if graph is not None else _own_arenas(options, device)
    # ONNX Runtime shrinks an arena when the run returns. Queued work may still be using it, and the manual doesn't
    # promise that freeing waits for that.
    unsynchronized = None if arenas and "gpu:" in arenas else "1"
    graph_id = _graph_id(options, NO_GRAPH if graph is None else graph)
    return _run_options({_UNSYNCHRONIZED: unsynchronized, _SHRINKAGE: arenas, _GRAPH_ID: graph_id})


def _graph_id(options: OnnxOptions, graph: int) -> str | None:
    """Set even where it means nothing: ONNX Runtime's Python looks it up, and if it isn't set, the exception and its
    stack trace cost 30 us each time. Not with TensorRT, whose provider would then skip graphs of its own."""
    return None if options.tensorrt is not None else str(graph)


def _own_arenas(options: OnnxOptions, device: Device) -> str | None:
    # A run fails if it names an arena that its session doesn't have, and the other GPUs named may be those of other
    # instances.
    own = {"cpu:0"} if device.kind is DeviceKind.CPU else {"cpu:0", f"gpu:{device.index}"}
    arenas = [arena for arena in options.shrink_arenas if arena in own]
    return ";".join(arenas) or None


def _run_options(entries: Mapping[str, str | None]) -> ort.RunOptions:
    made = ort.RunOptions()
    made.log_severity_level = _FATAL
    for key, value in entries.items():
        if value is not None:
            made.add_run_config_entry(key, value)
    return made
