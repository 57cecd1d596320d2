"""Arrays of NumPy: a row is an entry of the first axis, and has fixed dims.

Lives here: `.npy`, whose column is `array`, and `.npz`, whose arrays are the columns. Must not: list files, cut chunks.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from paceline.server.bulk.chunks import refuse_other_schema
from paceline.server.bulk.listing import Location
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
            for begin in range(unit.begin, end, at_once):
                rows = min(at_once, end - begin)
                table = pa.RecordBatch.from_pydict({name: array.read(begin, rows) for name, array in arrays.items()})
                yield Chunk(table, np.arange(begin, begin + rows))


@dataclass(frozen=True, slots=True)
class _Array:
    """An array of a file, which begins in `stream` at `place`. `is_fortran`: its first axis is the innermost."""

    stream: _Readable
    place: int
    rows: int
    dims: tuple[int, ...]
    dtype: np.dtype[np.generic]
    is_fortran: bool

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
        is_fortran = is_fortran and len(shape) > 1
        if is_fortran and isinstance(stream, zipfile.ZipExtFile):  # each step back would decompress it from the start
            raise pa.ArrowInvalid(
                "its rows aren't together (Fortran order): save numpy.ascontiguousarray(it), or it alone as .npy"
            )
        return cls(stream, stream.tell(), shape[0], shape[1:], dtype, is_fortran)

    @property
    def row_elements(self) -> int:
        return math.prod(self.dims)

    @property
    def row_bytes(self) -> int:
        return self.row_elements * self.dtype.itemsize

    @property
    def kind(self) -> pa.DataType:
        return self._column(np.zeros((0, *self.dims), self.dtype)).type

    def read(self, begin: int, rows: int) -> pa.Array:
        """The rows from `begin` on, which in a compressed file isn't before those read last."""
        if not self.is_fortran:
            return self._column(self._elements(begin * self.row_elements, rows * self.row_elements))
        # Each element of a row has its own run of all rows.
        runs = [self._elements(run * self.rows + begin, rows) for run in range(self.row_elements)]
        return self._column(np.stack(runs).reshape(*self.dims[::-1], rows).T)

    def _elements(self, begin: int, count: int) -> npt.NDArray[np.generic]:
        """Those that follow each other in the file."""
        self.stream.seek(self.place + begin * self.dtype.itemsize)
        data = self.stream.read(count * self.dtype.itemsize)
        if len(data) < count * self.dtype.itemsize:
            raise pa.ArrowInvalid("it is cut off")
        return np.frombuffer(data, self.dtype)

    def _column(self, elements: npt.NDArray[np.generic]) -> pa.Array:
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
                yield {name.removesuffix(".npy"): partial(entries.open, name) for name in names}
        except _FAULTS as error:
            raise pa.ArrowInvalid(str(error)) from None
