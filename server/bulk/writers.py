"""Output files: rows in, bytes out, chunk by chunk.

Lives here: one writer for each format, and columns as JSON texts, a column at a time: a row at a time, it would take
six times as long. Must not: know where the bytes go, or of units and jobs. The rule: the same rows in the same chunks
become the same bytes, and what is held doesn't depend on how many rows there are. JSON is valid, whatever the rows
hold, and numbers read back as they were.
"""

from __future__ import annotations

import io
import json
import math
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from typing import BinaryIO, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from paceline.server.bulk.values import BulkError, FlagError

__all__ = ["FORMATS", "Writer", "check_schema", "json_lines", "open_writer"]

_ROW_GROUP_BYTES = 32 << 20
"""A row group is as many chunks as reach this, if so much may be held: readers gain nothing by larger ones."""


class Writer(Protocol):
    """Blocks. Lets errors of the file through, and can only be dropped then."""

    def write(self, rows: pa.RecordBatch) -> None:
        """Adds rows, in order. May keep them until later ones come."""

    def finish(self) -> None:
        """Writes what is left. The file stays open."""

    def drop(self) -> None:
        """Instead of `finish`, or after it: nothing is written any more, also if the file is closed."""


class _Parquet:
    def __init__(self, schema: pa.Schema, file: BinaryIO, held_bytes: int) -> None:
        # Outputs are numbers that hardly repeat: a dictionary of them only costs time, and space in the end.
        texts = [field.name for field in schema if pa.types.is_string(field.type)]
        self._writer = pq.ParquetWriter(file, schema, compression="zstd", use_dictionary=texts)
        self._held: list[pa.RecordBatch] = []
        self._held_bytes, self._most_bytes = 0, min(held_bytes, _ROW_GROUP_BYTES)

    def write(self, rows: pa.RecordBatch) -> None:
        self._held.append(rows)
        self._held_bytes += rows.nbytes
        if self._held_bytes >= self._most_bytes:
            self._write_group()

    def finish(self) -> None:
        self._write_group()
        self._writer.close()

    def drop(self) -> None:
        self._writer.is_open = False  # or it would be closed, with what is left, when it is collected

    def _write_group(self) -> None:
        table = pa.Table.from_batches(self._held, self._writer.schema)
        if table.num_rows:
            self._writer.write_table(table, row_group_size=table.num_rows)
        self._held, self._held_bytes = [], 0


class _JsonLines:
    def __init__(self, schema: pa.Schema, file: BinaryIO, held_bytes: int) -> None:
        self._file = file

    def write(self, rows: pa.RecordBatch) -> None:
        self._file.writelines(json_lines(rows))

    def finish(self) -> None:
        pass

    def drop(self) -> None:
        pass


class _Npy:
    """One array [rows, ...]. How many rows it has is only known at the end, and then written to the front."""

    def __init__(self, schema: pa.Schema, file: BinaryIO, held_bytes: int) -> None:
        if len(schema) != 1:
            raise FlagError(f".npy has one column, got {', '.join(schema.names)}: keep none and name one output")
        self._name = schema.names[0]
        kind, self._dims = schema.types[0], []
        while pa.types.is_fixed_size_list(kind):
            self._dims.append(kind.list_size)
            kind = kind.value_type
        if not (pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)):
            raise FlagError(f".npy has numbers of one shape for all rows, got {self._name} of {schema.types[0]}")
        self._dtype = pa.array([], kind).to_numpy(zero_copy_only=False).dtype  # before pyarrow 26, others need pandas
        self._file = file
        self._rows = 0
        self._begin = file.tell()
        self._write_header()

    def write(self, rows: pa.RecordBatch) -> None:
        values = rows.column(0)
        for _ in self._dims:
            values = values.flatten()
        if len(values) != rows.num_rows * math.prod(self._dims) or values.null_count:
            raise BulkError(f".npy has no nulls, got some in {self._name}")
        self._file.write(np.ascontiguousarray(values.to_numpy(zero_copy_only=False), self._dtype).data)
        self._rows += rows.num_rows

    def finish(self) -> None:
        end = self._file.tell()
        self._file.seek(self._begin)
        self._write_header()
        self._file.seek(end)

    def drop(self) -> None:
        pass

    def _write_header(self) -> None:
        # It has the same length for any number of rows: the format leaves room for that.
        facts = {"descr": self._dtype.str, "fortran_order": False, "shape": (self._rows, *self._dims)}
        np.lib.format.write_array_header_1_0(self._file, facts)


