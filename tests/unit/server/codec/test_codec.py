"""Valid requests through the codec and back: which values come out, in which order, under which key."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from paceline.backends.spec import ModelSpec, TensorSpec
from paceline.protos import inference_pb2 as pb
from paceline.server.codec.codec import ModelCodec
from paceline.server.errors import AnswerTooLarge, InvalidRequest
from paceline.server.memory.regions import Regions
from tests.codecs import encoded_as_message
from tests.rlimits import room_for
from tests.wire import Array, bytes_element, infer, rows_of_floats

PAIR = ModelSpec(
    (TensorSpec("a", "FP32", (2,)), TensorSpec("b", "INT64", (-1, 3))),
    (TensorSpec("x", "FP32", (2,)), TensorSpec("y", "INT64", (-1, 3)), TensorSpec("z", "BYTES", ())),
    batched=True,
)

VALUES: dict[str, Array] = {
    "BOOL": np.array([True, False]),
    "UINT8": np.array([0, 255], "u1"),
    "UINT16": np.array([0, 65535], "<u2"),
    "UINT32": np.array([0, 2**32 - 1], "<u4"),
    "UINT64": np.array([0, 2**64 - 1], "<u8"),
    "INT8": np.array([-128, 127], "i1"),
    "INT16": np.array([-(2**15), 2**15 - 1], "<i2"),
    "INT32": np.array([-(2**31), 2**31 - 1], "<i4"),
    "INT64": np.array([-(2**63), 2**63 - 1], "<i8"),
    "FP16": np.array([0.5, -np.inf], "<f2"),
    "FP32": np.array([0.1, np.nan], "<f4"),
    "FP64": np.array([0.1, np.inf], "<f8"),
    "BYTES": np.array([b"", b"\x00\xff\x00"], object),
}
FIELDS = {
    "BOOL": "bool_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


def one_tensor(datatype: str, dims: tuple[int, ...] = (2,), regions: Regions | None = None) -> ModelCodec:
    tensor = TensorSpec("t", datatype, dims)
    return ModelCodec("m", "1", ModelSpec((tensor,), (tensor,)), 0, regions=regions)


def pair_codec() -> ModelCodec:
    return ModelCodec("m", "3", PAIR, 8)


def pair_request(rows: int = 2, middle: int = 1, **more: Sequence[str]) -> pb.ModelInferRequest:
    return infer("m", {"b": np.ones((rows, middle, 3), np.int64), "a": rows_of_floats(rows)}, **more)  # type: ignore[arg-type]


def pair_results(rows: int = 2) -> tuple[Array, Array, Array]:
    return rows_of_floats(rows), np.ones((rows, 1, 3), np.int64), np.array([b"z"] * rows, object)


def same(got: Array, want: Array) -> bool:
    """Equal to the last bit, NaNs included."""
    return got.shape == want.shape and got.dtype == want.dtype and got.tolist().__repr__() == want.tolist().__repr__()


def test_decode_returns_inputs_in_the_order_of_the_spec_whatever_that_of_the_request() -> None:
    decoded = pair_codec().read(pair_request())
    a, b = decoded.inputs[0]
    assert same(a, rows_of_floats(2))
    assert same(b, np.ones((2, 1, 3), np.int64))
    assert decoded.options.rows == 2


def test_decode_raw_input_is_a_view_of_the_message() -> None:
    request = infer("m", {"t": np.array([1.0, 2.0], np.float32)})
    (array,) = one_tensor("FP32").read(request).inputs[0]
    assert not array.flags.owndata
    assert not array.flags.writeable


@pytest.mark.parametrize("datatype", VALUES)
def test_decode_raw_of_each_datatype_gives_its_values(datatype: str) -> None:
    request = infer("m", {"t": VALUES[datatype]})
    (array,) = one_tensor(datatype).read(request).inputs[0]
    assert same(array, VALUES[datatype])


def test_decode_raw_of_bf16_gives_its_bits() -> None:
    request = infer("m", {"t": np.array([0x3F80, 0xFF80], "<u2")})
    request.inputs[0].datatype = "BF16"
    (array,) = one_tensor("BF16").read(request).inputs[0]
    assert array.tolist() == [0x3F80, 0xFF80]


@pytest.mark.parametrize("datatype", FIELDS)
def test_decode_typed_contents_of_each_datatype_gives_its_values(datatype: str) -> None:
    request = pb.ModelInferRequest()
    tensor = request.inputs.add(name="t", datatype=datatype, shape=[2])
    getattr(tensor.contents, FIELDS[datatype]).extend(VALUES[datatype].tolist())
    (array,) = one_tensor(datatype).read(request).inputs[0]
    assert same(array, VALUES[datatype])


def test_decode_several_typed_inputs_gives_each_its_own_values() -> None:
    request = pb.ModelInferRequest()
    second = request.inputs.add(name="b", datatype="INT64", shape=[1, 1, 3])
    second.contents.int64_contents.extend([1, 2, 3])
    first = request.inputs.add(name="a", datatype="FP32", shape=[1, 2])
    first.contents.fp32_contents.extend([4, 5])
    a, b = pair_codec().read(request).inputs[0]
    assert (a.tolist(), b.tolist()) == ([[4, 5]], [[[1, 2, 3]]])


def test_decode_empty_tensor_without_any_contents_is_accepted() -> None:
    request = pb.ModelInferRequest()
    request.inputs.add(name="t", datatype="FP32", shape=[0, 3])
    (array,) = one_tensor("FP32", (-1, 3)).read(request).inputs[0]
    assert array.shape == (0, 3)


def test_decode_scalar_of_rank_zero_is_accepted() -> None:
    request = infer("m", {"t": np.array(7, np.float32)})
    (array,) = one_tensor("FP32", ()).read(request).inputs[0]
    assert (array.shape, float(array)) == ((), 7.0)


def test_decode_without_batch_axis_gives_one_row_and_keeps_whole_shapes() -> None:
    decoded = one_tensor("FP32", (-1, 2)).read(infer("m", {"t": rows_of_floats(5)}))
    assert decoded.options.rows == 1
    assert decoded.inputs[0][0].shape == (5, 2)


def test_decode_key_is_equal_for_equal_free_dimensions_whatever_the_rows() -> None:
    codec = pair_codec()
    keys = {codec.read(pair_request(rows, middle=4)).options.key for rows in (1, 2, 8)}
    assert len(keys) == 1


def test_decode_key_differs_for_different_free_dimensions() -> None:
    codec = pair_codec()
    keys = {codec.read(pair_request(1, middle=middle)).options.key for middle in (0, 1, 2, 3)}
    assert len(keys) == 4


def test_decode_key_differs_if_inputs_swap_their_free_dimensions() -> None:
    free = (TensorSpec("a", "FP32", (-1,)), TensorSpec("b", "FP32", (-1,)))
    codec = ModelCodec("m", "1", ModelSpec(free, free, batched=True), 8)
    one = infer("m", {"a": rows_of_floats(1, 2), "b": rows_of_floats(1, 3)})
    other = infer("m", {"a": rows_of_floats(1, 3), "b": rows_of_floats(1, 2)})
    assert codec.read(one).options.key != codec.read(other).options.key


def test_decode_key_without_batch_axis_includes_the_first_dimension() -> None:
    codec = one_tensor("FP32", (-1,))
    keys = {codec.read(infer("m", {"t": np.zeros(size, np.float32)})).options.key for size in (1, 2, 3)}
    assert len(keys) == 3


def test_decode_key_of_a_tensor_of_any_rank_differs_by_rank_and_size() -> None:
    tensor = TensorSpec("t", "FP32", (), any_rank=True)
    codec = ModelCodec("m", "1", ModelSpec((tensor,), (tensor,), batched=True), 8)
    shapes = [(1,), (1, 2), (1, 3), (1, 2, 1)]
    keys = [codec.read(infer("m", {"t": np.zeros(shape, np.float32)})).options.key for shape in shapes]
    assert len(set(keys)) == 4
    assert codec.read(infer("m", {"t": np.zeros((5, 2), np.float32)})).options.key == keys[1]


def test_decode_key_ignores_which_outputs_are_wanted() -> None:
    codec = pair_codec()
    keys = [codec.read(pair_request(outputs=wanted)).options.key for wanted in (["x"], ["z", "y"])]
    assert keys[0] == keys[1]


def test_decode_without_named_outputs_asks_for_all_in_the_order_of_the_spec() -> None:
    assert pair_codec().read(pair_request()).options.outputs == (0, 1, 2)


def test_decode_keeps_the_order_of_named_outputs() -> None:
    assert pair_codec().read(pair_request(outputs=["z", "x"])).options.outputs == (2, 0)


def test_decode_parameters_reach_the_decoded_request() -> None:
    request = infer("m", {"t": VALUES["FP32"]}, parameters={"timeout": 250, "binary_data_output": False, "custom": "x"})
    decoded = one_tensor("FP32").read(request)
    assert (decoded.options.parameters.timeout_ns, decoded.options.parameters.typed_outputs) == (250_000, True)


@pytest.mark.parametrize("regions", [None, Regions(1)], ids=["no shared memory", "shared memory"])
def test_decode_accepts_tensor_parameters_without_a_meaning_here(regions: Regions | None) -> None:
    request = infer("m", {"t": VALUES["FP32"]}, outputs=["t"])
    request.inputs[0].parameters["binary_data_size"].string_param = "many"
    request.inputs[0].parameters["priority"].bool_param = True
    request.outputs[0].parameters["binary_data"].bool_param = True
    assert one_tensor("FP32", regions=regions).read(request).options.outputs == (0,)


def test_decode_utf8_text_for_a_utf8_input_is_accepted() -> None:
    tensor = TensorSpec("t", "BYTES", (2,), utf8=True)
    codec = ModelCodec("m", "1", ModelSpec((tensor,), (tensor,)), 0)
    text = np.array(["gr\u00fc\u00df".encode(), "\U0001f600".encode()], object)
    assert same(codec.read(infer("m", {"t": text})).inputs[0][0], text)


def test_encode_raw_gives_name_version_id_and_one_entry_per_wanted_output() -> None:
    codec, request = pair_codec(), pair_request(outputs=["y", "x"])
    request.id = "\u00fc-7"
    response = encoded_as_message(codec, request, codec.read(request), pair_results())
    assert (response.model_name, response.model_version, response.id) == ("m", "3", "\u00fc-7")
    assert [(one.name, one.datatype, list(one.shape)) for one in response.outputs] == [
        ("y", "INT64", [2, 1, 3]),
        ("x", "FP32", [2, 2]),
    ]
    assert list(response.raw_output_contents) == [
        np.ones((2, 1, 3), "<i8").tobytes(),
        rows_of_floats(2).tobytes(),
    ]
    assert not any(one.HasField("contents") for one in response.outputs)


def test_encode_bytes_puts_a_length_before_each_element() -> None:
    codec, request = pair_codec(), pair_request(outputs=["z"])
    response = encoded_as_message(codec, request, codec.read(request), pair_results())
    assert list(response.raw_output_contents) == [b"\x01\x00\x00\x00z" * 2]


def test_encode_writes_a_non_contiguous_result_row_by_row() -> None:
    codec = one_tensor("FP32", (2, 3))
    request = infer("m", {"t": rows_of_floats(2, 3)})
    transposed = np.asfortranarray(rows_of_floats(2, 3))
    response = encoded_as_message(codec, request, codec.read(request), (transposed,))
    assert response.raw_output_contents[0] == rows_of_floats(2, 3).tobytes()


@pytest.mark.parametrize(("datatype", "count"), [("FP32", 2**29), ("INT64", 2**31)])
@pytest.mark.parametrize("typed", [False, True])
def test_encode_more_than_one_message_can_carry_is_refused_before_it_is_copied(
    datatype: str, count: int, typed: bool
) -> None:
    codec, one = one_tensor(datatype, (-1,)), np.ones(1, VALUES[datatype].dtype)
    request = infer("m", {"t": one}, parameters={"binary_data_output": not typed})
    # Of stride 0, so that an array this large takes no memory.
    large = np.broadcast_to(one, (count,))
    with pytest.raises(AnswerTooLarge, match=r"^model 'm': expected outputs that one message can carry"):
        encoded_as_message(codec, request, codec.read(request), (large,))


@pytest.mark.parametrize("datatype", FIELDS)
def test_encode_typed_outputs_fills_the_datatypes_own_field(datatype: str) -> None:
    codec = one_tensor(datatype)
    request = infer("m", {"t": VALUES[datatype]}, parameters={"binary_data_output": False})
    response = encoded_as_message(codec, request, codec.read(request), (VALUES[datatype],))
    assert not response.raw_output_contents
    (output,) = response.outputs
    assert [field.name for field, _ in output.contents.ListFields()] == [FIELDS[datatype]]
    assert repr(list(getattr(output.contents, FIELDS[datatype]))) == repr(VALUES[datatype].tolist())


def test_encode_classes_replace_only_the_outputs_that_they_are_asked_for() -> None:
    labels = {"y": (b"no", b"yes")}
    request = pair_request(outputs=["y", "x"])
    request.outputs[0].parameters["classification"].int64_param = 2
    codec = ModelCodec("m", "3", PAIR, 8, labels)
    decoded = codec.read(request)
    assert decoded.options.classes == {1: 2}
    x, y, z = pair_results()
    response = encoded_as_message(codec, request, decoded, (x, y + np.arange(3), z))
    described = [(one.name, one.datatype, list(one.shape)) for one in response.outputs]
    assert described == [("y", "BYTES", [2, 2]), ("x", "FP32", [2, 2])]
    expected = b"".join(bytes_element(text) for text in [b"3:2", b"2:1:yes"] * 2)
    assert list(response.raw_output_contents) == [expected, x.tobytes()]


def test_encode_classes_in_typed_contents_are_bytes_too() -> None:
    request = pair_request(outputs=["x"])
    request.parameters["binary_data_output"].bool_param = False
    request.outputs[0].parameters["classification"].int64_param = 1
    codec = pair_codec()
    response = encoded_as_message(codec, request, codec.read(request), pair_results())
    assert list(response.outputs[0].contents.bytes_contents) == [b"1.000000:1", b"3.000000:1"]
    assert not response.raw_output_contents


def wants_classes(request: pb.ModelInferRequest, output: str, count: int) -> pb.ModelInferRequest:
    request.outputs.add(name=output).parameters["classification"].int64_param = count
    return request


def test_encode_classes_without_batch_axis_are_chosen_among_all_elements() -> None:
    codec = one_tensor("FP32", (2, 2))
    request = wants_classes(infer("m", {"t": rows_of_floats(2)}), "t", 3)
    response = encoded_as_message(codec, request, codec.read(request), (rows_of_floats(2),))
    assert list(response.outputs[0].shape) == [3]
    expected = [b"3.000000:3", b"2.000000:2", b"1.000000:1"]
    assert response.raw_output_contents[0] == b"".join(map(bytes_element, expected))


def test_encode_classes_of_a_shape_tensor_are_chosen_among_all_elements() -> None:
    a, shape = TensorSpec("a", "FP32", (2,)), TensorSpec("s", "INT64", (3,), shape_tensor=True)
    codec = ModelCodec("m", "1", ModelSpec((a,), (shape,), batched=True), 8)
    request = wants_classes(infer("m", {"a": rows_of_floats(2)}), "s", 2)
    response = encoded_as_message(codec, request, codec.read(request), (np.array([4, 6, 5]),))
    assert list(response.outputs[0].shape) == [2]
    assert response.raw_output_contents[0] == bytes_element(b"6:1") + bytes_element(b"5:2")


def test_encode_classes_of_too_large_an_output_are_refused_naming_model_and_output() -> None:
    codec = one_tensor("INT8", (-1,))
    request = wants_classes(infer("m", {"t": np.zeros(1, np.int8)}), "t", 1)
    decoded = codec.read(request)
    with pytest.raises(InvalidRequest) as caught:
        encoded_as_message(codec, request, decoded, (np.zeros(1_000_001, np.int8),))
    assert str(caught.value) == (
        "model 'm': output 't': parameter 'classification': expected an output of up to 1000000 elements, got 1000001"
    )


@pytest.mark.parametrize("binary", [True, False], ids=["raw", "typed"])
def test_response_without_room_raises_memory_error(binary: bool) -> None:
    """protobuf would end the process."""
    array = np.zeros(2**26, np.float32)
    codec = one_tensor("FP32", (-1,))
    request = infer("m", {"t": array[:1]}, parameters={"binary_data_output": binary})
    decoded = codec.read(request)
    with room_for(array.nbytes * 3 // 2), pytest.raises(MemoryError):
        encoded_as_message(codec, request, decoded, (array,))
    assert encoded_as_message(codec, request, decoded, (array[:1],))
