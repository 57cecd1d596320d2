"""A configuration combined with the model's own description: filled in, checked, or refused."""

from __future__ import annotations

import pytest
from google.protobuf import text_format

from paceline.backends.spec import ModelSpec, TensorSpec
from paceline.protos import model_config_pb2 as pb
from paceline.protos.datatypes import CONFIG_DATATYPES
from paceline.server.errors import ConfigError
from paceline.server.models.defaults import BatchDefaults
from paceline.server.models.model_config import ServingPlan, plan
from paceline.server.models.tensor_config import EXPORT_AGAIN

MERGES, ALONE = 0, 1

BATCHABLE = ModelSpec(
    (TensorSpec("a", "FP32", (-1, 16)), TensorSpec("b", "INT64", (-1, -1))),
    (TensorSpec("x", "FP32", (-1, 16)), TensorSpec("y", "BYTES", (-1, 4), utf8=True)),
)
FIXED = ModelSpec((TensorSpec("a", "FP32", (1, 16)),), (TensorSpec("x", "FP32", (-1, 16)),))

INPUT_A = 'input { name: "a" data_type: TYPE_FP32 dims: [ 16 ] }'
INPUT_B = 'input { name: "b" data_type: TYPE_INT64 dims: [ -1 ] }'
OUTPUT_X = 'output { name: "x" data_type: TYPE_FP32 dims: [ 16 ] }'
OUTPUT_Y = 'output { name: "y" data_type: TYPE_STRING dims: [ 4 ] }'
TENSORS = f"{INPUT_A} {INPUT_B} {OUTPUT_X} {OUTPUT_Y}"


def planned(text: str, own: ModelSpec = BATCHABLE) -> ServingPlan:
    return plan(text_format.Parse(text, pb.ModelConfig()), own)


def refusal(text: str, own: ModelSpec = BATCHABLE) -> str:
    with pytest.raises(ConfigError) as caught:
        planned(text, own)
    return str(caught.value)


def test_plan_without_configuration_is_filled_in_from_the_model_and_batches() -> None:
    served = planned("")
    assert served.max_batch_rows == served.policy.max_batch_rows == BatchDefaults().max_batch_rows
    assert served.policy.max_batch_requests == MERGES
    assert served.policy.max_queue_delay_ns == 0
    assert served.spec == ModelSpec(
        (TensorSpec("a", "FP32", (16,)), TensorSpec("b", "INT64", (-1,))),
        (TensorSpec("x", "FP32", (16,)), TensorSpec("y", "BYTES", (4,), utf8=True)),
        batched=True,
    )


def test_plan_without_configuration_of_a_model_that_cannot_batch_keeps_its_shapes() -> None:
    served = planned("", FIXED)
    assert (served.max_batch_rows, served.policy.max_batch_rows) == (0, 1)
    assert served.spec == ModelSpec(FIXED.inputs, FIXED.outputs, batched=False)


@pytest.mark.parametrize(
    "own",
    [
        FIXED,
        ModelSpec((TensorSpec("a", "FP32", (-1, 16)),), (TensorSpec("x", "FP32", (1, 16)),)),
        ModelSpec((TensorSpec("a", "FP32", ()),), (TensorSpec("x", "FP32", (-1,)),)),
        ModelSpec((), (TensorSpec("x", "FP32", (-1, 16)),)),
    ],
    ids=["fixed input", "fixed output", "scalar input", "no input"],
)
def test_plan_models_without_a_free_first_dimension_everywhere_have_no_batch_axis(own: ModelSpec) -> None:
    served = planned("", own)
    assert (served.max_batch_rows, served.spec.batched) == (0, False)


