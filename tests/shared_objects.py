"""Shared memory objects as clients make them, by plain system calls.

Lives here: making, truncating, unlinking, and counting what a process holds open. Must not: anything of the server.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.protos import inference_pb2 as pb
from tests.wire import Array

__all__ = ["SharedObject", "add_shared_input", "held_by", "request_shared_output", "shared_object"]

FOLDER = Path("/dev/shm")


class SharedObject:
    """A POSIX shared memory object; a client would register its `key`. `held_by` counts those with the default
    prefix."""

    def __init__(self, size: int, prefix: str = "paceline-test-") -> None:
        self.key = f"/{prefix}{secrets.token_hex(6)}"
        self._path = FOLDER / self.key[1:]
        self.descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self.resize(size)

    def resize(self, size: int) -> None:
        os.ftruncate(self.descriptor, size)

    def put(self, data: bytes | Array, offset: int = 0) -> None:
        os.pwrite(self.descriptor, data if isinstance(data, bytes) else data.tobytes(), offset)

    def get(self, size: int, offset: int = 0) -> bytes:
        return os.pread(self.descriptor, size, offset)

    def unlink(self) -> None:
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        self.unlink()
        os.close(self.descriptor)


@contextmanager
def shared_object(size: int) -> Iterator[SharedObject]:
    """An object that is removed when the block ends, whatever happens in it."""
    made = SharedObject(size)
    try:
        yield made
    finally:
        made.close()


def held_by(pid: int | str = "self", key: str = "/paceline-test-") -> tuple[int, int]:
    """How many descriptors and mappings a process has of objects in shared memory whose keys begin with `key`, deleted
    ones too. In the test's own process, something of an earlier test may not have been collected yet."""
    descriptors = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            descriptors += os.readlink(entry).startswith(f"{FOLDER}{key}")
    maps = Path(f"/proc/{pid}/maps").read_text()
    return descriptors, sum(f"{FOLDER}{key}" in line for line in maps.splitlines())


def add_shared_input(
    request: pb.ModelInferRequest,
    name: str,
    datatype: str,
    shape: Sequence[int],
    region: str,
    size: int,
    offset: int = 0,
) -> None:
    """Add an input in shared memory, whether it makes sense or not."""
    tensor = request.inputs.add(name=name, datatype=datatype, shape=shape)
    _say_where(tensor, region, size, offset)


def request_shared_output(request: pb.ModelInferRequest, name: str, region: str, size: int, offset: int = 0) -> None:
    """Ask for an output in shared memory."""
    _say_where(request.outputs.add(name=name), region, size, offset)


def _say_where(
    tensor: pb.ModelInferRequest.InferInputTensor | pb.ModelInferRequest.InferRequestedOutputTensor,
    region: str,
    size: int,
    offset: int,
) -> None:
    tensor.parameters["shared_memory_region"].string_param = region
    tensor.parameters["shared_memory_byte_size"].int64_param = size
    if offset:
        tensor.parameters["shared_memory_offset"].int64_param = offset
