"""Typed contents: every datatype, each kind of bad input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.protos.datatypes import DATATYPES, by_name
from paceline.protos.inference_pb2 import InferTensorContents
from paceline.protos.tensors import TensorError, decode_contents, encode_contents

TYPED = sorted(name for name, datatype in DATATYPES.items() if datatype.contents_field)
FIXED = sorted(set(TYPED) - {"BYTES"})
RAW_ONLY = ["BF16", "FP16"]
INTEGERS = [name for name in FIXED if "INT" in name]
NARROW = ["INT8", "INT16", "UINT8", "UINT16"]


def filled(field: str | None, values: list[Any]) -> InferTensorContents:
    arguments: dict[str, Any] = {str(field): values}
    return InferTensorContents(**arguments)


def values_for(name: str) -> list[Any]:
    return [b"a", b"", b"\x00"] if name == "BYTES" else [True, False, True] if name == "BOOL" else [1, 0, 3]


@pytest.mark.parametrize("name", TYPED)
def test_decode_contents_each_datatype_returns_its_values(name: str) -> None:
    datatype = DATATYPES[name]
    contents = filled(datatype.contents_field, values_for(name))
    decoded = decode_contents(contents, datatype, [3, 1])
    assert decoded.dtype == datatype.dtype
    assert decoded.shape == (3, 1)
    assert decoded.ravel().tolist() == values_for(name)


@pytest.mark.parametrize("name", TYPED)
@pytest.mark.parametrize("shape", [(0,), (0, 4)])
def test_decode_contents_zero_dimension_returns_an_empty_array(name: str, shape: tuple[int, ...]) -> None:
    decoded = decode_contents(InferTensorContents(), DATATYPES[name], shape)
    assert decoded.shape == shape
    assert decoded.dtype == DATATYPES[name].dtype


@pytest.mark.parametrize("name", TYPED)
def test_decode_contents_empty_shape_returns_a_scalar_array(name: str) -> None:
    datatype = DATATYPES[name]
    contents = filled(datatype.contents_field, values_for(name)[:1])
    assert decode_contents(contents, datatype, []).shape == ()


@pytest.mark.parametrize("name", INTEGERS)
def test_decode_contents_limits_of_the_datatype_are_accepted(name: str) -> None:
    datatype = DATATYPES[name]
    limits = np.iinfo(datatype.dtype)
    contents = filled(datatype.contents_field, [limits.min, limits.max])
    assert decode_contents(contents, datatype, [2]).tolist() == [limits.min, limits.max]


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("beyond", [-1, 1])
def test_decode_contents_value_beyond_the_datatype_raises_error(name: str, beyond: int) -> None:
    datatype = DATATYPES[name]
    limits = np.iinfo(datatype.dtype)
    value = limits.max + 1 if beyond > 0 or limits.min == 0 else limits.min - 1
    contents = filled(datatype.contents_field, [0, value])
    message = f"expected {limits.min} to {limits.max} in {datatype.contents_field} for {name}, got {value}"
    with pytest.raises(TensorError, match=message):
        decode_contents(contents, datatype, [2])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.0, 5e-324])
def test_decode_contents_special_floats_are_kept(value: float) -> None:
    decoded = decode_contents(InferTensorContents(fp64_contents=[value]), DATATYPES["FP64"], [1])
    assert decoded.tobytes() == np.array([value], "<f8").tobytes()


@pytest.mark.parametrize("name", TYPED)
@pytest.mark.parametrize("count", [2, 4])
def test_decode_contents_wrong_count_raises_error_with_both_counts(name: str, count: int) -> None:
    datatype = DATATYPES[name]
    contents = filled(datatype.contents_field, (values_for(name) * 2)[:count])
    message = rf"expected 3 values in {datatype.contents_field} for shape \[3\], got {count}"
    with pytest.raises(TensorError, match=message):
        decode_contents(contents, datatype, [3])


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40))
def test_decode_contents_integers_of_any_length_are_kept(values: list[int]) -> None:
    """A number takes one to ten bytes on the wire."""
    shape, large = [len(values)], [value % 2**64 for value in values]
    assert decode_contents(InferTensorContents(int64_contents=values), by_name("INT64"), shape).tolist() == values
    assert decode_contents(InferTensorContents(uint64_contents=large), by_name("UINT64"), shape).tolist() == large


def test_decode_contents_unknown_fields_are_ignored() -> None:
    unknown = b"\xfa\x01\x03abc"  # number 31
    data = InferTensorContents(int64_contents=[1, -300]).SerializeToString()
    for contents in (data + unknown, unknown + data):
        array = decode_contents(InferTensorContents.FromString(contents), by_name("INT64"), [2])
        assert array.tolist() == [1, -300]


def test_decode_contents_nothing_filled_raises_error() -> None:
    with pytest.raises(TensorError, match=r"expected 2 values in fp32_contents .* got 0"):
        decode_contents(InferTensorContents(), DATATYPES["FP32"], [2])


@pytest.mark.parametrize("name", TYPED)
def test_decode_contents_other_field_raises_error_naming_both(name: str) -> None:
    other = "fp64_contents" if name != "FP64" else "fp32_contents"
    with pytest.raises(TensorError, match=f"expected {name} in {DATATYPES[name].contents_field} alone, got {other}"):
        decode_contents(filled(other, [1.0]), DATATYPES[name], [1])


def test_decode_contents_second_field_beside_the_right_one_raises_error() -> None:
    contents = InferTensorContents(fp32_contents=[1.0], bool_contents=[True], int_contents=[1])
    message = "expected FP32 in fp32_contents alone, got bool_contents and int_contents"
    with pytest.raises(TensorError, match=message):
        decode_contents(contents, DATATYPES["FP32"], [1])


def test_decode_contents_values_for_an_empty_tensor_raise_error() -> None:
    with pytest.raises(TensorError, match="expected 0 values in int_contents"):
        decode_contents(InferTensorContents(int_contents=[1]), DATATYPES["INT32"], [0, 4])


@pytest.mark.parametrize("name", RAW_ONLY)
@pytest.mark.parametrize("contents", [InferTensorContents(), InferTensorContents(fp32_contents=[1.0])])
def test_decode_contents_raw_only_datatype_raises_error(name: str, contents: InferTensorContents) -> None:
    with pytest.raises(TensorError, match=f"expected the raw form for {name}"):
        decode_contents(contents, DATATYPES[name], [1])


@pytest.mark.parametrize("shape", [[-1], [2**62, 2**62], [1] * 65, [2**40]])
@pytest.mark.parametrize("name", TYPED)
def test_decode_contents_impossible_shape_raises_error(name: str, shape: list[int]) -> None:
    with pytest.raises(TensorError):
        decode_contents(InferTensorContents(), DATATYPES[name], shape)


@pytest.mark.parametrize("name", TYPED)
def test_encode_contents_each_datatype_fills_its_field_alone(name: str) -> None:
    datatype = DATATYPES[name]
    contents = encode_contents(np.array(values_for(name), datatype.dtype), datatype)
    assert contents == filled(datatype.contents_field, values_for(name))


@pytest.mark.parametrize("name", INTEGERS)
def test_encode_contents_limits_of_the_datatype_come_back(name: str) -> None:
    datatype = DATATYPES[name]
    limits = np.iinfo(datatype.dtype)
    array = np.array([limits.min, limits.max], datatype.dtype)
    np.testing.assert_array_equal(decode_contents(encode_contents(array, datatype), datatype, [2]), array)


def test_encode_contents_transposed_big_endian_array_is_row_major() -> None:
    array = np.arange(4, dtype=">i4").reshape(2, 2).T
    assert list(encode_contents(array, DATATYPES["INT32"]).int_contents) == [0, 2, 1, 3]


def test_encode_contents_scalar_and_empty_arrays_are_accepted() -> None:
    assert list(encode_contents(np.array(7, "<i8"), DATATYPES["INT64"]).int64_contents) == [7]
    assert encode_contents(np.empty((0, 4), "<i8"), DATATYPES["INT64"]) == InferTensorContents()


@pytest.mark.parametrize("array", [np.array(["ä", "b"]), np.array(["ä", b"b"], object)])
def test_encode_contents_text_becomes_utf8(array: np.ndarray[Any, np.dtype[Any]]) -> None:
    assert list(encode_contents(array, DATATYPES["BYTES"]).bytes_contents) == ["ä".encode(), b"b"]


@pytest.mark.parametrize("name", RAW_ONLY)
def test_encode_contents_raw_only_datatype_raises_error(name: str) -> None:
    with pytest.raises(TensorError, match=f"expected the raw form for {name}"):
        encode_contents(np.zeros(1, DATATYPES[name].dtype), DATATYPES[name])


@pytest.mark.parametrize(("name", "dtype"), [("FP32", "<f8"), ("INT8", "<i4"), ("BOOL", "u1"), ("BYTES", "<i4")])
def test_encode_contents_other_dtype_raises_error(name: str, dtype: str) -> None:
    with pytest.raises(TensorError, match=f"for {name}, got {np.dtype(dtype)}"):
        encode_contents(np.zeros(1, dtype), DATATYPES[name])
