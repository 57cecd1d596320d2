"""Exported GPU memory, with a stand-in for the driver."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bench.gpu_memory import export
from paceline.backends.cuda.memory import CudaMemories
from tests.cuda import stand_in


def test_exported_memory_is_opened_by_its_handle(tmp_path: Path) -> None:
    driver = stand_in.build(tmp_path)
    array = np.arange(1000, dtype=np.float32)
    exported = export(array, lambda name: driver)
    opened = CudaMemories(lambda name: driver).open(exported.handle, 0)
    assert opened.byte_size == array.nbytes
    got = np.empty_like(array)
    opened.read(got.ctypes.data, got.nbytes, 0)
    np.testing.assert_array_equal(got, array)
    del opened
    assert (driver.stand_in_opened(), driver.stand_in_device()) == (0, 1)
    del exported
    assert driver.stand_in_device() == 0