_Maker: TypeAlias = Callable[[pa.Schema, BinaryIO, int], Writer]
FORMATS: Mapping[str, _Maker] = {"parquet": _Parquet, "jsonl": _JsonLines, "npy": _Npy}
"""By the suffix of their files."""


def open_writer(output_format: str, schema: pa.Schema, file: BinaryIO, held_bytes: int) -> Writer:
    """Writes rows of this schema into `file`, from where it stands. Holds fewer rows than have `held_bytes`. Raises
    BulkError if the format can't have them."""
    if output_format not in FORMATS:
        raise FlagError(f"output format {output_format}: expected one of {', '.join(FORMATS)}")
    try:
        return FORMATS[output_format](schema, file, held_bytes)
    except pa.ArrowNotImplementedError as error:
        raise FlagError(f"{output_format} can't have these columns: {error}") from error


def check_schema(output_format: str, schema: pa.Schema) -> None:
    """Raises BulkError if the format can't have such rows: for the start of a job, before anything is computed."""
    open_writer(output_format, schema, io.BytesIO(), 0).finish()


_AT_ONCE_BYTES = 1 << 20
"""A number of one byte may take five letters, and there are a few copies of them on the way."""


def json_lines(rows: pa.RecordBatch) -> Iterator[bytes]:
    """A line for each row, in pieces of many lines. NaN and infinities, which JSON doesn't have, are null; bytes are in
    Base64; durations are integers in the column's unit; maps are objects, or lists of pairs if their keys aren't
    strings; what JSON has no form for, such as times, is a string."""
    if rows.nbytes > _AT_ONCE_BYTES and rows.num_rows > 1:
        half = rows.num_rows // 2
        yield from json_lines(rows.slice(0, half))
        yield from json_lines(rows.slice(half))
    else:
        lines = _objects(rows.schema.names, [_texts(column) for column in rows.columns], "}\n")
        yield pc.binary_join(pa.ListArray.from_arrays([0, len(lines)], lines), "")[0].as_buffer().to_pybytes()


def _texts(values: pa.Array) -> pa.StringArray:
    """The JSON of each value."""
    kind = values.type
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind):
        texts = values.cast(pa.string())
    elif pa.types.is_floating(kind):
        texts = _floats(values.cast(pa.float32()) if pa.types.is_float16(kind) else values)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        texts = _lists(values, _texts(values.flatten()), "[]")
    elif pa.types.is_map(kind):
        pairs = values.cast(pa.list_(pa.struct([("key", kind.key_type), ("value", kind.item_type)])))
        keys, items = map(_texts, pairs.flatten().flatten())
        if pa.types.is_string(kind.key_type) or pa.types.is_large_string(kind.key_type):
            texts = _lists(pairs, pc.binary_join_element_wise(keys, items, ":"), "{}")
        else:  # JSON has no such keys
            texts = _lists(pairs, pc.binary_join_element_wise("[", keys, ",", items, "]", ""), "[]")
    elif pa.types.is_duration(kind):
        texts = values.cast(pa.int64()).cast(pa.string())
    elif pa.types.is_struct(kind):
        texts = _objects([field.name for field in kind], [_texts(column) for column in values.flatten()], "}")
    else:
        texts = pa.array([_other(value) for value in values.to_pylist()], pa.string())
    return pc.if_else(values.is_valid(), texts, "null")


def _floats(values: pa.Array) -> pa.StringArray:
    # Arrow writes the shortest text that reads back as the same number of its size, but integral ones as integers.
    texts = values.cast(pa.string())
    if pc.any(pc.equal(pc.floor(values), values)).as_py():
        texts = pc.replace_substring_regex(texts, r"^(-?[0-9]+)$", r"\1.0")
    return pc.if_else(pc.is_finite(values), texts, "null")


def _lists(values: pa.Array, inside: pa.StringArray, ends: str) -> pa.StringArray:
    """The texts `inside` of each list, between the two `ends`."""
    lengths = pc.list_value_length(values).fill_null(0)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    lists = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), inside)
    return pc.binary_join_element_wise(ends[0], pc.binary_join(lists, ","), ends[1], "")


def _objects(names: list[str], texts: list[pa.StringArray], end: str) -> pa.StringArray:
    before = [f"{',' if place else '{'}{json.dumps(name, ensure_ascii=False)}:" for place, name in enumerate(names)]
    pieces = [piece for pair in zip(before, texts, strict=True) for piece in pair]
    return pc.binary_join_element_wise(*pieces, end, "")


def _other(value: object) -> str:
    if isinstance(value, bytes):
        value = b64encode(value).decode()
    return json.dumps(value if isinstance(value, str) else str(value), ensure_ascii=False)
