"""A model configuration's execution accelerators, as options of ONNX Runtime's execution providers.

Lives here: which accelerators and parameters exist, with the names and meanings of Triton's backend, and what ONNX
Runtime calls them. Must not: onnxruntime; files. Anything unknown is refused by name. So is what would let the author
of a configuration run code or call addresses: `trt_extra_plugin_lib_paths`, and CUDA's options that are pointers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from paceline.backends.base import ModelSource
from paceline.backends.errors import LoadError
from paceline.backends.spec import TensorSpec

ARENA_GROWTH = {"0": "kNextPowerOfTwo", "1": "kSameAsRequested"}
"""Triton's numbers for ONNX Runtime's names."""
CONV_SEARCH = {"0": "EXHAUSTIVE", "1": "HEURISTIC", "2": "DEFAULT"}
ENGINE_CACHE, ENGINE_CACHE_PATH = "trt_engine_cache_enable", "trt_engine_cache_path"

_GPU, _CPU = ("cuda", "tensorrt"), ("openvino",)


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a value may be: `expected`, in words, and `read`, its form in ONNX Runtime; None if it is something else."""

    expected: str
    read: Callable[[str], str | None]


def _one_of(choices: Sequence[str], numbers: Mapping[str, str] = MappingProxyType({})) -> _Kind:
    """One of `choices`, or Triton's number for one as in its `parameters`, if there are any."""
    known = {**{choice: choice for choice in choices}, **numbers}
    return _Kind(f"one of {', '.join(choices)}", known.get)


def _switch(off: str, on: str) -> _Kind:
    return _Kind("0, 1, false or true", lambda value: {"0": off, "1": on, "false": off, "true": on}.get(value.lower()))


_TEXT = _Kind("a text", lambda value: value or None)
_WHOLE = _Kind("a whole number", lambda value: value if value.isascii() and value.isdecimal() else None)
_POSITIVE = _Kind("a whole number above 0", lambda value: _WHOLE.read(value) if value.strip("0") else None)
_SWITCH, _BIT = _switch("False", "True"), _switch("0", "1")
# With fused biases, ONNX Runtime 1.31 clears a convolution's output with cudaMemset on the default stream and adds to
# it on its own stream, which doesn't wait for that: it adds to whatever is there, or what is in use is cleared. In
# graphs nothing is cleared at all.
_UNFUSED = _Kind(
    "0 or false, as answers would be wrong otherwise", lambda value: "0" if _BIT.read(value) == "0" else None
)

# Source: github.com/triton-inference-server/onnxruntime_backend. Values: ONNX Runtime's name, and what they may be.
_TENSORRT: Mapping[str, tuple[str, _Kind]] = {
    "max_workspace_size_bytes": ("trt_max_workspace_size", _WHOLE),
    "int8_calibration_table_name": ("trt_int8_calibration_table_name", _TEXT),
    "int8_use_native_calibration_table": ("trt_int8_use_native_calibration_table", _SWITCH),
    **{
        f"trt_{name}": (f"trt_{name}", kind)
        for kind, names in (
            (
                _SWITCH,
                "engine_cache_enable timing_cache_enable force_timing_cache dla_enable dump_subgraphs "
                "force_sequential_engine_build context_memory_sharing_enable layer_norm_fp32_fallback "
                "detailed_build_log build_heuristics_enable sparsity_enable cuda_graph_enable dump_ep_context_model",
            ),
            (
                _WHOLE,
                "max_partition_iterations min_subgraph_size dla_core builder_optimization_level auxiliary_streams "
                "ep_context_embed_mode",
            ),
            (
                _TEXT,
                "engine_cache_path engine_cache_prefix timing_cache_path tactic_sources profile_min_shapes "
                "profile_max_shapes profile_opt_shapes ep_context_file_path",
            ),
        )
        for name in names.split()
    },
}
_PRECISIONS: Mapping[str, Mapping[str, str]] = {
    "FP32": {},
    "FP16": {"trt_fp16_enable": "True"},
    "BF16": {"trt_bf16_enable": "True"},
    "INT8": {"trt_int8_enable": "True"},
}
_CUDA: Mapping[str, _Kind] = {
    "arena_extend_strategy": _one_of(tuple(ARENA_GROWTH.values()), ARENA_GROWTH),
    "cudnn_conv_algo_search": _one_of(tuple(CONV_SEARCH.values()), CONV_SEARCH),
    "fuse_conv_bias": _UNFUSED,
    "gpu_mem_limit": _POSITIVE,
    "sdpa_kernel": _WHOLE,
    "tunable_op_max_tuning_duration_ms": _WHOLE,
    **dict.fromkeys(
        (
            "cudnn_conv1d_pad_to_nc1d",
            "cudnn_conv_use_max_workspace",
            "do_copy_in_default_stream",
            "enable_cuda_graph",
            "enable_cudnn",
            "enable_skip_layer_norm_strict_mode",
            "prefer_nhwc",
            "tunable_op_enable",
            "tunable_op_tuning_enable",
            "use_ep_level_unified_stream",
            "use_tf32",
        ),
        _BIT,
    ),
}
_OPENVINO: Mapping[str, _Kind] = {
    "cache_dir": _TEXT,
    "num_of_threads": _WHOLE,
    "num_streams": _WHOLE,
    "precision": _one_of(("FP32", "FP16", "ACCURACY")),
}


