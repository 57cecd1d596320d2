"""The GPUs that models may use, under Triton's names, read at each scrape.

Lives here: the families, and the patience with a driver that doesn't answer. Must not: NVML (`server.telemetry.nvml`).
The rule: a scrape waits at most `patience_s`, and never for a reading that another scrape already waits for; old values
aren't reported.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from threading import Condition, Thread
from typing import Protocol

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from paceline.server.telemetry.nvml import GpuReading

__all__ = ["GpuCollector", "Gpus"]

_log = logging.getLogger("paceline.server.metrics")

_FRESH_S = 1.0
_FAMILIES: Sequence[tuple[str, str, str, Callable[[GpuReading], float | None]]] = (
    (
        "nv_gpu_utilization",
        "gauge",
        "Share of recent time in which the GPU computed, 0 to 1",
        lambda gpu: gpu.utilization,
    ),
    ("nv_gpu_memory_total_bytes", "gauge", "Memory of the GPU, in bytes", lambda gpu: gpu.memory_total_bytes),
    (
        "nv_gpu_memory_used_bytes",
        "gauge",
        "Memory of the GPU that any process uses, in bytes",
        lambda gpu: gpu.memory_used_bytes,
    ),
    ("nv_gpu_power_usage", "gauge", "Power that the GPU draws, in watts", lambda gpu: gpu.power_w),
    ("nv_gpu_power_limit", "gauge", "Power that the GPU may draw, in watts", lambda gpu: gpu.power_limit_w),
    (
        "nv_energy_consumption",
        "counter",
        "Energy that the GPU has used since the server started, in joules",
        lambda gpu: gpu.energy_j,
    ),
)


class Gpus(Protocol):
    def read(self) -> list[GpuReading]:
        """A reading of each GPU. May block for ever."""


class GpuCollector(Collector):
    """What `gpus` say, at most a second old. Energy counts from the first reading, which the constructor takes, so that
    blocks."""

    def __init__(self, gpus: Gpus, patience_s: float = 0.5, clock: Callable[[], float] = time.monotonic) -> None:
        self._gpus = gpus
        self._patience_s = patience_s
        self._clock = clock
        self._changed = Condition()
        self._reading = self._complained = False
        self._last = gpus.read()
        self._last_s = clock()
        self._energy_j = {one.uuid: one.energy_j for one in self._last}

    def collect(self) -> Iterator[Metric]:
        readings = self._recent()
        for name, kind, help, value_of in _FAMILIES:
            metric = Metric(name, help, kind)
            for one in readings:
                if (value := value_of(one)) is not None:
                    began = self._energy_j.get(one.uuid) or 0 if kind == "counter" else 0
                    metric.add_sample(name, {"gpu_uuid": one.uuid}, value - began)
            yield metric

    def _recent(self) -> list[GpuReading]:
        with self._changed:
            if self._clock() - self._last_s >= _FRESH_S:
                if not self._reading:
                    self._reading = True
                    # A daemon: one that hangs in the driver must not keep the process from ending.
                    Thread(target=self._read, name="gpu-metrics", daemon=True).start()
                if not self._changed.wait_for(lambda: not self._reading, self._patience_s):
                    self._complain()
                    return []
            return self._last

    def _read(self) -> None:
        try:
            readings = self._gpus.read()
        except Exception:  # noqa: BLE001 - the driver's; other metrics are still exposed
            _log.exception("GPU metrics can't be read")
            readings = []
        with self._changed:
            self._last, self._last_s = readings, self._clock()
            self._reading = self._complained = False
            self._changed.notify_all()

    def _complain(self) -> None:
        if not self._complained:
            self._complained = True
            _log.warning("the GPUs have not answered for %g s; their metrics are left out", self._patience_s)
