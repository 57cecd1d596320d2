"""What Prometheus sees: the names and labels of everything that is counted, and the text that it gets.

Lives here: families of samples, made at each scrape of what `VersionStatistics`, the batcher and others say,
and how they are written. Must not: count anything, or serve HTTP. Names are Triton's if the meaning is the same; names
that Triton lacks begin with `paceline_`. Collecting may happen on any thread.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Generic, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from paceline.backends.generation_totals import GenerationTotals
from paceline.scheduler.batcher import Batcher
from paceline.scheduler.sequence_batcher import SequenceBatcher
from paceline.server.telemetry.host_metrics import HostCollector
from paceline.server.telemetry.log_output import lost_lines
from paceline.server.telemetry.model_statistics import DURATION_BOUNDS_NS, DurationHistogram, VersionStatistics

_ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_SIZE_BUCKETS = tuple(1 << power for power in range(17))
_LEVELS = 16
"""Priority levels with a series of their own. There may be 2^64 levels, and clients choose among them."""

T = TypeVar("T")

_Any = Any  # each kind of model has payloads and results of its own
AnyBatcher = Batcher[_Any, _Any] | SequenceBatcher[_Any, _Any]
Labels = Mapping[str, str]
Samples = Iterable[tuple[str, Labels, float]]
"""What is appended to the family's name, further labels, value."""


class Family(NamedTuple, Generic[T]):
    """Samples of one name. `read` makes them of what is shown: any number, or the value of a single one, None: none."""

    name: str
    kind: str
    help: str
    read: Callable[[T], Samples | float | None]


class Families(Collector, Generic[T]):
    """`families` of all that `shown` returns, each with the labels that it has in all of them."""

    def __init__(self, families: Sequence[Family[T]], shown: Callable[[], Iterable[tuple[Labels, T]]]) -> None:
        self._families = families
        self._shown = shown

    def collect(self) -> Iterator[Metric]:
        return self.some(None)

    def some(self, names: Container[str] | None) -> Iterator[Metric]:
        """As of `Metrics`; None: all."""
        families = [one for one in self._families if names is None or one.name.removesuffix("_total") in names]
        shown = list(self._shown()) if families else []
        for name, kind, help, read in families:
            metric = Metric(name, help, kind)
            for labels, one in shown:
                found = read(one)
                samples = [("", {}, found)] if isinstance(found, (int, float)) else found or ()
                for suffix, more, value in samples:
                    metric.add_sample(name + suffix, {**labels, **more}, value)
            yield metric


_LABEL_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_HELP_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n"})


def exposition(families: Iterable[Metric]) -> str:
    """All of `families` in Prometheus' text format 0.0.4 (prometheus.io/docs/instrumenting/exposition_formats): labels
    in alphabetical order, whole numbers as such, samples under their own names. The library appends `_total` to each
    counter's and writes a million as 1e+06, while scripts made for Triton look for bare names and digits."""
    lines: list[str] = []
    for family in families:
        # The library's counters are named without the suffix that their samples bear.
        suffixed = family.type == "counter" and any(sample.name == f"{family.name}_total" for sample in family.samples)
        name = f"{family.name}_total" if suffixed else family.name
        lines += f"# HELP {name} {family.documentation.translate(_HELP_ESCAPES)}\n", f"# TYPE {name} {family.type}\n"
        for sample in family.samples:
            pairs = (f'{key}="{value.translate(_LABEL_ESCAPES)}"' for key, value in sorted(sample.labels.items()))
            labels = f"{{{','.join(pairs)}}}" if sample.labels else ""
            lines.append(f"{sample.name}{labels} {_number(sample.value)}\n")
    return "".join(lines)


def _number(value: float) -> str:
    if not math.isfinite(value):
        return {math.inf: "+Inf", -math.inf: "-Inf"}.get(value, "NaN")
    return str(int(value)) if value == int(value) else repr(value)


