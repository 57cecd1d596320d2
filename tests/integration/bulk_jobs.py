"""A bulk job in a test's own folders: input that is a column of numbers, a model in memory that returns them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from paceline.server.bulk.folder import Totals
from paceline.server.bulk.job import Job
from paceline.server.bulk.settings import BulkSettings, MaxBad
from paceline.server.bulk.tally import Tally
from tests.integration.serving import echo_model, write_model
from tests.memory_models import MemoryBackend, MemoryModel

__all__ = ["BulkJob", "files_of", "write_rows"]


def write_rows(path: Path, values: Sequence[float | None]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"id": pa.array(range(len(values)), pa.int64()), "a": pa.array(values, pa.float32())})
    pq.write_table(table, path)


def files_of(folder: Path) -> dict[str, bytes]:
    """What a job has written for others: all but how it came about."""
    found = (path for path in folder.rglob("*") if path.is_file() and "_paceline" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(found)}


@dataclass
class BulkJob:
    """Made once, started as often as a test likes. `memory` is the model: rows of one number, batches of 4. Any number
    of rows may be at fault."""

    root: Path
    settings: dict[str, Any] = field(default_factory=dict)
    memory: MemoryModel = field(default_factory=lambda: echo_model("FP32", 1))
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        if not (self.root / "m").exists():
            write_model(self.root, "m", "max_batch_size: 4 dynamic_batching { }")

    @property
    def out(self) -> Path:
        return self.root / str(self.settings.get("out", "out"))

    def job(self, **more: Any) -> Job:
        """A start of it. `tally` is that of the last one."""
        self.tally = Tally()
        given = {"inputs": (str(self.root / "in" / "*.parquet"),), "keep": ("id",), "batch_rows": 4, "instances": 1}
        given |= {"unit_rows": 8, "max_bad": MaxBad(share=1.0), **self.settings, **more, "out": self.out}
        backend = MemoryBackend({"m": self.memory})
        settings = BulkSettings(model=str(self.root / "m"), **given)
        return Job(settings, self.tally, lambda _: backend)

    async def run(self, **more: Any) -> Totals | None:
        return await self.job(**more).run()

    def rows(self) -> list[tuple[int, float]]:
        """Of all output files, in order."""
        tables = [pq.read_table(path) for path in sorted(self.out.glob("part-*.parquet"))]
        whole = pa.concat_tables(tables)
        values = np.array(whole["x"].to_pylist()).ravel()
        return list(zip(whole["id"].to_pylist(), values.tolist(), strict=True))

    def bad(self) -> list[tuple[str, int, str]]:
        """File, row and reason of each row at fault."""
        lines = [line for path in sorted((self.out / "_bad").glob("*.jsonl")) for line in path.read_text().splitlines()]
        told = [json.loads(line) for line in lines]
        return [(os.path.basename(one["file"]), one["row"], one["reason"]) for one in told]
