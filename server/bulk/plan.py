"""Which units there are, and whose they are.

Lives here: from files and their indexes to numbered units, and shards. Must not: touch a file; whoever asks brings the
indexes. The rule: numbers depend on the list of files and on `unit_rows` alone, so all shards and starts agree on them.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.server.bulk.values import BulkError, FileIndex, InputFile, Unit

__all__ = ["ALONE", "Shard", "units_of"]


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a job that one process does: of all units every `count`-th, from `number` (from 0) on."""

    number: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.count:
            raise BulkError(f"shard {self.number} of {self.count}: expected a number from 0 to {self.count - 1}")

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

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