@dataclass(frozen=True, slots=True)
class VersionMetrics:
    """One loaded version of a model, as far as metrics go. `tags` become labels, each with `_` in front of its name.
    `priority_levels` is 0 where all requests are equal. `open_requests` are those of a decoupled model.
    `keeps_responses`: it has a response cache. `generations`: those of a model that generates, with what goes on
    now."""

    model: str
    version: str
    statistics: VersionStatistics
    batcher: AnyBatcher
    priority_levels: int = 0
    load_ns: int = 0
    tags: Mapping[str, str] = field(default_factory=dict)
    open_requests: Sized | None = None
    keeps_responses: bool = False
    generations: GenerationTotals | None = None


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
        return _Line(version, (*self.past, self.current), (), self._sum(*self.gone))

    def without(self, version: VersionMetrics) -> _Line:
        """The same, after `version`, one of `past`, has gone."""
        left = tuple(one for one in self.past if one is not version)
        return self if len(left) == len(self.past) else replace(self, past=left, gone=(*self.gone, version))

    def shown(self) -> tuple[Labels, VersionMetrics]:
        """The current one, with all that was counted."""
        current, total = self.current, self._sum(*self.past, *self.gone, self.current)
        tags = {f"_{tag}": value for tag, value in current.tags.items()}
        return {"model": current.model, "version": current.version, **tags}, replace(current, statistics=total)

    def _sum(self, *versions: VersionMetrics) -> VersionStatistics:
        total = VersionStatistics()
        for one in (self.settled, *(version.statistics for version in versions)):
            total.merge(one)
        return total


class Metrics:
    """The metrics of one server. `add`, `remove` and `set_health` are for the event loop, `text` for any thread."""

    def __init__(self) -> None:
        self._health = (False, 0)
        self._versions: dict[tuple[str, str], _Line] = {}
        self._registry = CollectorRegistry()
        self._some: list[Callable[[Container[str]], Iterator[Metric]]] = []
        self.add_collector(Families(_OF_MODELS, self.shown))
        self.add_collector(Families(_OF_HEALTH, lambda: [({}, self._health)]))
        self.add_collector(Families([_LOST_LINES], lambda: [({}, lost_lines())]))
        self.add_collector(HostCollector())
        self._process = ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def add(self, version: VersionMetrics) -> None:
        """Show a version. If it replaces one of the same name and number, its counters go on from there, as they do in
        Triton: otherwise scrapes would miss whatever the earlier one still answers."""
        key = version.model, version.version
        line = self._versions.get(key)
        if line is None or line.current is not version:
            self._versions[key] = _Line(version) if line is None else line.replaced(version)

    def remove(self, version: VersionMetrics) -> None:
        """Show it no longer. The counts of a version that was replaced stay."""
        key = version.model, version.version
        line = self._versions.get(key)
        if line is not None and line.current is version:
            del self._versions[key]
        elif line is not None:
            self._versions[key] = line.without(version)

    def set_health(self, ready: bool, failed_models: int) -> None:
        """Show whether the server is ready, and how many models should serve and don't."""
        self._health = (ready, failed_models)

    def shown(self) -> list[tuple[Labels, VersionMetrics]]:
        """The versions that are shown, with their labels."""
        return [line.shown() for line in self._versions.copy().values()]

    def add_collector(self, collector: Collector) -> None:
        """Show what it collects."""
        self._registry.register(collector)
        if isinstance(collector, Families):
            self._some.append(collector.some)

    def some(self, names: Container[str]) -> Iterator[Metric]:
        """The families of `names`, counters without `_total`, and those of the process; at little cost, and without
        those of the machine, which tell what happened since they were last asked for."""
        for some in self._some:
            yield from some(names)
        yield from self._process.collect()

    def text(self) -> bytes:
        """Everything, in Prometheus' text format 0.0.4."""
        return exposition(self._registry.collect()).encode()


def _counter(
    name: str,
    help: str,
    value: Callable[[VersionStatistics], int],
    of: Callable[[VersionMetrics], object] = lambda version: True,
) -> Family[VersionMetrics]:
    return Family(name, "counter", help, lambda version: value(version.statistics) if of(version) else None)


def _by_level(version: VersionMetrics) -> Samples:
    own = range(1, min(version.priority_levels, _LEVELS) + 1)
    waiting = [version.batcher.waiting_of_level(level) for level in own]
    yield from (("", {"priority": str(level)}, count) for level, count in zip(own, waiting, strict=True))
    if version.priority_levels > _LEVELS:
        others = max(0, version.batcher.waiting_requests - sum(waiting))
        yield "", {"priority": f"{_LEVELS + 1}+"}, others


def _sequences(version: VersionMetrics) -> Samples:
    if (sequences := version.batcher.sequences) is not None:
        yield "", {"state": "live"}, sequences.live
        yield "", {"state": "waiting"}, sequences.waiting


def _batch_rows(version: VersionMetrics) -> Samples:
    counts = [0] * (len(_ROW_BUCKETS) + 1)
    total = 0
    for rows, totals in version.statistics.by_rows().items():
        counts[bisect_left(_ROW_BUCKETS, rows)] += totals.count
        total += rows * totals.count
    return buckets(_ROW_BUCKETS, counts, total)


