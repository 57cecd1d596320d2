"""What a file's reader gives as the chunks of a unit: Arrow's many layouts as the few that hold the same, cut by rows.

Lives here: plain types and columns, and how many bytes each row has; `Walk`, a file that is read from front to back;
`Pace`, how much of it at once; and where its chunks end. Must not: open files, know formats.

Whether text is dictionary-encoded, a view, or has 64-bit offsets is a matter of who wrote it, and may differ between
files. How large a row is depends on its values alone, and where a chunk ends on the rows and on `Fixed` alone, never on
how they were read, nor on where reading began: chunks are the same every time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from paceline.server.bulk.memory import too_large
from paceline.server.bulk.values import BadRow, BulkError, Chunk, Fixed

__all__ = ["Pace", "Walk", "cut", "one_batch", "plain_columns", "plain_schema", "refuse_other_schema", "row_bytes"]

_OFFSET_BYTES = 4


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """The same fields with plain types, all nullable, without metadata. What has no plain type keeps its own."""
    return pa.schema([pa.field(field.name, _plain(field.type)) for field in schema])


def plain_columns(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The batch as `schema`, its plain one. Copies only what has another layout."""
    arrays = [
        array if array.type == kind else array.cast(kind)
        for array, kind in zip(batch.columns, schema.types, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def one_batch(batches: Sequence[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    """All of their rows."""
    if len(batches) == 1:
        return batches[0]
    joined = pa.Table.from_batches(batches, schema).combine_chunks().to_batches()
    return joined[0] if joined else pa.RecordBatch.from_pylist([], schema)


def refuse_other_schema(file: str, expected: pa.Schema, found: pa.Schema) -> None:
    """Raises BulkError unless `found`, which `file` has, has the columns of `expected`, with the same types."""
    for field in expected:
        own = [other.type for other in found if other.name == field.name]
        if not own:
            raise BulkError(
                f"{file}: column {field.name!r} is missing: expected {field.type}, as in the first file; "
                f"got columns {', '.join(map(repr, found.names)) or 'none'}"
            )
        if own[0] != field.type:
            raise BulkError(f"{file}: column {field.name!r}: expected {field.type}, as in the first file; got {own[0]}")


def _plain(kind: pa.DataType) -> pa.DataType:
    if isinstance(kind, pa.BaseExtensionType):
        return _plain(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type)
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return pa.binary()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(_plain(kind.value_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_plain(kind.value_type), kind.list_size)
    if pa.types.is_map(kind):
        return pa.map_(_plain(kind.key_type), _plain(kind.item_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, _plain(field.type)) for field in kind])
    return kind


def row_bytes(batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
    """How many bytes each row's values have."""
    total = np.zeros(batch.num_rows, np.int64)
    for array in batch.columns:
        total += _value_bytes(array)
    return total


def _value_bytes(array: pa.Array) -> npt.NDArray[np.int64] | int:
    """How many bytes each value has: one number if all have as many."""
    kind: pa.DataType = array.type
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return np.diff(_offsets(array)) + _OFFSET_BYTES
    if pa.types.is_list(kind) or pa.types.is_map(kind):
        offsets = _offsets(array)
        children = (array.keys, array.items) if pa.types.is_map(kind) else (array.values,)
        total = np.full(len(array), _OFFSET_BYTES)
        for child in children:
            total += _spans(child, offsets)
        return total
    if pa.types.is_fixed_size_list(kind):
        each = _value_bytes(array.values.slice(array.offset * kind.list_size, len(array) * kind.list_size))
        size = int(kind.list_size)
        return each * size if isinstance(each, int) else np.asarray(each.reshape(len(array), size).sum(axis=1))
    if pa.types.is_struct(kind):
        return sum((_value_bytes(child) for child in array.flatten()), 0)
    if pa.types.is_nested(kind) or pa.types.is_run_end_encoded(kind):
        raise pa.ArrowInvalid(f"columns of type {kind} aren't supported")  # pyarrow doesn't make others of them rightly
    return 0 if pa.types.is_null(kind) else -(-int(kind.bit_width) // 8)


def _offsets(array: pa.Array) -> npt.NDArray[np.int64]:
    """Where each value begins among the bytes or the elements, and where the last one ends."""
    buffer = array.buffers()[1]
    if buffer is None or not len(array):
        return np.zeros(len(array) + 1, np.int64)
    whole: npt.NDArray[np.int32] = np.frombuffer(buffer, np.int32)
    return whole[array.offset : array.offset + len(array) + 1].astype(np.int64)


def _spans(child: pa.Array, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How many bytes the elements of each list have."""
    each = _value_bytes(child.slice(offsets[0], offsets[-1] - offsets[0]))
    if isinstance(each, int):
        return np.diff(offsets) * each
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(each)])
    return np.asarray(np.diff(ends[offsets - offsets[0]]))


_FIRST_ROWS = 64
_MOST_ROWS = 1024  # reading 8192 at once takes 0.05 us less a row


class Walk:
    """Reads on where it stopped. `position` is the next row's number, 0 at first. Not for several threads at once. No
    piece is empty."""

    def __init__(self, pieces: Iterator[Chunk]) -> None:
        self.position = 0
        self._pieces = pieces
        self._rest: Chunk | None = None

    def rows(self, begin: int, end: int, file: str) -> Iterator[Chunk]:
        """The rows from `begin`, which isn't before the position, to `end`, in pieces."""
        while self.position < end:
            if self.is_over():
                raise BulkError(f"{file} has only {self.position} rows, but had {end} or more when it was listed")
            piece, self._rest = self._rest, None
            assert piece is not None
            first = _first(piece)
            self.position = first + piece.read_rows
            if self.position > end:
                self._rest, self.position = _part(piece, end, self.position), end
            if self.position > begin:
                yield _part(piece, max(first, begin), self.position)

    def is_over(self) -> bool:
        """Whether there are no more rows. Reads some if need be; at its end, the file is closed."""
        self._rest = self._rest or next(self._pieces, None)
        return self._rest is None


class Pace:
    """How many rows to read at once, for pieces of a quarter of a chunk: by the rows just read, and by what is known of
    those to come. The first read is small, as nobody knows how large its rows are, and each has at most twice as many
    rows as the one before. More than some rows save nothing, but cost memory if they are suddenly larger."""

    def __init__(self, chunk_bytes: int) -> None:
        self._most_bytes = chunk_bytes / 4
        self._rows = _FIRST_ROWS // 2
        self._row_bytes = 1.0

    def rows(self, left_rows: int, left_bytes: int = 0) -> int:
        """`left_rows` are there, of so many bytes or more."""
        fitting = int(self._most_bytes / max(self._row_bytes, left_bytes / left_rows))
        self._rows = max(1, min(fitting, 2 * self._rows, _MOST_ROWS, left_rows))
        return self._rows

    def saw(self, batch: pa.RecordBatch) -> int:
        """How many bytes the rows that have been read have."""
        read_bytes = int(row_bytes(batch).sum())
        self._row_bytes = max(1.0, read_bytes / batch.num_rows)
        return read_bytes


def cut(pieces: Iterator[Chunk], fixed: Fixed) -> Iterator[Chunk]:
    """The same rows as chunks. A row of more than `chunk_bytes` becomes a bad one."""
    held: list[Chunk] = []
    rows = held_bytes = 0
    for whole in pieces:
        piece, sizes, first = _without_huge(whole, fixed.chunk_bytes)
        ends = np.cumsum(sizes)
        at = 0
        while at < len(ends):
            # Rows up to `at` are in chunks already, and the open chunk has `rows` of them.
            room = fixed.chunk_bytes - held_bytes + (int(ends[at - 1]) if at else 0)
            stop = min(int(np.searchsorted(ends, room, side="right")), at + fixed.chunk_rows - rows)
            if stop > at:
                held.append(_part(piece, first + at, first + stop))
                rows, held_bytes = rows + stop - at, held_bytes + int(sizes[at:stop].sum())
            if stop < len(ends) or rows == fixed.chunk_rows:
                yield _joined(held)
                held, rows, held_bytes = [], 0, 0
            at = stop
    if held:
        yield _joined(held)


def _without_huge(piece: Chunk, most: int) -> tuple[Chunk, np.ndarray[tuple[int], np.dtype[np.int64]], int]:
    """The piece with its rows of more than `most` bytes among the bad ones; each row's bytes; the first's number."""
    first = _first(piece)
    own = row_bytes(piece.table)
    huge = own > most
    if huge.any():
        reasons = [
            BadRow(int(number), too_large(f"the row has {size} bytes", most))
            for number, size in zip(piece.numbers[huge], own[huge], strict=True)
        ]
        piece = Chunk(piece.table.filter(pa.array(~huge)), piece.numbers[~huge], tuple(sorted([*piece.bad, *reasons])))
        own = own[~huge]
    sizes = np.zeros(piece.read_rows, np.int64)
    sizes[piece.numbers - first] = own
    return piece, sizes, first


def _first(piece: Chunk) -> int:
    """The number of the first row. Good and bad ones together are consecutive."""
    return min([*piece.numbers[:1].tolist(), *(bad.number for bad in piece.bad[:1])], default=0)


def _part(piece: Chunk, begin: int, end: int) -> Chunk:
    """The rows from number `begin` to `end`."""
    low, high = (int(place) for place in np.searchsorted(piece.numbers, (begin, end)))
    bad = tuple(row for row in piece.bad if begin <= row.number < end)
    return Chunk(piece.table.slice(low, high - low), piece.numbers[low:high], bad)


def _joined(held: list[Chunk]) -> Chunk:
    if len(held) == 1:
        return held[0]
    return Chunk(
        one_batch([chunk.table for chunk in held], held[0].table.schema),
        np.concatenate([chunk.numbers for chunk in held]),
        tuple(row for chunk in held for row in chunk.bad),
    )
