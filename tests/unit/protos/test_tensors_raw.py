"""The raw form: shapes, views, every datatype, each kind of bad input."""

from __future__ import annotations

import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest

from paceline.protos.datatypes import DATATYPES
from paceline.protos.inference_pb2 import ModelInferRequest
from paceline.protos.tensors import MAX_ELEMENTS, TensorError, decode_raw, element_count, encode_raw

BOOL, INT32, FP32, BF16, BYTES = (DATATYPES[name] for name in ("BOOL", "INT32", "FP32", "BF16", "BYTES"))
FIXED = sorted(set(DATATYPES) - {"BYTES"})


def packed(*elements: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)


def objects(*elements: object) -> np.ndarray[Any, np.dtype[Any]]:
    array = np.empty(len(elements), object)
    array[:] = elements
    return array


# ---- element_count ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "count"),
    [([], 1), ([1], 1), ([2, 3], 6), ([0], 0), ([0, 4], 0), ([4, 0], 0), ([1] * 64, 1), ([MAX_ELEMENTS], MAX_ELEMENTS)],
)
def test_element_count_good_shape_returns_the_product(shape: list[int], count: int) -> None:
    assert element_count(shape) == count


def test_element_count_shape_of_a_message_returns_the_product() -> None:
    assert element_count(ModelInferRequest.InferInputTensor(shape=[2, 3]).shape) == 6


@pytest.mark.parametrize("shape", [[-1], [2, -1], [0, -1], [-(2**63)], [-2, -3]])
def test_element_count_negative_dimension_raises_error(shape: list[int]) -> None:
    with pytest.raises(TensorError, match="expected no negative dimension, got") as caught:
        element_count(shape)
    assert str(shape) in str(caught.value)


@pytest.mark.parametrize("shape", [[MAX_ELEMENTS + 1], [2**63 - 1, 2], [2**32, 2**32], [2**63 - 1] * 64])
def test_element_count_product_too_large_raises_error(shape: list[int]) -> None:
    with pytest.raises(TensorError, match=f"expected at most {MAX_ELEMENTS} elements"):
        element_count(shape)


@pytest.mark.parametrize("shape", [[0, 2**62, 2**62], [2**62, 2**62, 0], [2**61, 0]])
def test_element_count_huge_dimensions_beside_a_zero_raise_error(shape: list[int]) -> None:
    with pytest.raises(TensorError, match="expected at most"):
        element_count(shape)


@pytest.mark.parametrize("rank", [65, 1000])
def test_element_count_rank_too_high_raises_error(rank: int) -> None:
    with pytest.raises(TensorError, match=f"expected at most 64 dimensions, got {rank}"):
        element_count([1] * rank)


# ---- decode_raw: fixed-size datatypes --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FIXED)
def test_decode_raw_fixed_size_returns_what_numpy_wrote(name: str) -> None:
    datatype = DATATYPES[name]
    array = np.arange(6).reshape(2, 3).astype(datatype.dtype)
    decoded = decode_raw(array.tobytes(), datatype, [2, 3])
    assert decoded.dtype == datatype.dtype
    assert decoded.shape == (2, 3)
    np.testing.assert_array_equal(decoded, array)


def test_decode_raw_known_bytes_are_read_as_little_endian() -> None:
    assert decode_raw(b"\x01\x02\x00\x00", INT32, [1])[0] == 0x0201


def test_decode_raw_bytes_returns_a_read_only_view() -> None:
    data = np.arange(4, dtype="<f4").tobytes()
    decoded = decode_raw(data, FP32, [4])
    assert np.shares_memory(decoded, np.frombuffer(data, np.uint8))
    assert not decoded.flags.writeable
    assert decoded.flags.c_contiguous
    assert decoded.flags.aligned


