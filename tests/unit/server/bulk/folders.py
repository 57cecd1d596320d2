"""A job's folder in tests: a small job, what is in the folder, and units that are done in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pyarrow as pa

from paceline.server.bulk.fingerprint import Plain
from paceline.server.bulk.folder import JobFolder, Mark, Start
from paceline.server.bulk.values import ALONE, BadRow, FileIndex, Fixed, InputFile, Shard, Unit, units_of

__all__ = ["FILES", "FINGERPRINT", "FIXED", "SCHEMA", "UNITS", "contents", "do", "never", "opened"]

FINGERPRINT: dict[str, Plain] = {"batch": 32, "map": {"ids": "tokens", "mask": "mask"}, "keep": ["id"]}
FILES = [InputFile(0, "/in/a.parquet", 10, 1), InputFile(1, "/in/b.parquet", 20, 2)]
FIXED = Fixed(unit_rows=2, chunk_rows=2, chunk_bytes=100, batch_rows=2, intra_op_threads=1, instances=1)
SCHEMA = pa.schema([("x", pa.int64())])
_FIRST = units_of(FILES[0], FileIndex(3), FIXED.unit_rows, 0)
UNITS = [*_FIRST, *units_of(FILES[1], FileIndex(4), FIXED.unit_rows, len(_FIRST))]


@contextmanager
def opened(path: Path, start: Start = Start.RESUME, shard: Shard = ALONE) -> Iterator[JobFolder]:
    with closing(JobFolder(str(path), shard=shard)) as folder:
        folder.open(FINGERPRINT, FILES, lambda: FIXED, start)
        yield folder


def never() -> Fixed:
    raise AssertionError("it was chosen again")


def do(folder: JobFolder, unit: Unit, bad: Sequence[int] = ()) -> Mark:
    """The rows' own numbers, except those at fault."""
    part = folder.part(unit, SCHEMA, FIXED)
    rows = [number for number in range(unit.begin, unit.end) if number not in bad]
    part.write(pa.record_batch([pa.array(rows, pa.int64())], schema=SCHEMA))
    return folder.commit(unit, part, [BadRow(row, "odd") for row in bad], lambda file, row: (file.path, row))


def contents(path: Path, without: Iterable[str] = ("locks", "tmp")) -> dict[str, bytes]:
    """All files of the folder, except those of some folders."""
    files = (file for file in path.rglob("*") if file.is_file() and file.parent.name not in without)
    return {str(file.relative_to(path)): file.read_bytes() for file in files}
