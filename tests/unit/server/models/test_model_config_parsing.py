"""Reading `config.pbtxt`, and refusing by name what this build can't do."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from google.protobuf import text_format
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.backends.base import GroupKind, InstanceGroup
from paceline.backends.spec import ModelSpec, TensorSpec
from paceline.protos import model_config_pb2 as pb
from paceline.server.errors import ConfigError
from paceline.server.models.batch_policy import backend_name
from paceline.server.models.config_text import parse_config
from paceline.server.models.model_config import (
    check_supported,
    instance_groups,
    model_source,
)


def config(text: str) -> pb.ModelConfig:
    return text_format.Parse(text, pb.ModelConfig())


def parsed(tmp_path: Path, content: str | bytes) -> pb.ModelConfig:
    path = tmp_path / "config.pbtxt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return parse_config(path)


def test_parse_reads_what_is_written(tmp_path: Path) -> None:
    read = parsed(tmp_path, '# as Triton writes it\nname: "m"\nmax_batch_size: 8\ndynamic_batching { }\n')
    assert (read.name, read.max_batch_size, read.HasField("dynamic_batching")) == ("m", 8, True)


def test_parse_accepts_a_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    assert parsed(tmp_path, b'\xef\xbb\xbfname: "m"\r\nmax_batch_size: 8\r\n').max_batch_size == 8


def test_parse_empty_file_is_an_empty_configuration(tmp_path: Path) -> None:
    assert parsed(tmp_path, "") == pb.ModelConfig()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("max_batch_size: 4\nmax_batchsize: 8", 'config.pbtxt:2:1 : Message type "inference.ModelConfig" has no field'),
        ("\n\ninput {\n  dim: 1 }", 'config.pbtxt:4:3 : Message type "inference.ModelInput" has no field named "dim".'),
        ("max_batch_size: 1\nmax_batch_size: 2", "config.pbtxt:2:17 : "),
        ('max_batch_size: "8"', "config.pbtxt:1:17 : "),
        ("input { name: 'a'", 'config.pbtxt:1:15 : Expected "}".'),
        ("instance_group { kind: KIND_TPU }", "config.pbtxt:1:24 : "),
    ],
)
def test_parse_error_names_file_line_and_column(tmp_path: Path, content: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(tmp_path, content)
    assert str(caught.value).startswith(f"{tmp_path}/{text}")


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        ("dynamic_batching { max_queue_delay: 2000 }", "Did you mean max_queue_delay_microseconds?"),
        ("dynamic_batching { preferred_batch_size: 16, 32 }", "A list is written in brackets, as in [ 16, 32 ]."),
        ("preferred_batch_size: 16", "It is a field of dynamic_batching."),
        ("optimization { graphs: true }", "It is a field of cuda."),
        ("version_policy { newest { } }", "Expected one of latest, all, specific."),
        ("input { data_type: FP32 }", "TYPE_FP16, TYPE_FP32, TYPE_FP64, TYPE_STRING, TYPE_BF16."),
    ],
)
def test_parse_error_says_what_was_meant(tmp_path: Path, content: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(tmp_path, content)
    assert str(caught.value).endswith(hint)


GBK = "\u6a21\u578b\u8bf4\u660e".encode("gbk")


@pytest.mark.parametrize(
    "content",
    [
        b"# " + GBK + b"\nname: 'm'",
        b"name: 'm' # it's \"" + GBK + b"\r\n",
        b"name: # " + GBK + b"\n  'm' # \xff",
        b"\xef\xbb\xbf#" + GBK + b"\nname: 'm'",
        b"name: 'm'#\\" + GBK,
    ],
)
def test_parse_skips_comments_in_any_encoding(tmp_path: Path, content: bytes) -> None:
    assert parsed(tmp_path, content) == pb.ModelConfig(name="m")


@pytest.mark.parametrize("text", ["a # b", "a'#b", 'a"#', "#", "a\\'#", "\\#", "'#' \" # \u4e2d"])
def test_parse_keeps_what_looks_like_a_comment_in_a_string(tmp_path: Path, text: str) -> None:
    config = pb.ModelConfig(name=text)
    assert parsed(tmp_path, text_format.MessageToString(config, as_utf8=True)) == config


@pytest.mark.filterwarnings("ignore:invalid escape sequence:DeprecationWarning")
@given(st.text(st.sampled_from("\"'\\#\nna:\x01 \u4e2d"), max_size=20))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_parse_agrees_with_protobuf_about_what_comments_are(tmp_path: Path, text: str) -> None:
    text = f"name: {text}\nmax_batch_size: 1"
    try:
        expected: object = text_format.Parse(text, pb.ModelConfig())
    except text_format.ParseError as error:
        expected = f"{tmp_path}/config.pbtxt:{error}"
    try:
        got: object = parsed(tmp_path, text)
    except ConfigError as error:
        got = str(error)
    assert got == expected or (isinstance(got, str) and got.startswith(f"{expected} "))  # with a hint


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b"max_batch_size: 8\n  name: '\xc4\xe3'", "2:10 : Expected UTF-8, got byte 0xc4"),
        (b'# \xff\nname: "\xe4\xb8\xad#\xff"', "2:10 : Expected UTF-8, got byte 0xff"),
        (b"n\xe4me: 'm'", "1:2 : Expected UTF-8, got byte 0xe4"),
        (b"name: 'a\\'# \xff'", "1:13 : Expected UTF-8, got byte 0xff"),
        ("name: 'm'".encode("utf-16"), "1:1 : Expected UTF-8, got byte 0xff"),
        (b"\n\nname: '\\xff'", "3:13 : "),
    ],
)
def test_parse_refuses_names_outside_utf8_by_line_and_column(tmp_path: Path, content: bytes, place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(tmp_path, content)
    assert str(caught.value).startswith(f"{tmp_path}/config.pbtxt:{place}")


def test_parse_of_too_large_a_number_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"/config\.pbtxt can't be read: "):
        parsed(tmp_path, "instance_group { kind: 99999999999999999999 }")


@pytest.mark.parametrize("put", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_parse_of_a_folder_pipe_or_device_is_a_config_error(tmp_path: Path, put: Callable[[Path], None]) -> None:
    put(tmp_path / "config.pbtxt")
    with pytest.raises(ConfigError, match=r"/config\.pbtxt can't be read: .*expected a file, got something else"):
        parse_config(tmp_path / "config.pbtxt")


def test_parse_of_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"/config\.pbtxt can't be read: .*No such file"):
        parse_config(tmp_path / "config.pbtxt")


@pytest.mark.parametrize(
    ("text", "feature"),
    [
        ('model_repository_agents { agents { name: "x" } }', "model_repository_agents"),
        ('input { name: "a" is_non_linear_format_io: true }', "input 'a': is_non_linear_format_io"),
        (
            'input { name: "a" } input { name: "b" is_non_linear_format_io: true }',
            "input 'b': is_non_linear_format_io",
        ),
        ('output { name: "x" is_non_linear_format_io: true }', "output 'x': is_non_linear_format_io"),
        ("instance_group { passive: true }", "instance_group.passive"),
        ("instance_group { secondary_devices { } }", "instance_group.secondary_devices"),
    ],
)
def test_check_supported_refuses_unsupported_features_by_name(text: str, feature: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_supported(config(text))
    assert str(caught.value) == f"{feature} is not supported by this build"


@pytest.mark.parametrize(
    "text",
    [
        "",
        'input { name: "a" reshape { } optional: true allow_ragged_batch: true is_shape_tensor: true }',
        'output { name: "x" reshape { shape: [ 1 ] } is_shape_tensor: true } batch_input { } batch_output { }',
        'input { name: "a" dims: [ 1 ] format: FORMAT_NCHW } output { name: "b" label_filename: "labels.txt" }',
        "dynamic_batching { preserve_ordering: true default_queue_policy { timeout_action: DELAY } }",
        "dynamic_batching { priority_levels: 2 priority_queue_policy { key: 1 value { } } }",
        "response_cache { enable: true } model_transaction_policy { decoupled: false }",
        "optimization { eager_batching: true }",
        "optimization { input_pinned_memory { enable: true } cuda { graphs: true } priority: PRIORITY_MAX }",
        'instance_group { name: "g" rate_limiter { priority: 1 } host_policy: "h" profile: "0" }',
        'cc_model_filenames { key: "7.5" value: "x.onnx" }',
        'metric_tags { key: "a" value: "b" }',
    ],
)
def test_check_supported_accepts_everything_harmless(text: str) -> None:
    check_supported(config(text))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("", "onnxruntime"),
        ('platform: "onnxruntime_onnx"', "onnxruntime_onnx"),
        ('backend: "identity"', "identity"),
        ('backend: "identity" platform: "onnxruntime_onnx"', "identity"),
    ],
)
def test_backend_name_is_the_backend_else_the_platform_else_onnx_runtime(text: str, name: str) -> None:
    assert backend_name(config(text)) == name


def test_instance_groups_each_becomes_one_of_ours() -> None:
    text = (
        "instance_group [ { count: 2 kind: KIND_CPU }, { kind: KIND_GPU gpus: [ 0, 2 ] }, { kind: KIND_MODEL }, { } ]"
    )
    assert instance_groups(config(text)) == (
        InstanceGroup(GroupKind.CPU, 2),
        InstanceGroup(GroupKind.GPU, 0, (0, 2)),
        InstanceGroup(GroupKind.MODEL),
        InstanceGroup(GroupKind.AUTO),
    )


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kind: 99", "instance_group: expected a kind, got 99"),
        ("count: -3", "instance_group: expected count >= 0, got -3"),
        ("count: 2147483647", "instance_group: expected up to 1024 instances in all, got 2147483647 or more"),
        ("count: 513 gpus: [ 0, 1 ]", "instance_group: expected up to 1024 instances in all, got 1026 or more"),
        ("count: 1024 } instance_group {", "instance_group: expected up to 1024 instances in all, got 1025 or more"),
    ],
)
def test_instance_groups_with_invalid_values_are_refused(text: str, fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        instance_groups(config(f"instance_group {{ {text} }}"))
    assert str(caught.value) == fault


def test_model_source_carries_parameters_level_and_accelerators_in_order() -> None:
    text = """
        name: "m"
        parameters { key: "intra_op_thread_count" value { string_value: "2" } }
        optimization {
          graph { level: -1 }
          execution_accelerators {
            cpu_execution_accelerator { name: "openvino" }
            gpu_execution_accelerator { name: "cuda" parameters { key: "k" value: "v" } }
          }
        }
    """
    source = model_source(config(text), Path("x.onnx"))
    assert (source.name, source.path, source.graph_level) == ("m", Path("x.onnx"), -1)
    assert source.parameters == {"intra_op_thread_count": "2"}
    assert source.accelerators == (("cuda", {"k": "v"}),)
    assert source.cpu_accelerators == (("openvino", {}),)


def test_model_source_of_an_empty_configuration_is_empty() -> None:
    source = model_source(config(""), Path("x.onnx"))
    assert (source.declared, source.parameters, source.graph_level, source.accelerators) == (None, {}, None, ())


TENSORS = (
    'input { name: "a" data_type: TYPE_FP32 dims: [ 2 ] } output { name: "b" data_type: TYPE_STRING dims: [ -1 ] }'
)


@pytest.mark.parametrize(("rows", "lead"), [(0, ()), (4, (-1,))])
def test_model_source_declares_tensors_with_their_batch_axis(rows: int, lead: tuple[int, ...]) -> None:
    source = model_source(config(f"max_batch_size: {rows} {TENSORS}"), Path("x"))
    assert source.declared == ModelSpec(
        (TensorSpec("a", "FP32", (*lead, 2)),), (TensorSpec("b", "BYTES", (*lead, -1)),)
    )


def test_model_source_declares_tensors_as_the_model_has_them() -> None:
    text = """
        max_batch_size: 4
        input { name: "a" data_type: TYPE_FP32 dims: [ 4 ] reshape { shape: [ 2, 2 ] } }
        input { name: "b" data_type: TYPE_FP32 dims: [ 3, -1 ] allow_ragged_batch: true }
        input { name: "c" data_type: TYPE_INT64 dims: [ 2 ] is_shape_tensor: true }
        input { name: "d" data_type: TYPE_FP32 dims: [ 1 ] reshape { } optional: true }
        output { name: "a" data_type: TYPE_FP32 dims: [ -1 ] }
        output { name: "b" data_type: TYPE_FP32 dims: [ 2 ] }
        batch_output { target_name: "a" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "b" }
    """
    assert model_source(config(text), Path("x")).declared == ModelSpec(
        (
            TensorSpec("a", "FP32", (-1, 2, 2)),
            TensorSpec("b", "FP32", (-1,)),
            TensorSpec("c", "INT64", (2,)),
            TensorSpec("d", "FP32", (-1,), optional=True),
        ),
        (TensorSpec("a", "FP32", (-1,)), TensorSpec("b", "FP32", (-1, 2))),
    )


@pytest.mark.parametrize("tensors", [TENSORS.partition("output")[0], "output" + TENSORS.partition("output")[2]])
def test_model_source_declares_nothing_unless_inputs_and_outputs_are_given(tensors: str) -> None:
    assert model_source(config(tensors), Path("x")).declared is None


@pytest.mark.parametrize("data_type", ["", "data_type: TYPE_INVALID"])
def test_model_source_declares_nothing_if_a_tensor_has_no_datatype(data_type: str) -> None:
    text = f'input {{ name: "a" {data_type} dims: [ 1 ] }} output {{ name: "b" data_type: TYPE_FP32 dims: [ 1 ] }}'
    assert model_source(config(text), Path("x")).declared is None


@pytest.mark.parametrize(
    ("tensor", "fault"),
    [
        ('name: "a" data_type: 77', r"^input 'a': expected a data_type, got 77$"),
        ("data_type: TYPE_FP32", r"^input: expected a name for each, got none for one of \[1\]$"),
    ],
)
def test_model_source_tensor_of_nothing_known_is_refused(tensor: str, fault: str) -> None:
    text = f'input {{ {tensor} dims: [ 1 ] }} output {{ name: "b" data_type: TYPE_FP32 dims: [ 1 ] }}'
    with pytest.raises(ConfigError, match=fault):
        model_source(config(text), Path("x"))
