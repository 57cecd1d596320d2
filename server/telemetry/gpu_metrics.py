"""The GPUs that models may use, under Triton's names, read at each scrape.

Lives here: the families, the patience with a driver that doesn't answer, and everything that names pynvml, NVIDIA's
management library. Must not: other devices. Its calls may block for as long as the driver does, so the rule: a scrape
waits at most `patience_s`, and never for a reading that another scrape already waits for; old values aren't reported.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Condition, Thread
from typing import Any, Protocol, TypeVar

from paceline.backends.cuda.driver import gpu_uuids
from paceline.backends.errors import DeviceError, LoadError
from paceline.server.telemetry.metrics import Families, Family

_log = logging.getLogger("paceline.server.metrics")

_FRESH_S = 1.0

T = TypeVar("T")

Library = Any
"""The module pynvml, which has no types."""


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU at one moment; None for what it doesn't report. `utilization` is the share of the last moments, 0 to 1,
    in which something computed, `energy_j` what it has used since the driver was loaded."""

    uuid: str
    utilization: float | None
    memory_total_bytes: int | None
    memory_used_bytes: int | None
    power_w: float | None
    power_limit_w: float | None
    energy_j: float | None


class Gpus(Protocol):
    def read(self) -> list[GpuReading]:
        """A reading of each GPU. May block for ever."""


class GpuCollector(Families[GpuReading]):
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
        families: Sequence[Family[GpuReading]] = (
            Family("nv_gpu_utilization", "gauge", "Share of recent time in which the GPU computed, 0 to 1",
                lambda one: one.utilization),
            Family("nv_gpu_memory_total_bytes", "gauge", "Memory of the GPU, in bytes",
                lambda one: one.memory_total_bytes),
            Family("nv_gpu_memory_used_bytes", "gauge", "Memory of the GPU that any process uses, in bytes",
                lambda one: one.memory_used_bytes),
            Family("nv_gpu_power_usage", "gauge", "Power that the GPU draws, in watts", lambda one: one.power_w),
            Family("nv_gpu_power_limit", "gauge", "Power that the GPU may draw, in watts",
                lambda one: one.power_limit_w),
            Family("nv_energy_consumption", "counter",
                "Energy that the GPU has used since the server started, in joules",
                lambda one: None if one.energy_j is None else one.energy_j - (self._energy_j.get(one.uuid) or 0)),
        )  # fmt: skip
        super().__init__(families, lambda: [({"gpu_uuid": one.uuid}, one) for one in self._recent()])

    def _recent(self) -> list[GpuReading]:
        with self._changed:
            if self._clock() - self._last_s >= _FRESH_S:
                if not self._reading:
                    try:
                        # A daemon: one that hangs in the driver must not keep the process from ending.
                        Thread(target=self._read, name="gpu-metrics", daemon=True).start()
                    except RuntimeError:  # no thread can be started for now
                        return []
                    self._reading = True
                if not self._changed.wait_for(lambda: not self._reading, self._patience_s):
                    if not self._complained:
                        self._complained = True
                        _log.warning(
                            "the GPUs have not answered for %g s; their metrics are left out", self._patience_s
                        )
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


class Nvml:
    """The GPUs `uuids`, read through the module `library`, which is initialised."""

    def __init__(self, library: Library, uuids: Sequence[str]) -> None:
        self._library = library
        self._handles = dict(map(self._find, uuids))

    def read(self) -> list[GpuReading]:
        """A reading of each GPU. Blocks."""
        return [self._read(uuid, handle) for uuid, handle in self._handles.items()]

    def _find(self, uuid: str) -> tuple[str, object]:
        """UUID and handle. CUDA doesn't say whether a GPU is a slice of one, which NVML names differently."""
        find = self._library.nvmlDeviceGetHandleByUUID
        try:
            return uuid, find(uuid)
        except self._library.NVMLError:
            slice_uuid = uuid.replace("GPU-", "MIG-", 1)
            return slice_uuid, find(slice_uuid)

    def _read(self, uuid: str, handle: object) -> GpuReading:
        library = self._library
        memory = self._ask(library.nvmlDeviceGetMemoryInfo, handle)
        rates = self._ask(library.nvmlDeviceGetUtilizationRates, handle)
        return GpuReading(
            uuid=uuid,
            utilization=None if rates is None else rates.gpu / 100,
            memory_total_bytes=None if memory is None else memory.total,
            memory_used_bytes=None if memory is None else memory.used,
            power_w=_thousandth(self._ask(library.nvmlDeviceGetPowerUsage, handle)),
            power_limit_w=_thousandth(self._ask(library.nvmlDeviceGetPowerManagementLimit, handle)),
            energy_j=_thousandth(self._ask(library.nvmlDeviceGetTotalEnergyConsumption, handle)),
        )

    def _ask(self, question: Callable[[object], T], handle: object) -> T | None:
        """None if there is no answer: not every GPU answers every question, and a lost one answers none."""
        try:
            return question(handle)
        except self._library.NVMLError:
            return None


def _thousandth(value: int | None) -> float | None:
    return None if value is None else value / 1000


def open_nvml(
    visible: Callable[[], Sequence[str]] = gpu_uuids, load: Callable[[str], Library] = importlib.import_module
) -> Nvml:
    """The GPUs that `visible` names. Blocks, up to a second. Raises DeviceError saying what is missing."""
    try:
        uuids = visible()
        library = load("pynvml")
    except LoadError as error:
        raise DeviceError(str(error)) from error
    except ImportError as error:
        raise DeviceError("the package nvidia-ml-py isn't installed: pip install nvidia-ml-py") from error
    try:
        library.nvmlInit()
        return Nvml(library, uuids)
    except library.NVMLError as error:
        raise DeviceError(f"NVIDIA's management library failed: {error}") from error
