"""CSV and TSV: a header, and a row in each line, or in several where quoted fields have newlines.

Lives here: which type each column has, by the first rows, and parsing rows. Must not: find rows, open files.

Numbers and truth values are read as such, and all else is text as it stands there: also what looks like a date, and
columns in which digits begin with a zero or are too many for a number, as these are names of something.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from paceline.server.bulk.chunks import one_batch, refuse_other_schema
from paceline.server.bulk.text_files import QuoteSplitter, RowParser, Splitter, parse_rows
from paceline.server.bulk.values import BulkError

__all__ = ["Csv"]

_NO_VALUE = ("", "NA", "N/A", "null", "NULL")
"""What stands for no value in columns of numbers. Text has none."""
_FIELDS = re.compile(r"Expected (\d+) columns, got (\d+)")
_NUMBER = r"^(?i:-?([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?|[-+]?(nan|inf))$"
_TRUTH = r"^(?i:true|false)$"
_NAME_OF_DIGITS = r"^-?0[0-9]"
_MANY_DIGITS = r"^-?[0-9]{16}"
_MOST_SHOWN = 60


class Csv:
    has_header = True

    def __init__(self, delimiter: str) -> None:
        self._delimiter = delimiter

    def splitter(self) -> Splitter:
        return QuoteSplitter(self._delimiter.encode())

    def schema(self, header: bytes, rows: Sequence[bytes]) -> pa.Schema:
        names = self._names(header)
        # Numbered, as names may come twice, which is for others to refuse.
        numbered = pa.schema([(str(place), pa.string()) for place in range(len(names))])
        texts = parse_rows(_Parser(numbered.names, numbered, self._delimiter), rows, 0, {}).table
        return pa.schema([(name, _type(column)) for name, column in zip(names, texts.columns, strict=True)])

    def parser(self, file: str, header: bytes, schema: pa.Schema, columns: Sequence[str]) -> RowParser:
        names = self._names(header)
        twice = [name for name in schema.names if names.count(name) > 1]
        if twice:
            raise BulkError(f"{file}: there are several columns {twice[0]!r}")
        refuse_other_schema(file, schema, pa.schema([field for field in schema if field.name in names]))
        return _Parser(names, pa.schema([schema.field(name) for name in columns]), self._delimiter)

    def _names(self, header: bytes) -> list[str]:
        table = pacsv.read_csv(pa.BufferReader(header + b"\n"), parse_options=_parse_options(self._delimiter))
        return list(table.column_names)


class _Parser:
    def __init__(self, names: Sequence[str], schema: pa.Schema, delimiter: str) -> None:
        self._names = list(names)
        self.schema = schema
        self._options = _parse_options(delimiter)

    def parse(self, rows: Sequence[bytes]) -> pa.RecordBatch:
        return self._parsed(rows, self.schema)

    def _parsed(self, rows: Sequence[bytes], schema: pa.Schema) -> pa.RecordBatch:
        text = b"".join(rows)
        text.decode()
        table = pacsv.read_csv(
            pa.BufferReader(text),
            read_options=pacsv.ReadOptions(use_threads=False, block_size=len(text) + 1, column_names=self._names),
            parse_options=self._options,
            convert_options=pacsv.ConvertOptions(
                column_types=schema, include_columns=schema.names, null_values=_NO_VALUE, strings_can_be_null=False
            ),
        )
        if table.num_rows != len(rows):
            raise pa.ArrowInvalid(f"{table.num_rows} rows, expected {len(rows)}")
        return one_batch(table.to_batches(), schema)

    def reason(self, row: bytes, error: Exception) -> str:
        if isinstance(error, UnicodeDecodeError):
            return f"not UTF-8: {error.reason} at byte {error.start}"
        fields = _FIELDS.search(str(error))
        if fields is not None:
            return f"expected {fields[1]} fields, as the header has; got {fields[2]}"
        for field in self.schema:
            try:
                self._parsed([row], pa.schema([field]))
            except pa.ArrowInvalid:
                (text,) = self._parsed([row], pa.schema([(field.name, pa.string())])).column(0).to_pylist()
                shown = text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "…"
                return f"column {field.name!r}: expected {field.type}, got {shown!r}"
        return str(error)


def _parse_options(delimiter: str) -> pacsv.ParseOptions:
    return pacsv.ParseOptions(delimiter=delimiter, newlines_in_values=True)


def _type(column: pa.Array) -> pa.DataType:
    """The type that nearly all of a column's texts have: the others are at fault."""
    texts = pc.utf8_trim_whitespace(column)
    texts = texts.filter(pc.invert(pc.is_in(texts, pa.array(_NO_VALUE))))
    enough = max(1, 0.9 * len(texts))
    numbers = texts.filter(pc.match_substring_regex(texts, _NUMBER))
    if len(numbers) >= enough and not pc.any(pc.match_substring_regex(numbers, _NAME_OF_DIGITS)).as_py():
        try:
            numbers.cast(pa.int64())
        except pa.ArrowInvalid:
            return pa.string() if pc.any(pc.match_substring_regex(numbers, _MANY_DIGITS)).as_py() else pa.float64()
        return pa.int64()
    truths = pc.sum(pc.match_substring_regex(texts, _TRUTH)).as_py() or 0
    return pa.bool_() if truths >= enough else pa.string()
