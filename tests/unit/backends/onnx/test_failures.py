"""How texts of ONNX Runtime's errors are classified. All are quoted but one: a real shortage of memory on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline.backends.base import Device, ModelSource
from paceline.backends.errors import DeviceLost, ExecutionError, InstanceError, OutOfMemory, Unequipped
from paceline.backends.onnx.backend import OnnxBackend
from paceline.backends.onnx.failures import failure
from paceline.backends.spec import ModelSpec, TensorSpec
from tests import models, odd_models

CUDA = (
    "[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running Conv node. Name:'c' Status Message: "
    "CUDA failure {}: {} ; GPU=0 ; hostname=h ; file=/onnxruntime_src/cuda_stream_handle.cc ; line=1 ; expr=f(); \n"
)


@pytest.mark.parametrize(
    "text",
    [
        "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Non-zero status code returned while running Expand node. Name:'' "
        "Status Message: /onnxruntime_src/onnxruntime/core/framework/bfc_arena.cc:360 void* onnxruntime::BFCArena::"
        "AllocateRawInternal(size_t, bool, onnxruntime::Stream*) Available memory of 1048576 is smaller than requested "
        "bytes of 4194304\n",
        "[ONNXRuntimeError] : 1 : FAIL : bfc_arena.cc:360 Failed to allocate memory for requested buffer of size 9",
        "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Status Message: std::bad_alloc",
        CUDA.format(2, "out of memory"),
        "[ONNXRuntimeError] : 1 : FAIL : CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED ; GPU=0 ; expr=cublasCreate(&h);",
        "[ONNXRuntimeError] : 1 : FAIL : CUDNN failure 4003: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED ; ",
        "[ONNXRuntimeError] : 1 : FAIL : CUDNN failure 2: CUDNN_STATUS_ALLOC_FAILED ; GPU=0 ; expr=f();",
    ],
)
def test_shortage_of_memory_is_recognized_by_its_text(text: str) -> None:
    assert type(failure(RuntimeError(text))) is OutOfMemory


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (46, "CUDA-capable device(s) is/are busy or unavailable"),
        (100, "no CUDA-capable device is detected"),
        (214, "uncorrectable ECC error encountered"),
        (700, "an illegal memory access was encountered"),
        (702, "the launch timed out and was terminated"),
        (710, "device-side assert triggered"),
        (715, "an illegal instruction was encountered"),
        (719, "unspecified launch failure"),
        (810, "the MPS client has been terminated"),
        (911, "an async error has occurred in external entity outside of CUDA"),
        (999, "unknown error"),
    ],
)
def test_lost_device_is_recognized_by_its_number(code: int, text: str) -> None:
    lost = failure(RuntimeError(CUDA.format(code, text)))
    assert type(lost) is DeviceLost
    assert f"CUDA failure {code}: {text}" in str(lost)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("IllegalAddress", "an illegal memory access was encountered"),
        ("LaunchTimeout", "the launch timed out and was terminated"),
        ("HardwareStackError", "hardware stack error"),
        ("MpsClientTerminated", "the MPS client has been terminated"),
        ("ExternalDevice", "an async error has occurred in external entity outside of CUDA"),
        ("Unknown", "unknown error"),
    ],
)
def test_lost_device_is_recognized_by_its_name_if_there_is_no_number(name: str, text: str) -> None:
    told = (
        f"Non-zero status code returned while running Greater node. Status Message: CUDA error cudaError{name}:{text}"
    )
    assert type(failure(RuntimeError(told))) is DeviceLost


def test_lost_device_takes_precedence_over_the_rest_of_a_text() -> None:
    text = CUDA.format(700, "an illegal memory access was encountered") + " Failed to allocate memory"
    assert type(failure(RuntimeError(text))) is DeviceLost


@pytest.mark.parametrize(
    "text",
    [
        CUDA.format(1, "invalid argument"),
        CUDA.format(701, "too many resources requested for launch"),
        CUDA.format(906, "operation would make the legacy stream depend on a capturing blocking stream"),
        "[ONNXRuntimeError] : 1 : FAIL : CUBLAS failure 13: CUBLAS_STATUS_EXECUTION_FAILED ; GPU=0 ; expr=f();",
        "[ONNXRuntimeError] : 1 : FAIL : CUDNN failure 5000: CUDNN_STATUS_EXECUTION_FAILED ; GPU=0 ; expr=f();",
        "[ONNXRuntimeError] : 1 : FAIL : CUDNN_FE failure 11: CUDNN_BACKEND_API_FAILED ; GPU=0 ; expr=f();",
        "running Sum node. Status Message: CUDA error cudaErrorInvalidDeviceFunction:invalid device function",
    ],
)
def test_other_errors_of_cuda_are_instance_errors(text: str) -> None:
    assert type(failure(RuntimeError(text))) is InstanceError


@pytest.mark.parametrize(
    "text",
    [
        "[ONNXRuntimeError] : 1 : FAIL : cuDNN is not available. Install cuDNN, or set enable_cudnn=0.",
        "Error in execution: running Conv node. Status Message: cuda_kernel.h:296 RequireCudnnHandle(cudnnHandle_t) "
        "[ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : cuDNN is unavailable or disabled for CUDA Execution Provider: why",
        "running Rfft node. Status Message: cuFFT is unavailable for CUDA Execution Provider: why",
        CUDA.format(209, "no kernel image is available for execution on the device"),
        "running Sum node. Status Message: CUDA error cudaErrorNoKernelImageForDevice:no kernel image is available for "
        "execution on the device",
        "[ONNXRuntimeError] : 1 : FAIL : CUBLAS failure 8: CUBLAS_STATUS_ARCH_MISMATCH ; GPU=0 ; expr=f();",
        "[ONNXRuntimeError] : 1 : FAIL : CUDNN failure 3007: CUDNN_STATUS_NOT_SUPPORTED_ARCH_MISMATCH ; GPU=0 ; ",
        "[ONNXRuntimeError] : 1 : FAIL : CUDNN failure 1008: CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED ; GPU=0 ; ",
        "[ONNXRuntimeError] : 1 : FAIL : CUDNN failure 1002: CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH ; GPU=0 ; ",
    ],
)
def test_permanent_lack_of_a_library_or_kernel_is_recognized_by_its_text(text: str) -> None:
    assert type(failure(RuntimeError(text))) is Unequipped


@pytest.mark.parametrize(
    "text",
    [
        "[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : Got invalid dimensions for input: x index: 1 Got: 700 Expected: 2",
        "[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running Gather node. Status Message: "
        "indices element out of data bounds, idx=700 must be within the inclusive range [-3,2]",
    ],
)
def test_errors_about_tensors_are_plain_execution_errors(text: str) -> None:
    assert type(failure(RuntimeError(text))) is ExecutionError


@pytest.mark.parametrize("arena", ["1", "0"])
def test_execution_that_needs_too_much_memory_fails_alone(arena: str, tmp_path: Path) -> None:
    path = models.write(odd_models.memory_hungry(2), tmp_path / "model.onnx")
    model = OnnxBackend().open(ModelSource("m", path, parameters={"enable_mem_arena": arena}), Device())
    spec = ModelSpec((TensorSpec("INPUT0", "FP32", (1,)),), (TensorSpec("OUTPUT0", "FP32", (1,)),), batched=True)
    instance = model.instance(spec, Device())
    row = np.ones((1, 1), np.float32)

    with pytest.raises(OutOfMemory, match="onnx runtime error"):
        instance.execute([(row,)] * 3)

    assert len(instance.execute([(row,)] * 2).results) == 2
