"""Execution accelerators as options of ONNX Runtime's providers: what is accepted, and what is refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from paceline.backends.base import ModelSource
from paceline.backends.errors import LoadError
from paceline.backends.onnx.options import OnnxOptions, parse_options
from paceline.backends.onnx.provider_options import profile_shapes
from paceline.backends.spec import TensorSpec


def options(
    name: str, parameters: Mapping[str, str], *, device: str = "gpu", threads: str | None = None
) -> OnnxOptions:
    accelerators = ((name, parameters),)
    given = {} if threads is None else {"intra_op_thread_count": threads}
    if device == "cpu":
        return parse_options(ModelSource("m", Path("m.onnx"), parameters=given, cpu_accelerators=accelerators))
    return parse_options(ModelSource("m", Path("m.onnx"), parameters=given, accelerators=accelerators))


def test_no_accelerator_gives_no_options() -> None:
    nothing = parse_options(ModelSource("m", Path("m.onnx")))
    assert (nothing.tensorrt, nothing.openvino) == (None, None)


def test_tensorrt_parameters_of_triton_become_options_of_onnx_runtime() -> None:
    given = {
        "precision_mode": "FP16",
        "max_workspace_size_bytes": "1073741824",
        "int8_use_native_calibration_table": "0",
        "trt_engine_cache_enable": "true",
        "trt_engine_cache_path": "/cache",
        "trt_builder_optimization_level": "3",
        "trt_cuda_graph_enable": "1",
        "trt_profile_min_shapes": "x:1x3",
    }
    assert options("tensorrt", given).tensorrt == {
        "trt_fp16_enable": "True",
        "trt_max_workspace_size": "1073741824",
        "trt_int8_use_native_calibration_table": "False",
        "trt_engine_cache_enable": "True",
        "trt_engine_cache_path": "/cache",
        "trt_builder_optimization_level": "3",
        "trt_cuda_graph_enable": "True",
        "trt_profile_min_shapes": "x:1x3",
    }


@pytest.mark.parametrize(
    ("precision", "expected"),
    [("FP32", {}), ("BF16", {"trt_bf16_enable": "True"}), ("INT8", {"trt_int8_enable": "True"})],
)
def test_tensorrt_precision_is_one_switch(precision: str, expected: Mapping[str, str]) -> None:
    assert options("tensorrt", {"precision_mode": precision}).tensorrt == expected


def test_cuda_choices_may_be_names_or_the_numbers_of_tritons_parameters() -> None:
    for search, growth in (("2", "1"), ("DEFAULT", "kSameAsRequested")):
        assert options("cuda", {"cudnn_conv_algo_search": search, "arena_extend_strategy": growth}).cuda == {
            "cudnn_conv_algo_search": "DEFAULT",
            "arena_extend_strategy": "kSameAsRequested",
        }


def test_cuda_switches_may_be_words_or_digits() -> None:
    given = {"enable_cuda_graph": "true", "use_tf32": "0", "fuse_conv_bias": "false"}
    assert options("cuda", given).cuda == {
        "cudnn_conv_algo_search": "HEURISTIC",
        "enable_cuda_graph": "1",
        "use_tf32": "0",
        "fuse_conv_bias": "0",
    }


def test_openvino_uses_the_cpu_and_the_models_number_of_threads_by_default() -> None:
    assert options("openvino", {}, device="cpu").openvino == {"device_type": "CPU"}
    assert options("openvino", {"num_streams": "2"}, device="cpu", threads="3").openvino == {
        "device_type": "CPU",
        "num_of_threads": "3",
        "num_streams": "2",
    }
    several = options("openvino", {"num_of_threads": "1"}, device="cpu", threads="3").openvino
    assert several == {"device_type": "CPU", "num_of_threads": "1"}


@pytest.mark.parametrize(
    ("device", "name", "known"),
    [
        ("gpu", "openvino", "cuda, tensorrt"),
        ("gpu", "auto_mixed_precision", "cuda, tensorrt"),
        ("cpu", "tensorrt", "openvino"),
        ("cpu", "xnnpack", "openvino"),
    ],
)
def test_unknown_accelerator_is_refused_by_name(device: str, name: str, known: str) -> None:
    message = f"model 'm': {device}_execution_accelerator: expected one of {known}, got '{name}'"
    with pytest.raises(LoadError, match=f"^{re.escape(message)}$"):
        options(name, {}, device=device)


@pytest.mark.parametrize(
    ("device", "name", "key"),
    [
        ("gpu", "tensorrt", "trt_engine_cache"),
        ("gpu", "tensorrt", "trt_extra_plugin_lib_paths"),  # would load code
        ("gpu", "tensorrt", "user_compute_stream"),
        ("gpu", "cuda", "gpu_external_alloc"),  # an address that would be called
        ("gpu", "cuda", "user_compute_stream"),
        ("cpu", "openvino", "device_type"),
    ],
)
def test_unknown_parameter_is_refused_by_name(device: str, name: str, key: str) -> None:
    with pytest.raises(LoadError, match=f"execution accelerator '{name}': expected one of .*, got '{key}'"):
        options(name, {key: "1"}, device=device)


@pytest.mark.parametrize(
    ("name", "key", "value", "expected"),
    [
        ("tensorrt", "precision_mode", "FP8", "one of FP32, FP16, BF16, INT8"),
        ("tensorrt", "trt_engine_cache_enable", "yes", "0, 1, false or true"),
        ("tensorrt", "max_workspace_size_bytes", "1 GB", "a whole number"),
        ("tensorrt", "trt_engine_cache_path", " ", "a text"),
        ("cuda", "gpu_mem_limit", "-1", "a whole number above 0"),
        ("cuda", "gpu_mem_limit", "0", "a whole number above 0"),
        ("cuda", "cudnn_conv_algo_search", "3", "one of EXHAUSTIVE, HEURISTIC, DEFAULT"),
        ("cuda", "fuse_conv_bias", "1", "0 or false, as answers would be wrong otherwise"),
        ("cuda", "fuse_conv_bias", "yes", "0 or false, as answers would be wrong otherwise"),
    ],
)
def test_malformed_value_is_refused(name: str, key: str, value: str, expected: str) -> None:
    message = f"model 'm': execution accelerator '{name}': '{key}': expected {expected}, got '{value.strip()}'"
    with pytest.raises(LoadError, match=f"^{re.escape(message)}$"):
        options(name, {key: value})


IMAGE, IDS = TensorSpec("image", "FP32", (-1, 3, 224, 224)), TensorSpec("ids", "INT64", (-1, 128))


def test_profile_ranges_from_one_row_to_the_largest_batch() -> None:
    assert profile_shapes([IMAGE, IDS], 32) == {
        "trt_profile_min_shapes": "image:1x3x224x224,ids:1x128",
        "trt_profile_opt_shapes": "image:32x3x224x224,ids:32x128",
        "trt_profile_max_shapes": "image:32x3x224x224,ids:32x128",
    }


def test_profile_leaves_out_inputs_of_one_shape() -> None:
    shapes = profile_shapes([IDS, TensorSpec("scale", "FP32", ())], 4)
    assert shapes["trt_profile_min_shapes"] == "ids:1x128"


@pytest.mark.parametrize(
    ("inputs", "rows"),
    [
        ([TensorSpec("free", "FP32", (-1, -1))], 8),
        ([IMAGE, TensorSpec("free", "FP32", (3, -1))], 8),
        ([TensorSpec("x:0", "FP32", (-1, 3))], 8),
        ([TensorSpec("fixed", "FP32", (1, 3))], 8),
        ([IMAGE, TensorSpec("any", "FP32", (), any_rank=True)], 8),
        ([IMAGE], 0),
    ],
)
def test_profile_is_empty_if_shapes_are_unknown_or_unsuitable(inputs: list[TensorSpec], rows: int) -> None:
    assert profile_shapes(inputs, rows) == {}
