"""ONNX Runtime's execution providers besides CUDA's and the CPU's: TensorRT and OpenVINO.

Lives here: what a session is told in order to use them, what it is asked afterwards, and why they aren't available.
Must not: the names of parameters (`provider_options`). The rule: a model whose configuration asks for one of them
computes on it, at least in part, or isn't loaded.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnxruntime as ort  # type: ignore[import-untyped,unused-ignore]

from paceline.backends.base import Device, DeviceKind
from paceline.backends.errors import LoadError
from paceline.backends.installed import how_to_install
from paceline.backends.onnx.options import OnnxOptions
from paceline.backends.onnx.provider_options import ENGINE_CACHE, ENGINE_CACHE_PATH, profile_shapes
from paceline.backends.onnx.spec import is_known, tensor_spec
from paceline.backends.spec import TensorSpec

_log = logging.getLogger("paceline.backends.onnx")

_TENSORRT, _OPENVINO = "TensorrtExecutionProvider", "OpenVINOExecutionProvider"
_RECORD = "session.record_ep_graph_assignment_info"
_TENSORRT_LIBRARIES = ("libnvinfer.so.10", "libnvinfer_plugin.so.10", "libnvonnxparser.so.10")


def provider_of(options: OnnxOptions, device: Device) -> tuple[str, Mapping[str, str]] | None:
    """The provider that a session on `device` is to prefer to others, with its options; None if none is asked for.
    LoadError if this onnxruntime doesn't have it."""
    if device.kind is DeviceKind.GPU and options.tensorrt is not None:
        return _available(_TENSORRT, "tensorrt", "the package onnxruntime-gpu has it"), options.tensorrt
    if device.kind is DeviceKind.CPU and options.openvino is not None:
        hint = "the package onnxruntime-openvino has it, which takes the place of onnxruntime-gpu"
        return _available(_OPENVINO, "openvino", hint), options.openvino
    return None


def ready_accelerator(name: str, path: Path, options: OnnxOptions, device: Device) -> OnnxOptions:
    """`options` of model `name` in `path`, with defaults for the accelerator that it asks for: a directory for
    TensorRT's engines, and the shapes that they are built for. Blocks; LoadError if the directory isn't writable."""
    configured = options.tensorrt
    if provider_of(options, device) is None:
        if configured is not None:
            _log.info("model '%s': instances on the CPU ignore its gpu_execution_accelerator", name)
        return options
    ready = replace(options, session_entries={**options.session_entries, _RECORD: "1"})
    if configured is None or device.kind is DeviceKind.CPU:
        return ready
    tensorrt = {**configured, **_engine_cache(name, configured, options.cache_directory)}
    if not any(key.startswith("trt_profile_") for key in configured):
        tensorrt |= _profile(name, path, options)
    return replace(ready, tensorrt={**tensorrt, "device_id": str(device.index)})


def prepare_accelerator(provider: str) -> None:
    """Load the libraries of PyPI's TensorRT packages, which are where the dynamic loader doesn't look."""
    found = importlib.util.find_spec("tensorrt_libs") if provider == _TENSORRT else None
    for folder in found.submodule_search_locations or () if found else ():
        for library in _TENSORRT_LIBRARIES:
            try:
                ctypes.CDLL(str(Path(folder, library)), mode=ctypes.RTLD_GLOBAL)
            except OSError as error:
                _log.debug("TensorRT: %s", error)


def check_taken(session: Any, provider: str) -> None:
    """Raise LoadError with the reason unless `session` computes some of its nodes by `provider`; log how many."""
    if provider not in session.get_providers():
        raise LoadError(
            missing_library(provider)
            or f"onnxruntime couldn't use {provider}, although its libraries are there; check device and driver"
        )
    if not hasattr(session, "get_provider_graph_assignment_info"):  # as in onnxruntime-openvino, which is older
        return
    counts: dict[str, int] = {}
    for part in session.get_provider_graph_assignment_info():
        counts[part.ep_name] = counts.get(part.ep_name, 0) + len(part.get_nodes())
    total = sum(counts.values())
    if not counts.get(provider):
        raise LoadError(f"{provider} takes none of the model's {total} nodes")
    _log.info("%s computes %d of the model's %d nodes", provider, counts[provider], total)


