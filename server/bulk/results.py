"""What became of a chunk's rows: outputs batch by batch, and rows that failed.

Lives here: these values. Must not: know files, or how outputs become columns (`tables.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa

from paceline.backends.spec import Array
from paceline.server.bulk.values import BadRow, Places

__all__ = ["Computed", "Failed", "Results", "Table"]


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
