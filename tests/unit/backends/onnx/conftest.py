"""What tests of ONNX Runtime on a GPU need."""

from __future__ import annotations

import pytest

from backends.cuda.accelerator import CudaAccelerator, open_cuda
from backends.cuda.driver import count_gpus
from backends.errors import LoadError


@pytest.fixture
def accelerator() -> CudaAccelerator:
    try:
        count_gpus()
    except LoadError as reason:
        pytest.skip(str(reason))
    return open_cuda(0)
