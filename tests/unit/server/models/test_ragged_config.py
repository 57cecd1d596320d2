"""Ragged inputs, and tensors made or scattered per batch: how they are configured, and what is refused."""

from __future__ import annotations

import pytest

from paceline.backends.spec import BatchInput, BatchInputKind, BatchOutput, ModelSpec, TensorSpec
from tests.unit.server.models.tensor_texts import RAGGED, SCATTER, X, batch_input, own, refusal, served, tensor


def test_ragged_input_has_its_own_dims_and_is_a_vector_to_the_model() -> None:
    spec = served(tensor("flat", "3, -1", "allow_ragged_batch: true"), own("flat"))

    assert spec.inputs == (TensorSpec("flat", "FP32", (3, -1), ragged=True),)
    assert not spec.paddable


@pytest.mark.parametrize(
    ("text", "model", "fault"),
    [
        (
            tensor("square", "2, 2", "allow_ragged_batch: true"),
            own("square"),
            "input 'square': allow_ragged_batch: expected a model whose input has shape [-1], to take the elements of "
            "all requests one after the other, got [-1, 2, 2]",
        ),
        (
            tensor("flat", "-1", "allow_ragged_batch: true is_shape_tensor: true"),
            own("flat"),
            "input 'flat': expected one of allow_ragged_batch and is_shape_tensor, got both",
        ),
        (
            tensor("flat", "-2", "allow_ragged_batch: true"),
            own("flat"),
            "input 'flat': expected dims >= -1, got [-2]",
        ),
        (
            RAGGED + 'parameters { key: "paceline.batch_sizes" value { string_value: "2,4" } }',
            own("flat"),
            "paceline.batch_sizes: expected none, as batches can't be padded with allow_ragged_batch, "
            "batch_input or batch_output, got [2, 4]",
        ),
        (
            RAGGED + 'parameters { key: "paceline.split_oversized" value { string_value: "true" } }',
            own("flat"),
            "paceline.split_oversized: expected false, as requests can't be split with allow_ragged_batch, "
            "batch_input, batch_output, optional or is_shape_tensor, got true",
        ),
    ],
)
def test_invalid_ragged_input_is_refused(text: str, model: ModelSpec, fault: str) -> None:
    assert refusal(text, model) == fault


@pytest.mark.parametrize("field", ["allow_ragged_batch", "batch_input", "batch_output"])
def test_ragged_fields_without_a_batch_axis_are_refused(field: str) -> None:
    texts = {
        "allow_ragged_batch": RAGGED + X,
        "batch_input": tensor("flat", "-1") + X + batch_input(),
        "batch_output": tensor("flat", "-1") + X + SCATTER,
    }

    assert refusal(texts[field], own("flat", "counts" if field == "batch_input" else ""), rows=0).endswith(
        f"{field}: expected a max_batch_size above 0, got 0"
    )


@pytest.mark.parametrize("kind", BatchInputKind)
def test_batch_input_of_each_kind_is_hidden_from_clients(kind: BatchInputKind) -> None:
    target = "items" if kind is BatchInputKind.ITEM_SHAPE else "counts"

    spec = served(RAGGED + batch_input(target, kind.value), own("flat", target))

    assert [one.name for one in spec.inputs] == ["flat"]
    assert spec.batch_inputs == (BatchInput(kind, (target,), "INT32", "flat"),)


def test_batch_input_is_not_among_the_inputs_filled_in_from_the_model() -> None:
    spec = served(batch_input(source="square"), own("square", "counts"))

    assert [one.name for one in spec.inputs] == ["square"]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            batch_input(data_type="INT64"),
            "batch_input BATCH_ELEMENT_COUNT: expected data_type TYPE_INT32 or TYPE_FP32, got INT64",
        ),
        (
            batch_input(data_type="FP32"),
            "batch_input BATCH_ELEMENT_COUNT: target_name 'counts': expected data_type of the model, INT32, got FP32",
        ),
        (
            batch_input("nil"),
            "batch_input BATCH_ELEMENT_COUNT: target_name 'nil': the model has no input of that name, "
            "only ['flat', 'counts']",
        ),
        (
            batch_input() + batch_input(kind="BATCH_ITEM_SHAPE_FLATTEN"),
            "batch_input BATCH_ITEM_SHAPE_FLATTEN: target_name 'counts': expected an input that nothing else fills, "
            "got one that is named twice",
        ),
        (
            tensor("counts", "", data_type="INT32") + batch_input(),
            "batch_input BATCH_ELEMENT_COUNT: target_name 'counts': expected an input that nothing else fills, "
            "got one that is named twice",
        ),
        (
            batch_input(kind="BATCH_ITEM_SHAPE"),
            "batch_input BATCH_ITEM_SHAPE: target_name 'counts': expected a model whose input takes shape [-1, 1], "
            "got [-1]",
        ),
        (
            batch_input(source="nil"),
            "batch_input: expected a source_input among the inputs that each request brings with a batch axis, "
            "['flat'], got 'nil'",
        ),
        (
            'batch_input { target_name: "counts" data_type: TYPE_INT32 }',
            "batch_input: expected 1 source_input, got 0: []",
        ),
        ('batch_input { source_input: "flat" data_type: TYPE_INT32 }', "batch_input: expected a target_name, got none"),
        (
            'batch_input { kind: 9 target_name: "counts" data_type: TYPE_INT32 source_input: "flat" }',
            "batch_input: expected a kind, got 9",
        ),
    ],
)
def test_invalid_batch_input_is_refused(text: str, fault: str) -> None:
    assert refusal(RAGGED + text, own("flat", "counts")) == fault


def test_batch_input_left_out_of_the_configuration_is_missing() -> None:
    assert refusal(RAGGED, own("flat", "counts")) == "input: the model needs ['counts'] too, got only ['flat']"


def test_batch_output_scatters_an_output_whatever_its_shape_in_the_model() -> None:
    text = RAGGED + tensor("y", "-1", kind="output") + SCATTER.replace('"x"', '"y"')

    spec = served(text, own("flat"))

    assert spec.outputs == (TensorSpec("y", "FP32", (-1,)),)
    assert spec.batch_outputs == (BatchOutput(("y",), "flat"),)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            SCATTER,
            "batch_output: target_name 'x': expected one of the outputs in the configuration, []",
        ),
        (X + SCATTER + SCATTER, "batch_output: target_name 'x': expected each output once, got it twice"),
        (
            tensor("x", "-1, -1", kind="output") + SCATTER,
            "batch_output: target_name 'x': expected an output with a batch axis and with dims of -1 only among the "
            "first 1 as in source_input 'flat', got [-1, -1]",
        ),
        (
            X + SCATTER.replace('"flat"', '"nil"'),
            "batch_output: expected a source_input among the inputs that each request brings with a batch axis, "
            "['flat'], got 'nil'",
        ),
        (
            X + SCATTER.replace("BATCH_SCATTER_WITH_INPUT_SHAPE", "3"),
            "batch_output: expected kind BATCH_SCATTER_WITH_INPUT_SHAPE, got 3",
        ),
    ],
)
def test_invalid_batch_output_is_refused(text: str, fault: str) -> None:
    assert refusal(RAGGED + text, own("flat")) == fault