@pytest.mark.parametrize(
    ("text", "rows", "requests"),
    [
        ("max_batch_size: 8", 8, MERGES),
        ("max_batch_size: 1", 1, MERGES),
        ("dynamic_batching { }", BatchDefaults().max_batch_rows, MERGES),
        (f"{INPUT_A} {INPUT_B}", BatchDefaults().max_batch_rows, MERGES),
        (f"{OUTPUT_X}", BatchDefaults().max_batch_rows, MERGES),
        (f"max_batch_size: 4 {OUTPUT_X}", 4, MERGES),
        (f"max_batch_size: 4 {TENSORS}", 4, ALONE),
        (f"max_batch_size: 4 dynamic_batching {{ }} {TENSORS}", 4, MERGES),
    ],
)
def test_plan_rows_and_merging_follow_what_the_configuration_leaves_out(text: str, rows: int, requests: int) -> None:
    served = planned(text)
    assert (served.max_batch_rows, served.policy.max_batch_rows, served.policy.max_batch_requests) == (
        rows,
        rows,
        requests,
    )
    assert served.spec.batched


def test_plan_output_left_out_of_the_configuration_needs_no_batch_axis() -> None:
    own = ModelSpec(BATCHABLE.inputs, (*BATCHABLE.outputs, TensorSpec("loss", "FP32", ())))
    served = planned(f"max_batch_size: 4 {OUTPUT_X}", own)
    assert (served.max_batch_rows, [one.name for one in served.spec.outputs]) == (4, ["x"])
    assert "expected 0, as not all tensors" in refusal("max_batch_size: 4", own)


def test_plan_complete_configuration_without_max_batch_size_has_no_batch_axis() -> None:
    text = """
        input { name: "a" data_type: TYPE_FP32 dims: [ -1, 16 ] }
        input { name: "b" data_type: TYPE_INT64 dims: [ 2, 3 ] }
        output { name: "x" data_type: TYPE_FP32 dims: [ -1, 16 ] }
    """
    served = planned(text)
    assert (served.max_batch_rows, served.spec.batched) == (0, False)
    assert [one.dims for one in served.spec.inputs] == [(-1, 16), (2, 3)]


def test_plan_tensors_follow_the_configuration_in_order_choice_and_narrower_dims() -> None:
    served = planned(
        f"""max_batch_size: 4 {OUTPUT_Y}
        input {{ name: "b" data_type: TYPE_INT64 dims: [ 7 ] }} {INPUT_A}"""
    )
    assert [(one.name, one.dims) for one in served.spec.inputs] == [("b", (7,)), ("a", (16,))]
    assert [(one.name, one.utf8) for one in served.spec.outputs] == [("y", True)]


@pytest.mark.parametrize(
    ("text", "dims"),
    [
        ('max_batch_size: 4 input { name: "a" } input { name: "b" data_type: TYPE_INT64 } output { name: "x" }', (16,)),
        ('input { name: "a" dims: [ 9, 16 ] } input { name: "b" dims: [ -1, -1 ] } output { name: "x" }', (9, 16)),
        ('input { name: "a" } input { name: "b" } output { name: "x" data_type: TYPE_FP32 }', (-1, 16)),
    ],
)
def test_plan_takes_omitted_datatypes_and_dims_from_the_model(text: str, dims: tuple[int, ...]) -> None:
    (a, b), (x,) = (served := planned(text).spec).inputs, served.outputs
    assert (a.datatype, b.datatype, x.datatype) == ("FP32", "INT64", "FP32")
    assert (a.dims, len(b.dims), x.dims[-1:]) == (dims, len(dims), (16,))


def test_plan_dims_omitted_beside_a_reshape_are_those_of_a_scalar() -> None:
    own = ModelSpec((TensorSpec("a", "FP32", (-1, 1)),), (TensorSpec("x", "FP32", (-1, 1)),))
    (a,) = planned('max_batch_size: 4 input { name: "a" reshape { shape: [ 1 ] } }', own).spec.inputs
    assert (a.dims, a.reshape) == ((), (1,))


