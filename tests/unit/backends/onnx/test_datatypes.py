"""Types without an equivalent in numpy or onnxruntime: strings and bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from paceline.backends.errors import ExecutionError, LoadError
from tests import models
from tests.unit.backends.onnx_models import (
    CPU,
    instance_of,
    open_model,
    run_directly,
    run_one,
    texts_of,
)

AWKWARD = [b"", b"\0", b"a\0", "naïve".encode(), "日本語\0\U0001f600".encode(), b"b'quoted'", b"x" * 5000]


def test_execute_strings_come_back_exact(tmp_path: Path) -> None:
    instance = instance_of(models.identity("BYTES"), tmp_path)

    results = instance.execute([(texts_of([text]),) for text in AWKWARD]).results

    assert [result[0].tolist() for result in results] == [[[text]] for text in AWKWARD]
    assert {type(result[0].item()) for result in results} == {bytes}


def test_execute_strings_equal_onnxruntime_run_directly(tmp_path: Path) -> None:
    words: dict[str, Any] = {
        "keys_strings": ["one", "größer"],
        "values_strings": ["eins", "bigger"],
        "default_string": "?",
    }
    model = models.model(
        [helper.make_node("LabelEncoder", ["INPUT0"], ["OUTPUT0"], domain="ai.onnx.ml", **words)],
        [models.tensor("INPUT0", "BYTES", ["batch", 1])],
        [models.tensor("OUTPUT0", "BYTES", ["batch", 1])],
    )
    texts = ["größer", "one", "two", ""]

    results = instance_of(model, tmp_path).execute([(texts_of([text.encode()]),) for text in texts]).results

    (expected,) = run_directly(model, {"INPUT0": np.array([[text] for text in texts], object)})
    assert [result[0].item().decode() for result in results] == expected.ravel().tolist()
    assert [result[0].item() for result in results] == [b"bigger", b"eins", b"?", b"?"]


def test_execute_converts_strings_to_numbers_and_accepts_no_elements(tmp_path: Path) -> None:
    instance = instance_of(models.cast("BYTES", "FP32"), tmp_path)

    results = instance.execute([(texts_of([b"1.5", b"2"]),), (texts_of([b"-3", b"4e2"]),)]).results

    assert [result[0].tolist() for result in results] == [[[1.5, 2.0]], [[-3.0, 400.0]]]
    assert run_one(instance, np.empty((1, 0), object))[0].shape == (1, 0)


def test_execute_invalid_utf8_names_the_input(tmp_path: Path) -> None:
    instance = instance_of(models.identity("BYTES"), tmp_path)

    with pytest.raises(ExecutionError, match="input 'INPUT0': expected UTF-8"):
        run_one(instance, texts_of([b"\xff"]))
    assert run_one(instance, texts_of([b"fine"]))[0].tolist() == [[b"fine"]]


def test_execute_model_that_outputs_invalid_utf8_is_an_execution_error(tmp_path: Path) -> None:
    model = models.model(
        [helper.make_node("Identity", ["constant"], ["OUTPUT0"])],
        [models.tensor("INPUT0", "FP32", [1])],
        [models.tensor("OUTPUT0", "BYTES", [1])],
        [TensorProto(name="constant", data_type=TensorProto.STRING, dims=[1], string_data=[b"\xff\xfe"])],
    )
    opened = open_model(model, tmp_path)

    with pytest.raises(ExecutionError, match=r"onnx runtime error: .*can't decode byte 0xff"):
        run_one(opened.instance(opened.spec, CPU), np.zeros(1, np.float32))


def test_execute_bf16_bit_patterns_come_back_exact(tmp_path: Path) -> None:
    instance = instance_of(models.identity("BF16"), tmp_path)
    every = np.arange(2**16, dtype=np.uint16).reshape(-1, 64)

    results = instance.execute([(every[:1],), (every[1:],)]).results

    assert np.concatenate([bits for (bits,) in results]).tobytes() == every.tobytes()
    assert results[0][0].dtype == np.uint16


def test_execute_bf16_casts_keep_the_value_of_the_bits(tmp_path: Path) -> None:
    x = np.array([[1.0, -2.5, 0.15625, 3e38]], np.float32)
    bits = (x.view(np.uint32) >> 16).astype(np.uint16)  # BF16 is the upper half of FP32; all but one need no rounding

    (widened,) = run_one(instance_of(models.cast("BF16", "FP32"), tmp_path / "widen"), bits)
    (narrowed,) = run_one(instance_of(models.cast("FP32", "BF16"), tmp_path / "narrow"), widened)

    assert widened.tobytes() == (bits.astype(np.uint32) << 16).tobytes()
    assert narrowed.tobytes() == bits.tobytes()


def test_execute_bf16_without_elements_keeps_its_shape(tmp_path: Path) -> None:
    (y,) = run_one(instance_of(models.identity("BF16"), tmp_path), np.empty((2, 0), np.uint16))

    assert (y.shape, str(y.dtype)) == ((2, 0), "uint16")


def test_execute_bf16_beside_floats_and_strings_made_from_it_converts_each_correctly(tmp_path: Path) -> None:
    dims: models.Dims = ["batch", 2]
    model = models.model(
        [
            helper.make_node("Cast", ["INPUT0"], ["wide"], to=TensorProto.FLOAT),
            helper.make_node("Add", ["wide", "INPUT1"], ["OUTPUT0"]),
            helper.make_node("Cast", ["wide"], ["OUTPUT1"], to=TensorProto.STRING),
            helper.make_node("Identity", ["INPUT0"], ["OUTPUT2"]),
        ],
        [models.tensor("INPUT0", "BF16", dims), models.tensor("INPUT1", "FP32", dims)],
        [models.tensor(f"OUTPUT{i}", datatype, dims) for i, datatype in enumerate(["FP32", "BYTES", "BF16"])],
    )
    bits = np.array([[0x3F80, 0xC000]], np.uint16)  # 1 and -2

    total, texts, same = run_one(instance_of(model, tmp_path), bits, np.array([[10, 20]], np.float32))

    assert total.tolist() == [[11, 18]]
    assert texts.tolist() == [[b"1", b"-2"]]
    assert same.tolist() == bits.tolist()


def test_instance_bf16_beside_string_inputs_is_refused(tmp_path: Path) -> None:
    dims: models.Dims = ["batch", 2]
    model = models.model(
        [helper.make_node("Identity", [f"INPUT{i}"], [f"OUTPUT{i}"]) for i in range(2)],
        [models.tensor("INPUT0", "BF16", dims), models.tensor("INPUT1", "BYTES", dims)],
        [models.tensor("OUTPUT0", "BF16", dims), models.tensor("OUTPUT1", "BYTES", dims)],
    )

    opened = open_model(model, tmp_path)
    assert opened.try_rows().why_not == ""  # nothing is said of batches, as there will be none
    with pytest.raises(LoadError) as refused:
        opened.instance(opened.spec, CPU)
    assert str(refused.value) == (
        "model 'm': expected no BF16 in a model with BYTES inputs, as ONNX Runtime can't be passed both from Python, "
        "got BYTES for ['INPUT1'] and BF16 for ['INPUT0', 'OUTPUT0']: let the model take and give FP32 there, by a "
        "Cast, or leave outputs of BF16 out of the configuration's output"
    )


def test_execute_bf16_failure_is_an_execution_error_and_leaves_the_instance_usable(tmp_path: Path) -> None:
    opened = open_model(models.identity("BF16", (2, 2)), tmp_path)
    instance = opened.instance(opened.spec, CPU)

    with pytest.raises(ExecutionError, match=r"onnx runtime error: .*INPUT0"):
        run_one(instance, np.zeros((3, 2), np.uint16))
    assert run_one(instance, np.ones((2, 2), np.uint16))[0].tolist() == [[1, 1], [1, 1]]