def _padded_sizes(version: VersionMetrics) -> Samples:
    statistics = version.statistics
    executions = statistics.padded_sizes.copy()
    for name in statistics.lengths:
        counts = [executions[name, bound] for bound in _SIZE_BUCKETS]
        beyond = sum(count for (one, bound), count in executions.items() if one == name and bound > _SIZE_BUCKETS[-1])
        yield from buckets(_SIZE_BUCKETS, [*counts, beyond], statistics.padded_size_sums[name], length=name)


def _durations(histogram: DurationHistogram, unit_ns: float = 1e3, **labels: str) -> Samples:
    bounds = [bound_ns / unit_ns for bound_ns in DURATION_BOUNDS_NS]
    return buckets(bounds, list(histogram.counts), histogram.total_ns / unit_ns, **labels)


def _executions(version: VersionMetrics) -> Samples:
    for size, histogram in version.statistics.by_size().items():
        yield from _durations(histogram, up_to_rows=str(size))


def buckets(bounds: Sequence[float], counts: Sequence[int], total: float, **labels: str) -> Samples:
    """Of a histogram, with one count more than bounds."""
    sums = list(accumulate(counts))
    for bound, count in zip([*map(floatToGoString, bounds), "+Inf"], sums, strict=True):
        yield "_bucket", {**labels, "le": bound}, count
    yield "_count", labels, sums[-1]
    yield "_sum", labels, total


