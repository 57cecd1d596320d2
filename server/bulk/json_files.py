"""JSON Lines: an object in each line, columns by their keys.

Lives here: which type each column has, by the first lines, and parsing lines. Must not: find lines, open files.

A key that a line lacks is null; a line with a value of another type is at fault.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.json as pajson

from paceline.server.bulk.chunks import one_batch
from paceline.server.bulk.text_files import LineSplitter, RowParser, Splitter

__all__ = ["JsonLines"]

_NUMBERS = (pa.int64(), pa.uint64(), pa.float64())
_MOST_SHOWN = 60


class JsonLines:
    has_header = False

    def splitter(self) -> Splitter:
        return LineSplitter()

    def schema(self, header: bytes, rows: Sequence[bytes]) -> pa.Schema:
        """Each column has the type that most of its values have, in which numbers are all the same."""
        columns: dict[str, dict[str, tuple[int, pa.DataType]]] = {}
        for row in rows:
            try:
                found = json.loads(row)
            except (ValueError, RecursionError):
                continue
            for name, value in found.items() if isinstance(found, dict) else ():
                kind = _kind(value)
                family = "number" if kind in _NUMBERS else str(kind).partition("<")[0]
                count, joined = columns.setdefault(name, {}).get(family, (0, pa.null()))
                columns[name][family] = (count + (value is not None), _joined(joined, kind))
        kinds = {name: max(families.values(), key=lambda family: family[0])[1] for name, families in columns.items()}
        return pa.schema([(name, _known(kind)) for name, kind in kinds.items()])

    def parser(self, file: str, header: bytes, schema: pa.Schema, columns: Sequence[str]) -> RowParser:
        return _Parser(pa.schema([schema.field(name) for name in columns]))


class _Parser:
    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema

    def parse(self, rows: Sequence[bytes]) -> pa.RecordBatch:
        lines = [row.strip() for row in rows]
        # If each line begins and ends like an object, none is in two lines; so if there are as many, each has one.
        if not all(line.startswith(b"{") and line.endswith(b"}") for line in lines):
            raise pa.ArrowInvalid("not an object in each line")
        text = b"\n".join(lines)
        text.decode()  # the parser doesn't look at this
        return self._parsed(text, len(lines), self.schema)

    def _parsed(self, text: bytes, rows: int, schema: pa.Schema) -> pa.RecordBatch:
        table = pajson.read_json(
            pa.BufferReader(text),
            read_options=pajson.ReadOptions(use_threads=False, block_size=len(text) + 1),
            parse_options=pajson.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
        )
        if table.num_rows != rows:
            raise pa.ArrowInvalid(f"{table.num_rows} objects in {rows} lines")
        return one_batch(table.select(schema.names).to_batches(), schema)

    def reason(self, row: bytes, error: Exception) -> str:
        try:
            found = json.loads(row.strip())
        except UnicodeDecodeError as why:
            return f"not UTF-8: {why.reason} at byte {why.start}"
        except json.JSONDecodeError as why:
            return f"not JSON: {why.msg} at character {why.colno}"
        except (ValueError, RecursionError) as why:
            return f"not JSON that can be read: {why}"
        if not isinstance(found, dict):
            return f"expected an object, got {_shown(found)}"
        for field in self.schema:
            value = found.get(field.name)
            try:
                self._parsed(json.dumps({field.name: value}).encode(), 1, pa.schema([field]))
            except pa.ArrowInvalid:
                return f"column {field.name!r}: expected {field.type}, got {_shown(value)}"
        return str(error).removeprefix("JSON parse error: ").removesuffix(" in row 0")


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False).encode(errors="backslashreplace").decode()
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "…"


def _kind(value: object) -> pa.DataType:
    if value is None:
        return pa.null()
    if isinstance(value, bool):
        return pa.bool_()
    if isinstance(value, int):
        return pa.int64() if -(2**63) <= value < 2**63 else pa.uint64() if 0 < value < 2**64 else pa.float64()
    if isinstance(value, float):
        return pa.float64()
    if isinstance(value, list):
        kind = pa.null()
        for item in value:
            kind = _joined(kind, _kind(item))
        return pa.list_(kind)
    if isinstance(value, dict):
        return pa.struct([(name, _kind(item)) for name, item in value.items()])
    return pa.string()


def _joined(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """The type of values of both: the first if there is none."""
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if one in _NUMBERS and other in _NUMBERS:
        return pa.uint64() if pa.float64() not in (one, other) else pa.float64()
    if pa.types.is_list(one) and pa.types.is_list(other):
        return pa.list_(_joined(one.value_type, other.value_type))
    if pa.types.is_struct(one) and pa.types.is_struct(other):
        fields: Mapping[str, pa.DataType] = {field.name: field.type for field in one}
        new = {field.name: field.type for field in other}
        both = {name: _joined(fields.get(name, pa.null()), new.get(name, pa.null())) for name in {**fields, **new}}
        return pa.struct(list(both.items()))
    return one


def _known(kind: pa.DataType) -> pa.DataType:
    """Text, where only nulls and empty lists have been seen."""
    if pa.types.is_list(kind):
        return pa.list_(_known(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _known(field.type)) for field in kind])
    return pa.string() if pa.types.is_null(kind) else kind
