"""The host as a device that stages batches: all of staging runs without hardware, with ONNX Runtime's CPU provider.

Lives here: an `Accelerator`. Must not: ONNX Runtime.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from paceline.backends.cuda.accelerator import Buffer, Event, Stream

__all__ = ["HostAccelerator"]

_ALIGNMENT = 64


class _Memory:
    def __init__(self, size_bytes: int) -> None:
        whole = ctypes.create_string_buffer(size_bytes + _ALIGNMENT)
        begin = -ctypes.addressof(whole) % _ALIGNMENT
        self.buffer: Buffer = (ctypes.c_uint8 * size_bytes).from_buffer(whole, begin)
        self.address = ctypes.addressof(self.buffer)
        self.size_bytes = size_bytes


class _Event:
    def __init__(self) -> None:
        self.stream: _Stream | None = None
        self.place = 0

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.carry_out(self.place)


class _Stream:
    handle = 0

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._waiting: deque[tuple[Callable[[int, int, int], Any], int, int, int]] = deque()
        self._done = 0

    def copy_in(self, target: int, source: int, size_bytes: int) -> None:
        with self._lock:
            self._waiting.append((ctypes.memmove, target, source, size_bytes))

    copy_out = copy_within = copy_in

    def copy_lines(self, target: int, pitch: int, source: int, source_pitch: int, size_bytes: int, count: int) -> None:
        for line in range(count):
            self.copy_in(target + line * pitch, source + line * source_pitch, size_bytes)

    def clear(self, target: int, size_bytes: int) -> None:
        with self._lock:
            self._waiting.append((ctypes.memset, target, 0, size_bytes))

    def record(self, event: Event) -> None:
        assert isinstance(event, _Event)
        with self._lock:
            event.stream, event.place = self, self._done + len(self._waiting)

    def wait(self, event: Event) -> None:
        event.synchronize()

    def synchronize(self) -> None:
        with self._lock:
            self.carry_out(self._done + len(self._waiting))

    def carry_out(self, place: int) -> None:
        """Carry out all copies before `place`."""
        with self._lock:
            while self._done < place:
                carry_out, *arguments = self._waiting.popleft()
                carry_out(*arguments)
                self._done += 1


class HostAccelerator:
    """The host as an `Accelerator` without hardware, on which all of staging runs with ONNX Runtime's CPU provider. It
    brings no speed. Its "device memory" is ordinary memory, and nothing is copied before somebody waits for it, so code
    that forgets to wait reads old contents: ordering faults show up without a device."""

    ort_device = ("cpu", 0)
    gpu = 0

    def __init__(self, memory_name: str = "Cpu") -> None:
        """With another `memory_name`, no tensor of any model counts as being on the device: all are in host memory.
        `allocations` counts allocations of memory."""
        self.memory_name = memory_name
        self._lock = threading.RLock()
        self.allocations = 0

    def enter(self) -> None:
        pass

    def current(self) -> AbstractContextManager[None]:
        return nullcontext()

    def synchronize(self) -> None:
        """Nothing to do: copies are carried out by whoever waits for them."""

    def free_bytes(self) -> int:
        """More than there is: nothing here needs to know."""
        return sys.maxsize

    def host_memory(self, size_bytes: int) -> _Memory:
        with self._lock:
            self.allocations += 1
        return _Memory(size_bytes)

    device_memory = host_memory

    def stream(self) -> Stream:
        return _Stream(self._lock)

    def event(self) -> Event:
        return _Event()
