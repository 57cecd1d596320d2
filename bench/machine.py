"""What the numbers were measured on: without it, they mean nothing.

Lives here: facts about the machine and the versions. Must not: measure anything but how fast Python itself is, which
versions don't tell: the same version built without profile-guided optimization takes half as long again.
"""

from __future__ import annotations

import os
import platform
import timeit
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any

from google.protobuf.internal import api_implementation

__all__ = ["facts"]

_STEPS = 5_000
_STEP = """
class Entry:
    __slots__ = ("key", "rows", "shape")

    def __init__(self, key, rows):
        self.key, self.rows, self.shape = key, rows, (rows, 16)

    def file(self, lanes):
        lanes.setdefault(self.key, []).append(self)
        return lanes.pop(self.key)[0]

def step(number, lanes):
    entry = Entry(str(number), 1).file(lanes)
    return b"".join((entry.key.encode(), bytes(entry.shape)))

lanes = {}
"""

_PACKAGES = ("paceline", "grpcio", "protobuf", "numpy", "uvloop")


def facts() -> dict[str, Any]:
    """Cores, processor, system, versions, GPUs if there are any, and how busy the machine was before the first
    measurement."""
    gpus = _gpus()
    return {
        **({"gpu": gpus} if gpus else {}),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "python_step_ns": _python_step_ns(),
        "versions": {name: _version(name) for name in _PACKAGES} | _onnxruntime(),
        "protobuf_implementation": api_implementation.Type(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _python_step_ns() -> int:
    """What Python takes for a bit of what the product does most: creating and filing small objects, joining bytes. The
    least of many measurements, because the others were interrupted."""
    return round(min(timeit.repeat("step(17, lanes)", _STEP, number=_STEPS, repeat=20)) / _STEPS * 1e9)


def _gpus() -> str:
    """Names of the GPUs and the version of their driver; "" if there are none, or NVML can't be asked."""
    try:
        import pynvml  # type: ignore[import-untyped,unused-ignore]

        pynvml.nvmlInit()
        names = [
            pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount())
        ]
        driver = pynvml.nvmlSystemGetDriverVersion()
    except Exception:  # noqa: BLE001 - the library may be missing, or fail; its errors share no base class
        return ""
    return f"{', '.join(names)}, driver {driver}" if names else ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _onnxruntime() -> dict[str, str]:
    """The versions of those of its packages that are installed."""
    found = {one.metadata["Name"]: one.version for one in distributions()}
    return {name: number for name, number in sorted(found.items()) if name.startswith("onnxruntime")}
