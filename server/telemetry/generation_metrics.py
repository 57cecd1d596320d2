"""Metrics of models that generate.

Lives here: their names, which are vLLM's (github.com/vllm-project/vllm, vllm/v1/metrics) where they mean the same, so
that dashboards made for it show them. Must not: count anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from paceline.backends.generation_totals import GENERATION_BOUNDS_NS, GenerationTotals, TokenTimes
from paceline.server.telemetry.metrics import Families, Family, Labels, Metrics, Samples, buckets


class _Generating(NamedTuple):
    """`now`: what goes on. `totals`: with what was counted by versions that it has replaced. `opened`: all that were
    accepted and haven't ended."""

    now: GenerationTotals
    totals: GenerationTotals
    opened: int


def generation_families(metrics: Metrics) -> Families[_Generating]:
    """Of the versions that `metrics` shows, those that generate."""

    def shown() -> Iterator[tuple[Labels, _Generating]]:
        for labels, version in metrics.shown():
            now, totals, opened = version.generations, version.statistics.generations, version.open_requests
            if now is not None and totals is not None and opened is not None:
                named = {"model_name" if key == "model" else key: value for key, value in labels.items()}
                yield named, _Generating(now, totals, len(opened))

    return Families(_GENERATIONS, shown)


def _seconds(times: TokenTimes) -> Samples:
    return buckets([bound_ns / 1e9 for bound_ns in GENERATION_BOUNDS_NS], list(times.counts), times.total_ns / 1e9)


_GENERATIONS: Sequence[Family[_Generating]] = (
    Family("vllm:num_requests_running", "gauge", "Generations that have a place", lambda one: one.now.running),
    Family("vllm:num_requests_waiting", "gauge", "Generations that wait for a place",
        lambda one: max(0, one.opened - one.now.running)),
    Family("vllm:kv_cache_usage_perc", "gauge", "Share of the room for keys and values that is used, 0 to 1",
        lambda one: one.now.cache_usage),
    Family("vllm:num_preemptions_total", "counter", "How often generations were put out, to be computed again later",
        lambda one: one.totals.preemptions),
    Family("vllm:prompt_tokens_total", "counter", "Tokens of prompts that were computed, each once",
        lambda one: one.totals.prompt_tokens),
    Family("vllm:generation_tokens_total", "counter", "Tokens that were chosen, with those that end answers",
        lambda one: one.totals.generation_tokens),
    Family("vllm:request_success_total", "counter", "Answers that are complete, by the reason of their end",
        lambda one: [("", {"finished_reason": reason}, n) for reason, n in one.totals.finished.copy().items()]),
    Family("vllm:time_to_first_token_seconds", "histogram", "Seconds from when a request arrived until its first token",
        lambda one: _seconds(one.totals.first_token)),
    Family("vllm:inter_token_latency_seconds", "histogram", "Seconds from one token to the next",
        lambda one: _seconds(one.totals.next_token)),
    Family("vllm:e2e_request_latency_seconds", "histogram", "Seconds from when a request arrived until its last answer",
        lambda one: _seconds(one.totals.whole)),
)  # fmt: skip
