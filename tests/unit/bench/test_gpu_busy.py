"""How busy the GPU was, without one."""

from __future__ import annotations

import re

import pytest

from bench.gpu_busy import open_utilization, shares, why_unknown
from paceline.backends.cuda.driver import count_gpus
from paceline.backends.errors import DeviceError, LoadError


def test_shares_are_read_at_once_and_not_after_the_end() -> None:
    values = iter([0.25, 0.5, 1.0])
    assert shares(lambda: next(values), 0.0) == [0.25]


def test_reason_for_no_utilization_is_that_of_the_driver() -> None:
    try:
        if count_gpus():
            pytest.skip("there is a GPU")
    except LoadError:
        pass
    with pytest.raises(DeviceError) as caught:
        open_utilization()
    assert why_unknown() == str(caught.value)
    assert re.search("NVIDIA driver|nvidia-ml-py|NVML", why_unknown())
