from __future__ import annotations

import re

import pytest

from paceline.backends.base import Device, DeviceKind, GroupKind, InstanceGroup, on_cpu, on_gpus
from paceline.backends.errors import LoadError


def _gpu(index: int) -> Device:
    return Device(DeviceKind.GPU, index)


@pytest.mark.parametrize(("count", "expected"), [(0, 1), (1, 1), (3, 3)])
def test_on_cpu_count_is_the_number_of_instances(count: int, expected: int) -> None:
    assert on_cpu(InstanceGroup(GroupKind.CPU, count)) == [Device(DeviceKind.CPU)] * expected


def test_on_gpus_without_named_ones_takes_all() -> None:
    assert on_gpus(InstanceGroup(GroupKind.GPU), 3) == [_gpu(0), _gpu(1), _gpu(2)]


def test_on_gpus_count_is_per_gpu() -> None:
    assert on_gpus(InstanceGroup(GroupKind.GPU, 2, (2, 0)), 3) == [_gpu(2), _gpu(2), _gpu(0), _gpu(0)]


@pytest.mark.parametrize("index", [-1, 2])
def test_on_gpus_index_out_of_range_is_refused(index: int) -> None:
    message = f"instance_group: expected GPUs below 2, the number there are, got GPU {index}"
    with pytest.raises(LoadError, match=re.escape(message)):
        on_gpus(InstanceGroup(GroupKind.GPU, 1, (0, index)), 2)
