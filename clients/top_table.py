"""What a server did between two looks at its metrics, as a table for a terminal.

Lives here: formatting, pure; numbers and times as people read them. Must not: what metrics mean (snapshots.py), ask
servers, clocks, or terminals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from paceline.clients.options import printable
from paceline.clients.snapshots import Activity, Interval

_HEADINGS = ("MODEL", "VERSION", "REQ/S", "FAIL/S", "ROWS/S", "BATCH/S", "ROWS/BATCH", "WAITING",
             "QUEUE P50", "P99", "COMPUTE", "LATENCY P50", "P99")  # fmt: skip
NONE: Final = "-"
"""Stands for a number that there isn't."""


def table(interval: Interval) -> str:
    """Lines with the whole server, and then each model."""
    if not interval.models:
        return f"{summary(interval)}\n\nno models"
    rows = [
        (printable(name), printable(version), *_cells(activity))
        for (name, version), activity in interval.models.items()
    ]
    (width, *widths) = [max(map(len, column)) for column in zip(_HEADINGS, *rows, strict=True)]
    lines = [
        "  ".join([name.ljust(width), *(cell.rjust(wide) for cell, wide in zip(cells, widths, strict=True))])
        for name, *cells in (_HEADINGS, *rows)
    ]
    return "\n".join([summary(interval), "", *lines])


def summary(interval: Interval) -> str:
    """The whole server in a line."""
    parts = [{True: "ready", False: "not ready", None: "readiness unknown"}[interval.ready]]
    parts.append(f"{rate_text(interval.requests_per_s)} requests/s")
    parts.append(f"{interval.waiting:.0f} waiting")
    if interval.cpu_share is not None:
        parts.append(f"CPU {100 * interval.cpu_share:.0f} %")
    if interval.memory_bytes is not None:
        parts.append(f"memory {interval.memory_bytes / 2**20:.0f} MiB")
    return ", ".join(parts)


def rate_text(rate: float | None) -> str:
    """A number per something, to a tenth if it is small."""
    if rate is None:
        return NONE
    return f"{rate:.1f}" if rate < 100 else f"{rate:.0f}"


def time_text(us: float | None) -> str:
    """Microseconds, in the unit that suits them."""
    if us is None:
        return NONE
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{us / size:.3g} {unit}"
    return f"{us:.0f} us"


def _cells(activity: Activity) -> Sequence[str]:
    queue, latency = activity.queue_us or (None, None), activity.latency_us or (None, None)
    return (
        rate_text(activity.requests_per_s),
        rate_text(activity.failed_per_s),
        rate_text(activity.rows_per_s),
        rate_text(activity.batches_per_s),
        NONE if activity.rows_per_batch is None else f"{activity.rows_per_batch:.1f}",
        f"{activity.waiting:.0f}",
        *map(time_text, queue),
        time_text(activity.compute_us),
        *map(time_text, latency),
    )
