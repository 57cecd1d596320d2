"""Which tensors of an ONNX file have no shape, and its operators: the same as the package onnx reads."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from paceline.backends.errors import LoadError
from paceline.backends.onnx.model_files import read_model_files
from tests import models, odd_models

SHAPES = [None, [], [3], ["batch", None], [0]]


def _value(name: str, dims: models.Dims | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, dims)


def _as_onnx_reads(path: Path) -> set[str]:
    graph = onnx.load(path).graph
    return {one.name for one in (*graph.input, *graph.output) if not one.type.tensor_type.HasField("shape")}


def test_without_shape_is_what_onnx_reads(tmp_path: Path) -> None:
    inputs = [_value(f"入力{number}", dims) for number, dims in enumerate(SHAPES)]
    outputs = [_value(f"OUTPUT{number}", dims) for number, dims in enumerate(SHAPES)]
    nodes = [helper.make_node("Neg", [one.name], [two.name]) for one, two in zip(inputs, outputs, strict=True)]
    # To be skipped: weights, and shapes of tensors other than the graph's inputs and outputs.
    weights = [numpy_helper.from_array(np.full(100_000, 0.1, np.float32), "w")]
    made = models.model(nodes, inputs, outputs, weights)
    made.graph.value_info.append(_value("between", None))
    path = models.write(made, tmp_path / "model.onnx")
    assert read_model_files(path).facts.shapeless == _as_onnx_reads(path) == {"入力0", "OUTPUT0"}


@pytest.mark.parametrize("make", [models.mlp, odd_models.memory_hungry, models.batch_input_echo, odd_models.endless])
def test_operators_are_what_onnx_reads(make: Callable[..., onnx.ModelProto], tmp_path: Path) -> None:
    made = make(2) if make is odd_models.memory_hungry else make()
    path = models.write(made, tmp_path / "model.onnx")
    assert read_model_files(path).facts.operators == {node.op_type for node in onnx.load(path).graph.node}


@pytest.mark.parametrize(
    "data", [b"", b"ORTM", bytes(range(256)), b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\x3b"]
)
def test_without_shape_of_a_file_in_another_format_is_empty(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model").write_bytes(data)
    facts = read_model_files(tmp_path / "model").facts
    assert facts.shapeless == facts.operators == frozenset()


@given(st.data())
def test_without_shape_of_a_damaged_file_terminates(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    whole = bytearray(odd_models.shapeless().SerializeToString())
    for place in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=8)):
        whole[place] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    with suppress(LoadError):  # damage may make it refer to weights elsewhere
        assert isinstance(read_model_files(path).facts.shapeless, frozenset)
