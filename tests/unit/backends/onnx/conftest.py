"""What tests of ONNX Runtime on a GPU need."""

from __future__ import annotations

import pytest

from paceline.backends.cuda.accelerator import CudaAccelerator, open_cuda
from paceline.backends.cuda.driver import count_gpus
from paceline.backends.errors import LoadError


@pytest.fixture
def accelerator() -> CudaAccelerator:
    try:
        count_gpus()
    except LoadError as reason:
        pytest.skip(str(reason))
    return open_cuda(0)
