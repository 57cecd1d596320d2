"""Units wait for their turn, so that no more are held than memory is reckoned for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from paceline.server.bulk.columns import Columns
from paceline.server.bulk.computing import UnitWork
from paceline.server.bulk.folder import Mark
from paceline.server.bulk.tally import Tally
from paceline.server.bulk.values import BadRow, BulkError, Chunk, FileIndex, Fixed, InputFile, Unit
from tests.unit.server.bulk.computing import DESCRIPTION, Doubling, failing_on
from tests.unit.server.bulk.folders import FILES, FIXED, UNITS, opened


class Numbers:
    """A source whose rows are their own numbers. `most_held`: so many units were read at once."""

    files: Sequence[InputFile] = FILES
    schema = pa.schema([("x", pa.int64())])

    def __init__(self) -> None:
        self.held = self.most_held = 0

    def index(self, file: InputFile, unit_rows: int) -> FileIndex:
        return FileIndex(3 + file.index)

    def chunks(self, unit: Unit, columns: Sequence[str], fixed: Fixed) -> Iterator[Chunk]:
        self.held += 1
        self.most_held = max(self.most_held, self.held)
        rows = np.arange(unit.begin, unit.end)
        yield Chunk(pa.record_batch([pa.array(rows)], schema=self.schema), rows)
        self.held -= 1

    def held_bytes(self, columns: Sequence[str]) -> int:
        return 0

    def place(self, file: InputFile, number: int) -> tuple[str, int]:
        return file.path, number


async def test_units_beyond_those_at_once_wait(tmp_path: Path) -> None:
    source, model = Numbers(), Doubling()
    with opened(tmp_path) as folder:
        columns, fixed = Columns(DESCRIPTION, source.schema), FIXED
        work = UnitWork(source, columns, model, folder, fixed, by_length=False, judge=lambda unit, bad: None, at_once=1)
        marks = await asyncio.gather(*(work.do(unit, Tally()) for unit in UNITS))
    assert marks == [Mark(unit.end - unit.begin, 0) for unit in UNITS]
    assert source.most_held == 1


async def test_rows_at_fault_end_a_job_in_the_midst_of_a_chunk(tmp_path: Path) -> None:
    source, model = Numbers(), Doubling(failing_on(*range(100)))
    found = list[int]()

    def judge(unit: Unit, bad: Sequence[BadRow]) -> None:
        found.extend(row.number for row in bad)
        if len(found) == 2:
            raise BulkError("enough")

    with opened(tmp_path) as folder:
        columns = Columns(DESCRIPTION, source.schema)
        work = UnitWork(source, columns, model, folder, FIXED, by_length=False, judge=judge, at_once=1)
        with pytest.raises(BulkError, match="enough"):
            await work.do(Unit(0, FILES[0], 0, 64), tally := Tally())
    assert len(found) == tally.rows_bad < 10
