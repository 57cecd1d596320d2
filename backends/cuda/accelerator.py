"""A GPU through the CUDA driver: page-locked memory, device memory, streams, events.

Lives here: the driver's calls, by ctypes. Must not: ONNX Runtime, tensors. The rules: every call is made with the
device's primary context current, and releasing raises no error, since nobody is left to handle it. Calls that wait or
allocate release the GIL; calls that only queue keep it: these take microseconds, and getting the GIL back beside a busy
event loop may take half a millisecond each time. They release it, too, while others may keep them waiting
(`long_calls`).

All methods of what is public here raise DeviceError, and may be called on any thread that has called `enter`. Code that
stages batches needs no more of a device than they, and is tested with the host as one.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from paceline.backends.base import Device, DeviceKind
from paceline.backends.cuda.driver import LIBRARY, PrimaryContext, check, ignore_captures, load_driver
from paceline.backends.cuda.long_calls import LongCalls, long_calls
from paceline.backends.errors import DeviceError

Buffer = ctypes.Array[ctypes.c_uint8]
"""Bytes at an address, for numpy to make arrays over. As it is no numpy array itself, it never replaces another base in
a chain of numpy's bases."""

_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE: page-locked for all contexts
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: not ordered with the default stream, which others may use
_WAITED_FOR = 1 | 2  # CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING: waiters sleep, as others need the core

_ON_DEVICE = 2  # CU_MEMORYTYPE_DEVICE

_pointer, _size, _address, _number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_uint


class _Lines(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (
        *(("sourceXInBytes", _size), ("sourceY", _size), ("sourceMemoryType", _number), ("sourceHost", _pointer)),
        *(("source", _address), ("sourceArray", _pointer), ("sourcePitch", _size)),
        *(("targetXInBytes", _size), ("targetY", _size), ("targetMemoryType", _number), ("targetHost", _pointer)),
        *(("target", _address), ("targetArray", _pointer), ("targetPitch", _size)),
        *(("size_bytes", _size), ("count", _size)),
    )


# Without these, ctypes would pass addresses as C ints.
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cuCtxSetCurrent": (_pointer,),
    "cuMemHostAlloc": (ctypes.POINTER(_pointer), _size, _number),
    "cuMemFreeHost": (_pointer,),
    "cuMemAlloc_v2": (ctypes.POINTER(_address), _size),
    "cuMemFree_v2": (_address,),
    "cuStreamCreate": (ctypes.POINTER(_pointer), _number),
    "cuStreamDestroy_v2": (_pointer,),
    "cuStreamSynchronize": (_pointer,),
    "cuStreamWaitEvent": (_pointer, _pointer, _number),
    "cuEventCreate": (ctypes.POINTER(_pointer), _number),
    "cuEventDestroy_v2": (_pointer,),
    "cuEventRecord": (_pointer, _pointer),
    "cuEventSynchronize": (_pointer,),
    "cuMemcpyHtoDAsync_v2": (_address, _pointer, _size, _pointer),
    "cuMemcpyDtoHAsync_v2": (_pointer, _address, _size, _pointer),
    "cuMemcpyDtoDAsync_v2": (_address, _address, _size, _pointer),
    "cuMemcpy2DAsync_v2": (ctypes.POINTER(_Lines), _pointer),
    "cuMemsetD8Async": (_address, ctypes.c_ubyte, _size, _pointer),
}
_QUEUE_ONLY = frozenset(
    ("cuCtxSetCurrent", "cuEventRecord", "cuStreamWaitEvent", *(name for name in _ARGUMENTS if "Async" in name))
)


