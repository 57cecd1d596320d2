"""Files of any kind as rows: what each is called, and its bytes.

Lives here: the `Source` whose input files are patterns, and whose rows are the files that those mean. Must not: list
files, look into them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from paceline.server.bulk.cutting import cut
from paceline.server.bulk.listing import Location
from paceline.server.bulk.sizing import too_large
from paceline.server.bulk.values import BadRow, BulkError, Chunk, FileIndex, Fixed, InputFile, Unit

__all__ = ["FileRows"]

_MOST_ROWS = 256


class FileRows:
    """Of an input file, the size is that of all of its files, and the time that of the last one."""

    schema = pa.schema([("path", pa.string()), ("bytes", pa.binary())])

    def __init__(self, listed: Sequence[tuple[str, Sequence[Location]]]) -> None:
        self._places = [places for _, places in listed]
        self.files: Sequence[InputFile] = tuple(
            InputFile(
                index,
                pattern,
                sum(place.size_bytes for place in places),
                max((place.changed_ns for place in places), default=0),
            )
            for index, (pattern, places) in enumerate(listed)
        )

    def index(self, file: InputFile, unit_rows: int) -> FileIndex:
        return FileIndex(len(self._places[file.index]))

    def chunks(self, unit: Unit, columns: Sequence[str], fixed: Fixed) -> Iterator[Chunk]:
        schema = pa.schema([self.schema.field(name) for name in columns])
        return cut(self._pieces(unit, schema, fixed), fixed)

    def held_bytes(self, columns: Sequence[str]) -> int:
        return 0

    def place(self, file: InputFile, number: int) -> tuple[str, int]:
        return self._places[file.index][number].shown, 0

    def _pieces(self, unit: Unit, schema: pa.Schema, fixed: Fixed) -> Iterator[Chunk]:
        rows, bad, held_bytes = list[tuple[int, str, bytes]](), list[BadRow](), 0
        for number in range(unit.begin, unit.end):
            place = self._places[unit.file.index][number]
            content = _content(place, fixed.chunk_bytes) if "bytes" in schema.names else b""
            if isinstance(content, str):
                bad.append(BadRow(number, content))
            else:
                rows.append((number, place.shown, content))
                held_bytes += len(content)
            if held_bytes > fixed.chunk_bytes / 4 or len(rows) + len(bad) == _MOST_ROWS or number == unit.end - 1:
                values = {"path": [row[1] for row in rows], "bytes": [row[2] for row in rows]}
                table = pa.RecordBatch.from_pydict({name: values[name] for name in schema.names}, schema)
                yield Chunk(table, np.array([row[0] for row in rows], np.int64), tuple(bad))
                rows, bad, held_bytes = [], [], 0


def _content(place: Location, most_bytes: int) -> bytes | str:
    """What the file has in it, or why that can't be a row. Raises BulkError if that is no fault of the file's."""
    if place.size_bytes > most_bytes:
        return too_large(f"the file has {place.size_bytes} bytes", most_bytes)
    try:
        with place.system.open_input_file(place.path) as file:
            content: bytes = file.read()
        now = place.current()
    except PermissionError as error:
        return f"the file can't be read: {error}"
    except (OSError, pa.ArrowException) as error:
        raise BulkError(f"{place.shown} can't be read: {error}") from None
    if (len(content), now.changed_ns) != (place.size_bytes, place.changed_ns):
        raise BulkError(f"{place.shown} has changed since the job began")
    return content
