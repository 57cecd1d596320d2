"""What an exception of ONNX Runtime means; only its text tells.

Lives here: the texts. Must not: onnxruntime. They are those of onnxruntime 1.31 and earlier
(onnxruntime/core/framework/bfc_arena.cc, core/providers/cuda/cuda_call.cc, core/providers/cpu/text/
string_normalizer.cc). CUDA's errors come as `CUDA failure NUMBER: TEXT ; GPU=…`, with cudaError_t's numbers; CUBLAS's
and CUDNN's likewise with their own. Some failed kernel launches come as `CUDA error cudaErrorNAME:TEXT`.
"""

from __future__ import annotations

import re

from paceline.backends.cuda.codes import BROKEN, GONE, code_of
from paceline.backends.errors import DeviceError, DeviceLost, ExecutionError, InstanceError, OutOfMemory, Unequipped

__all__ = ["device_failure", "failure", "may_lack_memory", "reason_of"]

_ERROR = re.compile(r"\[ONNXRuntimeError\] : (\d+) : \w+ : (.*)", re.DOTALL)
_CUDA_ERROR = re.compile(r"\bCUDA failure (\d+): ")
_NO_LOCALE = re.compile(r"Failed to construct locale with name:(?P<locale>(?P<language>[^.:]+)\.?(?P<charset>[^:]*)):")

_OUT_OF_MEMORY = re.compile(
    r"bad.?alloc"
    r"|[Ff]ailed to allocate memory"
    r"|Failed to find a free memory block"
    r"|Available memory of \d+ is smaller than requested bytes"
    r"|[Oo]ut of memory"  # CUDA failure 2, TensorRT
    r"|OUT_OF_MEMORY|MallocAsync failed|cudaMallocFromPoolAsync failed"
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|CUDNN_STATUS_INTERNAL_ERROR_\w*ALLOCATION_FAILED"
    r"|CUFFT_ALLOC_FAILED"
)
_LOST = re.compile(
    r"device lost|busy or unavailable|uncorrectable ECC|illegal memory access|unspecified launch failure"
    r"|illegal instruction was encountered|misaligned address|device-side assert|GPU (?:is lost|has fallen off the bus)"
)
# The same by name, for errors of a launch whose text differs from those above.
_LOST_BY_NAME = re.compile(
    r"\bCUDA error cudaError(?:InitializationError|CudartUnloading|NoDevice|InvalidDevice|DeviceUninitialized"
    r"|NvlinkUncorrectable|Contained|LaunchTimeout|ContextIsDestroyed|Assert|HardwareStackError|InvalidAddressSpace"
    r"|InvalidPc|TensorMemoryLeak|MpsClientTerminated|ExternalDevice|Unknown):"
)
# What cuBLAS and cuDNN say if they lack memory for a handle or a kernel, among other reasons.
_MAY_LACK_MEMORY = re.compile(r"CUBLAS_STATUS_NOT_INITIALIZED|CUDNN(?:_FE)? failure")
_SESSION_FAULT = re.compile(
    r"(CUDA|CUDNN(?:_FE)?|CUBLAS|CUFFT) failure|\bCUDA error cudaError|Failed to initialize CUDNN Frontend"
)
_UNEQUIPPED = re.compile(
    r"cu(DNN|FFT) is (not available|unavailable)|no kernel image is available|STATUS_\w*ARCH_MISMATCH"
    r"|CUDNN_STATUS_SUBLIBRARY_(LOADING_FAILED|VERSION_MISMATCH)"
)
"""Sessions open even if libraries are missing, are of different releases, or don't support the GPU (too old or too
new), and fail where they need them."""


def failure(error: Exception) -> ExecutionError:
    """The exception to raise for `error`, which an execution raised."""
    reason = reason_of(error)
    if _is_lost(reason):
        return DeviceLost(reason)
    if isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(reason):
        return OutOfMemory(reason)
    if _UNEQUIPPED.search(reason):
        return Unequipped(reason)
    return InstanceError(reason) if _SESSION_FAULT.search(reason) else ExecutionError(reason)


def device_failure(error: DeviceError) -> InstanceError:
    """The exception to raise for a driver's error during an execution. Its numbers are those of CUDA's errors."""
    reason = str(error)
    if code_of(error) in BROKEN | GONE:
        return DeviceLost(reason)
    return OutOfMemory(reason) if _OUT_OF_MEMORY.search(reason) else InstanceError(reason)


def may_lack_memory(error: BaseException) -> bool:
    """Whether a shortage of the device's memory may be why, though the text doesn't say so."""
    return type(error) is InstanceError and _MAY_LACK_MEMORY.search(str(error)) is not None


def reason_of(error: Exception) -> str:
    """One line, in the form that Triton's users know: `onnx runtime error 2: …`."""
    match = _ERROR.fullmatch(str(error))
    code, text = (f" {match[1]}", match[2]) if match else ("", str(error))
    if lacking := _NO_LOCALE.search(text):
        how = f"localedef -i {lacking['language']} -f {lacking['charset'] or 'UTF-8'} {lacking['locale']}"
        text = (
            f"its operator StringNormalizer needs the locale '{lacking['locale']}', which this machine or image lacks. "
            f"Install it (as root, on Debian: apt install locales && {how}), or export the model with the operator's "
            "attribute locale set to 'C.UTF-8', which needs no installation"
        )
    return f"onnx runtime error{code}: {' '.join(text.split())}"


def _is_lost(reason: str) -> bool:
    codes = {int(code) for code in _CUDA_ERROR.findall(reason)}
    return bool(codes & (BROKEN | GONE) or _LOST.search(reason) or _LOST_BY_NAME.search(reason))
