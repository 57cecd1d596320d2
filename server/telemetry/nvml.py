"""What NVIDIA's management library reports about the GPUs that this process may use.

Lives here: everything that names pynvml. Must not: metrics. Its calls may block for as long as the driver does; callers
have to expect that.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from paceline.backends.cuda.driver import gpu_uuids
from paceline.backends.errors import DeviceError, LoadError

__all__ = ["GpuReading", "Nvml", "open_nvml"]

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


def _thousandth(value: int | None) -> float | None:
    return None if value is None else value / 1000
