"""Rows through a model, as a bulk job takes them, without its files.

Lives here: from columns to what became of each row. Must not: assertions about behaviour.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from paceline.server.bulk.batches import batches
from paceline.server.bulk.columns import Columns
from paceline.server.bulk.execution import Calls, execute
from paceline.server.bulk.tally import Tally
from paceline.server.bulk.values import Chunk, Computes, Fixed

__all__ = ["Became", "rows_became"]


@dataclass
class Became:
    """What became of each row: its first output, or why it has none."""

    outputs: dict[int, Any] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)


async def rows_became(
    model: Computes, columns: Mapping[str, pa.Array], rows: int = 8, *, output: str = "", first_wait_s: float = 0.01
) -> Became:
    """What `model` makes of these rows, in calls of up to `rows`; of its first output, or that of this name."""
    table = pa.record_batch(dict(columns))
    chosen = Columns(model.description, table.schema, lengths=model.lengths)
    given = chosen.rows(Chunk(table, np.arange(len(table))))
    calls = Calls(model, [output or chosen.outputs[0]], first_wait_s=first_wait_s)
    results = await execute(calls, 0, given, batches(given, Fixed(64, 64, 2**20, rows, 0)), Tally())
    became = Became(reasons=dict(results.failed))
    for one in results.computed:
        (output,) = one.outputs.values()
        values = output.tolist() if model.max_rows else [output.tolist()]
        became.outputs |= dict(zip(one.places.tolist(), values, strict=True))
    return became
