"""What a job's columns may be, what is said of those that may not, and of rows that don't fit."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from paceline.backends.lengths import Lengths
from paceline.backends.spec import Array, Length, ModelSpec, TensorSpec
from paceline.clients.description import Batching, ModelDescription
from paceline.clients.messages import TensorMetadata
from paceline.protos.tensors import float32_from_bf16
from paceline.server.bulk.columns import Columns
from paceline.server.bulk.rows import Rows
from paceline.server.bulk.values import BadRow, BulkError, Chunk, Computed, Failed, Results, Table

Shape = tuple[int, ...]
_BATCHING = Batching(8, True, (), 0, 0, 0, ())
_SCHEMA = pa.schema(
    {"ids": pa.list_(pa.int64()), "text": pa.string(), "score": pa.float32(), "when": pa.timestamp("s")}
)


def _model(*inputs: tuple[str, str, Shape], outputs: tuple[tuple[str, str, Shape], ...] = ()) -> ModelDescription:
    given, made = (tuple(TensorMetadata(*one) for one in side) for side in (inputs, outputs or inputs))
    return ModelDescription("m", ("1",), "", given, made, optional_inputs=("maybe",), batching=_BATCHING)


def _chunk(**columns: pa.Array) -> Chunk:
    table = pa.record_batch(columns)
    return Chunk(table, np.arange(len(table)) + 10)


def _rows(values: list[Any], kind: pa.DataType, datatype: str, dims: Shape) -> Rows:
    chunk = _chunk(a=pa.array(values, kind))
    return Columns(_model(("x", datatype, (-1, *dims))), chunk.table.schema, map={"x": "a"}).rows(chunk)


def _table(outputs: Array, datatype: str, dims: Shape, **options: Any) -> Table:
    chunk = _chunk(x=pa.array(range(len(outputs))))
    columns = Columns(
        _model(("x", "INT64", (-1,)), outputs=(("y", datatype, (-1, *dims)),)), chunk.table.schema, **options
    )
    rows = columns.rows(chunk)
    return columns.table(chunk, rows, Results([Computed(rows.good, {"y": outputs}, ())]))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {},
            r"input 'x' \(INT64, a row has shape \[-1\]\).* --map x=COLUMN .*ids: list<item: int64>, text: string",
        ),
        ({"map": {"x": "idz"}}, r"'idz': expected one of the input's \(ids: .*\), got no such column"),
        ({"map": {"y": "ids"}}, r"--map y=ids: expected an input of the model \(x\), got 'y'"),
        ({"map": {"x": "text"}}, r"column 'text'.*input 'x': expected lists, 1 deep, of numbers.*, got string"),
        (
            {"map": {"x": "text,ids"}},
            r"'text' for input 'x': expected numbers or booleans \(INT64 of shape \[\]\), got",
        ),
        ({"map": {"x": "when"}}, r"got timestamp\[s\]"),
        ({"map": {"x": "ids"}, "keep": ["title"]}, r"column 'title': expected one of"),
        ({"map": {"x": "ids"}, "outputs": {"e": "z"}}, r"--output e=z: expected an output of the model \(x, t\)"),
        ({"map": {"x": "ids"}, "keep": ["text"], "outputs": {"text": "t"}}, r"'text'.*--output NAME=t"),
        ({"map": {"x": "ids"}, "binary": ["x"]}, r"--binary x: expected .* BYTES \(t\)"),
    ],
)
def test_impossible_columns_are_refused_early(options: dict[str, Any], text: str) -> None:
    model = _model(("x", "INT64", (-1, -1)), outputs=(("x", "INT64", (-1, -1)), ("t", "BYTES", (-1,))))
    with pytest.raises(BulkError, match=text):
        Columns(model, _SCHEMA, **options)


def test_tensors_without_rows_are_refused() -> None:
    with pytest.raises(BulkError, match=r"tensor 'ids': expected a batch axis.*got shape \[2\]"):
        Columns(_model(("ids", "INT64", (2,))), _SCHEMA)


def test_ambiguous_column_name_is_refused() -> None:
    schema = pa.schema([pa.field("x", pa.int64()), pa.field("x", pa.int64())])
    with pytest.raises(BulkError, match="got 2 of this name"):
        Columns(_model(("x", "INT64", (-1,))), schema)


def test_optional_input_without_column_is_left_out() -> None:
    columns = Columns(_model(("ids", "INT64", (-1, -1)), ("maybe", "INT64", (-1,))), _SCHEMA, keep=["text"])
    assert columns.names == ("ids", "text")


@pytest.mark.parametrize(
    ("value", "kind", "datatype", "dims", "reason"),
    [
        (None, pa.int64(), "INT64", (), "expected INT64 of shape [], got null"),
        ([1, None], pa.list_(pa.int64()), "FP32", (-1,), "expected FP32 of shape [-1], got a null in it"),
        ([1, 2], pa.list_(pa.int64()), "INT64", (3,), "expected INT64 of shape [3], got shape [2]"),
        (
            [[1], [2]],
            pa.list_(pa.list_(pa.int8())),
            "INT8",
            (-1, 2),
            "expected INT8 of shape [-1, 2], got shape [2, 1]",
        ),
        ([[1], []], pa.list_(pa.list_(pa.int8())), "INT8", (-1, -1), "got lists of different sizes in axis 1"),
        ([1, 2, 3], pa.list_(pa.int64()), "INT64", (2, 2), "expected INT64 of shape [2, 2], or 4 elements, got 3"),
        (2.0**53, pa.float64(), "INT64", (), "float64, which can't tell 9007199254740992 from others"),
        (256, pa.int64(), "UINT8", (), "expected values that are UINT8 without loss: UINT8 takes 0 to 255, got 256"),
        (0.5, pa.float64(), "INT32", (), "INT32 takes whole numbers"),
        (1e39, pa.float64(), "FP32", (), "out of range"),
        (2**24 + 1, pa.int64(), "FP32", (), "FP32 can't hold 16777217"),
        (2, pa.int8(), "BOOL", (), "BOOL takes 0 to 1, got 2"),
        (None, pa.string(), "BYTES", (), "expected BYTES of shape [], got null"),
    ],
)
def test_row_at_fault_says_why(value: Any, kind: pa.DataType, datatype: str, dims: Shape, reason: str) -> None:
    fitting = b"a" if datatype == "BYTES" else np.ones([max(1, dim) for dim in dims], np.int8).tolist()
    if reason.endswith("got 3"):
        fitting = [1, 1, 1, 1]
    if isinstance(value, list) and isinstance(value[0], list):
        fitting = [[1, 1]]
    rows = _rows([fitting, value, fitting], kind, datatype, dims)
    assert rows.good.tolist() == [0, 2]
    (bad,) = rows.bad
    assert bad.number == 11
    assert bad.reason.startswith("column 'a' (input 'x'): ")
    assert reason in bad.reason


def test_uniform_numbers_are_never_copied() -> None:
    values = np.arange(12, dtype=np.float32)
    column = pa.FixedSizeListArray.from_arrays(pa.array(values), 3)
    rows = Columns(_model(("x", "FP32", (-1, 3))), pa.schema({"x": column.type})).rows(_chunk(x=column))
    taken = rows.take(np.array([1, 2]), ())["x"]
    assert np.shares_memory(taken, values)
    assert taken.tolist() == [[3, 4, 5], [6, 7, 8]]


@pytest.mark.parametrize(("value", "kind"), [(7, pa.int64()), ([7], pa.list_(pa.int64()))])
def test_single_values_may_be_rows(value: Any, kind: pa.DataType) -> None:
    rows = _rows([value], kind, "FP32", (1, 1))
    assert rows.take(rows.good, ())["x"].tolist() == [[[7.0]]]


@pytest.mark.parametrize(("value", "kind"), [(2.0**60, pa.float64()), (2.0**30, pa.float32()), (300, pa.uint16())])
def test_any_numbers_may_be_bf16(value: float, kind: pa.DataType) -> None:
    rows = _rows([value], kind, "BF16", ())
    assert float32_from_bf16(rows.take(rows.good, ())["x"]).tolist() == [value]


@pytest.mark.parametrize(("datatype", "values"), [("FP32", [[1, 0.5], [2, 1.5]]), ("BYTES", [["a", "b"], ["c", "d"]])])
def test_columns_side_by_side_are_rows(datatype: str, values: list[list[Any]]) -> None:
    first, second = (pa.array(column) for column in zip(*values, strict=True))
    for dims in ((-1,), (2,), (1, 2)):
        chunk = _chunk(a=first, b=second)
        columns = Columns(_model(("x", datatype, (-1, *dims))), chunk.table.schema, map={"x": "b,a"})
        rows = columns.rows(chunk)
        flat = [b.encode() if isinstance(b, str) else b for row in values for b in reversed(row)]
        assert rows.take(rows.good, ())["x"].ravel().tolist() == flat
        assert rows.take(rows.good, ())["x"].shape == (2, *dims[:-1], 2)


def test_fault_names_its_own_column() -> None:
    chunk = _chunk(a=pa.array([1, 1]), b=pa.array([1, None]))
    (bad,) = Columns(_model(("x", "INT64", (-1, 2))), chunk.table.schema, map={"x": "a,b"}).rows(chunk).bad
    assert (bad.number, bad.reason.partition(":")[0]) == (11, "column 'b' (input 'x')")


def test_too_few_columns_are_refused() -> None:
    with pytest.raises(BulkError, match=r"as many columns as a row has elements.*\[3\], got 2: a, b"):
        Columns(_model(("x", "INT64", (-1, 3))), pa.schema({"a": pa.int64(), "b": pa.int64()}), map={"x": "a,b"})


def test_large_rows_are_taken_anywhere() -> None:
    values = [[float(row)] * (5000 + row % 2) for row in range(4)]
    rows = _rows(values, pa.list_(pa.float32()), "FP32", (-1,))
    assert rows.take(np.array([3, 1]), ())["x"].tolist() == [values[3], values[1]]


def _filled() -> tuple[Columns, Chunk]:
    """Two inputs, whose rows have one length."""
    names, axes = ("ids", "mask"), ((0, 1), (1, 1))
    specs = tuple(TensorSpec(name, "INT64", (-1,), fill=number) for number, name in enumerate(names))
    spec = ModelSpec(specs, specs, batched=True, lengths=(Length("words", axes, axes),))
    kind = pa.list_(pa.int64())
    chunk = _chunk(ids=pa.array([[1], [2, 3, 4], [5]], kind), mask=pa.array([[9], [9, 9, 9], [9, 9]], kind))
    model = _model(*((name, "INT64", (-1, -1)) for name in names))
    return Columns(model, chunk.table.schema, lengths=Lengths(spec)), chunk


def test_shorter_rows_are_filled_up() -> None:
    columns, chunk = _filled()
    rows = columns.rows(chunk)
    sizes = rows.common_sizes(rows.good)
    taken = rows.take(np.array([1, 0]), sizes)
    assert taken["ids"].tolist() == [[2, 3, 4], [1, 0, 0]]
    assert taken["mask"].tolist() == [[9, 9, 9], [9, 1, 1]]
    table = columns.table(chunk, rows, Results([Computed(np.array([1, 0]), taken, sizes)]))
    assert table.batch.column("ids").to_pylist() == [[1], [2, 3, 4]]


def test_row_of_two_lengths_is_bad() -> None:
    columns, chunk = _filled()
    (bad,) = columns.rows(chunk).bad
    assert bad == BadRow(12, "expected one size in the axes of length 'words', got ids[0]: 1, mask[0]: 2")


def test_outputs_of_other_lengths_are_bad() -> None:
    columns, chunk = _filled()
    rows = columns.rows(chunk)
    outputs = {"ids": np.zeros((2, 3), np.int64), "mask": np.zeros((2, 2), np.int64)}
    table = columns.table(chunk, rows, Results([Computed(rows.good, outputs, (3,))]))
    assert {bad.reason for bad in table.bad[:2]} == {"output 'mask': expected shape [2, 3], got [2, 2]"}


def test_other_bytes_than_text_need_binary() -> None:
    outputs = np.array([b"good", b"\xff", "é".encode()], object)
    text = _table(outputs, "BYTES", ())
    assert text.batch.column("y").to_pylist() == ["good", "é"]
    (bad,) = text.bad
    assert bad.number == 11
    assert "output 'y': expected text in UTF-8" in bad.reason
    assert bad.reason.endswith("--binary y")
    binary = _table(outputs, "BYTES", (), binary=["y"])
    assert (binary.batch.column("y").to_pylist(), binary.bad) == ([*outputs], [])


@pytest.mark.parametrize(
    ("outputs", "reason"),
    [
        (np.zeros((2, 3), np.float32), r"output 'y': expected shape \[2, 2\], got \[2, 3\]"),
        (np.zeros((2, 2), np.float64), "output 'y': expected FP32, got an array of float64"),
    ],
)
def test_outputs_against_the_metadata_are_bad(outputs: Array, reason: str) -> None:
    table = _table(outputs, "FP32", (2,))
    assert table.batch.num_rows == 0
    assert [bad.number for bad in table.bad] == [10, 11]
    assert all(re.fullmatch(reason, bad.reason) for bad in table.bad)


def test_bad_rows_of_all_kinds_are_listed() -> None:
    chunk = Chunk(pa.record_batch({"x": pa.array([1, None, 3])}), np.array([1, 2, 3]), (BadRow(0, "unreadable"),))
    columns = Columns(_model(("x", "INT64", (-1,))), chunk.table.schema)
    rows = columns.rows(chunk)
    results = Results([Computed(np.array([2]), {"x": np.array([9])}, ())], [Failed(0, "poisoned")])
    table = columns.table(chunk, rows, results)
    assert table.batch.to_pydict() == {"x": [9]}
    assert [bad.number for bad in table.bad] == [0, 1, 2]


def test_results_that_miss_rows_are_refused() -> None:
    chunk = _chunk(x=pa.array([1, 2]))
    columns = Columns(_model(("x", "INT64", (-1,))), chunk.table.schema)
    results = Results([Computed(np.array([0]), {"x": np.array([1])}, ())])
    with pytest.raises(ValueError, match="each good row"):
        columns.table(chunk, columns.rows(chunk), results)


def test_types_come_from_the_model_alone() -> None:
    outputs = (
        *(("f", "FP16", (-1, 3, -1)), ("b", "BF16", (-1,)), ("t", "BYTES", (-1, 2)), ("raw", "BYTES", (-1,))),
        ("o", "BOOL", (-1, -1, 2)),
    )
    model = _model(("ids", "INT64", (-1, -1)), outputs=outputs)
    schema = Columns(model, _SCHEMA, keep=["score"], binary=["raw"]).output_schema
    assert dict(zip(schema.names, schema.types, strict=True)) == {
        "score": pa.float32(),
        "f": pa.list_(pa.list_(pa.float16()), 3),
        "b": pa.float32(),
        "t": pa.list_(pa.string(), 2),
        "raw": pa.binary(),
        "o": pa.list_(pa.list_(pa.bool_(), 2)),
    }
