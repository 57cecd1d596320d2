"""What a file's reader gives, in pieces of any size, cut into the chunks of a unit.

Lives here: `Walk`, a file that is read from front to back; `Pace`, how much of it at once; and where its chunks end.
Must not: open files.

Where a chunk ends depends on the rows and on `Fixed` alone, never on the pieces in which they were read, nor on where
reading began.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from paceline.server.bulk.plain_types import one_batch, row_bytes
from paceline.server.bulk.sizing import too_large
from paceline.server.bulk.values import BadRow, BulkError, Chunk, Fixed

__all__ = ["Pace", "Walk", "cut"]

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
