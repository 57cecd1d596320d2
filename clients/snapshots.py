"""What a server did between two looks at its metrics, in numbers.

Lives here: the metrics' names, reading them, and pure arithmetic. Must not: ask servers or clocks, or show anything.
The rule of counters: one that is lower than before was reset by a restart or a reload, and all that it shows happened
since.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from prometheus_client.core import Metric

Histogram = dict[float, float]
"""Cumulative counts by upper bound."""
Version = tuple[str, str]
"""The names of a model and of its version."""

_NUMBERS: Final = {
    "nv_inference_request_success": "succeeded",
    "nv_inference_count": "rows",
    "nv_inference_exec_count": "batches",
    "nv_inference_pending_request_count": "waiting",
    "paceline_slots": "slots",
    # These come after the others. To the queue, a generation that is next to get a place waits no more.
    "vllm:num_requests_waiting": "waiting",
    "vllm:num_requests_running": "running",
    "vllm:kv_cache_usage_perc": "cache_share",
    "vllm:generation_tokens": "tokens",
}
_SUMS: Final = {
    "nv_inference_compute_input_duration_us": "compute_us",
    "nv_inference_compute_infer_duration_us": "compute_us",
    "nv_inference_compute_output_duration_us": "compute_us",
    "paceline_execution_us_sum": "executing_us",
}
_BY_LABEL: Final = {
    "nv_inference_request_failure": ("failures", "reason"),
    "paceline_sequences": ("sequences", "state"),
}
_HISTOGRAMS: Final = {
    "paceline_queue_wait_us_bucket": ("queue", 1.0),
    "paceline_request_duration_us_bucket": ("duration", 1.0),
    "vllm:time_to_first_token_seconds_bucket": ("first_token", 1e6),
}
"""With what makes their bounds microseconds."""
_OF_PROCESS: Final = {
    "process_start_time_seconds": "began_s",
    "process_cpu_seconds": "cpu_s",
    "process_resident_memory_bytes": "memory_bytes",
    "paceline_failed_models": "failed_models",
    "paceline_ready": "ready",
}
READ: Final = frozenset(
    name.removesuffix("_bucket").removesuffix("_sum")
    for name in chain(_NUMBERS, _SUMS, _BY_LABEL, _HISTOGRAMS, _OF_PROCESS)
)
"""The families that are read, counters without their suffix."""

_COUNTERS: Final = ("succeeded", "rows", "batches", "tokens", "compute_us", "executing_us")
_COUNTERS_OF_MANY: Final = ("failures", "queue", "duration", "first_token")


@dataclass(slots=True)
class Model:
    """What a version of a model has done since it was loaded, and what goes on now. Times are in microseconds.
    `running` and `cache_share` are None unless it generates."""

    succeeded: float = 0
    failures: dict[str, float] = field(default_factory=dict)
    rows: float = 0
    batches: float = 0
    waiting: float = 0
    compute_us: float = 0
    executing_us: float = 0
    slots: float = 0
    queue: Histogram = field(default_factory=dict)
    duration: Histogram = field(default_factory=dict)
    sequences: dict[str, float] = field(default_factory=dict)
    running: float | None = None
    cache_share: float | None = None
    tokens: float = 0
    first_token: Histogram = field(default_factory=dict)

    @property
    def ended(self) -> float:
        """Requests, also those that failed."""
        return self.succeeded + sum(self.failures.values())


@dataclass(slots=True)
class Snapshot:
    """What a server's metrics said at `taken_s`, in seconds on the monotonic clock. `began_s` is when its process
    started, in seconds since the epoch. What the metrics don't say is None."""

    taken_s: float
    models: dict[Version, Model] = field(default_factory=dict)
    ready: float | None = None
    began_s: float | None = None
    cpu_s: float | None = None
    memory_bytes: float | None = None
    failed_models: float | None = None


@dataclass(frozen=True, slots=True)
class Activity:
    """What a version of a model did in an interval, and what went on at its end. Times are in microseconds, pairs are
    the 50th and 99th percentile. `failures_per_s` has the reasons that occurred. None: there is nothing to say."""

    requests_per_s: float | None
    failed_per_s: float | None
    failures_per_s: Mapping[str, float]
    rows_per_s: float | None
    batches_per_s: float | None
    rows_per_batch: float | None
    waiting: float
    queue_us: tuple[float, float] | None
    compute_us: float | None
    latency_us: tuple[float, float] | None
    busy_share: float | None
    sequences: Mapping[str, float]
    running: float | None
    cache_share: float | None
    tokens_per_s: float | None
    first_token_us: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Interval:
    """What a server did in the `seconds` before `taken_s`, by model and version, the busiest first."""

    taken_s: float
    seconds: float | None
    models: Mapping[Version, Activity]
    requests_per_s: float | None
    ready: bool | None
    failed_models: float | None
    cpu_share: float | None
    memory_bytes: float | None

    @property
    def waiting(self) -> float:
        return sum(one.waiting for one in self.models.values())