def test_decode_raw_writable_memoryview_returns_a_read_only_view() -> None:
    buffer = bytearray(np.arange(4, dtype="<f4").tobytes())
    decoded = decode_raw(memoryview(buffer), FP32, [4])
    assert np.shares_memory(decoded, np.frombuffer(buffer, np.uint8))
    assert not decoded.flags.writeable


def test_decode_raw_memoryview_of_wider_items_counts_bytes() -> None:
    decoded = decode_raw(np.arange(4, dtype="<f4").data, FP32, [2, 2])
    np.testing.assert_array_equal(decoded, [[0, 1], [2, 3]])


def test_decode_raw_memoryview_with_gaps_raises_error() -> None:
    with pytest.raises(TensorError, match="expected contiguous bytes"):
        decode_raw(memoryview(bytes(16))[::2], FP32, [2])


def test_decode_raw_shape_of_a_message_is_accepted() -> None:
    shape = ModelInferRequest.InferInputTensor(shape=[2, 2]).shape
    assert decode_raw(bytes(16), FP32, shape).shape == (2, 2)


@pytest.mark.parametrize("name", DATATYPES)
@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (2, 0, 3)])
def test_decode_raw_zero_dimension_returns_an_empty_array(name: str, shape: tuple[int, ...]) -> None:
    decoded = decode_raw(b"", DATATYPES[name], shape)
    assert decoded.shape == shape
    assert decoded.dtype == DATATYPES[name].dtype


@pytest.mark.parametrize("name", DATATYPES)
def test_decode_raw_empty_shape_returns_a_scalar_array(name: str) -> None:
    data = bytes(DATATYPES[name].item_bytes or 4)
    assert decode_raw(data, DATATYPES[name], []).shape == ()


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("surplus", [-1, 1])
def test_decode_raw_wrong_byte_count_raises_error_with_both_counts(name: str, surplus: int) -> None:
    expected = 6 * DATATYPES[name].item_bytes
    with pytest.raises(TensorError) as caught:
        decode_raw(bytes(expected + surplus), DATATYPES[name], [2, 3])
    assert str(caught.value) == f"expected {expected} bytes for {name} of shape [2, 3], got {expected + surplus}"


def test_decode_raw_bytes_for_an_empty_tensor_raise_error() -> None:
    with pytest.raises(TensorError, match=r"expected 0 bytes for FP32 of shape \[0, 4\], got 4"):
        decode_raw(bytes(4), FP32, [0, 4])


@pytest.mark.parametrize("shape", [[-1], [2**62, 2**62], [1] * 65, [2**61, 0]])
@pytest.mark.parametrize("name", DATATYPES)
def test_decode_raw_impossible_shape_raises_error(name: str, shape: list[int]) -> None:
    with pytest.raises(TensorError, match=r"^shape: expected"):
        decode_raw(b"", DATATYPES[name], shape)


@pytest.mark.parametrize("name", DATATYPES)
def test_decode_raw_largest_shape_beside_a_zero_returns_an_empty_array(name: str) -> None:
    assert decode_raw(b"", DATATYPES[name], [MAX_ELEMENTS, 0]).shape == (MAX_ELEMENTS, 0)


def test_decode_raw_bool_zero_and_one_are_accepted() -> None:
    np.testing.assert_array_equal(decode_raw(b"\x00\x01\x01", BOOL, [3]), [False, True, True])


@pytest.mark.parametrize("byte", [2, 128, 255])
def test_decode_raw_bool_other_byte_raises_error(byte: int) -> None:
    with pytest.raises(TensorError, match=f"expected 0 or 1 in each byte of BOOL, got {byte}"):
        decode_raw(bytes([0, 1, byte, 1]), BOOL, [4])


# ---- decode_raw: BYTES -----------------------------------------------------------------------------------------------


def test_decode_raw_bytes_elements_come_back_in_row_major_order() -> None:
    decoded = decode_raw(packed(b"a", b"", b"\x00\x00", "ä".encode()), BYTES, [2, 2])
    assert decoded.dtype == object
    assert decoded.tolist() == [[b"a", b""], [b"\x00\x00", b"\xc3\xa4"]]
    assert {type(element) for element in decoded.flat} == {bytes}


