"""Which rows of a chunk share a call of the model.

Lives here: that choice. Must not: depend on anything but the rows and what was fixed at the job's start: the same
chunk has the same batches whenever and wherever it is computed, as the bits of outputs may depend on them.
"""

from __future__ import annotations

from paceline.server.bulk.rows import Rows
from paceline.server.bulk.values import Fixed, Places

__all__ = ["batches"]


def batches(rows: Rows, fixed: Fixed, *, by_length: bool = False, max_elements: int = 0) -> list[Places]:
    """The places of each call, of `fixed.batch_rows` at most: every good row is in one of them. Rows of a batch have
    one shape, but for lengths that `Rows.take` fills up. `by_length`: all rows are sorted by size first. `max_elements`
    is the most that rows times common sizes may be, unless of a single row; 0: no limit."""
    most = fixed.batch_rows if rows.batched else 1
    return [rows.good[begin : begin + most] for begin in range(0, len(rows.good), most)]