def parse(text: str, taken_s: float) -> Snapshot:
    """Read Prometheus' text format. Raises ValueError if `text` isn't in it, or doesn't come from a paceline server."""
    from prometheus_client.parser import text_string_to_metric_families  # which no other command needs

    try:
        snapshot = read(text_string_to_metric_families(text), taken_s)
    except ValueError as error:
        raise ValueError(f"expected Prometheus' text format: {error}") from None
    if snapshot.ready is None and not snapshot.models:
        raise ValueError("expected metrics of a paceline server")
    return snapshot


def read(families: Iterable[Metric], taken_s: float) -> Snapshot:
    """Those of `families` that are named in `READ`."""
    snapshot = Snapshot(taken_s)
    for family in families:
        for sample in family.samples:
            # The library gives every counter this suffix, whether it has it or not.
            name, labels = sample.name.removesuffix("_total"), sample.labels
            model_name = labels.get("model") or labels.get("model_name")
            if name in _OF_PROCESS:
                setattr(snapshot, _OF_PROCESS[name], sample.value)
            elif model_name is not None and "version" in labels:
                model = snapshot.models.setdefault((model_name, labels["version"]), Model())
                _add(model, name, labels, sample.value)
    return snapshot


def _add(model: Model, name: str, labels: Mapping[str, str], value: float) -> None:
    if name in _NUMBERS:
        setattr(model, _NUMBERS[name], value)
    elif name in _SUMS:
        setattr(model, _SUMS[name], getattr(model, _SUMS[name]) + value)
    elif name in _BY_LABEL:
        table, label = _BY_LABEL[name]
        getattr(model, table)[labels.get(label, "")] = value
    elif name in _HISTOGRAMS and "le" in labels:
        table, unit_us = _HISTOGRAMS[name]
        getattr(model, table)[float(labels["le"]) * unit_us] = value


def between(before: Snapshot | None, now: Snapshot) -> Interval:
    """What the server did from `before` to `now`. Without `before` there are no rates, and the rest covers all that it
    has done."""
    seconds = None if before is None else max(now.taken_s - before.taken_s, 1e-3)
    base = _base(before, now)
    changes = _changes(base, now)
    changes.sort(key=lambda item: (-item[1].ended, item[0][0], item[0][1].zfill(10)))
    return Interval(
        now.taken_s,
        seconds,
        {key: _activity(change, seconds) for key, change in changes},
        _per(seconds, sum(change.ended for _, change in changes)),
        None if now.ready is None else bool(now.ready),
        now.failed_models,
        None if now.cpu_s is None else _per(seconds, now.cpu_s - (base.cpu_s or 0.0)),
        now.memory_bytes,
    )


def ended(before: Snapshot, now: Snapshot) -> dict[str, int]:
    """How many requests to each model, by name, have ended from `before` to `now`, also those that failed."""
    found: dict[str, int] = {}
    for (name, _), change in _changes(_base(before, now), now):
        found[name] = found.get(name, 0) + round(change.ended)
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


def _changes(base: Snapshot, now: Snapshot) -> list[tuple[Version, Model]]:
    return [(key, _since(model, base.models.get(key))) for key, model in now.models.items()]


def _since(now: Model, before: Model | None) -> Model:
    if before is None or any(getattr(now, name) < getattr(before, name) for name in _COUNTERS):
        return now
    if any(now.failures.get(reason, 0) < count for reason, count in before.failures.items()):
        return now
    changes: dict[str, Any] = {name: getattr(now, name) - getattr(before, name) for name in _COUNTERS}
    for name in _COUNTERS_OF_MANY:
        earlier = getattr(before, name)
        changes[name] = {key: count - earlier.get(key, 0) for key, count in getattr(now, name).items()}
    return replace(now, **changes)


def _activity(change: Model, seconds: float | None) -> Activity:
    executed = max(change.queue.values(), default=0.0)
    failures = {reason: rate for reason, count in change.failures.items() if count and (rate := _per(seconds, count))}
    generates = change.running is not None
    executing = _per(seconds, change.executing_us / 1e6)
    # An execution that began before the interval is counted in it as a whole. One of a model that generates lasts until
    # its request has a place.
    busy = None if executing is None or generates or not change.slots else min(1.0, executing / change.slots)
    return Activity(
        requests_per_s=_per(seconds, change.ended),
        failed_per_s=_per(seconds, sum(change.failures.values())),
        failures_per_s=failures,
        rows_per_s=_per(seconds, change.rows),
        batches_per_s=_per(seconds, change.batches),
        rows_per_batch=change.rows / change.batches if change.batches else None,
        waiting=change.waiting,
        queue_us=_percentiles(change.queue),
        compute_us=change.compute_us / executed if executed else None,
        latency_us=_percentiles(change.duration),
        busy_share=busy,
        sequences=change.sequences,
        running=change.running,
        cache_share=change.cache_share,
        tokens_per_s=_per(seconds, change.tokens) if generates else None,
        first_token_us=_percentiles(change.first_token),
    )


def _per(seconds: float | None, count: float) -> float | None:
    return None if seconds is None else count / seconds


def _percentiles(histogram: Histogram) -> tuple[float, float] | None:
    p50, p99 = quantile(0.5, histogram), quantile(0.99, histogram)
    return None if p50 is None or p99 is None else (p50, p99)
