"""What Prometheus sees: the names and labels of everything that is counted.

Lives here: the families, made of `VersionStatistics` and the batcher's gauges at each scrape. Must not: count anything,
or serve HTTP. Names are Triton's if the meaning is the same; names that Triton lacks begin with `paceline_`. Collecting
may happen on any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Protocol

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric, Sample
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from paceline.server.telemetry.exposition import exposition
from paceline.server.telemetry.host_metrics import HostCollector
from paceline.server.telemetry.log_output import lost_lines
from paceline.server.telemetry.model_statistics import DURATION_BOUNDS_NS, DurationHistogram, VersionStatistics

__all__ = ["BatcherGauges", "FrontsCollector", "Metrics", "VersionMetrics"]

_ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_LEVELS = 16
"""Priority levels with a series of their own. There may be 2^64 levels, and clients choose among them."""


class BatcherGauges(Protocol):
    """What metrics read from a batcher."""

    @property
    def waiting_requests(self) -> int: ...

    @property
    def lanes(self) -> int: ...

    @property
    def allowed_rows(self) -> int: ...

    @property
    def resting_instances(self) -> int: ...

    def waiting_of_level(self, level: int) -> int: ...


class FrontsShown(Protocol):
    """What metrics read about the processes that speak gRPC."""

    @property
    def running(self) -> int: ...

    @property
    def restarts(self) -> int: ...

    @property
    def requests(self) -> int: ...

    @property
    def input_bytes(self) -> int: ...

    @property
    def output_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class VersionMetrics:
    """One loaded version of a model, as far as metrics go. `tags` become labels, each with `_` in front of its name.
    `priority_levels` is 0 where all requests are equal."""

    model: str
    version: str
    statistics: VersionStatistics
    batcher: BatcherGauges
    priority_levels: int = 0
    load_ns: int = 0
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def labels(self) -> dict[str, str]:
        tags = {f"_{name}": value for name, value in self.tags.items()}
        return {"model": self.model, "version": self.version, **tags}


@dataclass(frozen=True, slots=True)
class _Line:
    """A version that serves, and what was counted by those of its name and number that it replaced: `past` ones may go
    on counting while they answer what they accepted; those in `gone` don't; `settled` is the sum of earlier ones.

    A line that changes is replaced by a new one, so that any thread may read.
    """

    current: VersionMetrics
    past: tuple[VersionMetrics, ...] = ()
    gone: tuple[VersionMetrics, ...] = ()
    settled: VersionStatistics = field(default_factory=VersionStatistics)

    def replaced(self, version: VersionMetrics) -> _Line:
        """With `version` as the current one. Only now are those in `gone` summed up, since the last requests of a
        version are counted a moment after it has gone."""
        settled = _sum(self.settled, *(one.statistics for one in self.gone))
        return _Line(version, (*self.past, self.current), (), settled)

    def without(self, version: VersionMetrics) -> _Line:
        """The same, after `version`, one of `past`, has gone."""
        left = tuple(one for one in self.past if one is not version)
        return self if len(left) == len(self.past) else _Line(self.current, left, (*self.gone, version), self.settled)

    def shown(self) -> VersionMetrics:
        """The current one, with all that was counted."""
        earlier = [one.statistics for one in (*self.past, *self.gone)]
        return replace(self.current, statistics=_sum(self.settled, *earlier, self.current.statistics))


def _sum(*statistics: VersionStatistics) -> VersionStatistics:
    total = VersionStatistics()
    for one in statistics:
        total.merge(one)
    return total


class Metrics:
    """The metrics of one server. `add`, `remove` and `set_health` are for the event loop, `text` for any thread."""

    def __init__(self) -> None:
        self._health = (False, 0)
        self._versions: dict[tuple[str, str], _Line] = {}
        self._registry = CollectorRegistry()
        self._registry.register(_ModelCollector(self._versions))
        self._registry.register(_ServerCollector(lambda: self._health))
        self._registry.register(HostCollector())
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def add(self, version: VersionMetrics) -> None:
        """Show a version. If it replaces one of the same name and number, its counters go on from there, as they do in
        Triton: otherwise scrapes would miss whatever the earlier one still answers."""
        line = self._versions.get(_key(version))
        if line is None or line.current is not version:
            self._versions[_key(version)] = _Line(version) if line is None else line.replaced(version)

    def remove(self, version: VersionMetrics) -> None:
        """Show it no longer. The counts of a version that was replaced stay."""
        line = self._versions.get(_key(version))
        if line is None:
            return
        if line.current is version:
            del self._versions[_key(version)]
        else:
            self._versions[_key(version)] = line.without(version)

    def set_health(self, ready: bool, failed_models: int) -> None:
        """Show whether the server is ready, and how many models should serve and don't."""
        self._health = (ready, failed_models)

    def add_collector(self, collector: Collector) -> None:
        """Show what it collects."""
        self._registry.register(collector)

    def text(self) -> bytes:
        """Everything, in Prometheus' text format 0.0.4."""
        return exposition(self._registry.collect()).encode()