def test_decode_raw_bytes_memoryview_gives_bytes_elements() -> None:
    decoded = decode_raw(memoryview(bytearray(packed(b"ab", b"c"))), BYTES, [2])
    assert decoded.tolist() == [b"ab", b"c"]
    assert type(decoded[0]) is bytes


@pytest.mark.parametrize(
    ("data", "shape", "message"),
    [
        (b"", [1], "expected at least 4 bytes for the lengths of the 1 elements of BYTES of shape [1], got 0"),
        (b"\x00\x00\x00", [1], "expected at least 4 bytes for the lengths"),
        (packed(b"abcd"), [2], "expected 4 bytes for the length of element 1 of 2, got 0"),
        (packed(b"ab", b"cd")[:-1], [2], "expected 2 bytes in element 1 of 2, got 1"),
        (packed(b"abcd") + b"\x01\x00", [2], "expected 4 bytes for the length of element 1 of 2, got 2"),
        (b"\xff\xff\xff\xff", [1], "expected 4294967295 bytes in element 0 of 1, got 0"),
        (b"\xff\xff\xff\x7f" + bytes(8), [2], "expected 2147483647 bytes in element 0 of 2, got 8"),
        (packed(b"a", b"b"), [1], "expected 1 elements of BYTES to end at byte 5, got 5 bytes more"),
        (packed(b"a") + b"\x00", [1], "expected 1 elements of BYTES to end at byte 5, got 1 bytes more"),
        (packed(b""), [0], "expected 0 elements of BYTES to end at byte 0, got 4 bytes more"),
        (packed(b"", b""), [], "expected 1 elements of BYTES to end at byte 4, got 4 bytes more"),
    ],
)
def test_decode_raw_bytes_bad_data_raises_error_with_expected_and_got(
    data: bytes, shape: list[int], message: str
) -> None:
    with pytest.raises(TensorError) as caught:
        decode_raw(data, BYTES, shape)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("data", "shape"),
    [(bytes(64), [2**31]), (bytes(64), [MAX_ELEMENTS]), (b"\xff\xff\xff\xff" * 16, [16]), (b"", [2**40])],
)
def test_decode_raw_bytes_large_claims_allocate_nothing_large(data: bytes, shape: list[int]) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(TensorError):
            decode_raw(data, BYTES, shape)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 100_000


# ---- encode_raw ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FIXED)
def test_encode_raw_fixed_size_returns_what_numpy_writes(name: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(DATATYPES[name].dtype)
    assert encode_raw(array, DATATYPES[name]) == array.tobytes()


@pytest.mark.parametrize("name", FIXED)
def test_encode_raw_big_endian_array_returns_little_endian_bytes(name: str) -> None:
    array = np.arange(6).astype(DATATYPES[name].dtype)
    assert encode_raw(array.astype(array.dtype.newbyteorder(">")), DATATYPES[name]) == array.tobytes()


@pytest.mark.parametrize(
    "array",
    [np.arange(6, dtype="<f4").reshape(2, 3).T, np.arange(12, dtype="<f4")[::2], np.arange(4, dtype="<f4")[::-1]],
)
def test_encode_raw_other_layout_returns_row_major_bytes(array: np.ndarray[Any, np.dtype[Any]]) -> None:
    assert encode_raw(array, FP32) == np.ascontiguousarray(array).tobytes()


def test_encode_raw_scalar_array_returns_one_element() -> None:
    assert encode_raw(np.array(7, "<i4"), INT32) == b"\x07\x00\x00\x00"


@pytest.mark.parametrize("name", DATATYPES)
def test_encode_raw_empty_array_returns_no_bytes(name: str) -> None:
    assert encode_raw(np.empty((0, 4), DATATYPES[name].dtype), DATATYPES[name]) == b""


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("FP32", "<f8"),
        ("FP32", "<i4"),
        ("INT32", "<u4"),
        ("UINT8", "?"),
        ("FP16", "<u2"),
        ("BF16", "<f4"),
        ("INT64", "O"),
    ],
)
def test_encode_raw_other_dtype_raises_error_instead_of_casting(name: str, dtype: str) -> None:
    with pytest.raises(TensorError, match=f"for {name}, got {np.dtype(dtype)}"):
        encode_raw(np.zeros(2, dtype), DATATYPES[name])


