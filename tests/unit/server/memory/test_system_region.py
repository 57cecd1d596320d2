"""A range of a shared memory object: which are accepted, and what happens when its owner shrinks or unlinks it."""

from __future__ import annotations

import os
import re
import resource
import socket
from collections.abc import Iterator

import numpy as np
import pytest

from paceline.server.errors import InvalidRequest
from paceline.server.memory.system_region import RESERVED_PREFIX, SystemRegion, object_name, open_system_region
from tests.rlimits import limited
from tests.shared_objects import FOLDER, SharedObject, held_by, shared_object

MIB = 2**20


@pytest.fixture
def memory() -> Iterator[SharedObject]:
    with shared_object(100) as made:
        yield made


def read(region: SystemRegion, size: int, offset: int = 0) -> bytes:
    target = np.empty(size, np.uint8)
    region.read_into(target, offset)
    return target.tobytes()


@pytest.mark.parametrize("key", ["/a", "a", "/..a", "a b", "/grün", "/x.y-z"])
def test_object_name_ignores_one_leading_slash(key: str) -> None:
    assert object_name("n", key) == key.removeprefix("/")


@pytest.mark.parametrize("key", ["", "/", "//", "//a", "/a/", "a/b", ".", "..", "/.", "/..", "../a", "/../a", "a\0"])
def test_object_name_that_could_lead_elsewhere_is_refused(key: str) -> None:
    with pytest.raises(InvalidRequest, match=r"cannot register shared memory region 'n' - invalid shm key"):
        object_name("n", key)


@pytest.mark.parametrize("slash", ["", "/"])
def test_object_name_reserved_by_triton_is_refused(slash: str) -> None:
    with pytest.raises(InvalidRequest, match=f"with key '{slash}{RESERVED_PREFIX}7' as the key contains the reserved"):
        object_name("n", f"{slash}{RESERVED_PREFIX}7")


@pytest.mark.parametrize(("offset", "size"), [(0, 1), (0, 100), (99, 1), (37, 63)])
def test_open_range_within_the_object_reads_and_writes_only_there(memory: SharedObject, offset: int, size: int) -> None:
    memory.put(bytes(range(100)))
    region = open_system_region("n", memory.key, offset, size)
    assert read(region, size) == bytes(range(100))[offset : offset + size]
    region.write(b"\xff" * size, 0)
    assert memory.get(100) == bytes(range(offset)) + b"\xff" * size + bytes(range(offset + size, 100))


@pytest.mark.parametrize(
    ("offset", "size"), [(0, 0), (0, 101), (1, 100), (100, 1), (101, 0), (-1, 1), (0, -1), (2**64 - 1, 2**64 - 1)]
)
def test_open_range_not_within_the_object_is_refused_and_leaves_nothing_open(
    memory: SharedObject, offset: int, size: int
) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(f"within the 100 bytes of '{memory.key}', got {size} bytes")):
        open_system_region("n", memory.key, offset, size)
    assert held_by(key=memory.key)[0] == 1


def test_open_link_is_refused_wherever_it_leads(memory: SharedObject) -> None:
    link = FOLDER / f"{memory.key[1:]}-link"
    link.symlink_to("/etc/hostname")
    try:
        with pytest.raises(InvalidRequest, match=r"Unable to open shared memory region: .*Too many levels of symbolic"):
            open_system_region("n", link.name, 0, 1)
    finally:
        link.unlink()


@pytest.mark.parametrize("kind", ["pipe", "folder", "socket"])
def test_open_pipe_folder_or_socket_is_refused_without_blocking(memory: SharedObject, kind: str) -> None:
    other = FOLDER / f"{memory.key[1:]}-{kind}"
    if kind == "pipe":
        os.mkfifo(other)
    elif kind == "folder":
        other.mkdir()
    else:
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(other))
        listening.close()
    try:
        with pytest.raises(InvalidRequest, match="Unable to open shared memory region: "):
            open_system_region("n", other.name, 0, 1)
    finally:
        other.rmdir() if kind == "folder" else other.unlink()
    assert held_by(key=memory.key)[0] == 1