_OF_MODELS: Sequence[Family[VersionMetrics]] = (
    _counter("nv_inference_request_success", "Requests answered successfully", lambda s: s.requests.count),
    Family("nv_inference_request_failure", "counter", "Failed requests, by reason",
        lambda version: [("", {"reason": one.value}, count) for one, count in version.statistics.failures.items()]),
    _counter("nv_inference_count", "Rows executed, without padding", lambda s: s.rows),
    _counter("nv_inference_exec_count", "Executions: batches that the model answered", lambda s: s.execution_count),
    _counter("nv_inference_request_duration_us",
        "Microseconds from when successful requests were taken up until their answers were ready",
        lambda s: s.requests.total_ns // 1_000),
    _counter("nv_inference_queue_duration_us", "Microseconds in the queue, of requests that were executed and answered",
        lambda s: s.queue.total_ns // 1_000),
    _counter("nv_inference_compute_input_duration_us",
        "Microseconds of stacking inputs, the whole batch's for each of its requests", lambda s: s.input_ns // 1_000),
    _counter("nv_inference_compute_infer_duration_us",
        "Microseconds in the model, the whole batch's for each of its requests", lambda s: s.infer_ns // 1_000),
    _counter("nv_inference_compute_output_duration_us",
        "Microseconds of splitting outputs, the whole batch's for each of its requests",
        lambda s: s.output_ns // 1_000),
    Family("nv_inference_pending_request_count", "gauge", "Requests accepted and not yet executing",
        lambda version: version.batcher.waiting_requests),
    Family("nv_model_load_duration_secs", "gauge", "Seconds that loading took, including warm-up",
        lambda version: version.load_ns / 1e9),
    _counter("nv_cache_num_hits_per_model", "Requests answered from the response cache, or by another's execution",
        lambda s: s.cache_hit.count, lambda v: v.keeps_responses),
    _counter("nv_cache_num_misses_per_model", "Other requests that were looked up in the response cache",
        lambda s: s.cache_miss.count, lambda v: v.keeps_responses),
    _counter("nv_cache_hit_duration_per_model", "Microseconds of hashing and looking up, of hits",
        lambda s: s.cache_hit.ns // 1_000, lambda v: v.keeps_responses),
    _counter("nv_cache_miss_duration_per_model", "Microseconds of hashing, looking up, and keeping answers, of misses",
        lambda s: s.cache_miss.ns // 1_000, lambda v: v.keeps_responses),
    Family("nv_inference_first_response_histogram_ms", "histogram",
        "Milliseconds until a request of a decoupled model has its first answer",
        lambda v: None if v.open_requests is None else _durations(v.statistics.first_answers, 1e6)),
    Family("paceline_open_requests", "gauge", "Requests of a decoupled model that were accepted and haven't ended",
        lambda version: None if version.open_requests is None else len(version.open_requests)),
    Family("paceline_dropped_requests", "counter",
        "Requests that were not executed, by reason; of a split request, its parts",
        lambda version: [("", {"reason": one.value}, count) for one, count in version.statistics.drops.items()]),
    Family("paceline_pending_requests", "gauge", "Requests accepted and not yet executing, by priority level",
        _by_level),
    _counter("paceline_hung_executions", "Executions that exceeded their time limit, each of which cost an instance",
        lambda s: s.hung_executions),
    _counter("paceline_lost_instances", "Instances that were lost: their device failed, or their process ended",
        lambda s: s.lost_instances),
    _counter("paceline_out_of_memory", "Executions that ran out of memory", lambda s: s.shortages),
    Family("paceline_allowed_batch_rows", "gauge",
        "Rows that a batch may have; fewer than configured for a while after memory ran out",
        lambda version: version.batcher.allowed_rows),
    Family("paceline_batch_growth_bound", "gauge",
        "Rows (elements where requests differ in length) at which batches stop, as larger ones cost more; 0: nowhere",
        lambda version: version.batcher.growth_bound),
    Family("paceline_slots", "gauge", "Batches that can execute at a time: one for each instance, two on a GPU",
        lambda version: version.batcher.slots),
    Family("paceline_lanes", "gauge", "Shapes with waiting requests", lambda version: version.batcher.lanes),
    Family("paceline_sequences", "gauge", "Sequences that are live, and those that wait until there is room",
        _sequences),
    Family("paceline_ended_sequences", "counter", "Sequences that are over, by why", lambda version: [
        ("", {"reason": one.label}, count) for one, count in version.statistics.ended_sequences.items()]),
    _counter("paceline_padding_rows", "Padding rows executed, to bring batches to an allowed size",
        lambda s: s.padding_rows),
    Family("paceline_padding_share", "gauge", "Share of padding in all rows that the model saw, 0 to 1",
        lambda v: v.statistics.padding_rows / max(1, v.statistics.padding_rows + v.statistics.rows)),
    _counter("paceline_elements", "Elements executed, without padding: rows times sizes that may differ",
        lambda s: s.elements, lambda version: version.statistics.lengths),
    _counter("paceline_padding_elements", "Elements of padding executed, to fill up rows and sizes",
        lambda s: s.padding_elements, lambda version: version.statistics.lengths),
    Family("paceline_padded_size", "histogram", "Size that each execution's requests were filled up to, by length",
        _padded_sizes),
    Family("paceline_batch_rows", "histogram", "Rows of each execution, without padding", _batch_rows),
    Family("paceline_request_duration_us", "histogram",
        "Microseconds from when a successful request was taken up until its answer was ready",
        lambda version: _durations(version.statistics.requests)),
    Family("paceline_queue_wait_us", "histogram",
        "Microseconds in the queue, of each request that was executed and answered",
        lambda version: _durations(version.statistics.queue)),
    Family("paceline_execution_us", "histogram",
        "Microseconds of each execution, by the power of two that covers the rows that the model saw", _executions),
)  # fmt: skip

_OF_HEALTH: Sequence[Family[tuple[bool, int]]] = (
    Family("paceline_ready", "gauge", "1 while the server is ready, else 0", lambda health: health[0]),
    Family("paceline_failed_models", "gauge", "Models that should serve but failed to load", lambda health: health[1]),
)
_LOST_LINES: Family[int] = Family(
    "paceline_lost_log_lines", "counter", "Log lines that were lost because stderr didn't accept them", int
)


class LimitShown(NamedTuple):
    """A limit of the server: how much there may be, how much there is, how often more was refused. `used` is left out
    if only gRPC knows it, `refused` if refusals are counted elsewhere or nowhere."""

    bound: Callable[[], int]
    used: Callable[[], int] | None = None
    refused: Callable[[], int] | None = None


LIMITS: Sequence[Family[LimitShown]] = (
    Family("paceline_limit", "gauge", "The server's limits", lambda one: one.bound()),
    Family("paceline_limit_used", "gauge", "How much of each limit is used", lambda one: one.used and one.used()),
    Family("paceline_limit_refusals", "counter",
        "Registrations of shared memory and loads of models that were refused at a limit",
        lambda one: one.refused and one.refused()),
)  # fmt: skip

REFUSED_CALLS: Family[Mapping[str, int]] = Family(
    "paceline_refused_rpcs", "counter", "Calls refused before anything was done for them, by reason",
    lambda refused: [("", {"reason": reason}, count) for reason, count in refused.items()])  # fmt: skip
