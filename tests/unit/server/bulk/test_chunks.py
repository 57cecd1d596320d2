"""Arrow's layouts as those that hold the same, and how large rows are, however they are sliced."""

from __future__ import annotations

import datetime

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.server.bulk.chunks import plain_columns, plain_schema, row_bytes

TEXTS = ["a", None, "bcd", "a"]
LISTS = [["a", None], [], None, ["bcd"]]
LARGE, DICTIONARY = pa.large_string(), pa.dictionary(pa.int8(), pa.string())


@pytest.mark.parametrize(
    ("values", "kind", "plain"),
    [
        (TEXTS, LARGE, pa.string()),
        (TEXTS, pa.string_view(), pa.string()),
        (TEXTS, DICTIONARY, pa.string()),
        ([b"a", None], pa.large_binary(), pa.binary()),
        ([b"a", None], pa.binary_view(), pa.binary()),
        (LISTS, pa.large_list(LARGE), pa.list_(pa.string())),
        (LISTS, pa.list_(DICTIONARY), pa.list_(pa.string())),
        ([["a", "b"], None], pa.list_(LARGE, 2), pa.list_(pa.string(), 2)),
        ([{"x": "a"}, None], pa.struct({"x": LARGE}), pa.struct({"x": pa.string()})),
        ([[("a", 1)], None], pa.map_(LARGE, pa.int8()), pa.map_(pa.string(), pa.int8())),
        ([1, None], pa.bool8(), pa.int8()),
        ([datetime.date(2020, 1, 1), None], pa.date32(), pa.date32()),
    ],
    ids=str,
)
def test_layout_becomes_a_plain_one(values: list[object], kind: pa.DataType, plain: pa.DataType) -> None:
    batch = pa.record_batch({"x": pa.array(values, kind)})
    schema = plain_schema(batch.schema)
    assert schema == pa.schema({"x": plain})
    for part in (batch, batch.slice(1)):
        assert plain_columns(part, schema).to_pylist() == part.to_pylist()


@pytest.mark.parametrize(
    ("values", "kind", "sizes"),
    [
        ([1, None], pa.int64(), [8, 8]),
        ([True, None], pa.bool_(), [1, 1]),
        ([None, None], pa.null(), [0, 0]),
        (["abc", None, ""], pa.string(), [7, 4, 4]),
        ([[1, 2], None, []], pa.list_(pa.int32()), [12, 4, 4]),
        ([[["a", "bc"], []], None], pa.list_(pa.list_(pa.string())), [4 + 4 + 5 + 6 + 4, 4]),
        ([[[1, 2]], [[3, 4]]], pa.list_(pa.list_(pa.int16(), 2), 1), [4, 4]),
        ([["a", "bcd"]], pa.list_(pa.string(), 2), [5 + 7]),
        ([{"x": 1, "y": "ab"}], pa.struct({"x": pa.int8(), "y": pa.string()}), [1 + 6]),
        ([[("a", 1), ("b", 2)], []], pa.map_(pa.string(), pa.int8()), [4 + 2 * (5 + 1), 4]),
    ],
    ids=str,
)
def test_row_has_the_bytes_of_its_values(values: list[object], kind: pa.DataType, sizes: list[int]) -> None:
    assert row_bytes(pa.record_batch({"x": pa.array(values, kind)})).tolist() == sizes


NESTED = pa.struct({"l": pa.list_(pa.list_(pa.string())), "f": pa.list_(pa.string(), 2), "n": pa.int32()})
TEXT = st.none() | st.text(max_size=3)
ROW = st.none() | st.fixed_dictionaries(
    {
        "l": st.none() | st.lists(st.none() | st.lists(TEXT, max_size=3), max_size=3),
        "f": st.none() | st.lists(TEXT, min_size=2, max_size=2),
        "n": st.none() | st.integers(-9, 9),
    }
)


@given(st.lists(ROW, max_size=9), st.data())
def test_row_is_as_large_in_any_slice(rows: list[object], data: st.DataObject) -> None:
    batch = pa.record_batch({"x": pa.array(rows, NESTED)})
    begin = data.draw(st.integers(0, len(rows)))
    whole, part = row_bytes(batch), row_bytes(batch.slice(begin))
    np.testing.assert_array_equal(part, whole[begin:])


@pytest.mark.parametrize(
    "column",
    [
        pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1])]),
        pa.array([["a"]], pa.list_view(pa.string())),
        pa.array(["a"], pa.run_end_encoded(pa.int32(), pa.string())),
    ],
    ids=lambda column: str(column.type),
)
def test_other_layouts_are_refused_by_type(column: pa.Array) -> None:
    batch = pa.record_batch({"x": column})
    schema = plain_schema(batch.schema)
    with pytest.raises(pa.ArrowInvalid, match=r"columns of type .* aren't supported"):
        row_bytes(plain_columns(batch, schema))