def cuda_options(source: ModelSource) -> dict[str, str]:
    """The options given for accelerator `cuda`, if it is there. LoadError for an unknown option, or for an unknown
    accelerator of any device."""
    for known, given, kind in ((_GPU, source.accelerators, "gpu"), (_CPU, source.cpu_accelerators, "cpu")):
        for name, _ in given:
            if name not in known:
                raise LoadError(
                    f"model '{source.name}': {kind}_execution_accelerator: expected one of {', '.join(known)}, "
                    f"got '{name}'"
                )
    options: dict[str, str] = {}
    for key, value in _given(source.accelerators, "cuda") or ():
        if key == "device_id":
            raise LoadError(
                f"model '{source.name}': execution accelerator 'cuda': expected no 'device_id' (instance_group says "
                f"which GPUs serve the model), got '{value}'"
            )
        options[key] = _read(source, "cuda", key, value, _CUDA.get(key), _CUDA)
    return options


def tensorrt_options(source: ModelSource) -> dict[str, str] | None:
    """The options given for accelerator `tensorrt`; None if it isn't asked for. LoadError for an unknown option."""
    given = _given(source.accelerators, "tensorrt")
    if given is None:
        return None
    options: dict[str, str] = {}
    for key, value in given:
        if key == "precision_mode":
            _read(source, "tensorrt", key, value, _one_of(tuple(_PRECISIONS)), _TENSORRT)
            options.update(_PRECISIONS[value])
            continue
        name, kind = _TENSORRT.get(key, (key, None))
        options[name] = _read(source, "tensorrt", key, value, kind, ("precision_mode", *_TENSORRT))
    return options


def openvino_options(source: ModelSource, threads: int) -> dict[str, str] | None:
    """The options given for accelerator `openvino`; None if it isn't asked for. `threads`: the model's thread count, 0
    if not given. LoadError for an unknown option."""
    given = _given(source.cpu_accelerators, "openvino")
    if given is None:
        return None
    return {
        "device_type": "CPU",
        **({"num_of_threads": str(threads)} if threads else {}),
        **{key: _read(source, "openvino", key, value, _OPENVINO.get(key), _OPENVINO) for key, value in given},
    }


def profile_shapes(inputs: Sequence[TensorSpec], largest_rows: int) -> dict[str, str]:
    """Shapes for which TensorRT is to build one engine: batches of 1 to `largest_rows` rows, optimized for the largest.
    Empty if anything but the first dimension of the `inputs` (complete dims) is free, or their names can't be
    expressed."""
    batched = [tensor for tensor in inputs if tensor.dims[:1] == (-1,)]
    closed = all(min(tensor.dims[1:], default=1) > 0 for tensor in batched)
    others = all(min(tensor.dims, default=1) > 0 and not tensor.any_rank for tensor in inputs if tensor not in batched)
    if not (batched and closed and others and largest_rows) or any(set(one.name) & set(":,") for one in batched):
        return {}

    def shapes(rows: int) -> str:
        return ",".join(f"{one.name}:{'x'.join(map(str, (rows, *one.dims[1:])))}" for one in batched)

    largest = shapes(largest_rows)
    return {
        "trt_profile_min_shapes": shapes(1),
        "trt_profile_opt_shapes": largest,
        "trt_profile_max_shapes": largest,
    }


Given = Sequence[tuple[str, Mapping[str, str]]]


def _given(accelerators: Given, name: str) -> list[tuple[str, str]] | None:
    """The parameters of accelerator `name`; None if it isn't asked for."""
    given = [parameters.items() for one, parameters in accelerators if one == name]
    return [(key, value.strip()) for items in given for key, value in items] if given else None


def _read(
    source: ModelSource,
    accelerator: str,
    key: str,
    value: str,
    kind: _Kind | None,
    known: Sequence[str] | Mapping[str, object],
) -> str:
    where = f"model '{source.name}': execution accelerator '{accelerator}'"
    if kind is None:
        raise LoadError(f"{where}: expected one of {', '.join(sorted(known))}, got '{key}'")
    text = kind.read(value)
    if text is None:
        raise LoadError(f"{where}: '{key}': expected {kind.expected}, got '{value}'")
    return text
