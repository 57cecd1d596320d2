"""How busy the first GPU is, from NVML.

Lives here: asking for that and nothing else, as each question may disturb what is measured. Must not: decide when.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.backends.cuda.driver import gpu_uuids
from paceline.backends.errors import DeviceError
from paceline.server.telemetry.gpu_metrics import open_nvml

__all__ = ["open_utilization", "shares", "why_unknown"]

_PAUSE_S = 0.1


def open_utilization() -> Callable[[], float]:
    """Tells the share of the last moments, a second at most, in which something computed, 0 to 1. Raises DeviceError
    saying what is missing."""
    open_nvml()
    import pynvml  # type: ignore[import-untyped,unused-ignore]

    def read() -> float:
        return float(pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu) / 100

    try:
        gpu = pynvml.nvmlDeviceGetHandleByUUID(gpu_uuids()[0])
        read()
    except pynvml.NVMLError as error:
        raise DeviceError(f"NVML doesn't tell how busy the GPU is: {error}") from error
    return read


def shares(read: Callable[[], float], seconds: float) -> list[float]:
    """What `read` tells ten times a second; blocks for `seconds`."""
    found = [read()]
    until = time.monotonic() + seconds
    while time.monotonic() + _PAUSE_S < until:
        time.sleep(_PAUSE_S)
        found.append(read())
    return found


def why_unknown() -> str:
    """Why `open_utilization` fails; "" if it doesn't."""
    try:
        open_utilization()
    except DeviceError as error:
        return str(error)
    return ""
