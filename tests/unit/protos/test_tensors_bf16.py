"""BF16: rounding, special values, shapes."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.protos.tensors import TensorError, bf16_from_float32, float32_from_bf16


def float32(*bits: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.array(bits, "<u4").view("<f4")


@pytest.mark.parametrize(
    ("bits", "rounded"),
    [
        (0x3F800000, 0x3F80),  # 1.0 is exact
        (0x3F807FFF, 0x3F80),  # just under half: down
        (0x3F808000, 0x3F80),  # half, even below: down
        (0x3F808001, 0x3F81),  # just over half: up
        (0x3F818000, 0x3F82),  # half, odd below: up
        (0xBF818000, 0xBF82),  # the same, negative
        (0x00000000, 0x0000),
        (0x80000000, 0x8000),
        (0x00008001, 0x0001),  # subnormal
        (0x00000001, 0x0000),
        (0x7F7FFFFF, 0x7F80),  # the largest float32 is nearer to infinity
        (0x7F7F7FFF, 0x7F7F),
        (0x7F800000, 0x7F80),
        (0xFF800000, 0xFF80),
    ],
)
def test_bf16_from_float32_each_case_rounds_to_nearest_even(bits: int, rounded: int) -> None:
    assert bf16_from_float32(float32(bits))[0] == rounded


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FA00000])
def test_bf16_from_float32_nan_stays_nan_of_the_same_sign(bits: int) -> None:
    converted = bf16_from_float32(float32(bits))
    assert np.isnan(float32_from_bf16(converted))[0]
    assert converted[0] >> 15 == bits >> 31


def test_float32_from_bf16_every_pattern_comes_back() -> None:
    patterns = np.arange(2**16, dtype="<u2")
    widened = float32_from_bf16(patterns)
    number = ~np.isnan(widened)
    np.testing.assert_array_equal(bf16_from_float32(widened)[number], patterns[number])
    assert np.count_nonzero(~number) == 2 * 127


def test_bf16_from_float32_many_values_agree_with_ml_dtypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.random.default_rng(7).integers(0, 2**32, 200_000, np.uint32).view(np.float32)
    values = values[~np.isnan(values)]
    np.testing.assert_array_equal(bf16_from_float32(values), values.astype(ml_dtypes.bfloat16).view(np.uint16))


def test_float32_from_bf16_bfloat16_of_ml_dtypes_is_accepted() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    np.testing.assert_array_equal(float32_from_bf16(np.array([1.5, -2.0], ml_dtypes.bfloat16)), [1.5, -2.0])


@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (2, 3), (1, 1, 5)])
def test_bf16_each_shape_is_kept_in_both_directions(shape: tuple[int, ...]) -> None:
    array = np.zeros(shape, np.float32)
    converted = bf16_from_float32(array)
    assert (converted.shape, converted.dtype) == (shape, np.dtype("<u2"))
    assert (float32_from_bf16(converted).shape, float32_from_bf16(converted).dtype) == (shape, np.dtype("<f4"))


def test_bf16_transposed_big_endian_array_keeps_its_values() -> None:
    array = np.arange(6, dtype=">f4").reshape(2, 3).T
    converted = bf16_from_float32(array)
    np.testing.assert_array_equal(float32_from_bf16(converted), array)
    np.testing.assert_array_equal(float32_from_bf16(converted.astype(">u2").T), array.T)


@pytest.mark.parametrize("dtype", ["<f8", "<f2", "<u4", "<i4", "O"])
def test_bf16_from_float32_other_dtype_raises_error(dtype: str) -> None:
    with pytest.raises(TensorError, match=f"expected an array of float32, got {np.dtype(dtype)}"):
        bf16_from_float32(np.zeros(1, dtype))


@pytest.mark.parametrize("dtype", ["<f4", "<i2", "<f2"])
def test_float32_from_bf16_other_dtype_raises_error(dtype: str) -> None:
    with pytest.raises(TensorError, match=f"for BF16, got {np.dtype(dtype)}"):
        float32_from_bf16(np.zeros(1, dtype))
