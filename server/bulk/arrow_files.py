"""Arrow's own format, as files (also Feather) and as streams.

Lives here: record batches of any size, a few rows at a time. Must not: list files, cut chunks.

A file of this machine is mapped, not read, so that a record batch of many GiB costs no memory. Elsewhere, or
compressed, a record batch is in memory whole.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pyarrow as pa

from paceline.server.bulk.chunks import Pace, plain_columns, plain_schema, refuse_other_schema
from paceline.server.bulk.listing import Location
from paceline.server.bulk.values import Chunk, FileIndex, Fixed, Unit

__all__ = ["ArrowFormat"]

_FILE_BEGIN = b"ARROW1"
_FILE_BEGIN_BYTES = 8  # with what fills it up


class ArrowFormat:
    """Reading on is cheaper than beginning anew, as there is no other way into a stream than through it."""

    def schema(self, place: Location) -> pa.Schema | None:
        with _opened(place) as (source, _):
            return plain_schema(_reader(source).schema)

    def index(self, place: Location, schema: pa.Schema, unit_rows: int) -> FileIndex:
        with _opened(place) as (source, _):
            found = _reader(source).schema
            refuse_other_schema(place.shown, schema, plain_schema(found))
            return FileIndex(sum(batch.num_rows for batch in _batches(source, found.names[:1])))

    def held_bytes(self, place: Location, columns: Sequence[str]) -> int:
        return 0

    def start(self, unit: Unit) -> int | None:
        return 0

    def pieces(
        self, place: Location, schema: pa.Schema, columns: Sequence[str], unit: Unit, fixed: Fixed
    ) -> Iterator[Chunk]:
        names = list(columns)
        kept = pa.schema([schema.field(name) for name in names])
        pace = Pace(fixed.chunk_bytes)
        end = 0
        with _opened(place) as (source, forget):
            for batch in _batches(source, names):
                begin, end = max(end, unit.begin), end + batch.num_rows
                rows = batch.select(names).slice(max(0, batch.num_rows - (end - begin)))
                while rows.num_rows:
                    piece = plain_columns(rows.slice(0, pace.rows(rows.num_rows)), kept)
                    pace.saw(piece)
                    yield Chunk(piece, np.arange(begin, begin + piece.num_rows))
                    begin, rows = begin + piece.num_rows, rows.slice(piece.num_rows)
                    forget()


def _batches(source: pa.NativeFile, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """All record batches, with these columns. Raises ArrowInvalid if there are fewer than a file's footer says."""
    whole = _reader(source).schema
    expected = pa.ipc.open_file(source).num_record_batches if _is_file(source) else None
    options = pa.ipc.IpcReadOptions(included_fields=[whole.get_field_index(name) for name in names], use_threads=False)
    count = 0
    for batch in _reader(source, options):
        yield batch
        count += 1
    if expected not in (None, count):
        raise pa.ArrowInvalid(f"there are {count} record batches, {expected} by the footer")


def _reader(source: pa.NativeFile, options: pa.ipc.IpcReadOptions | None = None) -> pa.RecordBatchStreamReader:
    """A file has a stream in it. Read as a file, it would be copied from the mapped memory."""
    source.seek(_FILE_BEGIN_BYTES if _is_file(source) else 0)
    return pa.ipc.open_stream(source, options=options)


def _is_file(source: pa.NativeFile) -> bool:
    source.seek(0)
    return bool(source.read(len(_FILE_BEGIN)) == _FILE_BEGIN)


@contextmanager
def _opened(place: Location) -> Iterator[tuple[pa.NativeFile, Callable[[], None]]]:
    """The file, and what to call when rows have been read: then they are in memory only as long as others use them."""
    if not place.size_bytes:
        raise pa.ArrowInvalid("it is empty")
    if not place.is_local:
        with place.system.open_input_file(place.path) as source:
            yield source, lambda: None
        return
    with open(place.path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # closed with the last column that is in it
    with pa.BufferReader(pa.py_buffer(mapped)) as source:
        yield source, lambda: mapped.madvise(mmap.MADV_DONTNEED)
