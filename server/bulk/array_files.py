"""Arrays of NumPy: a row is an entry of the first axis, and has fixed dims.

Lives here: `.npy`, whose column is `array`, and `.npz`, whose arrays are the columns. Must not: list files, cut chunks.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa

from paceline.server.bulk.listing import Location
from paceline.server.bulk.plain_types import refuse_other_schema
from paceline.server.bulk.values import Chunk, FileIndex, Fixed, Unit

__all__ = ["ArrayFormat"]

_COLUMN = "array"  # of a file that has only one
_ZIP_BEGIN = b"PK"
_FAULTS = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError, RuntimeError)


class _Readable(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...
    def seek(self, place: int, /) -> int: ...
    def tell(self) -> int: ...


_Openers = Mapping[str, Callable[[], _Readable]]


class ArrayFormat:
    def schema(self, place: Location) -> pa.Schema | None:
        with _opened(place) as arrays:
            return pa.schema([(name, _Array.open(opener).kind) for name, opener in arrays.items()])

    def index(self, place: Location, schema: pa.Schema, unit_rows: int) -> FileIndex:
        with _opened(place) as arrays:
            found = {name: _Array.open(opener) for name, opener in arrays.items()}
            refuse_other_schema(place.shown, schema, pa.schema([(name, array.kind) for name, array in found.items()]))
            counts = {name: array.rows for name, array in found.items()}
            if len(set(counts.values())) > 1:
                raise pa.ArrowInvalid(f"its arrays have different numbers of rows: {counts}")
            return FileIndex(max(counts.values(), default=0))

    def held_bytes(self, place: Location, columns: Sequence[str]) -> int:
        return 0

    def start(self, unit: Unit) -> int | None:
        return 0 if unit.file.path.lower().endswith(".npz") else None

    def pieces(
        self, place: Location, schema: pa.Schema, columns: Sequence[str], unit: Unit, fixed: Fixed
    ) -> Iterator[Chunk]:
        with _opened(place) as openers:
            arrays = {name: _Array.open(openers[name]) for name in columns}
            end = unit.end if self.start(unit) is None else min(array.rows for array in arrays.values())
            row_bytes = sum(array.row_bytes for array in arrays.values())
            at_once = max(1, min(int(fixed.chunk_bytes / 4 / row_bytes), fixed.chunk_rows))
            for array in arrays.values():
                array.skip(unit.begin)
            for begin in range(unit.begin, end, at_once):
                rows = min(at_once, end - begin)
                table = pa.RecordBatch.from_pydict({name: array.read(rows) for name, array in arrays.items()})
                yield Chunk(table, np.arange(begin, begin + rows))


@dataclass(frozen=True, slots=True)
class _Array:
    """An array of a file, whose rows are read in order."""

    stream: _Readable
    rows: int
    dims: tuple[int, ...]
    dtype: np.dtype[np.generic]

    @classmethod
    def open(cls, opener: Callable[[], _Readable]) -> _Array:
        """Raises ArrowInvalid for arrays without rows of numbers, truth values or text."""
        stream = opener()
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read(stream)
        if dtype.kind not in "biufSUmM" or dtype.itemsize == 0:
            raise pa.ArrowInvalid(f"its elements are {dtype}: expected numbers, truth values or text")
        if not shape or 0 in shape[1:]:
            raise pa.ArrowInvalid(f"its shape is {shape}: expected an axis of rows, and no others of 0")
        if is_fortran and len(shape) > 1:
            raise pa.ArrowInvalid("its rows aren't together (Fortran order): save numpy.ascontiguousarray(it)")
        return cls(stream, shape[0], shape[1:], dtype)

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.dims, dtype=np.int64)) * self.dtype.itemsize

    @property
    def kind(self) -> pa.DataType:
        return self._column(np.zeros((0, *self.dims), self.dtype)).type

    def skip(self, rows: int) -> None:
        self.stream.seek(self.stream.tell() + rows * self.row_bytes)

    def read(self, rows: int) -> pa.Array:
        data = self.stream.read(rows * self.row_bytes)
        if len(data) < rows * self.row_bytes:
            raise pa.ArrowInvalid("it is cut off")
        return self._column(np.frombuffer(data, self.dtype))

    def _column(self, elements: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> pa.Array:
        column = pa.array(elements.ravel().astype(self.dtype.newbyteorder("="), copy=False))
        for size in reversed(self.dims):
            column = pa.FixedSizeListArray.from_arrays(column, size)
        return column


@contextmanager
def _opened(place: Location) -> Iterator[_Openers]:
    """What opens each array. What is wrong with a file is told as pyarrow would."""
    with place.system.open_input_file(place.path) as file:
        is_zip = file.read(len(_ZIP_BEGIN)) == _ZIP_BEGIN
        file.seek(0)
        try:
            if not is_zip:
                yield {_COLUMN: lambda: file}
                return
            with zipfile.ZipFile(file) as entries:
                names = [name for name in entries.namelist() if name.endswith(".npy")]
                yield {name.removesuffix(".npy"): _entry(entries, name) for name in names}
        except _FAULTS as error:
            raise pa.ArrowInvalid(str(error)) from None


def _entry(entries: zipfile.ZipFile, name: str) -> Callable[[], _Readable]:
    return lambda: entries.open(name)
