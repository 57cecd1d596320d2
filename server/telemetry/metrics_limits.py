"""The server's limits for Prometheus: how much there may be, how much there is, what was refused.

Lives here: the families. Must not: count anything. Collecting may happen on any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

__all__ = ["LimitCollector", "LimitShown"]


@dataclass(frozen=True, slots=True)
class LimitShown:
    """One limit. `used` is left out if only gRPC knows it, `refused` if refusals are counted elsewhere or nowhere."""

    name: str
    bound: int | Callable[[], int]
    used: Callable[[], int] | None = None
    refused: Callable[[], int] | None = None


class LimitCollector(Collector):
    """`limits`, and how many calls were `refused`, by reason."""

    def __init__(self, limits: Sequence[LimitShown], refused: Callable[[], Mapping[str, int]]) -> None:
        self._limits = limits
        self._refused = refused

    def collect(self) -> Iterator[Metric]:
        bounds = GaugeMetricFamily("paceline_limit", "The server's limits", labels=["limit"])
        used = GaugeMetricFamily("paceline_limit_used", "How much of each limit is used", labels=["limit"])
        refusals = Metric(
            "paceline_limit_refusals",
            "Registrations of shared memory and loads of models that were refused at a limit",
            "counter",
        )
        for limit in self._limits:
            bounds.add_metric([limit.name], limit.bound() if callable(limit.bound) else limit.bound)
            if limit.used is not None:
                used.add_metric([limit.name], limit.used())
            if limit.refused is not None:
                refusals.add_sample("paceline_limit_refusals", {"limit": limit.name}, limit.refused())
        yield bounds
        yield used
        yield refusals
        refused = Metric(
            "paceline_refused_rpcs", "Calls refused before anything was done for them, by reason", "counter"
        )
        for reason, count in self._refused().items():
            refused.add_sample("paceline_refused_rpcs", {"reason": reason}, count)
        yield refused
