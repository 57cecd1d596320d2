"""JSON Lines of Arrow's columns: the witness is Python's own reader."""

from __future__ import annotations

import json
from datetime import datetime
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.server.bulk import writers as module
from paceline.server.bulk.writers import json_lines


def read_back(column: pa.Array) -> list[object]:
    """What a reader finds, by line."""
    lines = b"".join(json_lines(pa.record_batch([column], names=["a"]))).decode().split("\n")
    assert lines.pop() == ""
    return [json.loads(line, parse_constant=pytest.fail)["a"] for line in lines]


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([1, None, -(2**63)]), [1, None, -(2**63)]),
        (pa.array([2**64 - 1], pa.uint64()), [2**64 - 1]),
        (pa.array([True, False, None]), [True, False, None]),
        (pa.array([0.1, 1.0, 1e-7, 3.4e38, None], pa.float32()), [0.1, 1.0, 1e-7, 3.4e38, None]),
        (pa.array([0.1, 1e300, 123456789.0]), [0.1, 1e300, 123456789.0]),
        (pa.array([0.5, 65504], pa.float16()), [0.5, 65504.0]),
        (pa.array([float("nan"), float("inf"), -float("inf")]), [None] * 3),
        (pa.array(['a"b\\', "é\n\x00", "", None]), ['a"b\\', "é\n\x00", "", None]),
        (pa.array([b"\xff\x00", b"", None]), ["/wA=", "", None]),
        (pa.array([[[1], []], [], None]), [[[1], []], [], None]),
        (pa.array([[1, 2], None, [3, None]], pa.list_(pa.int8(), 2)), [[1, 2], None, [3, None]]),
        (pa.array([{"x": 1, "y": ["a"]}, None]), [{"x": 1, "y": ["a"]}, None]),
        (
            pa.array([[("a", 1), ('"', None)], None, [], [("c", 3)]], pa.map_(pa.string(), pa.int64())),
            [{"a": 1, '"': None}, None, {}, {"c": 3}],
        ),
        (pa.array([[(1, [2]), (3, [])], []], pa.map_(pa.int8(), pa.list_(pa.int8()))), [[[1, [2]], [3, []]], []]),
        (pa.array([1, None, -(2**62)], pa.duration("ns")), [1, None, -(2**62)]),
        (pa.array([datetime(2020, 1, 2), None]), ["2020-01-02 00:00:00", None]),
        (pa.array([Decimal("1.50")]), ["1.50"]),
        (pa.nulls(2), [None, None]),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_each_type_reads_back(column: pa.Array, expected: list[object]) -> None:
    assert read_back(column) == expected
    assert read_back(column.slice(1)) == expected[1:]


def test_floats_stay_floats() -> None:
    assert [type(value) for value in read_back(pa.array([1.0, 0.5, -0.0]))] == [float] * 3


@given(st.lists(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False)), min_size=1))
def test_single_precision_reads_back_exactly(rows: list[list[float]]) -> None:
    found = read_back(pa.array(rows, pa.list_(pa.float32())))
    assert [np.asarray(row, np.float32).tobytes() for row in found] == [
        np.asarray(row, np.float32).tobytes() for row in rows
    ]


@given(st.lists(st.text()))
def test_texts_read_back_exactly(texts: list[str]) -> None:
    assert read_back(pa.array(texts, pa.string())) == texts


def test_names_of_columns_are_escaped() -> None:
    rows = pa.record_batch([pa.array([1]), pa.array([2])], names=['we"ird', "ö"])
    assert b"".join(json_lines(rows)) == '{"we\\"ird":1,"ö":2}\n'.encode()


def test_many_bytes_are_written_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = pa.record_batch({"a": list(range(100)), "b": [["x"] * (number % 5) for number in range(100)]})
    (whole,) = json_lines(rows)
    monkeypatch.setattr(module, "_AT_ONCE_BYTES", 50)
    pieces = list(json_lines(rows))
    assert len(pieces) > 10
    assert b"".join(pieces) == whole
