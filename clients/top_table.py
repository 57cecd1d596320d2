"""What a server did between two scrapes, as a table for a terminal.

Lives here: pure arithmetic and formatting. Must not: scrape, clocks, or terminals. The rule of counters: one that is
lower than before was reset by a restart or a reload, and all that it shows happened since.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.clients.printable import printable
from paceline.clients.scrape import Histogram, Model, Snapshot

__all__ = ["quantile", "table"]

_HEADINGS = ("MODEL", "VERSION", "REQ/S", "FAIL/S", "ROWS/S", "BATCH/S", "ROWS/BATCH", "WAITING",
             "QUEUE P50", "P99", "COMPUTE", "LATENCY P50", "P99")  # fmt: skip
_NONE = "-"


def table(before: Snapshot | None, now: Snapshot) -> str:
    """What the server did from `before` to `now`. Without `before` there are no rates, and the rest covers all that it
    has done."""
    restarted = before is not None and before.began_s != now.began_s
    seconds = None if before is None else max(now.taken_s - before.taken_s, 1e-3)
    base = Snapshot(now.taken_s) if before is None or restarted else before
    changes = [(key, _since(model, base.models.get(key))) for key, model in now.models.items()]
    # The busiest first, then by name and version.
    changes.sort(key=lambda item: (-item[1].succeeded - item[1].failed, item[0][0], item[0][1].zfill(10)))
    rows = [(printable(name), printable(version), *_cells(change, seconds)) for (name, version), change in changes]
    lines = [_summary([change for _, change in changes], base, now, seconds), ""]
    lines += _aligned([_HEADINGS, *rows]) if rows else ["no models"]
    return "\n".join(lines)


def quantile(share: float, histogram: Histogram) -> float | None:
    """The value below which `share` (0 to 1) of the observations are, as by Prometheus' histogram_quantile; None if
    there are none."""
    bounds = sorted(histogram)
    if not bounds or not histogram[bounds[-1]]:
        return None
    rank = share * histogram[bounds[-1]]
    lower_bound, lower_count = 0.0, 0.0
    for bound in bounds:
        count = histogram[bound]
        if count >= rank and count > lower_count:
            if math.isinf(bound):
                return lower_bound
            return lower_bound + (bound - lower_bound) * (rank - lower_count) / (count - lower_count)
        lower_bound, lower_count = bound, count
    return lower_bound


def _since(now: Model, before: Model | None) -> Model:
    if before is None or _began_anew(now, before):
        return now
    return Model(
        succeeded=now.succeeded - before.succeeded,
        failed=now.failed - before.failed,
        rows=now.rows - before.rows,
        batches=now.batches - before.batches,
        waiting=now.waiting,
        compute_us=now.compute_us - before.compute_us,
        queue=_difference(now.queue, before.queue),
        duration=_difference(now.duration, before.duration),
    )


def _began_anew(now: Model, before: Model) -> bool:
    names = ("succeeded", "failed", "rows", "batches")
    return any(getattr(now, name) < getattr(before, name) for name in names)


def _difference(now: Histogram, before: Histogram) -> Histogram:
    return {bound: count - before.get(bound, 0) for bound, count in now.items()}


def _summary(changes: Sequence[Model], base: Snapshot, now: Snapshot, seconds: float | None) -> str:
    parts = [{True: "ready", False: "not ready", None: "readiness unknown"}[now.ready]]
    parts.append(f"{_rate(sum(one.succeeded + one.failed for one in changes), seconds)} requests/s")
    parts.append(f"{sum(one.waiting for one in changes):.0f} waiting")
    if now.cpu_s is not None and seconds is not None:
        parts.append(f"CPU {100 * (now.cpu_s - (base.cpu_s or 0.0)) / seconds:.0f} %")
    if now.memory_bytes is not None:
        parts.append(f"memory {now.memory_bytes / 2**20:.0f} MiB")
    return ", ".join(parts)


def _cells(change: Model, seconds: float | None) -> Sequence[str]:
    executed = max(change.queue.values(), default=0.0)
    return (
        _rate(change.succeeded + change.failed, seconds),
        _rate(change.failed, seconds),
        _rate(change.rows, seconds),
        _rate(change.batches, seconds),
        f"{change.rows / change.batches:.1f}" if change.batches else _NONE,
        f"{change.waiting:.0f}",
        _time(quantile(0.5, change.queue)),
        _time(quantile(0.99, change.queue)),
        _time(change.compute_us / executed if executed else None),
        _time(quantile(0.5, change.duration)),
        _time(quantile(0.99, change.duration)),
    )


def _rate(count: float, seconds: float | None) -> str:
    if seconds is None:
        return _NONE
    rate = count / seconds
    return f"{rate:.1f}" if rate < 100 else f"{rate:.0f}"


def _time(us: float | None) -> str:
    if us is None:
        return _NONE
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{us / size:.3g} {unit}"
    return f"{us:.0f} us"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0] = row[0].ljust(widths[0])
        lines.append("  ".join(cells))
    return lines