def missing_library(provider: str) -> str:
    """Why a session couldn't be opened, which ONNX Runtime only logs: as a rule, a library that the provider needs is
    missing. "" if all are there. Call it only after the failure: unless ONNX Runtime loads a provider's library first,
    the library doesn't find its host."""
    library, hint = {
        _TENSORRT: (
            "libonnxruntime_providers_tensorrt.so",
            f"it needs TensorRT 10 and CUDA: pip install tensorrt-cu13 and {how_to_install('cuda')}",
        ),
        _OPENVINO: ("libonnxruntime_providers_openvino.so", "the package onnxruntime-openvino includes it"),
    }[provider]
    try:
        ctypes.CDLL(str(Path(ort.__file__).with_name("capi") / library))
    except OSError as error:
        return f"onnxruntime couldn't use {provider}: {error}; {hint}"
    return ""


def _available(provider: str, name: str, hint: str) -> str:
    available = ort.get_available_providers()
    if provider not in available:
        raise LoadError(
            f"execution accelerator '{name}': this onnxruntime {ort.__version__} has no {provider}, only "
            f"{', '.join(available)}; {hint}"
        )
    return provider


def _engine_cache(name: str, configured: Mapping[str, str], flag: str) -> dict[str, str]:
    """Options for caching engines: building one takes minutes. A model isn't refused over a directory that it didn't
    ask for."""
    if configured.get(ENGINE_CACHE) == "False":
        return {}
    given = configured.get(ENGINE_CACHE_PATH) or flag
    try:
        home = os.environ.get("XDG_CACHE_HOME") or ("" if given else Path.home() / ".cache")
        folder = Path(given) if given else Path(home) / "paceline"
        # Engines are for one version of TensorRT; those of a model's versions are distinguished by their graphs.
        place = folder if configured.get(ENGINE_CACHE_PATH) else folder / f"tensorrt-{ort.__version__}" / name
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.access(place, os.W_OK | os.X_OK):
            raise PermissionError(f"no permission to write to '{place}'")
    except (OSError, RuntimeError) as error:  # no home directory is a RuntimeError
        if given or ENGINE_CACHE in configured:
            raise LoadError(
                f"execution accelerator 'tensorrt': engines can't be stored: {error}; expected a folder that the "
                "server can write to, in trt_engine_cache_path or --backend-config onnxruntime,cache-directory=DIR"
            ) from error
        _log.warning(
            "model '%s': TensorRT rebuilds its engines at each start, as they can't be stored: %s", name, error
        )
        return {ENGINE_CACHE: "False"}
    _log.info("model '%s': TensorRT keeps its engines in '%s'", name, place)
    return {ENGINE_CACHE: "True", ENGINE_CACHE_PATH: str(place)}


def _profile(name: str, path: Path, options: OnnxOptions) -> dict[str, str]:
    """Profile shapes from the model itself and the largest batch; without them, TensorRT builds another engine for each
    shape outside those that it has seen."""
    made = ort.SessionOptions()
    made.log_severity_level = 4
    made.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        for library in options.op_libraries:
            made.register_custom_ops_library(str(library))
        session = ort.InferenceSession(str(path), made, providers=["CPUExecutionProvider"], enable_fallback=0)
    except Exception as error:  # noqa: BLE001 - the real session fails the same way, and that is reported
        _log.debug("model '%s': its shapes aren't known: %s", name, error)
        return {}
    nodes = session.get_inputs()
    inputs: list[TensorSpec] = [tensor_spec(name, "input", node) for node in nodes if is_known(node)]
    shapes = profile_shapes(inputs, options.largest_rows) if len(inputs) == len(nodes) else {}
    if not shapes:
        _log.info(
            "model '%s': its shapes aren't fixed, so TensorRT builds more engines; trt_profile_*_shapes avoids that",
            name,
        )
    return shapes
