"""Inputs of ONNX models other than one array per request: defaults of the graph, batch inputs, ragged ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from paceline.backends.base import Device, ModelSource
from paceline.backends.errors import ExecutionError, LoadError
from paceline.backends.onnx.backend import OnnxBackend, OnnxModel
from paceline.backends.onnx.instance import OnnxInstance
from paceline.backends.spec import MISSING, BatchInput, BatchInputKind, BatchOutput, ModelSpec, TensorSpec
from tests import models

CPU = Device()


def opened(model: onnx.ModelProto, folder: Path) -> OnnxModel:
    return OnnxBackend().open(ModelSource("m", models.write(model, folder / "model.onnx")), CPU)


def optional(name: str, datatype: str = "FP32") -> TensorSpec:
    return TensorSpec(name, datatype, (-1,), optional=True)


def with_default(folder: Path, datatype: str = "FP32", default: Any = (10.0,)) -> OnnxInstance:
    model = opened(models.with_default(datatype, default), folder)
    spec = model.spec
    return model.instance(replace(spec, inputs=(spec.inputs[0], optional("BIAS", datatype))), CPU)


def lists(instance: OnnxInstance, *request: Any) -> list[Any]:
    return [array.tolist() for array in instance.execute([request]).results[0]]


def test_open_model_with_a_default_reports_that_the_input_is_optional(tmp_path: Path) -> None:
    spec = opened(models.with_default(), tmp_path).spec

    assert [(one.name, one.optional, one.dims) for one in spec.inputs] == [
        ("INPUT0", False, (-1,)),
        ("BIAS", True, (-1,)),
    ]


def test_defaulted_input_of_a_foreign_type_is_hidden(tmp_path: Path) -> None:
    model = models.with_default()
    kept = onnx.helper.make_tensor("KEPT", onnx.TensorProto.FLOAT8E4M3FN, [1], [1.0])
    model.graph.initializer.append(kept)
    model.graph.input.append(onnx.helper.make_tensor_value_info("KEPT", onnx.TensorProto.FLOAT8E4M3FN, [1]))
    model.opset_import[0].version = 19

    assert [one.name for one in opened(model, tmp_path).spec.inputs] == ["INPUT0", "BIAS"]


@pytest.mark.parametrize(
    ("datatype", "dtype", "default", "given"),
    [
        ("FP32", np.float32, (10.0,), [1.5]),
        ("INT64", np.int64, (7,), [-1]),
        ("BYTES", object, ("ten",), [b"\xc3\xa9"]),
    ],
)
def test_execute_missing_optional_input_is_the_graphs_default(
    datatype: str, dtype: Any, default: Any, given: list[Any], tmp_path: Path
) -> None:
    instance = with_default(tmp_path, datatype, default)
    array = np.array(given, dtype)
    own = [text.encode() if isinstance(text, str) else text for text in default]

    assert lists(instance, array, MISSING) == [given, own]
    assert lists(instance, array, array) == [given, given]
    assert lists(instance, array, MISSING) == [given, own]


def test_execute_missing_optional_bf16_input_is_the_graphs_default(tmp_path: Path) -> None:
    instance = with_default(tmp_path, "BF16", (1.0,))
    bits = np.array([0x4000], np.uint16)

    assert lists(instance, bits, MISSING) == [[0x4000], [0x3F80]]
    assert lists(instance, bits, bits) == [[0x4000], [0x4000]]


def test_instance_may_leave_out_an_input_with_a_default(tmp_path: Path) -> None:
    model = opened(models.with_default(), tmp_path)
    instance = model.instance(replace(model.spec, inputs=model.spec.inputs[:1]), CPU)

    assert lists(instance, np.float32([1])) == [[1], [10]]


def test_instance_optional_input_that_the_graph_needs_is_refused(tmp_path: Path) -> None:
    model = opened(models.identity("FP32", [None]), tmp_path)

    with pytest.raises(LoadError) as caught:
        model.instance(replace(model.spec, inputs=(optional("INPUT0"),)), CPU)

    assert str(caught.value) == (
        "model 'm': input 'INPUT0': expected an initializer for it in the graph, as the default where it is left "
        "out, got optional: true without one"
    )


def test_instance_optional_input_in_a_batched_model_is_refused(tmp_path: Path) -> None:
    model = opened(models.with_default(batched=True), tmp_path)
    inputs = (TensorSpec("INPUT0", "FP32", (-1,)), optional("BIAS"))

    with pytest.raises(LoadError) as caught:
        model.instance(replace(model.spec, inputs=inputs, batched=True), CPU)

    assert str(caught.value) == (
        "model 'm': input 'BIAS': expected no optional inputs in a model with a batch axis, got optional: true; "
        "ONNX models can have them only with max_batch_size 0"
    )


RAGGED = TensorSpec("RAGGED", "FP32", (-1,), ragged=True)
ROWS = TensorSpec("ROWS", "FP32", (1,))


def made(kind: BatchInputKind, datatype: str = "INT32", target: str = "MADE") -> ModelSpec:
    one = BatchInput(kind, (target,), datatype, "RAGGED")
    return ModelSpec((RAGGED, ROWS), (TensorSpec("OUTPUT0", "FP32", (-1,)),), batched=True, batch_inputs=(one,))


@pytest.mark.parametrize("datatype", ["INT32", "FP32"])
def test_execute_batch_input_reaches_the_model(datatype: str, tmp_path: Path) -> None:
    model = opened(models.batch_input_echo(datatype), tmp_path)
    instance = model.instance(made(BatchInputKind.ACCUMULATED_ELEMENT_COUNT_WITH_ZERO, datatype), CPU)
    requests = [(np.ones((2, 3), np.float32), np.ones((2, 1), np.float32)), (np.ones((1, 1), np.float32),) * 2]

    results = instance.execute(requests).results

    assert [result[0].tolist() for result in results] == [[[0, 6, 7]] * 2, [[0, 6, 7]]]


def test_execute_failure_of_a_ragged_batch_is_an_execution_error(tmp_path: Path) -> None:
    model = opened(models.batch_input_echo(), tmp_path)
    instance = model.instance(made(BatchInputKind.ELEMENT_COUNT), CPU)

    with pytest.raises(ExecutionError, match=r"^onnx runtime error 2: "):
        instance.execute([(np.ones((1, 1), np.float64), np.ones((1, 1), np.float32))])


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (made(BatchInputKind.ELEMENT_COUNT, target="NONE"), "got 'NONE'"),
        (made(BatchInputKind.ELEMENT_COUNT, "FP32"), "input 'MADE': expected the model's datatype INT32, got FP32"),
        (replace(made(BatchInputKind.ELEMENT_COUNT), batch_inputs=()), "input 'MADE' isn't among those served"),
    ],
)
def test_instance_batch_input_that_does_not_match_the_model_is_refused(
    spec: ModelSpec, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(LoadError) as caught:
        opened(models.batch_input_echo(), tmp_path).instance(spec, CPU)
    assert str(caught.value).endswith(reason)


def test_execute_ragged_batch_scatters_its_output(tmp_path: Path) -> None:
    spec = ModelSpec(
        (replace(RAGGED, name="INPUT0"),),
        (TensorSpec("OUTPUT0", "FP32", (-1,)),),
        batched=True,
        batch_outputs=(BatchOutput(("OUTPUT0",), "INPUT0"),),
    )
    instance = opened(models.ragged(), tmp_path).instance(spec, CPU)
    requests = [(np.full((rows, size), rows, np.float32),) for rows, size in ((1, 16), (1, 8), (2, 3))]

    results = instance.execute(requests).results

    for (result,), (request,) in zip(results, requests, strict=True):
        np.testing.assert_array_equal(result, request + 1, strict=True)


def test_open_model_reports_the_names_of_axes_in_the_file(tmp_path: Path) -> None:
    model = models.identity("FP32", ("batch", None, 3, "words"))
    (tensor,) = opened(model, tmp_path).spec.inputs

    assert tensor.axis_names == ("batch", "", "", "words")
    assert opened(models.identity("FP32", (None, None)), tmp_path).spec.inputs[0].axis_names == ()
