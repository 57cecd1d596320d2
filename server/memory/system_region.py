"""System shared memory: a range of a client's POSIX shared memory object, read and written by the kernel.

Lives here: keys, bounds, one object's descriptor. Must not: names of regions (`regions`), tensors, messages.

The rule: only the operating system's kernel touches the object. Its owner may truncate it at any moment, and a process
that then touches a missing page dies of SIGBUS, which no Python program survives; `preadv` returns a short count
instead, and so does `copy_all` for a mapping. Both also read every byte only once, so that a client that writes
meanwhile can't change an index after a compute kernel has checked it: ONNX Runtime's Gather, run on a mapping that was
written at the same time, crashed within seconds. The price is about 35 us for 600 KB, where copying a warm mapping
takes 15.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
import weakref
from functools import cached_property
from pathlib import Path

import numpy as np

from paceline.backends.spec import Array
from paceline.server.errors import InvalidRequest
from paceline.server.memory.regions import Region

RESERVED_PREFIX = "triton_python_backend_shm_region_"
_FOLDER = Path("/dev/shm")
_UINT8 = np.dtype(np.uint8)

# The size, as `os.fstat` gives it, in a third of the time and without releasing the interpreter lock: an answer that is
# known already needn't wait for other threads.
_end_of = ctypes.PyDLL(None).lseek
_end_of.restype, _end_of.argtypes = ctypes.c_int64, [ctypes.c_int, ctypes.c_int64, ctypes.c_int]


class SystemRegion(Region):
    """`byte_size` bytes of an object, from `offset`. The descriptor is closed when nobody holds the region any more:
    requests that use it keep it open, whatever becomes of its registration, its name or its owner."""

    kind = "system"

    def __init__(self, name: str, key: str, offset: int, byte_size: int, descriptor: int) -> None:
        self.name = name
        self.key = key
        self.offset = offset
        self.byte_size = byte_size
        self._descriptor = descriptor
        closing = weakref.finalize(self, os.close, descriptor)
        # At the end of the process a thread may still read.
        closing.atexit = False

    @cached_property
    def mapped_at(self) -> int | None:
        # Mappings begin at a page boundary, so what precedes the range in its page is mapped, too.
        lead = self.offset % mmap.ALLOCATIONGRANULARITY
        try:
            mapping = mmap.mmap(self._descriptor, lead + self.byte_size, prot=mmap.PROT_READ, offset=self.offset - lead)
        except (OSError, ValueError):  # no room for it, or the object was truncated
            return None
        # Two threads may come here at once: the first mapping stays, as its address may be known already.
        mapping = self.__dict__.setdefault("_mapping", mapping)
        return np.frombuffer(mapping, np.uint8).ctypes.data + lead

    def check(self) -> None:
        """Raise InvalidRequest if the object has become smaller than what was registered."""
        size = _end_of(self._descriptor, 0, os.SEEK_END)
        if size < self.offset + self.byte_size:
            raise self._cut_short(size)

    # hot path: 1 us and the copy, the interpreter free for other threads meanwhile
    def read_into(self, target: Array, offset: int) -> None:
        """Raises InvalidRequest if the object ends too early."""
        rest, at = target.reshape(-1).view(_UINT8), self.offset + offset
        while len(rest):
            count = os.preadv(self._descriptor, [rest.data], at)
            if not count:
                raise self._cut_short(os.fstat(self._descriptor).st_size)
            rest, at = rest[count:], at + count

    def write(self, data: bytes | memoryview, offset: int) -> None:
        """Raises InvalidRequest if the object has become too small, or memory for it runs out. An object that is
        truncated between check and write grows again, which harms nobody but its owner."""
        self.check()
        at = self.offset + offset
        try:
            while count := len(data):
                done = os.pwrite(self._descriptor, data, at)
                if done == count:
                    break
                data, at = memoryview(data)[done:], at + done
        except OSError as error:
            raise InvalidRequest(f"shared memory region '{self.name}' can't be written: {error.strerror}") from None

    def _cut_short(self, size: int) -> InvalidRequest:
        return InvalidRequest(
            f"shared memory region '{self.name}': expected '{self.key}' to have at least "
            f"{self.offset + self.byte_size} bytes as when it was registered, got {size}"
        )


def open_system_region(name: str, key: str, offset: int, byte_size: int) -> SystemRegion:
    """The region `name`: `byte_size` bytes from `offset` in the object `key`. Raises InvalidRequest for a key that
    names no shared memory object, or a range that isn't in it."""
    # By path, as shm_open does, but without the standard library's private module. Only this way are links refused; and
    # opening a pipe, for instance, doesn't block.
    path = _FOLDER / object_name(name, key)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidRequest(f"Unable to open shared memory region: '{key}': {error.strerror}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise InvalidRequest(f"Unable to open shared memory region: '{key}': expected a shared memory object")
        if byte_size < 1 or offset < 0 or offset + byte_size > status.st_size:
            raise InvalidRequest(
                f"failed to register shared memory region '{name}': invalid args: expected at least 1 byte, all within "
                f"the {status.st_size} bytes of '{key}', got {byte_size} bytes from offset {offset}"
            )
        return SystemRegion(name, key, offset, byte_size, descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def object_name(name: str, key: str) -> str:
    """The file name of the object that `key` means; one leading slash doesn't count. `name`, the region's, is for error
    texts. Raises InvalidRequest for a key that can't be one, and for names that Triton keeps to itself."""
    file = key.removeprefix("/")
    if file in ("", ".", "..") or "/" in file or "\0" in file:
        raise InvalidRequest(
            f"cannot register shared memory region '{name}' - invalid shm key '{key}': expected the name of a POSIX "
            "shared memory object, with no slash except a leading one"
        )
    if file.startswith(RESERVED_PREFIX):
        raise InvalidRequest(
            f"cannot register shared memory region '{name}' with key '{key}' as the key contains the reserved prefix "
            f"'{RESERVED_PREFIX}'"
        )
    return file