class _Device:
    """The driver and a device's context, kept as long as anything made with it."""

    def __init__(self, driver: Any, index: int, calls: LongCalls) -> None:
        self.driver = driver
        self.calls = calls
        # The same library, called without releasing the GIL.
        self._quick = ctypes.PyDLL(LIBRARY, handle=driver._handle)
        for library in (driver, self._quick):
            for name, arguments in _ARGUMENTS.items():
                getattr(library, name).argtypes = arguments
        self.context = PrimaryContext(driver, index)
        closing = weakref.finalize(self, self.context.release)
        # At process exit the driver may be gone first; likewise below.
        closing.atexit = False

    def enter(self) -> None:
        """Make the context current on this thread from now on."""
        self.calls.look()
        self.call("cuCtxSetCurrent", self.context.handle)
        ignore_captures(self.driver)

    # hot path: a dozen per batch
    def call(self, name: str, *arguments: Any) -> None:
        is_quick = name in _QUEUE_ONLY and not (self.calls.expected or self.calls.overdue)
        library = self._quick if is_quick else self.driver
        check(self.driver, name, getattr(library, name)(*arguments))

    def wait(self, name: str, handle: int) -> None:
        self.calls.wait_began()
        try:
            self.call(name, handle)
        finally:
            self.calls.wait_ended()

    def make(self, owner: object, call: str, give_back: str, *arguments: Any) -> int:
        """The handle or address that `call` creates. When `owner` is garbage-collected, on whichever thread, the
        driver's call `give_back` releases it."""
        made = _ARGUMENTS[call][0]._type_()  # the first argument points to it
        with self.calls.making():
            self.call(call, ctypes.byref(made), *arguments)
        handle: int = made.value
        closing = weakref.finalize(owner, _give_back, self, give_back, handle)
        closing.atexit = False
        return handle


def _give_back(device: _Device, call: str, handle: int) -> None:
    try:
        with device.calls.making(), device.context.current():
            getattr(device.driver, call)(handle)
    except DeviceError:
        pass


class DeviceMemory:
    """`size_bytes` bytes of the device's memory from `address` on, aligned to at least 64 bytes; freed when nobody
    holds the object."""

    def __init__(self, device: _Device, size_bytes: int) -> None:
        self.address = device.make(self, "cuMemAlloc_v2", "cuMemFree_v2", size_bytes)
        self.size_bytes = size_bytes


class HostMemory:
    """The same of the host's memory, in pages that stay where they are (page-locked), so that the device reads and
    writes them without the CPU's help. `buffer` is all of it; arrays over it must not outlive the object."""

    def __init__(self, device: _Device, size_bytes: int) -> None:
        self.address = device.make(self, "cuMemHostAlloc", "cuMemFreeHost", size_bytes, _PORTABLE)
        self.size_bytes = size_bytes
        self.buffer: Buffer = (ctypes.c_uint8 * size_bytes).from_address(self.address)


class Event:
    """A position in a stream, which each `Stream.record` sets anew."""

    def __init__(self, device: _Device) -> None:
        self._device = device
        self.handle = device.make(self, "cuEventCreate", "cuEventDestroy_v2", _WAITED_FOR)

    def synchronize(self) -> None:
        """Block until the stream has reached the position recorded last. Other Python threads run meanwhile."""
        self._device.wait("cuEventSynchronize", self.handle)


