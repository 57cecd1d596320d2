"""Output files: rows in, bytes out, chunk by chunk.

Lives here: one writer for each format. Must not: know where the bytes go, or of units and jobs. The rule: the same
rows in the same chunks become the same bytes, and what is held doesn't depend on how many rows there are.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import BinaryIO, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from paceline.server.bulk.values import BulkError

__all__ = ["FORMATS", "Writer", "check_schema", "open_writer"]

ROW_GROUP_BYTES = 32 << 20
"""A row group is as many chunks as reach this, so that readers find large ones and the writer holds little."""


class Writer(Protocol):
    def write(self, rows: pa.RecordBatch) -> None:
        """Adds rows, in order. May keep them until later ones come."""

    def finish(self) -> None:
        """Writes what is left. The file stays open."""


class ParquetFile:
    def __init__(self, schema: pa.Schema, file: BinaryIO) -> None:
        self._writer = pq.ParquetWriter(file, schema, compression="zstd")
        self._schema = schema
        self._held: list[pa.RecordBatch] = []
        self._held_bytes = 0

    def write(self, rows: pa.RecordBatch) -> None:
        self._held.append(rows)
        self._held_bytes += rows.nbytes
        if self._held_bytes >= ROW_GROUP_BYTES:
            self._flush()

    def finish(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._held:
            table = pa.Table.from_batches(self._held, self._schema)
            self._writer.write_table(table, row_group_size=max(1, table.num_rows))
        self._held, self._held_bytes = [], 0


class JsonLines:
    def __init__(self, schema: pa.Schema, file: BinaryIO) -> None:
        self._file = file

    def write(self, rows: pa.RecordBatch) -> None:
        for row in rows.to_pylist():
            self._file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")

    def finish(self) -> None:
        pass


FORMATS: dict[str, Callable[[pa.Schema, BinaryIO], Writer]] = {"parquet": ParquetFile, "jsonl": JsonLines}
"""By the suffix of their files."""


def open_writer(output_format: str, schema: pa.Schema, file: BinaryIO) -> Writer:
    """Writes rows of this schema into `file`, from where it stands. Raises BulkError if the format can't have them."""
    if output_format not in FORMATS:
        raise BulkError(f"output format {output_format}: expected one of {', '.join(FORMATS)}")
    return FORMATS[output_format](schema, file)


def check_schema(output_format: str, schema: pa.Schema) -> None:
    """Raises BulkError if the format can't have such rows: for the start of a job, before anything is computed."""
    open_writer(output_format, schema, io.BytesIO()).finish()
