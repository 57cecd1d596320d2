"""What the numbers were taken on: without it they mean nothing.

Lives here: facts about the machine and the versions. Must not: measure.
"""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any

from google.protobuf.internal import api_implementation

__all__ = ["facts"]

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
        "versions": {name: _version(name) for name in _PACKAGES} | _onnxruntime(),
        "protobuf_implementation": api_implementation.Type(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _gpus() -> str:
    """Names of the GPUs and the version of their driver; "" where there are none, or nobody to ask."""
    try:
        import pynvml  # type: ignore[import-untyped,unused-ignore]

        pynvml.nvmlInit()
        names = [
            pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount())
        ]
        driver = pynvml.nvmlSystemGetDriverVersion()
    except Exception:  # noqa: BLE001 - the library's errors share no base class with its absence
        return ""
    return f"{', '.join(names)}, driver {driver}" if names else ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _onnxruntime() -> dict[str, str]:
    """Whichever of its packages is installed."""
    found = {one.metadata["Name"]: one.version for one in distributions()}
    return {name: number for name, number in sorted(found.items()) if name.startswith("onnxruntime")}