def _key(version: VersionMetrics) -> tuple[str, str]:
    return version.model, version.version


Samples = Iterable[tuple[str, Mapping[str, str], float]]
"""Of one version: what is appended to the family's name, further labels, value."""


@dataclass(frozen=True, slots=True)
class _Family:
    name: str
    kind: str
    help: str
    samples: Callable[[VersionMetrics], Samples]


class FrontsCollector(Collector):
    """The processes that speak gRPC, if there are any."""

    def __init__(self, fronts: FrontsShown) -> None:
        self._fronts = fronts

    def collect(self) -> Iterator[Metric]:
        shown = self._fronts
        yield GaugeMetricFamily("paceline_frontends", "Frontends: processes that handle gRPC and listen", shown.running)
        restarts = Metric(
            "paceline_frontend_restarts", "Frontends that died, or hung and were killed, and were replaced", "counter"
        )
        restarts.add_sample("paceline_frontend_restarts", {}, shown.restarts)
        yield restarts
        yield GaugeMetricFamily(
            "paceline_frontend_requests",
            "Calls that frontends have handed over to the process with the models and wait for",
            shown.requests,
        )
        held = GaugeMetricFamily(
            "paceline_frontend_memory_bytes",
            "Shared memory, in bytes, that holds tensors in transit, by direction",
            labels=["direction"],
        )
        held.add_metric(["in"], shown.input_bytes)
        held.add_metric(["out"], shown.output_bytes)
        yield held


class _ModelCollector(Collector):
    def __init__(self, versions: dict[tuple[str, str], _Line]) -> None:
        self._versions = versions

    def collect(self) -> Iterator[Metric]:
        versions = [line.shown() for line in self._versions.copy().values()]
        for family in _FAMILIES:
            metric = Metric(family.name, family.help, family.kind)
            for version in versions:
                labels = version.labels
                for suffix, more, value in family.samples(version):
                    metric.samples.append(Sample(family.name + suffix, {**labels, **more}, value))
            yield metric


class _ServerCollector(Collector):
    def __init__(self, health: Callable[[], tuple[bool, int]]) -> None:
        self._health = health

    def collect(self) -> Iterator[Metric]:
        ready, failed_models = self._health()
        yield GaugeMetricFamily("paceline_ready", "1 while the server is ready, else 0", ready)
        yield GaugeMetricFamily("paceline_failed_models", "Models that should serve but failed to load", failed_models)
        lost = Metric(
            "paceline_lost_log_lines", "Log lines that were lost because stderr didn't accept them", "counter"
        )
        lost.add_sample("paceline_lost_log_lines", {}, lost_lines())
        yield lost


def _counter(name: str, help: str, value: Callable[[VersionStatistics], int]) -> _Family:
    return _Family(name, "counter", help, lambda version: [("", {}, value(version.statistics))])


def _gauge(name: str, help: str, value: Callable[[VersionMetrics], float]) -> _Family:
    return _Family(name, "gauge", help, lambda version: [("", {}, value(version))])


def _histogram(name: str, help: str, samples: Callable[[VersionStatistics], Samples]) -> _Family:
    return _Family(name, "histogram", help, lambda version: samples(version.statistics))


def _failures(version: VersionMetrics) -> Samples:
    return [("", {"reason": reason.value}, count) for reason, count in version.statistics.failures.items()]


def _drops(version: VersionMetrics) -> Samples:
    return [("", {"reason": drop.value}, count) for drop, count in version.statistics.drops.items()]


def _padding_share(version: VersionMetrics) -> float:
    padding = version.statistics.padding_rows
    return padding / (padding + version.statistics.rows) if padding else 0.0


def _by_level(version: VersionMetrics) -> Samples:
    own = range(1, min(version.priority_levels, _LEVELS) + 1)
    waiting = [version.batcher.waiting_of_level(level) for level in own]
    yield from (("", {"priority": str(level)}, count) for level, count in zip(own, waiting, strict=True))
    if version.priority_levels > _LEVELS:
        others = max(0, version.batcher.waiting_requests - sum(waiting))
        yield "", {"priority": f"{_LEVELS + 1}+"}, others


def _batch_rows(statistics: VersionStatistics) -> Samples:
    counts = [0] * (len(_ROW_BUCKETS) + 1)
    total = 0
    for rows, totals in statistics.by_rows().items():
        bucket = next((number for number, bound in enumerate(_ROW_BUCKETS) if rows <= bound), len(_ROW_BUCKETS))
        counts[bucket] += totals.count
        total += rows * totals.count
    return _buckets(_ROW_BUCKETS, counts, total)


