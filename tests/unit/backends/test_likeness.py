"""When two results are the same but for rounding, if they are too large to be compared at once."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.backends.likeness import alike
from paceline.backends.spec import Array, TensorSpec

COLUMNS = 3 << 20
"""Of which a third is compared at a time."""


def _apart(datatype: str, one: dict[int, float], two: dict[int, float]) -> bool:
    """Whether two rows of ones that have other numbers in some columns are told apart."""
    return not alike(TensorSpec("x", datatype, (-1, COLUMNS)), _row(datatype, one), _row(datatype, two))


def _row(datatype: str, numbers: dict[int, float]) -> Array:
    row = np.ones((1, COLUMNS), np.float32)
    for column, number in numbers.items():
        row[0, column] = number
    return (row.view(np.uint32) >> 16).astype(np.uint16) if datatype == "BF16" else row.astype(datatype.lower())


@pytest.mark.parametrize("datatype", ["FLOAT16", "FLOAT32", "BF16", "INT32"])
@pytest.mark.parametrize("column", [0, COLUMNS // 2, COLUMNS - 1])
def test_one_different_number_tells_results_apart(datatype: str, column: int) -> None:
    assert not _apart(datatype, {}, {})
    assert _apart(datatype, {}, {column: 2})


@pytest.mark.parametrize(("large", "small"), [(0, COLUMNS - 1), (COLUMNS - 1, 0), (5, 6)])
def test_larger_numbers_excuse_smaller_ones_anywhere(large: int, small: int) -> None:
    rounded = {large: 1000.0}, {large: 1004.0}
    for apart, told_apart in ((30, False), (50, True)):
        one, two = ({**row, small: number} for row, number in zip(rounded, (100.0, 100.0 + apart), strict=True))
        assert _apart("FLOAT32", one, two) == told_apart
