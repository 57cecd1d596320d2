"""From instance groups to devices.

Lives here: the counting. Must not: looking for devices; backends know which there are.
"""

from __future__ import annotations

from paceline.backends.base import Device, DeviceKind, InstanceGroup
from paceline.backends.errors import LoadError

__all__ = ["on_cpu", "on_gpus"]


def on_cpu(group: InstanceGroup) -> list[Device]:
    """The CPU, once per instance; one instance if the group gives no count."""
    return [Device(DeviceKind.CPU)] * max(group.count, 1)


def on_gpus(group: InstanceGroup, gpus: int) -> list[Device]:
    """Each GPU of the group (all `gpus` if it names none), once per instance; one instance each if it gives no count.

    LoadError for a GPU that isn't among the `gpus` there are.
    """
    for index in group.gpus:
        if not 0 <= index < gpus:
            raise LoadError(f"instance_group: expected GPUs below {gpus}, the number there are, got GPU {index}")
    indices = group.gpus or range(gpus)
    return [Device(DeviceKind.GPU, index) for index in indices for _ in range(max(group.count, 1))]
