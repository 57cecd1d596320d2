"""Files of text, plain or compressed: units begin at a byte, and a row that can't be read is nobody else's problem.

Lives here: bytes cut into rows, by newlines (`LineSplitter`), or by those outside of quotes (`QuoteSplitter`);
`TextFormat`, which finds rows and has them parsed, and again in halves if any is at fault. Must not: know what is in a
row.

Index and reading cut alike, so a row is the same to both wherever reading begins. Rows without a byte aren't any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from paceline.server.bulk.chunks import one_batch
from paceline.server.bulk.listing import Location
from paceline.server.bulk.memory import too_large
from paceline.server.bulk.values import BadRow, BulkError, Chunk, FileIndex, Fixed, Unit

__all__ = [
    "COMPRESSIONS",
    "Dialect",
    "LineSplitter",
    "QuoteSplitter",
    "RowParser",
    "Splitter",
    "TextFormat",
    "TextRows",
    "parse_rows",
    "text_rows",
]

_BLOCK_BYTES = 1 << 20
_LONGEST_BYTES = 16 << 20
_LF, _CR, _QUOTE = b'\n\r"'

Positions = npt.NDArray[np.int64]
_NONE: Positions = np.zeros(0, np.int64)


class Splitter(Protocol):
    """Goes through a text from a row's beginning on."""

    in_quotes: bool

    def ends(self, held: bytes, block: bytes) -> tuple[Positions, bool]:
        """Where rows end in `held + block`, behind their newlines. `held` is the beginning of a row, as far as it has
        been gone through; an empty block is the end of the file. Also whether a quote of that row has no other."""


class LineSplitter:
    """Each newline ends a row."""

    in_quotes = False

    def ends(self, held: bytes, block: bytes) -> tuple[Positions, bool]:
        return np.flatnonzero(np.frombuffer(block, np.uint8) == _LF) + (len(held) + 1), False


class QuoteSplitter:
    """Each LF or CR ends a row, except in quoted fields. A quote opens a field only where one begins, as in RFC 4180;
    in the midst of a field it is text. Of two in a quoted field, which mean one, the first closes, the second opens.
    A quote without its other within `longest_bytes` is text: else it would make all rows behind it one."""

    def __init__(self, delimiter: bytes, longest_bytes: int = _LONGEST_BYTES) -> None:
        self.in_quotes = False
        self._longest_bytes = longest_bytes
        self._starts = (delimiter[0], _LF, _CR)
        self._before = _LF  # the byte before the block
        self._just_closed = False  # and whether that was a closing quote
        self._open_bytes = 0  # how long the open quote has been

    def ends(self, held: bytes, block: bytes) -> tuple[Positions, bool]:
        ends, unclosed = _NONE, False
        if self.in_quotes:
            first = block.find(b'"')
            unclosed = not block or self._open_bytes + (first if first >= 0 else len(block)) > self._longest_bytes
        if unclosed:
            # There is no quote behind the one that opened, so all newlines behind it end rows.
            self.in_quotes = False
            opened = len(held) - self._open_bytes
            ends = _newlines(held[opened:]) + (opened + 1)
        return np.concatenate([ends, self._ends(block) + (len(held) + 1)]), unclosed

    def _ends(self, block: bytes) -> Positions:
        """The newlines of the block that end rows."""
        newlines = _newlines(block)
        data = np.frombuffer(block, np.uint8)
        quotes = self._counted(data, np.flatnonzero(data == _QUOTE)) if b'"' in block else _NONE
        if len(quotes) or self.in_quotes:
            newlines = newlines[(np.searchsorted(quotes, newlines) + self.in_quotes) % 2 == 0]
        self.in_quotes ^= len(quotes) % 2 == 1
        if self.in_quotes:
            self._open_bytes = len(block) - int(quotes[-1]) if len(quotes) else self._open_bytes + len(block)
        if block:
            self._before = block[-1]
            self._just_closed = not self.in_quotes and len(quotes) > 0 and int(quotes[-1]) == len(block) - 1
        return newlines

    def _counted(self, data: npt.NDArray[np.uint8], quotes: Positions) -> Positions:
        """The quotes that open or close. If each second one, which had to open, may, that is all of them."""
        before = np.where(quotes > 0, data[quotes - 1], self._before)
        adjacent = np.diff(quotes, prepend=-1 if self._just_closed else -2) == 1
        may_open = np.isin(before, self._starts) | adjacent
        opens = (np.arange(len(quotes)) + self.in_quotes) % 2 == 0
        if (may_open | ~opens).all():
            return quotes
        counted, is_open, closed = [], self.in_quotes, -1 if self._just_closed else -2
        for quote, begins in zip(quotes.tolist(), np.isin(before, self._starts).tolist(), strict=True):
            if is_open:
                closed = quote
            if is_open or begins or quote == closed + 1:
                counted.append(quote)
                is_open = not is_open
        return np.array(counted, np.int64)


def _newlines(block: bytes) -> Positions:
    data = np.frombuffer(block, np.uint8)
    return np.flatnonzero((data == _LF) | (data == _CR) if b"\r" in block else data == _LF)


@dataclass(frozen=True, slots=True)
class TextRows:
    """Rows of `text`, from `begins` to `ends`, and where each begins in the file; what is wrong with those at fault."""

    text: bytes
    begins: Positions
    ends: Positions
    offsets: Positions
    faults: Mapping[int, str]

    def lines(self) -> list[bytes]:
        return [self.text[begin:end] for begin, end in zip(self.begins.tolist(), self.ends.tolist(), strict=True)]


def text_rows(
    read: Callable[[int], bytes], splitter: Splitter, offset: int, most_bytes: int = _LONGEST_BYTES
) -> Iterator[TextRows]:
    """The rows of what `read` gives, which begins at byte `offset` of a file. A row of more than `most_bytes` isn't
    held in memory, and is at fault."""
    held, dropped, block = b"", 0, b"\n"
    while block:
        # A field that begins and ends in one block isn't too long; a row of many blocks isn't copied with each of them.
        block = read(min(max(_BLOCK_BYTES, len(held)), _LONGEST_BYTES))
        ends, unclosed = splitter.ends(held, block)
        text = held + block
        if not block and text and (not len(ends) or ends[-1] < len(text)):
            ends = np.append(ends, len(text))  # the last newline is missing
        if not len(ends):
            held = text
            if len(held) > most_bytes and not splitter.in_quotes:
                held, dropped = b"", dropped + len(held)
            continue
        begins = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
        offsets, sizes = begins + (offset + dropped), ends - begins
        offsets[0], sizes[0] = offset, dropped + sizes[0]
        kept = _with_content(np.frombuffer(text, np.uint8), begins, ends)
        kept[0] |= dropped > 0
        faults = {
            place: too_large(f"the row has {size} bytes of text", most_bytes)
            for place, size in enumerate(sizes[kept].tolist())
            if size > most_bytes
        }
        if unclosed:
            faults[0] = "a quoted field begins that doesn't end"
        held, offset, dropped = text[int(ends[-1]) :], offset + dropped + int(ends[-1]), 0
        if kept.any():
            yield TextRows(text, begins[kept], ends[kept], offsets[kept], faults)


def _with_content(data: npt.NDArray[np.uint8], begins: Positions, ends: Positions) -> npt.NDArray[np.bool_]:
    """Which rows have more than their newline."""
    first = data[begins]
    return np.asarray((first != _LF) & ((first != _CR) | (ends - begins > 2)))


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
