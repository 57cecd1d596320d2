"""What the parts of a bulk job hand to each other: files, units, shards, chunks, what was computed, rows at fault.

Lives here: these values, which units there are, and what a part has to be able to do for the others. Must not: read,
compute or write anything.

A job's input files are cut into units, consecutive rows of one file, each of which becomes one output file. A unit is
done in chunks, so that memory is bounded whatever its rows contain. Both are the same whoever does them and how often:
they depend on the input and on `Fixed` alone. So do the units' numbers, and all shards and starts agree on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from paceline.backends.lengths import Lengths
from paceline.backends.spec import Array
from paceline.clients.description import ModelDescription

__all__ = [
    "ALONE",
    "BadRow",
    "BulkError",
    "Chunk",
    "Computed",
    "Computes",
    "Failed",
    "FileIndex",
    "Fixed",
    "FlagError",
    "InputFile",
    "Places",
    "Results",
    "Shard",
    "Source",
    "Table",
    "Unit",
    "units_of",
]

Places = npt.NDArray[np.int64]
"""Places of rows in a chunk, from 0."""


class BulkError(Exception):
    """The job can't begin or go on: what is wrong, what was expected, what to do. Rows at fault are none of these."""


class FlagError(BulkError):
    """What was asked for can't be, of this input and this model, whatever its rows are."""


class BadRow(NamedTuple):
    """A row without outputs. `number` counts from 0 in its unit's input file."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class InputFile:
    """`path` is what the user would open it with: a path, or a URL. A folder whose files are rows is one of these."""

    index: int
    path: str
    size_bytes: int
    changed_ns: int


@dataclass(frozen=True, slots=True)
class FileIndex:
    """How many rows a file has, and at which byte each of its units begins, if its format needs that."""

    rows: int
    offsets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Unit:
    """Rows `begin` to `end` of `file`, which become the output file `number`. `offset`: the byte at which they begin,
    for formats that need it."""

    number: int
    file: InputFile
    begin: int
    end: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Fixed:
    """What is chosen once, at the first start of a job, and holds for all of its starts and shards, as the bytes that
    it writes depend on it. A chunk ends after `chunk_rows`, or before the row with which it would have more than
    `chunk_bytes`; a row that is larger than that by itself is at fault. `instances` of the model, of
    `intra_op_threads` each; 0: as it is configured."""

    unit_rows: int
    chunk_rows: int
    chunk_bytes: int
    batch_rows: int
    intra_op_threads: int
    instances: int = 1


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive rows of a unit: `table` has the columns that were asked for, and `numbers` which rows of the file
    these are. Rows that couldn't be read at all are in `bad` instead. `read_rows` counts both."""

    table: pa.RecordBatch
    numbers: Places
    bad: Sequence[BadRow] = field(default_factory=tuple)

    @property
    def read_rows(self) -> int:
        return len(self.numbers) + len(self.bad)


class Source(Protocol):
    """The job's input: files of one format. Everything blocks, and may be called from any thread, also at once; what a
    call opens is closed when it returns, or its iterator is."""

    files: Sequence[InputFile]

    @property
    def schema(self) -> pa.Schema:
        """The columns. Reads the beginning of a file, once. Raises BulkError."""

    def index(self, file: InputFile, unit_rows: int) -> FileIndex:
        """How the file is cut into units of so many rows. Reads as little of it as the format allows. Raises BulkError
        if it can't be read, or lacks a column of `schema` or has another type for it."""

    def chunks(self, unit: Unit, columns: Sequence[str], fixed: Fixed) -> Iterator[Chunk]:
        """The unit's rows, in order. Holds a few times `chunk_bytes` at most. Raises BulkError if the file has changed
        since it was listed, or can't be read."""

    def held_bytes(self, columns: Sequence[str]) -> int:
        """About how much a unit that is read holds besides its chunks."""

    def place(self, file: InputFile, number: int) -> tuple[str, int]:
        """For people: in which file the row is, and which row of it."""


class Computes(Protocol):
    """A model that computes rows. `max_rows` is the most rows of a call, 0 if it has no batch axis: then a call is one
    row without one. `batch_sizes`: what batches are filled up to, the last of them `max_rows`; empty: they aren't.
    `max_elements`: the most that rows times common sizes should be, 0 for any. `at_once`: how many calls at a time keep
    it busy. `lengths`: the axes in which rows of a call may have been filled up, if whoever calls has to do that."""

    description: ModelDescription
    max_rows: int
    batch_sizes: Sequence[int]
    max_elements: int
    at_once: int
    lengths: Lengths | None

    async def infer(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        """The outputs of these names. Raises InferenceError, of which `NOT_THE_ROWS` aren't about the rows."""


class Computed(NamedTuple):
    """Rows that were computed by one call, which got what `Rows.take(places, sizes)` returned. `outputs` are what it
    answered: with rows in front if the model has a batch axis, one for each place."""

    places: Places
    outputs: Mapping[str, Array]
    sizes: tuple[int, ...]


class Failed(NamedTuple):
    """A row that the model can't compute, by its place in the chunk."""

    place: int
    reason: str


@dataclass(slots=True)
class Results:
    """What became of the good rows of a chunk, in any order; each of them is in one of these, once."""

    computed: list[Computed] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)


class Table(NamedTuple):
    """What is to be written of a chunk: the rows that have outputs, in the input's order, and all others of it with
    their reasons, those too that were bad before."""

    batch: pa.RecordBatch
    bad: list[BadRow]


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a job that one process does: of all units every `count`-th, from `number` (from 0) on."""

    number: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.count:
            raise BulkError(f"shard {self.number} of {self.count}: expected a number from 0 to {self.count - 1}")

    @property
    def file_name(self) -> str:
        return f"{self.number}-of-{self.count}"

    def has(self, unit: int) -> bool:
        return unit % self.count == self.number


ALONE = Shard(0, 1)


def units_of(file: InputFile, index: FileIndex, unit_rows: int, first: int) -> list[Unit]:
    """A file's units in order, of all shards, numbered from `first` on. One without rows has none, and the last may be
    short."""
    begins = range(0, index.rows, unit_rows)
    offsets = index.offsets or [0] * len(begins)
    return [
        Unit(first + place, file, begin, min(begin + unit_rows, index.rows), offsets[place])
        for place, begin in enumerate(begins)
    ]
