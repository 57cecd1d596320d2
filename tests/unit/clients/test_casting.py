"""Values cast to datatypes: kept exactly, rounded only from float to float, or refused."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.clients.casting import cast, datatype_of, to_array
from paceline.protos.datatypes import DATATYPES, by_name

INTEGERS = ["UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"]
SOURCES = ["u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8"]


def test_to_array_array_is_returned_itself() -> None:
    array = np.zeros(2)
    assert to_array(array) is array


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        ([1, 2], np.int64),
        ([1.0, 2], np.float64),
        ([True], np.bool_),
        ([], np.float64),
        (3, np.int64),
        ([2**63 + 1, 1], np.uint64),
        ([2**64 - 1], np.uint64),
        ([1e300, 1], np.float64),
        ([float("nan"), float("inf")], np.float64),
        (["a", "b"], object),
        ([b"a\0"], object),
        ("text", object),
    ],
)
def test_to_array_python_values_keep_their_values(value: Any, dtype: type) -> None:
    array = to_array(value)
    assert array.dtype == dtype
    np.testing.assert_array_equal(array, np.array(value, dtype))


def test_to_array_mixed_large_integers_stay_exact() -> None:
    assert to_array([2**63 + 1, 1]).tolist() == [2**63 + 1, 1]


@pytest.mark.parametrize("kind", [np.matrix, np.ma.MaskedArray, np.recarray])
def test_to_array_subclass_is_the_plain_array_of_the_same_memory(kind: type[np.ndarray[Any, Any]]) -> None:
    array = np.array([["a", "b"]], object)
    plain = to_array(array.view(kind))
    assert type(plain) is np.ndarray
    assert np.shares_memory(plain, array)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([[1], [2, 3]], "inhomogeneous"),
        ([2**63, -1], "64-bit"),
        ([2**64], "64-bit"),
        (-(2**63) - 1, "64-bit"),
        (np.ma.array([1.0, 2.0], mask=[False, True]), "without masked elements"),
        (np.ma.masked, "without masked elements"),
    ],
)
def test_to_array_ragged_or_too_large_raises(value: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        to_array(value)


@pytest.mark.parametrize("dtype", [np.complex64, "datetime64[s]", [("a", "f4")]])
def test_datatype_of_foreign_dtype_raises(dtype: Any) -> None:
    with pytest.raises(TypeError, match="no v2 datatype"):
        datatype_of(np.zeros(1, dtype))


@pytest.mark.parametrize("name", [name for name in DATATYPES if name not in ("BF16", "BYTES")])
def test_cast_own_dtype_is_the_same_array(name: str) -> None:
    array = np.zeros(3, by_name(name).dtype)
    assert cast(array, by_name(name)) is array


@given(data=st.data(), source=st.sampled_from(SOURCES), target=st.sampled_from([*INTEGERS, "BOOL"]))
def test_cast_integers_keep_every_value_or_raise(data: st.DataObject, source: str, target: str) -> None:
    info = np.iinfo(source)
    values = data.draw(st.lists(st.integers(int(info.min), int(info.max)), max_size=4))
    low, high = (0, 1) if target == "BOOL" else _limits(target)
    array = np.array(values, source)
    if all(low <= value <= high for value in values):
        assert [int(item) for item in cast(array, by_name(target))] == values
    else:
        with pytest.raises(ValueError, match=target):
            cast(array, by_name(target))


@given(st.lists(st.floats(width=64), max_size=4), st.sampled_from(INTEGERS))
def test_cast_floats_to_integers_keep_whole_numbers_or_raise(values: list[float], target: str) -> None:
    low, high = _limits(target)
    array = np.array(values, np.float64)
    if all(value.is_integer() and low <= int(value) <= high for value in values):
        assert cast(array, by_name(target)).tolist() == [int(value) for value in values]
    else:
        with pytest.raises(ValueError, match=target):
            cast(array, by_name(target))


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4), st.sampled_from(["FP16", "FP32", "FP64"]))
def test_cast_integers_to_floats_keep_every_value_or_raise(values: list[int], target: str) -> None:
    wide = by_name(target).dtype.type
    with np.errstate(over="ignore"):
        representable = [np.isfinite(wide(value)) and int(wide(value)) == value for value in values]
    if all(representable):
        assert [int(item) for item in cast(np.array(values, np.int64), by_name(target))] == values
    else:
        with pytest.raises(ValueError, match="can't hold"):
            cast(np.array(values, np.int64), by_name(target))


def _limits(name: str) -> tuple[int, int]:
    info = np.iinfo(by_name(name).dtype)
    return int(info.min), int(info.max)


def test_cast_float_to_narrower_float_rounds() -> None:
    converted = cast(np.array([0.1, np.nan, np.inf]), by_name("FP32"))
    np.testing.assert_array_equal(converted, np.array([0.1, np.nan, np.inf], np.float32))


@pytest.mark.parametrize(("value", "target"), [(1e300, "FP32"), (70000.0, "FP16"), (1e300, "BF16"), (3.4e38, "BF16")])
def test_cast_float_out_of_range_raises(value: float, target: str) -> None:
    with pytest.raises(ValueError, match=f"^{target} can't hold .*: out of range"):
        cast(np.array([value]), by_name(target))


@pytest.mark.parametrize("target", ["FP16", "FP32", "FP64"])
def test_cast_bools_become_numbers(target: str) -> None:
    assert cast(np.array([True, False]), by_name(target)).tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    "values",
    [
        np.array([1.0, 1.00390625, -2.7, 1e-40, np.inf, -0.0], np.float32),
        np.array([256, 257, 2**24 + 1, -(2**63), 2**63 - 1]),
        np.array([65_535, 2**64 - 1], np.uint64),
        np.array([True, False]),
    ],
    ids=lambda values: values.dtype.name,
)
def test_cast_to_bf16_rounds_as_ml_dtypes_does(values: np.ndarray[Any, Any]) -> None:
    expected = values.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(cast(values, by_name("BF16")), expected.view(np.uint16))
    assert cast(expected, by_name("BF16")) is expected


@pytest.mark.parametrize("value", [[], [[]], np.zeros((2, 0), np.float32)])
def test_cast_of_an_empty_array_to_bytes_has_no_elements(value: Any) -> None:
    array = cast(to_array(value), by_name("BYTES"))
    assert (array.dtype, array.shape) == (object, np.shape(value))


def test_cast_bfloat16_array_to_fp32_is_exact() -> None:
    array = np.array([1.5, -2.0], ml_dtypes.bfloat16)
    np.testing.assert_array_equal(cast(array, by_name("FP32")), np.array([1.5, -2.0], np.float32))


@pytest.mark.parametrize(
    ("value", "named"),
    [([[1, "a"]], "'a'"), (np.array(["b", "c"]), "'b'"), (["x" * 1000], r"'x{12}\.\.\.x{13}'"), ([1, None], "None")],
)
def test_cast_names_what_is_no_number(value: Any, named: str) -> None:
    with pytest.raises(TypeError, match=f"^FP32 takes numbers, got {named}$"):
        cast(to_array(value), by_name("FP32"))


@pytest.mark.parametrize(
    ("array", "target"),
    [
        (np.array(["1"], object), "FP32"),
        (np.array(["1"]), "INT32"),
        (np.array([None], object), "INT32"),
        (np.array([1], object), "BYTES"),
        (np.array([1.0]), "BYTES"),
        (np.array([1j]), "FP32"),
        (np.array(["1"], object), "BF16"),
    ],
)
def test_cast_between_text_and_numbers_raises(array: np.ndarray[Any, Any], target: str) -> None:
    with pytest.raises(TypeError, match=r"takes (numbers|bytes or str), got"):
        cast(array, by_name(target))