class Stream:
    """A queue of work that the device does in order; streams are ordered with each other only by events. Only
    `synchronize` blocks. `handle` is that by which the runtime knows the stream."""

    def __init__(self, device: _Device) -> None:
        self._device = device
        self.handle = device.make(self, "cuStreamCreate", "cuStreamDestroy_v2", _NON_BLOCKING)

    def copy_in(self, target: int, source: int, size_bytes: int) -> None:
        """Copy to the device's memory at `target` from the host's at `source`, when its turn comes."""
        self._device.call("cuMemcpyHtoDAsync_v2", target, source, size_bytes, self.handle)

    def copy_out(self, target: int, source: int, size_bytes: int) -> None:
        """Copy to the host's memory at `target` from the device's at `source`, when its turn comes."""
        self._device.call("cuMemcpyDtoHAsync_v2", target, source, size_bytes, self.handle)

    def copy_within(self, target: int, source: int, size_bytes: int) -> None:
        """Copy from the device's memory at `source` to the same device's at `target`, when its turn comes."""
        self._device.call("cuMemcpyDtoDAsync_v2", target, source, size_bytes, self.handle)

    def copy_lines(self, target: int, pitch: int, source: int, source_pitch: int, size_bytes: int, count: int) -> None:
        """Copy within the device's memory `count` times so many bytes, which lie `source_pitch` bytes from each other
        from `source` on, and will lie `pitch` from each other from `target` on."""
        lines = _Lines(
            sourceMemoryType=_ON_DEVICE, source=source, sourcePitch=source_pitch, targetMemoryType=_ON_DEVICE,
            target=target, targetPitch=pitch, size_bytes=size_bytes, count=count,
        )  # fmt: skip
        self._device.call("cuMemcpy2DAsync_v2", ctypes.byref(lines), self.handle)

    def clear(self, target: int, size_bytes: int) -> None:
        """Fill the device's memory at `target` with zeros, when its turn comes."""
        self._device.call("cuMemsetD8Async", target, 0, size_bytes, self.handle)

    def record(self, event: Event) -> None:
        """Make `event` stand for everything in the stream now."""
        self._device.call("cuEventRecord", event.handle, self.handle)

    def wait(self, event: Event) -> None:
        """Make everything queued here from now on wait for what `event` stands for now."""
        self._device.call("cuStreamWaitEvent", self.handle, event.handle, 0)

    def synchronize(self) -> None:
        """Block until everything in the stream is done."""
        self._device.wait("cuStreamSynchronize", self.handle)


class CudaAccelerator:
    """GPU `index`, the number by which clients know it, too. `ort_device` and `memory_name` are the names that ONNX
    Runtime's CUDA provider uses for it, and for its memory as opposed to the host's. `calls` are the process's long
    calls."""

    memory_name = "Cuda"

    def __init__(self, driver: Any, index: int, calls: LongCalls = long_calls) -> None:
        self._device = _Device(driver, index, calls)
        self.gpu = index
        self.ort_device = "cuda", index

    def enter(self) -> None:
        """Prepare the calling thread for this device."""
        self._device.enter()

    def current(self) -> AbstractContextManager[None]:
        """Within the block, the calling thread is prepared for this device, whichever it is prepared for otherwise."""
        return self._device.context.current()

    def synchronize(self) -> None:
        """Block until the device has finished all its work. Other Python threads run meanwhile. No capture may be in
        progress on it. May be called on any thread, whether it has called `enter` or not."""
        with self._device.calls.making(), self._device.context.current():
            self._device.call("cuCtxSynchronize")

    def free_bytes(self) -> int:
        """How much of the device's memory nobody has. May be called on any thread."""
        free, total = _size(), _size()
        with self._device.context.current():
            self._device.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def host_memory(self, size_bytes: int) -> HostMemory:
        return HostMemory(self._device, size_bytes)

    def device_memory(self, size_bytes: int) -> DeviceMemory:
        return DeviceMemory(self._device, size_bytes)

    def stream(self) -> Stream:
        return Stream(self._device)

    def event(self) -> Event:
        return Event(self._device)


@dataclass(frozen=True, slots=True)
class Streams:
    """An accelerator's streams for one session: copies in, computation and copies out proceed in parallel."""

    accelerator: CudaAccelerator
    copy_in: Stream
    compute: Stream
    copy_out: Stream

    @property
    def all(self) -> Sequence[Stream]:
        return (self.copy_in, self.compute, self.copy_out)


def open_streams(accelerator: CudaAccelerator) -> Streams:
    """New streams; they live as long as somebody holds them. Raises DeviceError."""
    accelerator.enter()
    return Streams(accelerator, accelerator.stream(), accelerator.stream(), accelerator.stream())


def accelerator_of(device: Device) -> CudaAccelerator | None:
    """The accelerator that stages the batches of `device`. Blocks as `open_cuda`; raises DeviceError."""
    return open_cuda(device.index) if device.kind is DeviceKind.GPU else None


def open_cuda(index: int) -> CudaAccelerator:
    """GPU `index`. Blocks, the first time until its context is created; raises DeviceError."""
    with long_calls.making():
        return CudaAccelerator(load_driver(ctypes.CDLL), index)
