"""The machine's processors and memory, under Triton's names. Only on Linux; elsewhere there is nothing to collect.

Lives here: reading /proc. Must not: the process's own numbers, which the library collects.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from threading import Lock

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_SHORTEST_S = 1.0
"""Ticks are 10 ms: over less time than this, a share of them means little."""


class HostCollector(Collector):
    """`nv_cpu_utilization`, `nv_cpu_memory_total_bytes` and `nv_cpu_memory_used_bytes`, of the whole machine.

    Utilization is measured from scrape to scrape; scrapes within a second of a measurement get the same number.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._lock = Lock()
        self._read_s = time.monotonic()
        self._busy, self._all = self._ticks() or (0, 0)
        self._utilization = 0.0

    def collect(self) -> Iterator[Metric]:
        if (utilization := self._measure()) is not None:
            yield GaugeMetricFamily(
                "nv_cpu_utilization",
                "Share of the machine's processor time in use between two scrapes, 0 to 1",
                utilization,
            )
        if (memory := self._memory()) is not None:
            total, available = memory
            yield GaugeMetricFamily("nv_cpu_memory_total_bytes", "Memory of the machine, in bytes", total)
            yield GaugeMetricFamily(
                "nv_cpu_memory_used_bytes", "Memory of the machine in use, in bytes", total - available
            )

    def _measure(self) -> float | None:
        with self._lock:
            now_s = time.monotonic()
            if (ticks := self._ticks()) is None:
                return None
            busy, ticks_in_all = ticks
            if now_s - self._read_s >= _SHORTEST_S and ticks_in_all > self._all:
                self._utilization = max(0.0, (busy - self._busy) / (ticks_in_all - self._all))
                self._busy, self._all, self._read_s = busy, ticks_in_all, now_s
            return self._utilization

    def _ticks(self) -> tuple[int, int] | None:
        """Ticks of all processors since the machine started: busy ones, and all. Source: proc_stat(5)."""
        try:
            first, *numbers = (self._proc / "stat").read_text().split("\n", 1)[0].split()
            user, nice, system, idle, iowait, irq, softirq, steal = (int(number) for number in numbers[:8])
        except (OSError, ValueError):
            return None
        busy = user + nice + system + irq + softirq + steal
        return (busy, busy + idle + iowait) if first == "cpu" else None

    def _memory(self) -> tuple[int, int] | None:
        """Bytes in all, and those available without swapping. Source: proc_meminfo(5)."""
        try:
            lines = (line.split() for line in (self._proc / "meminfo").read_text().splitlines())
            found = {line[0]: int(line[1]) * 1024 for line in lines if line[0] in ("MemTotal:", "MemAvailable:")}
            return found["MemTotal:"], found["MemAvailable:"]
        except (OSError, ValueError, KeyError, IndexError):
            return None
