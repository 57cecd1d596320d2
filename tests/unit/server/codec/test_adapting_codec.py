"""Requests and answers of models whose tensors differ from what their clients send and receive."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.backends.spec import MISSING, ModelSpec, TensorSpec
from paceline.protos import inference_pb2 as pb
from paceline.server.codec.adapting_codec import AdaptingCodec, codec_for
from paceline.server.codec.codec import ModelCodec
from paceline.server.codec.known_requests import Group
from paceline.server.errors import InvalidRequest
from tests.codecs import encoded_as_message
from tests.wire import Array, infer

PLAIN = TensorSpec("a", "FP32", (2,))
RESHAPED = TensorSpec("r", "FP32", (4, -1), reshape=(2, 2, -1))
SCALAR = TensorSpec("z", "FP32", (1,), reshape=())
OPTIONAL = TensorSpec("o", "FP32", (-1,), optional=True)
SHAPE = TensorSpec("s", "INT64", (-1,), shape_tensor=True)
RAGGED = TensorSpec("g", "FP32", (-1,), ragged=True)


def codec(*inputs: TensorSpec, outputs: tuple[TensorSpec, ...] = (PLAIN,), rows: int = 8) -> ModelCodec:
    return codec_for("m", "1", ModelSpec(inputs, outputs, batched=rows > 0), rows)


def floats(*shape: int) -> Array:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def decoded(made: ModelCodec, **inputs: Array) -> Group:
    return made.read(infer("m", inputs))


def refusal(made: ModelCodec, **inputs: Array) -> str:
    with pytest.raises(InvalidRequest) as caught:
        decoded(made, **inputs)
    return str(caught.value)


@pytest.mark.parametrize("tensor", [PLAIN, RAGGED])
def test_codec_is_the_plain_one_for_models_that_see_what_clients_send(tensor: TensorSpec) -> None:
    assert type(codec(tensor)) is ModelCodec


@pytest.mark.parametrize("tensor", [RESHAPED, SCALAR, OPTIONAL, SHAPE])
def test_codec_for_other_models_is_an_adapting_one(tensor: TensorSpec) -> None:
    assert type(codec(tensor)) is AdaptingCodec
    assert type(codec(PLAIN, outputs=(tensor,))) is AdaptingCodec


@pytest.mark.parametrize(
    ("tensor", "given", "seen"),
    [(RESHAPED, (3, 4, 5), (3, 2, 2, 5)), (RESHAPED, (3, 4, 0), (3, 2, 2, 0)), (SCALAR, (3, 1), (3,))],
)
def test_reshape_input_is_a_view_in_the_models_shape(
    tensor: TensorSpec, given: tuple[int, ...], seen: tuple[int, ...]
) -> None:
    (array,) = decoded(codec(tensor), **{tensor.name: floats(*given)}).inputs[0]

    assert array.shape == seen
    assert array.tobytes() == floats(*given).tobytes()
    assert not array.flags.owndata


def test_reshape_without_a_batch_axis_applies_to_the_whole_shape() -> None:
    made = codec(RESHAPED, outputs=(RESHAPED,), rows=0)
    request = infer("m", {"r": floats(4, 3)})
    response = encoded_as_message(made, request, made.read(request), [floats(2, 2, 5)])

    assert made.read(request).inputs[0][0].shape == (2, 2, 3)
    assert list(response.outputs[0].shape) == [4, 5]


def test_reshape_input_is_checked_against_the_clients_dims() -> None:
    assert refusal(codec(RESHAPED), r=floats(1, 2, 2, 3)) == (
        "unexpected shape for input 'r' for model 'm': expected [-1, 4, -1], got [1, 2, 2, 3]"
    )


@pytest.mark.parametrize("typed", [False, True])
def test_reshape_output_is_returned_in_the_clients_shape(typed: bool) -> None:
    made = codec(PLAIN, outputs=(RESHAPED, SCALAR))
    request = infer("m", {"a": floats(3, 2)}, parameters={"binary_data_output": not typed})

    response = encoded_as_message(made, request, made.read(request), [floats(3, 2, 2, 5), floats(3)])

    assert [list(one.shape) for one in response.outputs] == [[3, 4, 5], [3, 1]]
    if typed:
        assert list(response.outputs[1].contents.fp32_contents) == [0, 1, 2]
    else:
        assert list(response.raw_output_contents) == [floats(60).tobytes(), floats(3).tobytes()]


def test_reshape_of_a_shape_tensor_output_applies_to_the_whole_shape() -> None:
    made = codec(PLAIN, outputs=(TensorSpec("s", "INT64", (4,), reshape=(2, 2), shape_tensor=True),))
    request = infer("m", {"a": floats(3, 2)})

    response = encoded_as_message(made, request, made.read(request), [np.array([[1, 2], [3, 4]])])

    assert list(response.outputs[0].shape) == [4]
    assert response.raw_output_contents[0] == np.array([1, 2, 3, 4]).tobytes()


def test_optional_input_left_out_is_marked_missing_at_its_position() -> None:
    made = codec(OPTIONAL, PLAIN)

    assert decoded(made, a=floats(2, 2)).inputs[0][0] is MISSING
    assert decoded(made, a=floats(2, 2)).inputs[0][1].shape == (2, 2)
    assert decoded(made, o=floats(2, 3), a=floats(2, 2)).inputs[0][0].shape == (2, 3)


def test_optional_input_with_a_reshape_is_marked_missing_too_if_left_out() -> None:
    made = codec(TensorSpec("r", "FP32", (4, -1), optional=True, reshape=(2, 2, -1)), PLAIN)

    assert decoded(made, a=floats(2, 2)).inputs[0][0] is MISSING
    assert decoded(made, r=floats(2, 4, 3), a=floats(2, 2)).inputs[0][0].shape == (2, 2, 2, 3)


def test_optional_input_does_not_stand_in_for_a_required_one() -> None:
    assert refusal(codec(OPTIONAL, PLAIN), o=floats(1, 2)) == (
        "model 'm': missing inputs ['a']: expected ['a'], got ['o']"
    )


def test_optional_inputs_given_are_part_of_the_key() -> None:
    made = codec(OPTIONAL, TensorSpec("p", "FP32", (-1,), optional=True), PLAIN)
    sets = [{}, {"o": floats(1, 0)}, {"p": floats(1, 0)}, {"o": floats(1, 0), "p": floats(1, 0)}]

    keys = [decoded(made, a=floats(1, 2), **given).options.key for given in sets]

    assert len(set(keys)) == 4
    assert decoded(made, a=floats(3, 2), o=floats(3, 0)).options.key == keys[1]


def test_optional_inputs_all_left_out_are_refused_for_a_batched_model() -> None:
    assert refusal(codec(OPTIONAL)) == (
        "model 'm': expected at least one input with a leading batch dimension, got none"
    )


def test_optional_inputs_all_left_out_without_a_batch_axis_are_one_row() -> None:
    assert decoded(codec(OPTIONAL, rows=0)).options.rows == 1


@pytest.mark.parametrize("left_out", [OPTIONAL, TensorSpec("r", "FP32", (4, -1), optional=True, reshape=(2, 2, -1))])
def test_optional_output_left_out_by_the_model_is_not_in_the_response(left_out: TensorSpec) -> None:
    made = codec(PLAIN, outputs=(left_out, PLAIN))
    request = infer("m", {"a": floats(1, 2)})

    response = encoded_as_message(made, request, made.read(request), [MISSING, floats(1, 2)])

    assert [one.name for one in response.outputs] == ["a"]
    assert len(response.raw_output_contents) == 1


def test_shape_tensor_has_no_batch_dimension_and_does_not_count_rows() -> None:
    made = codec(SHAPE, PLAIN)

    one = decoded(made, s=np.array([7, 8, 9]), a=floats(2, 2))

    assert one.options.rows == 2
    assert one.inputs[0][0].tolist() == [7, 8, 9]
    assert refusal(made, s=np.array([[7, 8]] * 2), a=floats(2, 2)) == (
        "unexpected shape for input 's' for model 'm': expected [-1], got [2, 2]"
    )


def test_shape_tensor_alone_gives_no_row_count() -> None:
    made = codec(SHAPE, TensorSpec("o", "FP32", (2,), optional=True))

    assert "expected at least one input with a leading batch dimension" in refusal(made, s=np.array([1]))


def test_shape_tensor_contents_are_part_of_the_key_to_the_last_byte() -> None:
    made = codec(SHAPE, PLAIN)
    contents = [[1, 2], [1, 3], [1], [1, 2, 0], [0, 1], [0, 2]]

    keys = [decoded(made, s=np.array(content), a=floats(1, 2)).options.key for content in contents]

    assert len(set(keys)) == len(contents)
    assert decoded(made, s=np.array([1, 2]), a=floats(5, 2)).options.key == keys[0]


def test_shape_tensor_of_texts_is_part_of_the_key_element_by_element() -> None:
    made = codec(TensorSpec("s", "BYTES", (2,), shape_tensor=True), PLAIN)
    contents = [[b"ab", b"c"], [b"a", b"bc"], [b"ab", b"c\x00"]]

    keys = [decoded(made, s=np.array(content, object), a=floats(1, 2)).options.key for content in contents]

    assert len(set(keys)) == 3
    assert decoded(made, s=np.array(contents[0], object), a=floats(5, 2)).options.key == keys[0]


def test_ragged_dims_are_not_part_of_the_key_but_are_checked() -> None:
    made = codec(RAGGED, TensorSpec("b", "FP32", (-1,)))

    keys = {decoded(made, g=floats(1, size), b=floats(1, 2)).options.key for size in (0, 1, 5)}

    assert len(keys) == 1
    assert decoded(made, g=floats(1, 1), b=floats(1, 3)).options.key not in keys
    assert "unexpected shape for input 'g' for model 'm': expected [-1, -1], got [1, 2, 2]" in refusal(
        made, g=floats(1, 2, 2), b=floats(1, 1)
    )


def test_typed_contents_of_a_reshaped_input_are_reshaped_too() -> None:
    request = pb.ModelInferRequest()
    tensor = request.inputs.add(name="z", datatype="FP32", shape=[2, 1])
    tensor.contents.fp32_contents.extend([4, 5])

    assert codec(SCALAR).read(request).inputs[0][0].tolist() == [4, 5]