def test_encode_raw_bfloat16_of_ml_dtypes_returns_its_bit_patterns() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.array([[1.0, -2.0]], ml_dtypes.bfloat16)
    assert encode_raw(array, BF16) == array.tobytes() == b"\x80\x3f\x00\xc0"
    assert encode_raw(array[0, 1], BF16) == b"\x00\xc0"


def test_encode_raw_bfloat16_for_another_datatype_raises_error() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    with pytest.raises(TensorError, match="expected an array of uint16 for UINT16, got bfloat16"):
        encode_raw(np.zeros(2, ml_dtypes.bfloat16), DATATYPES["UINT16"])


@pytest.mark.parametrize(
    "array",
    [
        objects(b"ab", b""),
        objects("ab", ""),
        objects(b"ab", ""),
        objects(np.bytes_(b"ab"), np.str_("")),
        np.array([b"ab", b""]),
        np.array(["ab", ""]),
        np.array(["ab", ""]).astype(">U2"),
    ],
)
def test_encode_raw_bytes_each_kind_of_array_returns_prefixed_elements(array: np.ndarray[Any, np.dtype[Any]]) -> None:
    assert encode_raw(array, BYTES) == packed(b"ab", b"")


def test_encode_raw_bytes_text_becomes_utf8() -> None:
    assert encode_raw(objects("äß€"), BYTES) == packed("äß€".encode())


def test_encode_raw_bytes_object_elements_keep_trailing_nuls() -> None:
    assert encode_raw(objects(b"a\x00\x00"), BYTES) == packed(b"a\x00\x00")


def test_encode_raw_bytes_transposed_array_returns_row_major_elements() -> None:
    array = objects(b"a", b"b", b"c", b"d").reshape(2, 2).T
    assert encode_raw(array, BYTES) == packed(b"a", b"c", b"b", b"d")


def test_encode_raw_bytes_scalar_array_returns_one_element() -> None:
    assert encode_raw(objects(b"abc").reshape(()), BYTES) == packed(b"abc")


@pytest.mark.parametrize("element", [None, 1, 1.5, [b"a"], bytearray(b"a")])
def test_encode_raw_bytes_other_element_raises_error_with_its_index(element: object) -> None:
    with pytest.raises(TensorError, match=f"expected bytes or str in element 1 of BYTES, got {type(element).__name__}"):
        encode_raw(objects(b"a", element), BYTES)


def test_encode_raw_bytes_text_that_is_not_unicode_raises_error() -> None:
    with pytest.raises(TensorError, match="expected text that UTF-8 can encode in element 0"):
        encode_raw(objects("\ud800"), BYTES)


@pytest.mark.parametrize("dtype", ["<f4", "?", "<u2", "M8[s]", "c8"])
def test_encode_raw_bytes_numeric_array_raises_error(dtype: str) -> None:
    with pytest.raises(TensorError, match="expected an array of bytes or str for BYTES"):
        encode_raw(np.zeros(2, dtype), BYTES)


class GiantBytes(bytes):
    """Claims to hold one byte more than a length prefix can express."""

    def __len__(self) -> int:
        return 2**32


def test_encode_raw_bytes_element_over_4_gib_raises_error() -> None:
    with pytest.raises(TensorError, match="expected at most 4294967295 bytes in element 0 of BYTES, got 4294967296"):
        encode_raw(objects(GiantBytes()), BYTES)
