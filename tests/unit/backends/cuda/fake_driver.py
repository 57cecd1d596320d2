"""A CUDA driver as an object with its C functions, over host memory; it counts what is open."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

from paceline.backends.cuda.memory import HANDLE_BYTES

HANDLE = bytes(range(HANDLE_BYTES))


@dataclass
class Driver:
    """One GPU with one allocation of `size` bytes, which `HANDLE` opens at `begin` bytes into it. `codes` are what
    calls return instead of 0."""

    size: int = 100
    begin: int = 0
    codes: dict[str, int] = field(default_factory=dict)
    contexts: int = 0
    opened: int = 0
    current: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.memory = ctypes.create_string_buffer(self.size)
        self.base = ctypes.addressof(self.memory)

    def load(self, name: str) -> Driver:
        assert name == "libcuda.so.1"
        return self

    def cuInit(self, flags: int) -> int:
        return self.codes.get("cuInit", 0)

    def cuGetErrorName(self, code: int, name: Any) -> int:
        name._obj.value = b"CUDA_ERROR_OF_SOME_KIND"
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = 40 + ordinal
        return 0 if ordinal == 0 else 101

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        assert device.value == 40
        context._obj.value = 7
        self.contexts += not self.codes.get("retain", 0)
        return self.codes.get("retain", 0)

    def cuDevicePrimaryCtxRelease_v2(self, device: Any) -> int:
        assert device.value == 40
        self.contexts -= 1
        return 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        if self.codes.get("push"):
            return self.codes["push"]
        self.current.append(context.value)
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        self.current.pop()
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        assert (self.current, mode._obj.value) == ([7], 1)
        return 0

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: Any) -> int:
        assert (self.current, flags.value, bytes(handle)) == ([7], 1, HANDLE)
        address._obj.value = self.base + self.begin
        self.opened += not self.codes.get("open", 0)
        return self.codes.get("open", 0)

    def cuMemGetAddressRange_v2(self, base: Any, size: Any, address: Any) -> int:
        assert self.current == [7]
        base._obj.value, size._obj.value = self.base, self.size
        return self.codes.get("range", 0)

    def cuIpcCloseMemHandle(self, address: Any) -> int:
        assert (self.current, address.value) == ([7], self.base + self.begin)
        self.opened -= 1
        return 0

    def cuMemcpyDtoH_v2(self, target: Any, source: Any, size: Any) -> int:
        assert self.current == [7]
        ctypes.memmove(target, source.value, size.value)
        return self.codes.get("copy", 0)

    def cuMemcpyHtoD_v2(self, target: Any, source: Any, size: Any) -> int:
        assert self.current == [7]
        ctypes.memmove(target.value, source, size.value)
        return self.codes.get("copy", 0)

    def cuStreamSynchronize(self, stream: Any) -> int:
        assert (self.current, stream) == ([7], None)
        return self.codes.get("wait", 0)
