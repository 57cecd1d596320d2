"""Parquet: row groups are skipped, and one of any size is read a little at a time.

Lives here: where reading begins, and how many rows are read at once. Must not: list files, cut chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from paceline.server.bulk.chunks import Pace, plain_columns, plain_schema, refuse_other_schema
from paceline.server.bulk.listing import Location
from paceline.server.bulk.values import Chunk, FileIndex, Fixed, Unit

__all__ = ["ParquetFormat"]

# Of a column are read so many bytes at a time. A request to another machine takes as long as the transfer of some MiB.
_LOCAL_BUFFER_BYTES = 1 << 20
_REMOTE_BUFFER_BYTES = 8 << 20
_PAGE_ROWS = 1024
"""Of each column, a page is held as a whole, and its values once more. Most writers end one after so many rows at the
earliest, however large these are."""


class ParquetFormat:
    """`Unit.offset` is the row at which the row group that has the unit's first row begins."""

    def schema(self, place: Location) -> pa.Schema:
        with _opened(place) as file:
            return plain_schema(file.schema_arrow)

    def index(self, place: Location, schema: pa.Schema, unit_rows: int) -> FileIndex:
        with _opened(place) as file:
            refuse_other_schema(place.shown, schema, plain_schema(file.schema_arrow))
            begins = _begins(file.metadata)
        units = np.arange(0, begins[-1], unit_rows)
        groups = np.searchsorted(begins, units, side="right") - 1
        return FileIndex(begins[-1], tuple(begins[group] for group in groups.tolist()))

    def held_bytes(self, place: Location, columns: Sequence[str]) -> int:
        with _opened(place) as file:
            groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
        sizes = [(_group_bytes(group, [*columns]), group.num_rows) for group in groups]
        return max((2 * size * min(_PAGE_ROWS, rows) // max(1, rows) for size, rows in sizes), default=0)

    def start(self, unit: Unit) -> int | None:
        return unit.offset

    def pieces(
        self, place: Location, schema: pa.Schema, columns: Sequence[str], unit: Unit, fixed: Fixed
    ) -> Iterator[Chunk]:
        names = list(columns)
        kept = pa.schema([schema.field(name) for name in names])
        with _opened(place) as file:
            number = unit.offset
            for batch in _batches(file, names, kept, _begins(file.metadata).index(number), fixed):
                numbers = np.arange(number, number + batch.num_rows)
                number += batch.num_rows
                yield Chunk(batch, numbers)


def _batches(
    file: pq.ParquetFile, names: list[str], kept: pa.Schema, first_group: int, fixed: Fixed
) -> Iterator[pa.RecordBatch]:
    """The rows from a row group on. The file tells what the rest of a group has on average, but too little of values
    that repeat. How many rows a read has is set before each of them."""
    metadata = file.metadata
    groups = range(first_group, metadata.num_row_groups)
    pace, batches = Pace(fixed.chunk_bytes), None
    for group in groups:
        left_rows, left_bytes = metadata.row_group(group).num_rows, _group_bytes(metadata.row_group(group), names)
        while left_rows > 0:
            rows = pace.rows(left_rows, left_bytes)
            if batches is None:  # its own size replaces what is set before its first read
                batches = file.iter_batches(rows, row_groups=groups, columns=names, use_threads=False)
            else:
                file.reader.set_batch_size(rows)
            batch = next(batches, None)
            if batch is None:
                raise pa.ArrowInvalid(f"row group {group} has {left_rows} rows less than the file's footer says")
            plain = plain_columns(batch.select(names), kept)
            left_rows, left_bytes = left_rows - batch.num_rows, max(0, left_bytes - pace.saw(plain))
            yield plain


def _group_bytes(group: pq.RowGroupMetaData, names: list[str]) -> int:
    columns = [group.column(place) for place in range(group.num_columns)]
    return sum(
        column.total_uncompressed_size
        for column in columns
        if any(f"{column.path_in_schema}.".startswith(f"{name}.") for name in names)
    )


def _begins(metadata: pq.FileMetaData) -> list[int]:
    """The first row of each row group, and how many rows there are."""
    rows = (metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
    return list(accumulate(rows, initial=0))


@contextmanager
def _opened(place: Location) -> Iterator[pq.ParquetFile]:
    buffer_bytes = _LOCAL_BUFFER_BYTES if place.is_local else _REMOTE_BUFFER_BYTES
    with (
        place.system.open_input_file(place.path) as source,
        # Buffered ahead, a whole row group would be in memory.
        pq.ParquetFile(source, pre_buffer=False, buffer_size=buffer_bytes, page_checksum_verification=True) as file,
    ):
        yield file
