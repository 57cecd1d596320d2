"""Metrics of models that generate.

Lives here: their names, which are vLLM's (github.com/vllm-project/vllm, vllm/v1/metrics) where they mean the same, so
that dashboards made for it show them. Must not: count anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.backends.generation_totals import GENERATION_BOUNDS_NS, GenerationTotals, TokenTimes
from paceline.server.telemetry.metrics import Families, Family, Labels, Metrics, Samples, VersionMetrics, buckets

__all__ = ["generation_families"]


def generation_families(metrics: Metrics) -> Families[VersionMetrics]:
    """Of the versions that `metrics` shows, those that generate."""

    def shown() -> list[tuple[Labels, VersionMetrics]]:
        return [
            ({"model_name" if key == "model" else key: value for key, value in labels.items()}, version)
            for labels, version in metrics.shown()
            if version.generations is not None
        ]

    return Families(_GENERATIONS, shown)


def _counter(name: str, help: str, value: Callable[[GenerationTotals], Samples | int]) -> Family[VersionMetrics]:
    return Family(name, "counter", help, lambda version: value(_totals(version)))


def _histogram(name: str, help: str, of: Callable[[GenerationTotals], TokenTimes]) -> Family[VersionMetrics]:
    def samples(version: VersionMetrics) -> Samples:
        times = of(_totals(version))
        bounds_s = [bound_ns / 1e9 for bound_ns in GENERATION_BOUNDS_NS]
        return buckets(bounds_s, list(times.counts), times.total_ns / 1e9)

    return Family(name, "histogram", help, samples)


def _totals(version: VersionMetrics) -> GenerationTotals:
    """With what was counted by versions that it has replaced."""
    assert version.statistics.generations is not None
    return version.statistics.generations


def _running(version: VersionMetrics) -> int:
    assert version.generations is not None
    return version.generations.running


def _waiting(version: VersionMetrics) -> int:
    assert version.open_requests is not None
    return max(0, len(version.open_requests) - _running(version))


def _cache_usage(version: VersionMetrics) -> float:
    assert version.generations is not None
    return version.generations.cache_usage


_GENERATIONS: Sequence[Family[VersionMetrics]] = (
    Family("vllm:num_requests_running", "gauge", "Generations that have a place", _running),
    Family("vllm:num_requests_waiting", "gauge", "Generations that wait for a place", _waiting),
    Family("vllm:kv_cache_usage_perc", "gauge", "Share of the room for keys and values that is used, 0 to 1",
        _cache_usage),
    _counter("vllm:num_preemptions_total", "How often generations were put out, to be computed again later",
        lambda totals: totals.preemptions),
    _counter("vllm:prompt_tokens_total", "Tokens of prompts that were computed, each once",
        lambda totals: totals.prompt_tokens),
    _counter("vllm:generation_tokens_total", "Tokens that were chosen, with those that end answers",
        lambda totals: totals.generation_tokens),
    _counter("vllm:request_success_total", "Answers that are complete, by the reason of their end",
        lambda totals: [("", {"finished_reason": reason}, n) for reason, n in totals.finished.copy().items()]),
    _histogram("vllm:time_to_first_token_seconds", "Seconds from when a request arrived until its first token",
        lambda totals: totals.first_token),
    _histogram("vllm:inter_token_latency_seconds", "Seconds from one token to the next",
        lambda totals: totals.next_token),
    _histogram("vllm:e2e_request_latency_seconds", "Seconds from when a request arrived until its last answer",
        lambda totals: totals.whole),
)  # fmt: skip
