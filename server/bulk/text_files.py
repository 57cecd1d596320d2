"""Files of text, plain or compressed: units begin at a byte, and a row that can't be read is nobody else's problem.

Lives here: `TextFormat`, which finds rows and has them parsed, and again in halves if any is at fault. Must not: know
what rows look like.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Protocol

import numpy as np
import pyarrow as pa

from paceline.server.bulk.listing import Location
from paceline.server.bulk.plain_types import one_batch
from paceline.server.bulk.text_rows import Splitter, text_rows
from paceline.server.bulk.values import BadRow, BulkError, Chunk, FileIndex, Fixed, Unit

__all__ = ["COMPRESSIONS", "Dialect", "RowParser", "TextFormat", "parse_rows"]

COMPRESSIONS = (".gz", ".bz2", ".zst", ".lz4")
_BOM = b"\xef\xbb\xbf"
_SKIPPED_AT_ONCE_BYTES = 4 << 20


class RowParser(Protocol):
    """Parses rows whole, with nothing that depends on what other rows there are."""

    schema: pa.Schema

    def parse(self, rows: Sequence[bytes]) -> pa.RecordBatch:
        """A row of the batch for each. Raises ArrowInvalid or UnicodeDecodeError if any is at fault."""

    def reason(self, row: bytes, error: Exception) -> str:
        """What is wrong with a row that can't be parsed, in words for people."""


class Dialect(Protocol):
    """What the rows of a file look like."""

    has_header: bool

    def splitter(self) -> Splitter:
        """For a text that begins with a row."""

    def schema(self, header: bytes, rows: Sequence[bytes]) -> pa.Schema:
        """The columns, by the header and the first rows of a file, which may be at fault."""

    def parser(self, file: str, header: bytes, schema: pa.Schema, columns: Sequence[str]) -> RowParser:
        """For a file with this header. Raises BulkError if it lacks a column of the schema."""


class TextFormat:
    """`Unit.offset` is the byte at which the unit begins, in the decompressed text."""

    def __init__(self, dialect: Callable[[str], Dialect]) -> None:
        self._dialect = dialect  # of a file of that name

    def schema(self, place: Location) -> pa.Schema | None:
        dialect = self._dialect(place.name)
        header, begin = _header(place, dialect)
        with _opened(place, begin) as read:
            # The second is the last row, if that has no newline.
            first = [line for rows in islice(text_rows(read, dialect.splitter(), begin), 2) for line in rows.lines()]
        return dialect.schema(header, first) if first else None

    def index(self, place: Location, schema: pa.Schema, unit_rows: int) -> FileIndex:
        dialect = self._dialect(place.name)
        header, begin = _header(place, dialect)
        if header or not dialect.has_header:
            dialect.parser(place.shown, header, schema, schema.names)
        count, offsets = 0, list[int]()
        with _opened(place, begin) as read:
            for rows in text_rows(read, dialect.splitter(), begin):
                offsets += rows.offsets[-count % unit_rows :: unit_rows].tolist()
                count += len(rows.offsets)
        return FileIndex(count, tuple(offsets))

    def held_bytes(self, place: Location, columns: Sequence[str]) -> int:
        return 0

    def start(self, unit: Unit) -> int | None:
        return 0 if unit.file.path.lower().endswith(COMPRESSIONS) else None

    def pieces(
        self, place: Location, schema: pa.Schema, columns: Sequence[str], unit: Unit, fixed: Fixed
    ) -> Iterator[Chunk]:
        dialect = self._dialect(place.name)
        header, _ = _header(place, dialect)
        parser = dialect.parser(place.shown, header, schema, columns)
        number = unit.begin
        last = unit.end if self.start(unit) is None else None
        with _opened(place, unit.offset) as read:
            for found in text_rows(read, dialect.splitter(), unit.offset, fixed.chunk_bytes):
                rows = found.lines()[: None if last is None else last - number]
                yield parse_rows(parser, rows, number, found.faults)
                number += len(rows)
                if number == last:
                    return


def parse_rows(parser: RowParser, rows: Sequence[bytes], number: int, faults: Mapping[int, str]) -> Chunk:
    """The rows, of which the first has this number. Those at fault are found by halving."""
    whole = [place for place in range(len(rows)) if place not in faults]
    bad = {place: reason for place, reason in faults.items() if place < len(rows)}
    batches = list[pa.RecordBatch]()
    waiting = [whole] if whole else []
    while waiting:  # no recursion: a function within that calls itself would keep all rows until garbage is collected
        places = waiting.pop()
        try:
            batches.append(parser.parse([rows[place] for place in places]))
        except (pa.ArrowInvalid, UnicodeDecodeError) as error:
            if len(places) == 1:
                bad[places[0]] = parser.reason(rows[places[0]], error)
            else:
                middle = len(places) // 2
                waiting += (places[middle:], places[:middle])
    numbers = np.array([number + place for place in whole if place not in bad], np.int64)
    reasons = tuple(BadRow(number + place, bad[place]) for place in sorted(bad))
    return Chunk(one_batch(batches, parser.schema), numbers, reasons)


def _header(place: Location, dialect: Dialect) -> tuple[bytes, int]:
    """The header, and at which byte the rows begin."""
    with _opened(place, 0) as read:
        first = read(len(_BOM))
        if first.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise BulkError(f"{place.shown} can't be read: it is UTF-16, expected UTF-8")
        begin = len(_BOM) if first == _BOM else 0
        if not dialect.has_header:
            return b"", begin
        rest = iter((first[begin:],))
        rows = next(text_rows(lambda size: next(rest, b"") or read(size), dialect.splitter(), begin), None)
    return (b"", begin) if rows is None else (rows.lines()[0], int(rows.offsets[0] + rows.ends[0] - rows.begins[0]))


@contextmanager
def _opened(place: Location, offset: int) -> Iterator[Callable[[int], bytes]]:
    """Reads from byte `offset` of the decompressed text on."""
    if place.name.lower().endswith(COMPRESSIONS):
        with place.system.open_input_stream(place.path) as stream:
            for size in (
                *[_SKIPPED_AT_ONCE_BYTES] * (offset // _SKIPPED_AT_ONCE_BYTES),
                offset % _SKIPPED_AT_ONCE_BYTES,
            ):
                stream.read(size)
            yield partial(stream.read)
    else:
        with place.system.open_input_file(place.path) as file:
            file.seek(offset)
            yield partial(file.read)
