"""JSON Lines: types by the first lines, and what is wrong with lines, which is their problem alone."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.server.bulk.json_files import JsonLines
from paceline.server.bulk.sources import find_source
from paceline.server.bulk.text_files import parse_rows
from paceline.server.bulk.values import BadRow, Source
from tests.unit.server.bulk import reading

BIG = 2**63 + 5


def source(folder: Path, *lines: str | bytes, name: str = "a.jsonl") -> Source:
    (folder / name).write_bytes(b"\n".join(line.encode() if isinstance(line, str) else line for line in lines))
    return find_source([str(folder / name)])


@pytest.mark.parametrize(
    ("lines", "kind"),
    [
        (["1", "2"], pa.int64()),
        (["1", "2.5"], pa.float64()),
        (["true", "null"], pa.bool_()),
        (['"2020-01-01"'], pa.string()),
        (["null"], pa.string()),
        ([str(BIG), "1"], pa.uint64()),
        ([str(2**70)], pa.float64()),
        (["[]", "[[1, 2], [null]]"], pa.list_(pa.list_(pa.int64()))),
        (["[1]", "[0.5]"], pa.list_(pa.float64())),
        (['{"p": 1}', '{"q": []}'], pa.struct({"p": pa.int64(), "q": pa.list_(pa.string())})),
        (['"text"', "1", "2"], pa.int64()),
        (["1", "[1]", "null", "[2]"], pa.list_(pa.int64())),
    ],
)
def test_first_lines_give_the_type(tmp_path: Path, lines: list[str], kind: pa.DataType) -> None:
    assert source(tmp_path, *(f'{{"x": {line}}}' for line in lines)).schema == pa.schema({"x": kind})


def test_keys_may_differ_between_lines(tmp_path: Path) -> None:
    found = source(tmp_path, '{"b": [1]}', "{}", '{"a": "x"}', '{"a": null, "b": null}', '{"a": "y", "b": []}')
    assert found.schema.names == ["b", "a"]
    none = {"b": None, "a": None}
    assert reading.rows(found, reading.fixed()) == [
        none | {"b": [1]},
        none,
        none | {"a": "x"},
        none,
        {"b": [], "a": "y"},
    ]


def test_large_numbers_keep_their_value(tmp_path: Path) -> None:
    found = source(tmp_path, f'{{"x": {BIG}}}', '{"x": 1}')
    assert reading.rows(found, reading.fixed()) == [{"x": BIG}, {"x": 1}]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"x": 1', "not JSON: Expecting ',' delimiter at character 8"),
        ("nonsense", "not JSON: Expecting value at character 1"),
        ("   ", "not JSON: Expecting value at character 1"),
        ('{"x": 1} {"x": 2}', "not JSON: Extra data at character 10"),
        ("[1]", "expected an object, got [1]"),
        ('{"x": 1.5}', "column 'x': expected int64, got 1.5"),
        ('{"x": "1"}', "column 'x': expected int64, got \"1\""),
        ('{"x": [1]}', "column 'x': expected int64, got [1]"),
        ('{"x": true}', "column 'x': expected int64, got true"),
        (f'{{"x": {BIG}}}', f"column 'x': expected int64, got {BIG}"),
        ('{"x": 1e2}', "column 'x': expected int64, got 100.0"),
        ('{"l": [["a"]]}', "column 'l': expected list<item: list<item: int64>>, got [[\"a\"]]"),
        ('{"l": [[1], 2]}', "column 'l': expected list<item: list<item: int64>>, got [[1], 2]"),
        ('{"s": 3}', "column 's': expected string, got 3"),
        ('{"x": 1, "x": 2}', "Column(/x) was specified twice"),
        (b'{"s": "\xff"}', "not UTF-8: invalid start byte at byte 7"),
        ('{"s": "\\ud800"}', "column 's': expected string, got \"\\ud800\""),
    ],
)
def test_broken_line_is_bad_alone(tmp_path: Path, line: str | bytes, reason: str) -> None:
    good = '{"x": 1, "l": [[1]], "s": "a"}'
    source(tmp_path, good)
    source(tmp_path, good, "", line, good, good, name="b.jsonl")
    found = find_source([str(tmp_path)])
    limits = reading.fixed(chunk_rows=3)
    assert reading.bad_rows(found, limits) == [BadRow(1, reason)]
    assert [chunk.numbers.tolist() for chunk in reading.chunks(found, limits)] == [[0], [0, 2], [3]]
    assert reading.rows(found, limits) == [json.loads(good)] * 4


def test_white_space_around_objects_is_allowed(tmp_path: Path) -> None:
    found = source(tmp_path, '\ufeff{"x": 1}\r', '  {"x": 2}\t', '{"x": 3} ', "\r", "")
    assert reading.rows(found, reading.fixed()) == [{"x": 1}, {"x": 2}, {"x": 3}]


def test_type_is_that_of_the_first_file_with_rows(tmp_path: Path) -> None:
    source(tmp_path, name="a.jsonl")
    source(tmp_path, '{"x": 1}', name="b.jsonl")
    source(tmp_path, '{"x": 0.5}', '{"x": 7}', name="c.jsonl")
    found = find_source([str(tmp_path)])
    assert reading.rows(found, reading.fixed()) == [{"x": 1}, {"x": 7}]
    assert reading.bad_rows(found, reading.fixed()) == [BadRow(0, "column 'x': expected int64, got 0.5")]


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**66), 2**66), st.floats(), st.text(max_size=3), st.just([]), st.just({})
)
LINES = st.one_of(
    st.dictionaries(st.sampled_from(["x", "l", "s", "other"]), st.one_of(VALUES, st.lists(VALUES, max_size=3))).map(
        json.dumps
    ),
    st.sampled_from(['{"x": 1', "}", "{", '{"x": [}', '{"s": "a"}{}', "", "nul"]),
)


@given(st.lists(LINES, max_size=12))
def test_line_is_bad_if_it_is_bad_alone(lines: list[str]) -> None:
    schema = pa.schema({"x": pa.int64(), "l": pa.list_(pa.float64()), "s": pa.string()})
    parser = JsonLines().parser("a.jsonl", b"", schema, schema.names)
    rows = [line.encode() + b"\n" for line in lines]
    together = parse_rows(parser, rows, 0, {})
    alone = [parse_rows(parser, [row], number, {}) for number, row in enumerate(rows)]
    assert list(together.bad) == [bad for one in alone for bad in one.bad]
    expected = [row for one in alone for row in one.table.to_pylist()]
    assert repr(together.table.to_pylist()) == repr(expected)  # NaN isn't equal to itself
