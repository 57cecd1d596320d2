"""Tensors of a configuration that aren't just rows of dims: how they are served, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from google.protobuf import text_format

from paceline.backends.spec import ModelSpec, TensorSpec
from paceline.protos import model_config_pb2 as pb
from paceline.server.models.model_config import plan
from tests.unit.server.models.tensor_texts import (
    OWN,
    RAGGED,
    SCATTER,
    SQUARE,
    batch_input,
    own,
    refusal,
    served,
    tensor,
)


def test_reshape_keeps_both_the_clients_and_the_models_dims() -> None:
    (square,) = served(SQUARE, own("square")).inputs

    assert (square.dims, square.reshape, square.model_dims) == ((4,), (2, 2), (2, 2))


@pytest.mark.parametrize(
    ("dims", "reshape", "mine"),
    [
        ("1", "", (-1,)),
        ("1, 1", "", (-1,)),
        ("2, 4, -1, 6", "8, -1, 1, 6", (-1, 8, -1, 1, 6)),
        ("-1, 2", "1, -1, 2", (-1, 1, -1, 2)),
        ("-1, -1", "-1, 1, -1", (-1, -1, 1, -1)),
    ],
)
def test_reshape_to_as_many_elements_is_accepted(dims: str, reshape: str, mine: tuple[int, ...]) -> None:
    model = ModelSpec((TensorSpec("a", "FP32", mine),), (TensorSpec("x", "FP32", mine),))
    text = "".join(tensor(name, dims, f"reshape {{ shape: [ {reshape} ] }}", kind=kind)
                   for name, kind in (("a", "input"), ("x", "output")))  # fmt: skip

    spec = served(text, model)

    assert spec.inputs[0].model_dims == spec.outputs[0].model_dims == mine[1:]


@pytest.mark.parametrize(
    ("dims", "reshape"),
    [("4", "2, 3"), ("-1, 4", "4, -1"), ("-1", "2"), ("4", "-1"), ("-1, 2", "-1"), ("2", ""), ("-1", "-1, -1")],
)
def test_reshape_to_other_elements_is_refused(dims: str, reshape: str) -> None:
    text = tensor("square", dims, f"reshape {{ shape: [ {reshape} ] }}")

    assert refusal(text, own("square")) == (
        f"input 'square': expected a reshape.shape with as many elements as dims [{dims}], before, between and after "
        f"dims of -1, got [{reshape}]"
    )


@pytest.mark.parametrize(("dims", "reshape"), [("-2, -2", "2, 2"), ("2, 2", "-2, -2")])
def test_reshape_of_or_to_sizes_below_minus_one_is_refused(dims: str, reshape: str) -> None:
    text = tensor("square", dims, f"reshape {{ shape: [ {reshape} ] }}")

    assert refusal(text, own("square")) == (
        f"input 'square': expected dims and reshape.shape >= -1, got [{dims}, {reshape}]"
    )


def test_reshape_that_is_not_the_models_shape_is_refused() -> None:
    text = tensor("y", "2, 2", "reshape { shape: [ 4 ] }", kind="output")

    assert refusal(text, own("square")) == "output 'y': expected reshape.shape of the model, [2, 2], got [4]"


def test_reshape_without_a_batch_axis_applies_to_the_whole_tensor() -> None:
    model = ModelSpec((TensorSpec("a", "FP32", (2, -1)),), (TensorSpec("x", "FP32", ()),))
    text = tensor("a", "1, 2, -1", "reshape { shape: [ 2, -1 ] }") + tensor("x", "1", "reshape { }", kind="output")

    spec = served(text, model, rows=0)

    assert [one.reshape for one in (*spec.inputs, *spec.outputs)] == [(2, -1), ()]


@pytest.mark.parametrize("rows", [0, 4])
def test_scalar_may_be_a_vector_of_one_to_clients_without_a_reshape(rows: int) -> None:
    lead = (-1,) if rows else ()
    model = ModelSpec((TensorSpec("a", "FP32", lead),), (TensorSpec("x", "FP32", lead),))

    spec = served(tensor("a", "1") + tensor("x", "1, 1", kind="output"), model, rows)

    assert [(one.dims, one.reshape) for one in (*spec.inputs, *spec.outputs)] == [((1,), ()), ((1, 1), ())]


@pytest.mark.parametrize("dims", ["2", "-1", "1, 2"])
def test_scalar_with_other_dims_is_refused_as_an_input_and_accepted_as_an_output(dims: str) -> None:
    """As an output only if nobody has seen that it is one: what a model says about its outputs isn't binding."""
    model = ModelSpec((TensorSpec("a", "FP32", ()),), (TensorSpec("x", "FP32", (), assumed=True),))
    seen = replace(model, outputs=(TensorSpec("x", "FP32", ()),))

    assert refusal(tensor("a", dims), model, 0).startswith(f"input 'a': expected dims of the model, [], got [{dims}]")
    text = refusal(tensor("x", dims, kind="output"), seen, 0)
    assert text.startswith(f"output 'x': expected dims of the model, [], got [{dims}]")
    (output,) = served(tensor("x", dims, kind="output"), model, rows=0).outputs
    assert (list(output.dims), output.reshape) == ([int(dim) for dim in dims.split(",")], None)


