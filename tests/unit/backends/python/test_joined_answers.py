"""Answers of a batch that travel together, joined by rows, if they are alike."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.backends.python.triton.model import joined
from paceline.backends.spec import Array

TWO = ((0, 1), "", -1)
ROW, ROWS, FLAT, SCALAR = np.ones((1, 4)), np.ones((2, 4)), np.ones(1), np.array(1.0)


def test_answers_that_differ_in_rows_are_joined() -> None:
    columns = joined([TWO, TWO], [[ROW, FLAT], [ROWS, np.ones(2)]])
    assert columns is not None
    assert [one.shape for one in columns] == [(3, 4), (3,)]


@pytest.mark.parametrize(
    "second",
    [[ROW, SCALAR], [SCALAR, FLAT], [ROWS, FLAT], [ROW.astype(np.float32), FLAT], [np.ones((1, 5)), FLAT], [ROW]],
    ids=["scalar", "first", "rows", "datatype", "shape", "fewer"],
)
def test_answer_unlike_others_keeps_them_apart(second: list[Array]) -> None:
    assert joined([TWO, TWO], [[ROW, FLAT], second]) is None
    assert joined([TWO, TWO], [second, [ROW, FLAT]]) is None


def test_answers_with_parameters_are_not_joined() -> None:
    said = ((0, 1), "{}", -1)
    assert joined([said, said], [[ROW, FLAT], [ROW, FLAT]]) is None
    assert joined([TWO, said], [[ROW, FLAT], [ROW, FLAT]]) is None
