"""CSV: types by the first rows, quotes and line ends of all kinds, and what is wrong with rows."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.server.bulk.csv_files import Csv
from paceline.server.bulk.sources import find_source
from paceline.server.bulk.text_files import parse_rows
from paceline.server.bulk.values import BadRow, BulkError, Source
from tests.unit.server.bulk import reading


def source(folder: Path, text: str | bytes, name: str = "a.csv") -> Source:
    (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
    return find_source([str(folder / name)])


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["1", "-2", " 3"], pa.int64()),
        (["1", "", "NA"], pa.int64()),
        (["9223372036854775807"], pa.int64()),
        (["9223372036854775808"], pa.string()),
        (["1", "0.5", "nan", "1e3"], pa.float64()),
        (["true", "False"], pa.bool_()),
        (["01234", "5"], pa.string()),
        (["0", "0.5"], pa.float64()),
        (["0x1f"], pa.string()),
        (["2020-01-01"], pa.string()),
        (["", "null"], pa.string()),
        (["1", "one"], pa.string()),
        (["1"] * 9 + ["one"], pa.int64()),
        (["1"] * 99 + ["0.5"], pa.float64()),
    ],
)
def test_first_rows_give_the_type(tmp_path: Path, values: list[str], kind: pa.DataType) -> None:
    assert source(tmp_path, "".join(f"{value},\n" for value in ["x", *values])).schema.field("x").type == kind


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("start", ["", "\ufeff", "\n\n"])
@pytest.mark.parametrize("last", ["", "\n", "\n\n\n"])
def test_line_ends_of_all_kinds_are_read(tmp_path: Path, end: str, start: str, last: str) -> None:
    text = f'{start}n,"text of it"\n1,a\n\n2,"b\n""c"", d"\n3,{last}'.replace("\n", end)
    assert reading.rows(source(tmp_path, text), reading.fixed(unit_rows=1)) == [
        {"n": 1, "text of it": "a"},
        {"n": 2, "text of it": f'b{end}"c", d'},
        {"n": 3, "text of it": ""},
    ]


def test_stray_quote_is_text(tmp_path: Path) -> None:
    found = source(tmp_path, 'n,size\n1,5" disk\n2,"3"" disk"\n3,x""y"\n4,"a"b\n')
    assert [row["size"] for row in reading.rows(found, reading.fixed(unit_rows=1))] == [
        '5" disk',
        '3" disk',
        'x""y"',
        "ab",
    ]


def test_columns_come_as_asked(tmp_path: Path) -> None:
    found = source(tmp_path, "a,b,c\n1,x,0.5\n")
    (chunk,) = reading.chunks(found, reading.fixed(), ["c", "a"])
    assert chunk.table.to_pylist() == [{"c": 0.5, "a": 1}]
    assert chunk.table.schema.names == ["c", "a"]


def test_tabs_separate_fields_of_tsv(tmp_path: Path) -> None:
    assert reading.rows(source(tmp_path, "a\tb\n1\tx,y\n", "a.tsv"), reading.fixed()) == [{"a": 1, "b": "x,y"}]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("1", "expected 3 fields, as the header has; got 1"),
        ("1,a", "expected 3 fields, as the header has; got 2"),
        ("1,a,2,", "expected 3 fields, as the header has; got 4"),
        ("1,a,x", "column 'f': expected double, got 'x'"),
        ("1.5,a,2", "column 'n': expected int64, got '1.5'"),
        ("9223372036854775808,a,2", "column 'n': expected int64, got '9223372036854775808'"),
        ('"a\nb",a,2', "column 'n': expected int64, got 'a\\nb'"),
        ("b" * 99 + ",a,2", "column 'n': expected int64, got '" + "b" * 60 + "…'"),
        (b"1,\xff,2", "not UTF-8: invalid start byte at byte 2"),
        ('"1,a,2', "a quoted field begins that doesn't end"),
    ],
)
def test_broken_row_is_bad_alone(tmp_path: Path, row: str | bytes, reason: str) -> None:
    broken = row.encode() if isinstance(row, str) else row
    source(tmp_path, "n,s,f\n1,a,0.5\n")
    source(tmp_path, b"n,s,f\n1,a,0.5\n2,b,1.5\n\n" + broken + b"\n3,c,2.5\n4,d,3.5", "b.csv")
    found = find_source([str(tmp_path)])
    limits = reading.fixed(chunk_rows=4)
    assert reading.bad_rows(found, limits) == [BadRow(2, reason)]
    assert [chunk.numbers.tolist() for chunk in reading.chunks(found, limits)] == [[0], [0, 1, 3], [4]]
    assert [row["s"] for row in reading.rows(found, limits)] == ["a", "a", "b", "c", "d"]


def test_quote_that_never_ends_costs_one_row(tmp_path: Path) -> None:
    found = source(tmp_path, 'n,s\n1,a\n2,"b\n3,c\n4,d\n')
    assert reading.bad_rows(found, reading.fixed()) == [BadRow(1, "a quoted field begins that doesn't end")]
    assert [row["s"] for row in reading.rows(found, reading.fixed(unit_rows=2))] == ["a", "c", "d"]


def test_files_may_have_columns_in_other_order(tmp_path: Path) -> None:
    source(tmp_path, "n,s\n1,a\n")
    source(tmp_path, "more,s,n\n,b,2\n", "b.csv")
    found = find_source([str(tmp_path)])
    assert reading.rows(found, reading.fixed()) == [{"n": 1, "s": "a"}, {"n": 2, "s": "b"}]


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("n,t", r"b\.csv: column 's' is missing: expected string, as in the first file; got columns 'n'"),
        ("n,s,n", r"b\.csv: there are several columns 'n'"),
    ],
)
def test_file_with_other_header_is_refused(tmp_path: Path, header: str, words: str) -> None:
    source(tmp_path, "n,s\n1,a\n")
    source(tmp_path, f"{header}\n", "b.csv")
    found = find_source([str(tmp_path)])
    with pytest.raises(BulkError, match=words):
        found.index(found.files[1], 10)


@pytest.mark.parametrize("text", ["", "n,s", "n,s\n\n", "\ufeff"])
def test_file_without_rows_has_no_units(tmp_path: Path, text: str) -> None:
    source(tmp_path, text)
    source(tmp_path, "n,s\n1,a\n", "b.csv")
    found = find_source([str(tmp_path)])
    assert [found.index(file, 5).rows for file in found.files] == [0, 1]
    assert found.schema == pa.schema({"n": pa.int64(), "s": pa.string()})


def test_utf16_is_refused_by_name(tmp_path: Path) -> None:
    found = source(tmp_path, "n\n1\n".encode("utf-16"))
    with pytest.raises(BulkError, match=r"a\.csv can't be read: it is UTF-16, expected UTF-8"):
        _ = found.schema


FIELDS = st.text(st.sampled_from('",\n\rab 1é'), max_size=5)


@given(
    st.lists(st.tuples(FIELDS, FIELDS), min_size=1, max_size=20),
    st.integers(1, 8),
    st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]),
)
def test_units_give_what_a_writer_wrote(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], unit_rows: int, quoting: int
) -> None:
    text = io.StringIO()
    writer = csv.writer(text, quoting=quoting)  # type: ignore[arg-type]
    writer.writerows([("é,1", "b"), *rows])
    found = source(tmp_path_factory.mktemp("csv"), text.getvalue())
    schema = found.schema
    found.schema = pa.schema([(name, pa.string()) for name in schema.names])
    assert [tuple(row.values()) for row in reading.rows(found, reading.fixed(unit_rows))] == rows


@given(
    st.lists(
        st.sampled_from(["1,a\n", "1\n", "x,a\n", '2,"b\nc"\n', "3,d,e\n", '4,"f"g\n', ",\n", '"5",h\n']), max_size=12
    )
)
def test_row_is_bad_if_it_is_bad_alone(rows: list[str]) -> None:
    schema = pa.schema({"n": pa.int64(), "s": pa.string()})
    parser = Csv(",").parser("a.csv", b"n,s\n", schema, schema.names)
    lines = [row.encode() for row in rows]
    together = parse_rows(parser, lines, 0, {})
    alone = [parse_rows(parser, [line], number, {}) for number, line in enumerate(lines)]
    assert list(together.bad) == [bad for one in alone for bad in one.bad]
    assert together.table.to_pylist() == [row for one in alone for row in one.table.to_pylist()]