@pytest.mark.parametrize(
    ("text", "own", "fault"),
    [
        ("max_batch_size: -1", BATCHABLE, "max_batch_size: expected >= 0, got -1"),
        (
            "max_batch_size: 8",
            FIXED,
            "max_batch_size: expected 0, as not all tensors of the model have a free first dimension, got 8; "
            f"the model's shapes are {{'a': [1, 16], 'x': [-1, 16]}}; {EXPORT_AGAIN}",
        ),
        (INPUT_A, BATCHABLE, "input: the model needs ['b'] too, got only ['a']"),
        (
            'input { name: "q" data_type: TYPE_FP32 dims: [ 1 ] }',
            BATCHABLE,
            "input 'q': the model has none of that name, only ['a', 'b']",
        ),
        (
            'output { name: "q" data_type: TYPE_FP32 dims: [ 1 ] }',
            BATCHABLE,
            "output 'q': the model has none of that name, only ['x', 'y']",
        ),
        (f"{INPUT_A} {INPUT_A}", BATCHABLE, "input 'a' is declared twice"),
        (f"{OUTPUT_X} {OUTPUT_X}", BATCHABLE, "output 'x' is declared twice"),
        (
            'input { name: "a" data_type: TYPE_INT32 dims: [ 16 ] }',
            BATCHABLE,
            "input 'a': expected data_type of the model, FP32, got INT32",
        ),
        (
            'output { name: "y" data_type: TYPE_UINT8 dims: [ 4 ] }',
            BATCHABLE,
            "output 'y': expected data_type of the model, BYTES, got UINT8",
        ),
        (
            'input { name: "a" data_type: TYPE_FP32 dims: [ 8 ] }',
            BATCHABLE,
            "input 'a': expected dims of the model, [16], got [8]",
        ),
        (
            'input { name: "a" data_type: TYPE_FP32 dims: [ -1 ] }',
            BATCHABLE,
            "input 'a': expected dims of the model, [16], got [-1]",
        ),
        (
            'input { name: "a" data_type: TYPE_FP32 dims: [ -1, 16 ] }',
            BATCHABLE,
            "input 'a': expected dims of the model, [16], got [-1, 16]; dims don't include the batch axis",
        ),
        (
            f"{INPUT_A} {OUTPUT_X}",
            BATCHABLE,
            "input 'a': expected dims of the model, [-1, 16], got [16]; without a batch axis, dims are the whole shape",
        ),
        (
            'input { name: "b" data_type: TYPE_INT64 dims: [ -2 ] }',
            BATCHABLE,
            "input 'b': expected dims of the model, [-1], got [-2]",
        ),
        (
            'input { name: "a" data_type: TYPE_FP32 dims: [ 2, 16 ] }',
            FIXED,
            "input 'a': expected dims of the model, [1, 16], got [2, 16]",
        ),
    ],
)
def test_plan_contradictions_are_refused_naming_tensor_expected_and_got(text: str, own: ModelSpec, fault: str) -> None:
    assert refusal(text, own) == fault


@pytest.mark.parametrize(("number", "datatype"), CONFIG_DATATYPES.items())
def test_plan_each_datatype_of_a_configuration_matches_that_of_the_model(number: int, datatype: str) -> None:
    own = ModelSpec((TensorSpec("a", datatype, (-1, 1)),), (TensorSpec("x", datatype, (-1, 1)),))
    name = pb.DataType.Name(number)
    served = planned(f'input {{ name: "a" data_type: {name} dims: [ 1 ] }}', own)
    assert served.spec.inputs[0].datatype == datatype


def test_plan_metric_tags_are_kept_unchanged() -> None:
    tags = planned('metric_tags { key: "team_1" value: "blue \\"x\\"" } metric_tags { key: "0" value: "" }').metric_tags
    assert dict(tags) == {"team_1": 'blue "x"', "0": ""}
    assert planned("metric_tags { }").metric_tags == {}


@pytest.mark.parametrize("tag", ["", "_team", "my-team", "a b", "gr\u00fcn", "team\n", 'x="1"'])
def test_plan_metric_tags_that_cannot_be_labels_are_refused(tag: str) -> None:
    config = pb.ModelConfig(metric_tags={tag: "x"})
    with pytest.raises(ConfigError) as caught:
        plan(config, BATCHABLE)
    expected = "expected names of ASCII letters, digits and _, which is not the first"
    assert str(caught.value) == f"metric_tags: {expected}, got '{tag}'"