@pytest.mark.parametrize("assumed", [False, True])
@pytest.mark.parametrize(
    ("dims", "more", "text"),
    [
        ("-1", "", "expected dims of the model, [], got [-1]; dims don't include the batch axis"),
        ("2", "", "expected dims of the model, [], got [2]; dims don't include the batch axis"),
        ("1", "reshape { shape: [ 1 ] }", "expected reshape.shape of the model, [], got [1]; dims don't include"),
    ],
)
def test_output_of_one_number_a_row_with_more_dims_is_refused(assumed: bool, dims: str, more: str, text: str) -> None:
    model = ModelSpec((TensorSpec("a", "FP32", (-1, 4)),), (TensorSpec("x", "FP32", (-1,), assumed=assumed),))
    assert refusal(tensor("x", dims, more, kind="output"), model).startswith(f"output 'x': {text}")


def test_unconfigured_rows_of_rank_zero_look_like_vectors() -> None:
    spec = served("", own("flat"))

    assert [(one.dims, one.reshape) for one in (*spec.inputs, *spec.outputs)] == [
        ((1,), ()),
        ((1,), ()),
        ((2, 2), None),
    ]


def test_shape_tensor_keeps_its_whole_shape_in_a_batched_model() -> None:
    text = SQUARE + tensor("shape", "2", "is_shape_tensor: true", "INT64")

    spec = served(text, own("square", "shape"))

    assert spec.inputs[1] == TensorSpec("shape", "INT64", (2,), shape_tensor=True)
    assert spec.paddable


def test_shape_tensors_alone_in_a_batched_model_are_refused() -> None:
    assert refusal(tensor("shape", "2", "is_shape_tensor: true", "INT64"), own("shape")) == (
        "input: expected one with a batch axis, got only shape tensors: ['shape']"
    )


@pytest.mark.parametrize("optional", [False, True])
def test_input_with_a_default_in_the_model_is_served_as_declared(optional: bool) -> None:
    text = SQUARE + tensor("bias", "4", f"optional: {str(optional).lower()}")

    assert served(text, own("square", "bias")).inputs[1].optional is optional


def test_input_with_a_default_in_the_model_is_hidden_unless_declared() -> None:
    assert [one.name for one in served(SQUARE, own("square", "bias")).inputs] == ["square"]
    assert [one.name for one in served("", own("square", "bias")).inputs] == ["square"]


def test_refusal_of_an_unknown_name_lists_only_some_of_many_names() -> None:
    weights = tuple(TensorSpec(f"w{number}", "FP32", (3,), optional=True) for number in range(30))
    model = ModelSpec((*OWN.inputs[1:2], *weights), OWN.outputs)

    text = refusal(tensor("nil", "1"), model)

    assert text.startswith("input 'nil': the model has none of that name, only ['square', 'w0', ")
    assert text.endswith(", 'w18'] and 11 more")


ANY = ModelSpec((TensorSpec("a", "FP32", (), any_rank=True),), (TensorSpec("x", "FP32", (), any_rank=True),))


def test_any_rank_stays_where_a_configuration_gives_no_dims() -> None:
    assert served(tensor("a", ""), ANY, rows=0) == ANY
    rows = served(tensor("a", "") + tensor("x", "", kind="output"), ANY)
    assert (rows.batched, rows.inputs, rows.outputs) == (True, ANY.inputs, ANY.outputs)


@pytest.mark.parametrize("rows", [0, 4])
def test_any_rank_is_replaced_by_dims_and_by_a_reshape(rows: int) -> None:
    spec = served(tensor("a", "4", "reshape { shape: [ 2, -1 ] }".replace("-1", "2")), ANY, rows)
    assert spec.inputs == (TensorSpec("a", "FP32", (4,), reshape=(2, 2)),)
    spec = served(tensor("x", "-1, 3", kind="output"), ANY, rows)
    assert spec.outputs == (TensorSpec("x", "FP32", (-1, 3)),)
    assert "expected dims of the model, [-1], got [-2]" in refusal(tensor("a", "-2"), ANY, rows)


def test_any_rank_may_be_ragged_scattered_made_per_batch_or_a_shape() -> None:
    spec = served(
        tensor("a", "-1", "allow_ragged_batch: true") + tensor("x", "-1", kind="output") + SCATTER.replace("flat", "a"),
        ANY,
    )
    assert (spec.inputs[0].ragged, spec.inputs[0].any_rank, spec.outputs[0].any_rank) == (True, False, False)
    made = ModelSpec((*own("flat").inputs, TensorSpec("made", "INT32", (), any_rank=True)), OWN.outputs)
    assert served(RAGGED + batch_input("made"), made).batch_inputs[0].targets == ("made",)
    shape = served(
        tensor("a", "", "is_shape_tensor: true") + tensor("square", "2, 2"),
        ModelSpec((*ANY.inputs, *own("square").inputs), OWN.outputs),
    )
    assert (shape.inputs[0].shape_tensor, shape.inputs[0].any_rank) == (True, True)


def test_served_tensors_keep_the_models_names_of_axes() -> None:
    names = ("batch", "words")
    model = ModelSpec(
        (TensorSpec("a", "FP32", (-1, -1), axis_names=names),), (TensorSpec("x", "FP32", (-1, -1), axis_names=names),)
    )
    text = "max_batch_size: 8 " + tensor("a", "-1") + tensor("x", "-1", kind="output")

    for config in (pb.ModelConfig(max_batch_size=8), text_format.Parse(text, pb.ModelConfig())):
        spec = plan(config, model).spec
        assert [one.axis_names for one in (*spec.inputs, *spec.outputs)] == [names, names]
