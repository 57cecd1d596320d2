"""The job's input: which files there are, of which format, and their rows.

Lives here: the choice of the format, `FileSource`, which reads the files of one, and `FileRows`, to which each file is
a row. Must not: know what is inside, list files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from threading import Lock
from typing import Protocol

import numpy as np
import pyarrow as pa

from paceline.server.bulk.array_files import ArrayFormat
from paceline.server.bulk.arrow_files import ArrowFormat
from paceline.server.bulk.chunks import Walk, cut
from paceline.server.bulk.csv_files import Csv
from paceline.server.bulk.json_files import JsonLines
from paceline.server.bulk.listing import Location, find_locations
from paceline.server.bulk.memory import too_large
from paceline.server.bulk.parquet_files import ParquetFormat
from paceline.server.bulk.text_files import COMPRESSIONS, TextFormat
from paceline.server.bulk.values import BadRow, BulkError, Chunk, FileIndex, Fixed, FlagError, InputFile, Source, Unit

__all__ = ["FORMATS", "FileRows", "FileSource", "Format", "find_source"]


class Format(Protocol):
    """What a kind of file has inside. Raises OSError, ArrowException or BulkError if a file can't be read."""

    def schema(self, place: Location) -> pa.Schema | None:
        """The file's columns, None if it has nothing that tells."""

    def index(self, place: Location, schema: pa.Schema, unit_rows: int) -> FileIndex:
        """As `Source.index`."""

    def held_bytes(self, place: Location, columns: Sequence[str]) -> int:
        """As `Source.held_bytes`."""

    def start(self, unit: Unit) -> int | None:
        """From which row on a file that is open already gets to the unit sooner than one that is opened for it. None
        if none does, as one can begin anywhere."""

    def pieces(
        self, place: Location, schema: pa.Schema, columns: Sequence[str], unit: Unit, fixed: Fixed
    ) -> Iterator[Chunk]:
        """The rows from the unit's first, or before it, to the file's end, or the unit's if `start` is None; in pieces
        of about `chunk_bytes` at most."""


_SUFFIXES: Mapping[str, tuple[str, ...]] = {
    "parquet": (".parquet", ".pq", ".parq"),
    "arrow": (".arrow", ".arrows", ".feather", ".ipc"),
    "npy": (".npy", ".npz"),
    "csv": (".csv", ".tsv"),
    "jsonl": (".jsonl", ".ndjson"),
}
_MAKERS: Mapping[str, Callable[[], Format]] = {
    "parquet": ParquetFormat,
    "arrow": ArrowFormat,
    "npy": ArrayFormat,
    "csv": lambda: TextFormat(lambda name: Csv("\t" if ".tsv" in name.lower() else ",")),
    "jsonl": lambda: TextFormat(lambda name: JsonLines()),
}
_TEXT = ("csv", "jsonl")
_FILES = "files"
FORMATS = (*_MAKERS, _FILES)


def find_source(patterns: Sequence[str], format: str | None = None, output: str | None = None) -> Source:
    """The files that the patterns (paths, URLs, globs, folders) mean, in order, each once. Their suffix tells the
    format unless `format` does. `output` is the job's own folder, which is never input. Blocks; raises FlagError if
    there are no files, or several formats, and BulkError."""
    if format == _FILES:
        return FileRows(find_locations(patterns, lambda name: True, output, hidden="."))
    listed = find_locations(patterns, lambda name: _is_data(name, format), output)
    places = [place for _, found in listed for place in found]
    names = {format} if format is not None else {_format_of(place.name) for place in places}
    if None in names:
        unknown = next(place.shown for place in places if _format_of(place.name) is None)
        raise FlagError(f"{unknown}: its name tells no format: give one by --format, of {', '.join(FORMATS)}")
    if len(names) > 1:
        raise FlagError(
            f"the input has files of several formats, {', '.join(sorted(map(str, names)))}: choose by --format"
        )
    return FileSource(_MAKERS[str(names.pop())](), places)


def _format_of(name: str) -> str | None:
    plain = name.lower()
    for suffix in COMPRESSIONS:
        plain = plain.removesuffix(suffix)
    kinds = tuple(_MAKERS) if plain == name.lower() else _TEXT
    return next((kind for kind in kinds if plain.endswith(_SUFFIXES[kind])), None)


def _is_data(name: str, format: str | None) -> bool:
    """Whether a file of a folder is input. Where the format is given, names without any suffix are, too."""
    return _format_of(name) in ((format,) if format else _MAKERS) or (format is not None and "." not in name)


