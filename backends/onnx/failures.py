"""What an exception of ONNX Runtime means, which only its text tells, and what it leaves behind.

Lives here: the texts, and which executions a session can't be trusted with after one failed. Must not: onnxruntime,
locks. The texts are those of onnxruntime 1.31 and earlier (onnxruntime/core/framework/bfc_arena.cc,
core/providers/cuda/cuda_call.cc, core/providers/cpu/text/string_normalizer.cc). CUDA's errors come as `CUDA failure
NUMBER: TEXT ; GPU=…`, with cudaError_t's numbers; CUBLAS's and CUDNN's likewise with their own. Some failed kernel
launches come as `CUDA error cudaErrorNAME:TEXT`.
"""

from __future__ import annotations

import re
from collections.abc import Hashable

from paceline.backends.cuda.driver import BROKEN, GONE, code_of
from paceline.backends.errors import (
    DeviceError,
    DeviceLost,
    ExecutionError,
    InstanceError,
    OutOfMemory,
    StalePlan,
    Unequipped,
)

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
    codes = {int(code) for code in _CUDA_ERROR.findall(reason)}
    if codes & (BROKEN | GONE) or _LOST.search(reason) or _LOST_BY_NAME.search(reason):
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


_IN_CONVOLUTION = re.compile(r"running \w*Conv\w* node\b(?:\. Name:'(.*?)' )?")
"""ConvTranspose, FusedConv and NhwcConv store shapes in the same way."""

_MAX_FAILED = 8


class Plans:
    """Which plans of one session's convolutions are wrong after an execution failed. `key` identifies executions with
    the same plans: the number of rows, where there are rows.

    Each of CUDA's convolutions keeps the plan for the last shape that it has seen. ONNX Runtime (1.31,
    core/providers/cuda/nn/conv.cc) stores the shape first; only then does it validate the shape, allocate the output,
    and plan. If that fails, the plan is still the one for the previous shape, and an execution with the shape that
    failed uses it without an error: the answers are those of other rows, of another size, or of what lies behind the
    tensor in device memory. An execution with another number of rows renews all plans, and once it has succeeded they
    can be trusted again.
    """

    __slots__ = ("_failed", "_reason")

    def __init__(self) -> None:
        # Per node that failed: the keys of the execution in which it failed last. In that one, nodes before it have the
        # right plan, and nodes after it weren't reached.
        self._failed: dict[str, tuple[Hashable, ...]] = {}
        self._reason = ""

    def check(self, key: Hashable) -> None:
        """Raise StalePlan if the execution of `key` may use plans made for something else."""
        if self._failed and self._has_failed(key):
            raise StalePlan(f"a convolution that failed before would compute with an outdated plan: {self._reason}")

    def next_rows(self, rows: int) -> int:
        """The smallest number of rows, from `rows` on, that can be computed with. Raises StalePlan after too many
        failures in a row."""
        if len(self._failed) > _MAX_FAILED:
            raise StalePlan(f"convolutions failed in too many executions in a row: {self._reason}")
        return next(more for more in range(rows, rows + _MAX_FAILED + 1) if not self._has_failed(more))

    def executed(self) -> None:
        """To be called after an execution of the whole model that `check` let pass, if it wasn't the replay of a
        graph."""
        self._failed.clear()

    def failed(self, error: ExecutionError, *keys: Hashable) -> ExecutionError:
        """Note `error`, which ended an execution, and return it. `keys`: all keys by which later callers may identify
        the same execution."""
        found = _IN_CONVOLUTION.search(str(error))
        if found is not None:
            # Nodes without a name can't be told apart, so each failure counts as another node.
            self._failed[found[1] or f" {len(self._failed)}"] = keys
            self._reason = str(error)
        return error

    def _has_failed(self, key: Hashable) -> bool:
        return any(key in keys for keys in self._failed.values())
