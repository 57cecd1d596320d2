"""What a server did between two looks at its metrics, as a table for a terminal.

Lives here: the metrics' names and reading them, pure arithmetic and formatting. Must not: ask servers, clocks, or
terminals. The rule of counters: one that is lower than before was reset by a restart or a reload, and all that it shows
happened since.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.clients.options import printable

__all__ = ["Histogram", "Model", "Snapshot", "ended", "parse", "quantile", "table"]

Histogram = dict[float, float]
"""Cumulative counts by upper bound."""

_NUMBERS = {
    "nv_inference_request_success": "succeeded",
    "nv_inference_count": "rows",
    "nv_inference_exec_count": "batches",
    "nv_inference_pending_request_count": "waiting",
}
_HISTOGRAMS = {"paceline_queue_wait_us_bucket": "queue", "paceline_request_duration_us_bucket": "duration"}
_OF_PROCESS = {
    "process_start_time_seconds": "began_s",
    "process_cpu_seconds": "cpu_s",
    "process_resident_memory_bytes": "memory_bytes",
}
_HEADINGS = ("MODEL", "VERSION", "REQ/S", "FAIL/S", "ROWS/S", "BATCH/S", "ROWS/BATCH", "WAITING",
             "QUEUE P50", "P99", "COMPUTE", "LATENCY P50", "P99")  # fmt: skip
_NONE = "-"


@dataclass(slots=True)
class Model:
    """What a version of a model has done since it was loaded, and how many requests wait now. Times are in
    microseconds."""

    succeeded: float = 0
    failed: float = 0
    rows: float = 0
    batches: float = 0
    waiting: float = 0
    compute_us: float = 0
    queue: Histogram = field(default_factory=dict)
    duration: Histogram = field(default_factory=dict)


@dataclass(slots=True)
class Snapshot:
    """What a server's metrics said at `taken_s`, in seconds on the monotonic clock.

    `models` is by name and version; `began_s` is when its process started, in seconds since the epoch. What the metrics
    don't say is None.
    """

    taken_s: float
    models: dict[tuple[str, str], Model] = field(default_factory=dict)
    ready: bool | None = None
    began_s: float | None = None
    cpu_s: float | None = None
    memory_bytes: float | None = None


def parse(text: str, taken_s: float) -> Snapshot:
    """Read Prometheus' text format. Raises ValueError if `text` isn't in it, or doesn't come from a paceline server."""
    from prometheus_client.parser import text_string_to_metric_families  # which no other command needs

    snapshot = Snapshot(taken_s)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            # The library gives every counter this suffix, whether it has it or not.
            name, labels = sample.name.removesuffix("_total"), sample.labels
            if name in _OF_PROCESS:
                setattr(snapshot, _OF_PROCESS[name], sample.value)
            elif name == "paceline_ready":
                snapshot.ready = bool(sample.value)
            elif "model" in labels and "version" in labels:
                model = snapshot.models.setdefault((labels["model"], labels["version"]), Model())
                _add(model, name, labels, sample.value)
    if snapshot.ready is None and not snapshot.models:
        raise ValueError("expected metrics of a paceline server")
    return snapshot


def _add(model: Model, name: str, labels: Mapping[str, str], value: float) -> None:
    if name in _NUMBERS:
        setattr(model, _NUMBERS[name], value)
    elif name == "nv_inference_request_failure":
        model.failed += value
    elif name in _HISTOGRAMS and "le" in labels:
        getattr(model, _HISTOGRAMS[name])[float(labels["le"])] = value
    elif name.startswith("nv_inference_compute_"):
        model.compute_us += value


def table(before: Snapshot | None, now: Snapshot) -> str:
    """What the server did from `before` to `now`. Without `before` there are no rates, and the rest covers all that it
    has done."""
    seconds = None if before is None else max(now.taken_s - before.taken_s, 1e-3)
    base = _base(before, now)
    changes = _changes(base, now)
    # The busiest first, then by name and version.
    changes.sort(key=lambda item: (-item[1].succeeded - item[1].failed, item[0][0], item[0][1].zfill(10)))
    summary = _summary([change for _, change in changes], base, now, seconds)
    if not changes:
        return f"{summary}\n\nno models"
    rows = [(printable(name), printable(version), *_cells(change, seconds)) for (name, version), change in changes]
    (width, *widths) = [max(map(len, column)) for column in zip(_HEADINGS, *rows, strict=True)]
    lines = [
        "  ".join([name.ljust(width), *(cell.rjust(wide) for cell, wide in zip(cells, widths, strict=True))])
        for name, *cells in (_HEADINGS, *rows)
    ]
    return "\n".join([summary, "", *lines])


def ended(before: Snapshot, now: Snapshot) -> dict[str, int]:
    """How many requests to each model, by name, have ended from `before` to `now`, also those that failed."""
    found: dict[str, int] = {}
    for (name, _), change in _changes(_base(before, now), now):
        found[name] = found.get(name, 0) + round(change.succeeded + change.failed)
    return found


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


def _base(before: Snapshot | None, now: Snapshot) -> Snapshot:
    """What the counters of `now` are to be compared with: nothing, if the server was restarted since `before`."""
    return Snapshot(now.taken_s) if before is None or before.began_s != now.began_s else before


def _changes(base: Snapshot, now: Snapshot) -> list[tuple[tuple[str, str], Model]]:
    return [(key, _since(model, base.models.get(key))) for key, model in now.models.items()]


def _since(now: Model, before: Model | None) -> Model:
    counted = ("succeeded", "failed", "rows", "batches")
    if before is None or any(getattr(now, name) < getattr(before, name) for name in counted):
        return now
    counts = {name: getattr(now, name) - getattr(before, name) for name in (*counted, "compute_us")}
    queue, duration = (
        {bound: count - earlier.get(bound, 0) for bound, count in later.items()}
        for later, earlier in ((now.queue, before.queue), (now.duration, before.duration))
    )
    return replace(now, queue=queue, duration=duration, **counts)


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