class FileSource:
    """`Source` for files that have rows.

    Reading on where another unit ended is much cheaper than beginning in the midst of a file if that has to be read
    from its front, or from the front of a row group. So files stay open for the next unit, no more of them than units
    have been read at once.
    """

    def __init__(self, format: Format, places: Sequence[Location]) -> None:
        self.files: Sequence[InputFile] = tuple(
            InputFile(index, place.shown, place.size_bytes, place.changed_ns) for index, place in enumerate(places)
        )
        self._format = format
        self._places = tuple(places)
        self._lock = Lock()
        self._kept: list[tuple[tuple[object, ...], Walk]] = []  # guarded by the lock, as the two below
        self._reading = 0
        self._most_reading = 0

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns of the first file that tells any: only then a file is read."""
        for file in self.files:
            with self._unchanged(file) as place:
                schema = self._format.schema(place)
            if schema is not None:
                twice = [name for name in schema.names if schema.names.count(name) > 1]
                if twice:
                    raise BulkError(f"{place.shown}: there are several columns {twice[0]!r}")
                return schema
        return pa.schema([])

    def index(self, file: InputFile, unit_rows: int) -> FileIndex:
        with self._unchanged(file) as place:
            return self._format.index(place, self.schema, unit_rows)

    def chunks(self, unit: Unit, columns: Sequence[str], fixed: Fixed) -> Iterator[Chunk]:
        key = (unit.file.index, tuple(columns), fixed)
        with self._counted(), self._unchanged(unit.file) as place:
            walk = self._take(key, unit)
            if walk is None:
                pieces = self._format.pieces(place, self.schema, columns, unit, fixed)
                walk = Walk(pieces)
            yield from cut(walk.rows(unit.begin, unit.end, place.shown), fixed)
            if self._format.start(unit) is not None and not walk.is_over():
                self._keep(key, walk)

    def held_bytes(self, columns: Sequence[str]) -> int:
        """Going by the first file and the largest, whose rows may be."""
        held = 0
        for file in {self.files[0], max(self.files, key=lambda file: file.size_bytes)}:
            with self._unchanged(file) as place:
                held = max(held, self._format.held_bytes(place, columns))
        return held

    def place(self, file: InputFile, number: int) -> tuple[str, int]:
        return file.path, number

    @contextmanager
    def _unchanged(self, file: InputFile) -> Iterator[Location]:
        """Where `file` is. Raises BulkError if it has changed before or meanwhile, or can't be read."""
        place = self._places[file.index]
        self._refuse_changed(file, place)
        try:
            yield place
        except (OSError, pa.ArrowException) as error:
            self._refuse_changed(file, place)
            raise BulkError(f"{place.shown} can't be read: {error}") from None
        self._refuse_changed(file, place)

    def _refuse_changed(self, file: InputFile, place: Location) -> None:
        now = place.current()
        if (now.size_bytes, now.changed_ns) != (file.size_bytes, file.changed_ns):
            raise BulkError(
                f"{place.shown} has changed since the job began: it had {file.size_bytes} bytes, and has "
                f"{now.size_bytes}" + (", written later" if now.size_bytes == file.size_bytes else "")
            )

    @contextmanager
    def _counted(self) -> Iterator[None]:
        with self._lock:
            self._reading += 1
            self._most_reading = max(self._most_reading, self._reading)
        try:
            yield
        finally:
            with self._lock:
                self._reading -= 1

    def _take(self, key: tuple[object, ...], unit: Unit) -> Walk | None:
        """The open file that is closest before the unit, if that is closer than where a new one would begin."""
        start = self._format.start(unit)
        if start is None:
            return None
        with self._lock:
            usable = [kept for kept in self._kept if kept[0] == key and start <= kept[1].position <= unit.begin]
            if not usable:
                return None
            best = max(usable, key=lambda kept: kept[1].position)
            self._kept.remove(best)
            return best[1]

    def _keep(self, key: tuple[object, ...], walk: Walk) -> None:
        """For the unit that goes on here. Those that have waited longest make way."""
        with self._lock:
            self._kept.append((key, walk))
            del self._kept[: max(0, len(self._kept) + self._reading - 1 - self._most_reading)]


_MOST_FILES = 256


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
            if held_bytes > fixed.chunk_bytes / 4 or len(rows) + len(bad) == _MOST_FILES or number == unit.end - 1:
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