def _durations(histogram: DurationHistogram, **labels: str) -> Samples:
    bounds_us = [bound_ns / 1_000 for bound_ns in DURATION_BOUNDS_NS]
    return _buckets(bounds_us, list(histogram.counts), histogram.total_ns / 1_000, **labels)


def _executions(statistics: VersionStatistics) -> Samples:
    for size, histogram in statistics.by_size().items():
        yield from _durations(histogram, up_to_rows=str(size))


def _buckets(bounds: Sequence[float], counts: Sequence[int], total: float, **labels: str) -> Samples:
    sums = list(accumulate(counts))
    for bound, count in zip([*map(floatToGoString, bounds), "+Inf"], sums, strict=True):
        yield "_bucket", {**labels, "le": bound}, count
    yield "_count", labels, sums[-1]
    yield "_sum", labels, total


_FAMILIES = (
    _counter("nv_inference_request_success", "Requests answered successfully", lambda s: s.requests.count),
    _Family("nv_inference_request_failure", "counter", "Failed requests, by reason", _failures),
    _counter("nv_inference_count", "Rows executed, without padding", lambda s: s.rows),
    _counter("nv_inference_exec_count", "Executions: batches that the model answered", lambda s: s.execution_count),
    _counter(
        "nv_inference_request_duration_us",
        "Microseconds from when successful requests were taken up until their answers were ready",
        lambda s: s.requests.total_ns // 1_000,
    ),
    _counter(
        "nv_inference_queue_duration_us",
        "Microseconds in the queue, of requests that were executed and answered",
        lambda s: s.queue.total_ns // 1_000,
    ),
    _counter(
        "nv_inference_compute_input_duration_us",
        "Microseconds of stacking inputs, the whole batch's for each of its requests",
        lambda s: s.input_ns // 1_000,
    ),
    _counter(
        "nv_inference_compute_infer_duration_us",
        "Microseconds in the model, the whole batch's for each of its requests",
        lambda s: s.infer_ns // 1_000,
    ),
    _counter(
        "nv_inference_compute_output_duration_us",
        "Microseconds of splitting outputs, the whole batch's for each of its requests",
        lambda s: s.output_ns // 1_000,
    ),
    _gauge(
        "nv_inference_pending_request_count",
        "Requests accepted and not yet executing",
        lambda version: version.batcher.waiting_requests,
    ),
    _gauge(
        "nv_model_load_duration_secs",
        "Seconds that loading took, including warm-up",
        lambda version: version.load_ns / 1e9,
    ),
    _Family(
        "paceline_dropped_requests",
        "counter",
        "Requests that were not executed, by reason; of a split request, its parts",
        _drops,
    ),
    _Family(
        "paceline_pending_requests", "gauge", "Requests accepted and not yet executing, by priority level", _by_level
    ),
    _counter(
        "paceline_hung_executions",
        "Executions that exceeded their time limit, each of which cost an instance",
        lambda s: s.hung_executions,
    ),
    _counter(
        "paceline_lost_instances",
        "Instances that were lost: their device failed, or their process ended",
        lambda s: s.lost_instances,
    ),
    _counter("paceline_out_of_memory", "Executions that ran out of memory", lambda s: s.shortages),
    _gauge(
        "paceline_allowed_batch_rows",
        "Rows that a batch may have; fewer than configured for a while after memory ran out",
        lambda version: version.batcher.allowed_rows,
    ),
    _gauge(
        "paceline_resting_instances",
        "Instances that get no requests for a while, because they had no memory for what others execute",
        lambda version: version.batcher.resting_instances,
    ),
    _gauge("paceline_lanes", "Shapes with waiting requests", lambda version: version.batcher.lanes),
    _counter(
        "paceline_padding_rows", "Padding rows executed, to bring batches to an allowed size", lambda s: s.padding_rows
    ),
    _gauge("paceline_padding_share", "Share of padding in all rows that the model saw, 0 to 1", _padding_share),
    _histogram("paceline_batch_rows", "Rows of each execution, without padding", _batch_rows),
    _histogram(
        "paceline_request_duration_us",
        "Microseconds from when a successful request was taken up until its answer was ready",
        lambda s: _durations(s.requests),
    ),
    _histogram(
        "paceline_queue_wait_us",
        "Microseconds in the queue, of each request that was executed and answered",
        lambda s: _durations(s.queue),
    ),
    _histogram(
        "paceline_execution_us",
        "Microseconds of each execution, by the power of two that covers the rows that the model saw",
        _executions,
    ),
)
