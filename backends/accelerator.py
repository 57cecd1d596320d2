"""What staging needs of a device that computes beside the CPU: memory on both sides, and queues of copies.

Lives here: the protocols, and nothing of one device. Must not: a runtime, tensors. Source of the terms: CUDA's streams
and events, which other devices have under other names.

All methods raise DeviceError, and may be called on any thread that has called `enter`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Accelerator", "Buffer", "Event", "HostMemory", "Memory", "Stream", "Streams", "open_streams"]

Buffer = ctypes.Array[ctypes.c_uint8]
"""Bytes at an address, for numpy to make arrays over. Being no array itself, it never stands in the place of another
in a chain of numpy's bases."""


class Memory(Protocol):
    """`size_bytes` bytes from `address` on, aligned to 64 at least; given back when nobody holds the object."""

    @property
    def address(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...


class HostMemory(Memory, Protocol):
    """Memory of the host that the device reads and writes without the CPU's help: pages that stay where they are."""

    @property
    def buffer(self) -> Buffer:
        """All of it. Arrays over it must not outlive the object."""


class Event(Protocol):
    """A place in a stream, which `Stream.record` says anew each time."""

    def synchronize(self) -> None:
        """Block until the stream has come to where the event was recorded last. Other Python threads run meanwhile."""


class Stream(Protocol):
    """What the device does one after the other; streams know nothing of each other but by events. Nothing but
    `synchronize` blocks."""

    @property
    def handle(self) -> int:
        """What the runtime knows it by."""

    def copy_in(self, target: int, source: int, size_bytes: int) -> None:
        """Copy to the device's memory at `target` from the host's at `source`, when its turn comes."""

    def copy_out(self, target: int, source: int, size_bytes: int) -> None:
        """Copy to the host's memory at `target` from the device's at `source`, when its turn comes."""

    def copy_within(self, target: int, source: int, size_bytes: int) -> None:
        """Copy from the device's memory at `source` to the same device's at `target`, when its turn comes."""

    def record(self, event: Event) -> None:
        """`event` stands for all that is in the stream now."""

    def wait(self, event: Event) -> None:
        """What comes later in this stream happens after what `event` stands for now."""

    def synchronize(self) -> None:
        """Block until all that is in it is done."""


class Accelerator(Protocol):
    """One device."""

    @property
    def ort_device(self) -> tuple[str, int]:
        """Name and index by which ONNX Runtime knows the device."""

    @property
    def gpu(self) -> int:
        """By which number clients know the device."""

    @property
    def memory_name(self) -> str:
        """What ONNX Runtime calls memory of the device, as opposed to the host's."""

    def enter(self) -> None:
        """Make the calling thread ready for this device."""

    def synchronize(self) -> None:
        """Block until the device has done all that it was told. Other Python threads run meanwhile. Nothing may be
        captured on it. For any thread, be it ready or not."""

    def host_memory(self, size_bytes: int) -> HostMemory: ...

    def device_memory(self, size_bytes: int) -> Memory: ...

    def stream(self) -> Stream: ...

    def event(self) -> Event: ...


@dataclass(frozen=True, slots=True)
class Streams:
    """An accelerator's streams for one session: copies in, computation and copies out go on side by side."""

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