@pytest.mark.parametrize("left", [0, 1, 49, 50, 89])
def test_truncated_object_fails_each_use_without_killing_the_process(memory: SharedObject, left: int) -> None:
    region = open_system_region("n", memory.key, 10, 80)
    memory.resize(left)
    text = re.escape(f"region 'n': expected '{memory.key}' to have at least 90 bytes as when it was registered, got")
    with pytest.raises(InvalidRequest, match=text):
        region.check()
    with pytest.raises(InvalidRequest, match=text):
        read(region, 80)
    with pytest.raises(InvalidRequest, match=text):
        region.write(b"x", 0)
    assert os.fstat(memory.descriptor).st_size == left
    memory.resize(100)
    region.check()
    region.write(b"x", 0)
    assert read(region, 1) == b"x"


@pytest.mark.parametrize("left", [0, 5 * MIB, 12 * MIB - 1, 12 * MIB])
def test_large_read_is_complete_or_reported_as_truncated(left: int) -> None:
    with shared_object(13 * MIB) as memory:
        data = np.random.default_rng(1).integers(0, 256, 12 * MIB - 7, np.uint8)
        memory.put(data, 7)
        region = open_system_region("n", memory.key, 3, 12 * MIB - 3)
        memory.resize(left)
        if left == 12 * MIB:
            assert read(region, 12 * MIB - 7, 4) == data.tobytes()
        else:
            with pytest.raises(InvalidRequest, match=f"got {left}"):
                read(region, 12 * MIB - 7, 4)


def test_truncation_behind_the_bytes_read_does_no_harm(memory: SharedObject) -> None:
    memory.put(b"abc")
    region = open_system_region("n", memory.key, 0, 100)
    memory.resize(3)
    assert read(region, 3) == b"abc"


def test_memory_unlinked_and_closed_by_its_owner_stays_usable() -> None:
    with shared_object(10) as memory:
        memory.put(b"abc")
        region = open_system_region("n", memory.key, 0, 10)
    assert read(region, 3) == b"abc"
    region.write(b"xyz", 7)
    assert read(region, 3, 7) == b"xyz"
    assert held_by(key=memory.key) == (1, 0)
    del region
    assert held_by(key=memory.key) == (0, 0)


def test_region_is_closed_when_its_last_holder_releases_it(memory: SharedObject) -> None:
    region = open_system_region("n", memory.key, 0, 10)
    other = region
    del region
    assert held_by(key=memory.key) == (2, 0)
    assert read(other, 1) == b"\0"
    del other
    assert held_by(key=memory.key) == (1, 0)


@pytest.mark.parametrize("dtype", ["?", "u1", "<f2", "<f4", "<i8", "<f8"])
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (4,), (2, 3)])
def test_read_into_an_array_of_any_dtype_and_shape_fills_it(
    memory: SharedObject, dtype: str, shape: tuple[int, ...]
) -> None:
    sent = np.arange(int(np.prod(shape))).astype(dtype).reshape(shape)
    memory.put(sent, 5)
    target = np.empty(shape, dtype)
    open_system_region("n", memory.key, 3, 97).read_into(target, 2)
    assert target.tobytes() == sent.tobytes()


def test_write_that_runs_out_of_memory_is_refused_and_the_next_one_succeeds(memory: SharedObject) -> None:
    """Sparse objects may promise more memory than there is: writing through a mapping would then kill the process."""
    region = open_system_region("n", memory.key, 0, 100)
    with (
        limited(resource.RLIMIT_FSIZE, 10),
        pytest.raises(InvalidRequest, match="region 'n' can't be written: File too large"),
    ):
        region.write(b"x", 50)
    region.write(b"x", 50)
    assert read(region, 1, 50) == b"x"
