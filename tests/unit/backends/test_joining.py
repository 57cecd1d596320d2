"""Joining arrays into existing memory: the same as concatenating them, whatever their sizes and layouts."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.backends.batching import join_into
from paceline.backends.errors import ExecutionError
from paceline.backends.spec import Array


def made(dtype: str, rows: int, size: int, first: int = 0) -> Array:
    return (np.arange(first, first + rows * size) % 251).astype(dtype).reshape(rows, size)


@pytest.mark.parametrize("dtype", ["f4", "f2", "u2", "i8", "?"])
@pytest.mark.parametrize("size", [0, 1, 499, 500, 2**17, 2**18 + 1])
def test_join_into_writes_the_arrays_one_after_another(dtype: str, size: int) -> None:
    arrays = [made(dtype, 1, size), made(dtype, 2, size, 5), made(dtype, 1, size, 9)]
    target = np.full((4, size), 1, dtype)
    join_into(target, arrays)
    np.testing.assert_array_equal(target, np.concatenate(arrays))
    join_into(target[:2], arrays[1:2])
    np.testing.assert_array_equal(target[:2], arrays[1])


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_join_into_is_the_same_for_arrays_in_another_memory_layout(odd: int) -> None:
    arrays = [made("f4", 2, 600, number) for number in range(3)]
    given = [np.asfortranarray(one) if number == odd else one for number, one in enumerate(arrays)]
    target = np.zeros((6, 600), np.float32)
    join_into(target, given)
    np.testing.assert_array_equal(target, np.concatenate(arrays))
    wide = np.repeat(arrays[0], 2, axis=1)[:, ::2]
    join_into(target, [wide, *arrays[1:]])
    np.testing.assert_array_equal(target, np.concatenate(arrays))


@pytest.mark.parametrize("size", [2, 600])
@pytest.mark.parametrize("wrong", [made("f8", 1, 600), made("f4", 1, 601), made("f4", 1, 600).reshape(1, 2, 300)])
def test_join_into_of_arrays_that_do_not_fit_is_refused(size: int, wrong: Array) -> None:
    with pytest.raises(ExecutionError, match="requests of one batch don't fit together"):
        join_into(np.zeros((2, size), np.float32), [made("f4", 1, size), wrong])
    with pytest.raises(ExecutionError, match="requests of one batch don't fit together"):
        join_into(np.zeros((1, size), np.float32), [wrong])
