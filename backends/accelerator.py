"""What staging needs from a device that computes beside the CPU: memory on both sides, and queues of copies.

Lives here: the protocols, and nothing specific to one device. Must not: a runtime, tensors. Source of the terms: CUDA's
streams and events, which other devices have under other names.

All methods raise DeviceError, and may be called on any thread that has called `enter`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Accelerator", "Buffer", "Event", "HostMemory", "Memory", "Stream", "Streams", "open_streams"]

Buffer = ctypes.Array[ctypes.c_uint8]
"""Bytes at an address, for numpy to make arrays over. As it is no numpy array itself, it never replaces another base in
a chain of numpy's bases."""


class Memory(Protocol):
    """`size_bytes` bytes from `address` on, aligned to at least 64 bytes; freed when nobody holds the object."""

    @property
    def address(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...


class HostMemory(Memory, Protocol):
    """Host memory that the device reads and writes without the CPU's help: pages that stay where they are
    (page-locked)."""

    @property
    def buffer(self) -> Buffer:
        """All of the memory. Arrays over it must not outlive the object."""


class Event(Protocol):
    """A position in a stream, which each `Stream.record` sets anew."""

    def synchronize(self) -> None:
        """Block until the stream has reached the position recorded last. Other Python threads run meanwhile."""


class Stream(Protocol):
    """A queue of work that the device does in order; streams are ordered with each other only by events. Only
    `synchronize` blocks."""

    @property
    def handle(self) -> int:
        """The handle by which the runtime knows the stream."""

    def copy_in(self, target: int, source: int, size_bytes: int) -> None:
        """Copy to the device's memory at `target` from the host's at `source`, when its turn comes."""

    def copy_out(self, target: int, source: int, size_bytes: int) -> None:
        """Copy to the host's memory at `target` from the device's at `source`, when its turn comes."""

    def copy_within(self, target: int, source: int, size_bytes: int) -> None:
        """Copy from the device's memory at `source` to the same device's at `target`, when its turn comes."""

    def record(self, event: Event) -> None:
        """Make `event` stand for everything in the stream now."""

    def wait(self, event: Event) -> None:
        """Make everything queued here from now on wait for what `event` stands for now."""

    def synchronize(self) -> None:
        """Block until everything in the stream is done."""


class Accelerator(Protocol):
    """One device."""

    @property
    def ort_device(self) -> tuple[str, int]:
        """Name and index by which ONNX Runtime knows the device."""

    @property
    def gpu(self) -> int:
        """The number by which clients know the device."""

    @property
    def memory_name(self) -> str:
        """ONNX Runtime's name for the device's memory, as opposed to the host's."""

    def enter(self) -> None:
        """Prepare the calling thread for this device."""

    def current(self) -> AbstractContextManager[None]:
        """Within the block, the calling thread is prepared for this device, whichever it is prepared for otherwise."""

    def synchronize(self) -> None:
        """Block until the device has finished all its work. Other Python threads run meanwhile. No capture may be in
        progress on it. May be called on any thread, whether it has called `enter` or not."""

    def free_bytes(self) -> int:
        """How much of the device's memory nobody has. May be called on any thread."""

    def host_memory(self, size_bytes: int) -> HostMemory: ...

    def device_memory(self, size_bytes: int) -> Memory: ...

    def stream(self) -> Stream: ...

    def event(self) -> Event: ...


@dataclass(frozen=True, slots=True)
class Streams:
    """An accelerator's streams for one session: copies in, computation and copies out proceed in parallel."""

    accelerator: Accelerator
    copy_in: Stream
    compute: Stream
    copy_out: Stream

    @property
    def all(self) -> Sequence[Stream]:
        return (self.copy_in, self.compute, self.copy_out)


def open_streams(accelerator: Accelerator) -> Streams:
    """New streams; they live as long as somebody holds them. Raises DeviceError."""
    accelerator.enter()
    return Streams(accelerator, accelerator.stream(), accelerator.stream(), accelerator.stream())
