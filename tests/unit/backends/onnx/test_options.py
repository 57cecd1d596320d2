from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from paceline.backends.base import ModelSource
from paceline.backends.errors import LoadError
from paceline.backends.onnx.options import GraphLevel, OnnxOptions, parse_options


def _source(
    parameters: Mapping[str, str] | None = None,
    graph_level: int | None = None,
    accelerators: tuple[tuple[str, Mapping[str, str]], ...] = (),
) -> ModelSource:
    return ModelSource(
        "m", Path("m.onnx"), parameters=parameters or {}, graph_level=graph_level, accelerators=accelerators
    )


def test_parse_options_nothing_given_is_onnx_runtimes_default_but_for_the_convolution_search() -> None:
    assert parse_options(_source()) == OnnxOptions(cuda={"cudnn_conv_algo_search": "HEURISTIC"})


def test_parse_options_every_parameter_reaches_its_option() -> None:
    parameters = {
        "intra_op_thread_count": "3",
        "inter_op_thread_count": "2",
        "execution_mode": "1",
        "enable_mem_arena": "1",
        "enable_mem_pattern": "0",
        "session.use_device_allocator_for_initializers": "1",
        "session.intra_op.allow_spinning": "0",
        "session.inter_op.allow_spinning": "false",
        "memory.enable_memory_arena_shrinkage": "cpu:0;gpu:1",
        "cudnn_conv_algo_search": "2",
        "gpu_mem_limit": "1073741824",
        "arena_extend_strategy": "1",
        "do_copy_in_default_stream": "0",
    }

    assert parse_options(_source(parameters)) == OnnxOptions(
        intra_op_threads=3,
        inter_op_threads=2,
        parallel=True,
        cpu_mem_arena=True,
        mem_pattern=False,
        session_entries={
            "session.use_device_allocator_for_initializers": "1",
            "session.intra_op.allow_spinning": "0",
            "session.inter_op.allow_spinning": "0",
        },
        shrink_arenas=("cpu:0", "gpu:1"),
        cuda={
            "cudnn_conv_algo_search": "DEFAULT",
            "gpu_mem_limit": "1073741824",
            "arena_extend_strategy": "kSameAsRequested",
            "do_copy_in_default_stream": "0",
        },
    )


def test_parse_options_switched_off_stays_off() -> None:
    options = parse_options(_source({"enable_mem_arena": "0", "execution_mode": "0", "enable_mem_pattern": "false"}))

    assert (options.cpu_mem_arena, options.parallel, options.mem_pattern) == (False, False, False)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (None, GraphLevel.ALL),
        (0, GraphLevel.ALL),
        (-1, GraphLevel.BASIC),
        (1, GraphLevel.EXTENDED),
        (2, GraphLevel.NONE),
    ],
)
def test_parse_options_graph_level_has_the_same_meaning_as_in_triton(level: int | None, expected: GraphLevel) -> None:
    assert parse_options(_source(graph_level=level)).graph_level is expected


def test_parse_options_cuda_accelerator_overrides_parameters() -> None:
    source = _source(
        {"cudnn_conv_algo_search": "0", "gpu_mem_limit": "1000"},
        accelerators=(("cuda", {"cudnn_conv_algo_search": "DEFAULT", "enable_cuda_graph": "1"}),),
    )

    assert parse_options(source).cuda == {
        "cudnn_conv_algo_search": "DEFAULT",
        "gpu_mem_limit": "1000",
        "enable_cuda_graph": "1",
    }


def test_parse_options_unknown_and_foreign_parameters_are_ignored() -> None:
    source = _source({"paceline.padding": "what", "author": "somebody", "enable_mem_arenas": "perhaps"})

    assert parse_options(source) == parse_options(_source())


@pytest.mark.parametrize(
    ("parameter", "value", "expected"),
    [
        ("intra_op_thread_count", "many", "an integer from 0 to 1024"),
        ("intra_op_thread_count", "-1", "an integer from 0 to 1024"),
        ("intra_op_thread_count", "", "an integer from 0 to 1024"),
        ("inter_op_thread_count", "1.5", "an integer from 0 to 1024"),
        ("inter_op_thread_count", "1_0", "an integer from 0 to 1024"),
        ("intra_op_thread_count", "1025", "an integer from 0 to 1024"),
        ("inter_op_thread_count", str(1 << 32), "an integer from 0 to 1024"),
        ("inter_op_thread_count", "9" * 5000, "an integer from 0 to 1024"),
        ("execution_mode", "2", "one of 0, 1"),
        ("enable_mem_arena", "yes", "one of 0, 1, false, true"),
        ("enable_mem_pattern", "2", "one of 0, 1, false, true"),
        ("session.use_device_allocator_for_initializers", "x", "one of 0, 1, false, true"),
        ("session.intra_op.allow_spinning", "2", "one of 0, 1, false, true"),
        ("memory.enable_memory_arena_shrinkage", "cpu", "devices such as cpu:0;gpu:0"),
        ("memory.enable_memory_arena_shrinkage", "gpu:0;", "devices such as cpu:0;gpu:0"),
        ("cudnn_conv_algo_search", "HEURISTIC", "one of 0, 1, 2"),
        ("gpu_mem_limit", "0", "an integer from 1 to 18446744073709551615"),
        ("gpu_mem_limit", str(1 << 64), "an integer from 1 to 18446744073709551615"),
        ("gpu_mem_limit", "2GB", "an integer from 1 to 18446744073709551615"),
        ("arena_extend_strategy", "2", "one of 0, 1"),
        ("do_copy_in_default_stream", "on", "one of 0, 1, false, true"),
    ],
)
def test_parse_options_malformed_value_names_model_parameter_expected_and_got(
    parameter: str, value: str, expected: str
) -> None:
    message = f"model 'm': parameter '{parameter}': expected {expected}, got '{value}'"
    with pytest.raises(LoadError, match=f"^{re.escape(message)}$"):
        parse_options(_source({parameter: value}))


def test_parse_options_blanks_around_a_value_are_ignored() -> None:
    assert parse_options(_source({"intra_op_thread_count": " 4 "})).intra_op_threads == 4


def test_parse_options_shrinking_an_arena_that_is_switched_off_is_refused() -> None:
    with pytest.raises(LoadError, match="expected no cpu:0 where enable_mem_arena is 0, got 'cpu:0'"):
        parse_options(_source({"enable_mem_arena": "0", "memory.enable_memory_arena_shrinkage": "cpu:0"}))


@pytest.mark.parametrize("level", [-2, 3])
def test_parse_options_unknown_graph_level_is_refused(level: int) -> None:
    message = f"model 'm': optimization graph level: expected one of -1, 0, 1, 2, got {level}"
    with pytest.raises(LoadError, match=re.escape(message)):
        parse_options(_source(graph_level=level))
