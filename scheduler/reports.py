"""What is told of a batch that has ended: to its requests if it failed, and to observers.

Lives here: making that. Must not: deliver it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from scheduler.errors import ExecutionFailed
from scheduler.executing import Batch
from scheduler.lane import Entry
from scheduler.observer import BatchReport
from scheduler.runner import Outcome

__all__ = ["failure", "report"]

_log = logging.getLogger("paceline.scheduler")


def failure(cause: BaseException | None) -> ExecutionFailed:
    """An exception for one request of a failed batch; each gets its own, as tracebacks grow on shared ones."""
    try:
        text = str(cause)
    except Exception:  # noqa: BLE001 - the requests are owed an answer all the same
        _log.exception("an instance's error can't be told in words")
        text = ""
    failed = ExecutionFailed(text or type(cause).__name__)
    failed.__cause__ = cause
    return failed


def report(batch: Batch[Any], outcome: Outcome[Any], failed: Sequence[Entry[Any]]) -> BatchReport:
    """To be made once those who get an answer have it: who is cancelled by then gets none."""
    leaving = failed if outcome.error else batch.entries
    there = [entry for entry in leaving if not entry.payload.cancelled()]
    answered = [] if outcome.error else [entry for entry in there if not entry.payload.refused]
    waits_ns = [outcome.started_ns - entry.enqueued_ns for entry in answered]
    return BatchReport(
        rows=batch.rows,
        padded_rows=batch.padded_rows,
        waits_ns=waits_ns,
        started_ns=outcome.started_ns,
        finished_ns=outcome.finished_ns,
        execution=outcome.executed,
        error=outcome.error,
        failed=len(there) - len(waits_ns),
        cancelled=len(leaving) - len(there),
        number=batch.number,
        entries=batch.entries,
    )
