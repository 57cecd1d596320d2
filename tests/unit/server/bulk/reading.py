"""Reads a source whole, as a job does: unit by unit, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.server.bulk.values import BadRow, Chunk, Fixed, Source, Unit


def fixed(unit_rows: int = 7, chunk_rows: int = 3, chunk_bytes: int = 1 << 20) -> Fixed:
    return Fixed(unit_rows, chunk_rows, chunk_bytes, batch_rows=1, intra_op_threads=1)


def units(source: Source, unit_rows: int) -> Iterator[Unit]:
    number = 0
    for file in source.files:
        index = source.index(file, unit_rows)
        for place, begin in enumerate(range(0, index.rows, unit_rows)):
            offset = index.offsets[place] if index.offsets else 0
            yield Unit(number, file, begin, min(begin + unit_rows, index.rows), offset)
            number += 1


def chunks(source: Source, limits: Fixed, columns: Sequence[str] | None = None) -> list[Chunk]:
    names = source.schema.names if columns is None else columns
    return [chunk for unit in units(source, limits.unit_rows) for chunk in source.chunks(unit, names, limits)]


def rows(source: Source, limits: Fixed, columns: Sequence[str] | None = None) -> list[dict[str, object]]:
    return [row for chunk in chunks(source, limits, columns) for row in chunk.table.to_pylist()]


def bad_rows(source: Source, limits: Fixed) -> list[BadRow]:
    return [row for chunk in chunks(source, limits) for row in chunk.bad]
