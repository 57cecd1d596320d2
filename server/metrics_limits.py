"""What Prometheus gets to see of the server's limits: how much there may be, how much there is, what was refused.

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
    """One limit. `used` is left out where gRPC keeps it and tells nobody."""

    name: str
    bound: int
    used: Callable[[], int] | None = None


class LimitCollector(Collector):
    """`limits`, and how many calls were `refused`, by reason."""

    def __init__(self, limits: Sequence[LimitShown], refused: Callable[[], Mapping[str, int]]) -> None:
        self._limits = limits
        self._refused = refused

    def collect(self) -> Iterator[Metric]:
        bounds = GaugeMetricFamily("paceline_limit", "How much the server bears, by limit", labels=["limit"])
        used = GaugeMetricFamily("paceline_limit_used", "How much of a limit is taken", labels=["limit"])
        for limit in self._limits:
            bounds.add_metric([limit.name], limit.bound)
            if limit.used is not None:
                used.add_metric([limit.name], limit.used())
        yield bounds
        yield used
        refused = Metric("paceline_refused_rpcs", "Calls refused before anything was done for them", "counter")
        for reason, count in self._refused().items():
            refused.add_sample("paceline_refused_rpcs", {"reason": reason}, count)
        yield refused
