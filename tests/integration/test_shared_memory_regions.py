"""Regions of shared memory over gRPC: registered, listed and unregistered, and what is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest

from paceline.protos import inference_pb2 as pb
from tests.integration.regions import in_region, regions, register, settings, unregister
from tests.integration.serving import Served, echo_model, failure_of, serving
from tests.polling import eventually_async
from tests.shared_objects import SharedObject, held_by, shared_object

Code = grpc.StatusCode


@pytest.fixture
def memory() -> Iterator[SharedObject]:
    with shared_object(4096) as made:
        yield made


@pytest.fixture
async def served(tmp_path: Path, memory: SharedObject) -> AsyncIterator[Served]:
    """Region `r` is the whole of `memory`."""
    async with serving(tmp_path, {"m": echo_model()}, settings=settings(tmp_path)) as served:
        await register(served, "r", memory.key, 4096)
        yield served


# ---- Switched off ----------------------------------------------------------------------------------------------------


async def test_registering_while_switched_off_names_the_flag(tmp_path: Path) -> None:
    async with serving(tmp_path, {"m": echo_model()}) as served:
        calls = [
            served.stub.SystemSharedMemoryRegister(pb.SystemSharedMemoryRegisterRequest(name="r")),
            served.stub.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest()),
            served.stub.CudaSharedMemoryRegister(pb.CudaSharedMemoryRegisterRequest(name="r")),
            served.stub.CudaSharedMemoryUnregister(pb.CudaSharedMemoryUnregisterRequest()),
        ]
        for call in calls:
            code, text = await failure_of(call)
            assert code is Code.UNIMPLEMENTED
            assert "--allow-client-shm=true" in text
        code, text = await failure_of(served.infer(in_region()))
        assert code is Code.UNIMPLEMENTED
        assert text.startswith("model 'm': input 'a': 'shared_memory_region' is switched off")
        assert await regions(served) == {}
        assert not (await served.stub.CudaSharedMemoryStatus(pb.CudaSharedMemoryStatusRequest())).regions
        code, text = await failure_of(
            served.stub.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest(name="r"))
        )
        assert (code, "'r'" in text) == (Code.NOT_FOUND, True)
        metadata = await served.stub.ServerMetadata(pb.ServerMetadataRequest())
        assert not [name for name in metadata.extensions if "shared_memory" in name]


async def test_extension_is_advertised_when_switched_on(served: Served) -> None:
    assert "system_shared_memory" in (await served.stub.ServerMetadata(pb.ServerMetadataRequest())).extensions


# ---- Registering -----------------------------------------------------------------------------------------------------


async def test_status_reports_the_registered_regions(served: Served, memory: SharedObject) -> None:
    await register(served, "part", memory.key[1:], 100, 7)
    assert await regions(served) == {"r": (memory.key, 0, 4096), "part": (memory.key[1:], 7, 100)}
    assert await regions(served, "part") == {"part": (memory.key[1:], 7, 100)}
    code, text = await failure_of(regions(served, "other"))
    assert (code, text) == (
        Code.NOT_FOUND,
        "Unable to find system shared memory region: 'other'; registered are ['part', 'r']",
    )


async def test_registering_twice_keeps_the_first_region(served: Served, memory: SharedObject) -> None:
    code, text = await failure_of(register(served, "r", memory.key, 10))
    assert code is Code.ALREADY_EXISTS
    assert text.startswith("shared memory region 'r' already in manager")
    assert await regions(served) == {"r": (memory.key, 0, 4096)}


@pytest.mark.parametrize(
    ("name", "key", "offset", "size", "text"),
    [
        ("n", "", 0, 1, "invalid shm key ''"),
        ("n", "/", 0, 1, "invalid shm key '/'"),
        ("n", "//x", 0, 1, "invalid shm key '//x'"),
        ("n", "/a/b", 0, 1, "invalid shm key '/a/b'"),
        ("n", "../etc/passwd", 0, 1, "invalid shm key '../etc/passwd'"),
        ("n", "..", 0, 1, "invalid shm key '..'"),
        ("n", "/.", 0, 1, "invalid shm key '/.'"),
        ("n", "a\0b", 0, 1, "invalid shm key 'a\0b'"),
        ("n", "/triton_python_backend_shm_region_1", 0, 1, "the reserved prefix 'triton_python_backend_shm_region_'"),
        ("n", "/paceline-test-nosuch", 0, 1, "Unable to open shared memory region: '/paceline-test-nosuch': No such"),
        ("n", "x" * 300, 0, 1, "File name too long"),
        ("", None, 0, 1, "expected a name"),
        ("n" * 1025, None, 0, 1, "expected a name of at most 1024 bytes, got 1025"),
        ("n", None, 0, 0, "expected at least 1 byte, all within the 4096 bytes of "),
        ("n", None, 0, 4097, "got 4097 bytes from offset 0"),
        ("n", None, 1, 4096, "got 4096 bytes from offset 1"),
        ("n", None, 4096, 1, "got 1 bytes from offset 4096"),
        ("n", None, 4097, 0, "got 0 bytes from offset 4097"),
        ("n", None, 2**64 - 1, 2, f"got 2 bytes from offset {2**64 - 1}"),
        ("n", None, 1, 2**64 - 1, f"got {2**64 - 1} bytes from offset 1"),
    ],
)
async def test_invalid_registration_is_refused_and_changes_nothing(
    served: Served, memory: SharedObject, name: str, key: str | None, offset: int, size: int, text: str
) -> None:
    before = held_by(key=memory.key)
    code, got = await failure_of(register(served, name, memory.key if key is None else key, size, offset))
    assert code is Code.INVALID_ARGUMENT
    assert text in got
    assert await regions(served) == {"r": (memory.key, 0, 4096)}
    assert held_by(key=memory.key) == before


async def test_registering_too_many_regions_is_refused(tmp_path: Path, memory: SharedObject) -> None:
    allowed = settings(tmp_path, max_client_shm_regions=2)
    async with serving(tmp_path, {"m": echo_model()}, settings=allowed) as served:
        await register(served, "1", memory.key, 1)
        await register(served, "2", memory.key, 1)
        code, text = await failure_of(register(served, "3", memory.key, 1))
        assert code is Code.RESOURCE_EXHAUSTED
        assert "--max-client-shm-regions" in text
        assert await served.metric("paceline_limit_refusals", 'limit="client_shm_regions"') == 1
        await unregister(served, "1")
        await register(served, "3", memory.key, 1)
        assert (await regions(served)).keys() == {"2", "3"}


async def test_unregister_removes_one_or_all_and_ignores_unknown_names(served: Served, memory: SharedObject) -> None:
    await register(served, "s", memory.key, 8)
    await unregister(served, "nosuch")
    await unregister(served, "s")
    assert (await regions(served)).keys() == {"r"}
    await register(served, "s", memory.key, 16)
    await unregister(served)
    assert await regions(served) == {}
    await unregister(served)
    await eventually_async(lambda: held_by(key=memory.key)[0] == 1, "no descriptor but the test's own")


async def test_cuda_registration_without_driver_alone_is_refused(served: Served) -> None:
    extensions = (await served.stub.ServerMetadata(pb.ServerMetadataRequest())).extensions
    if "cuda_shared_memory" in extensions:
        pytest.skip("there is a GPU")
    request = pb.CudaSharedMemoryRegisterRequest(name="c", raw_handle=b"\0" * 64, byte_size=8)
    code, text = await failure_of(served.stub.CudaSharedMemoryRegister(request))
    assert code is Code.UNIMPLEMENTED
    assert "GPUs not supported: " in text
    await served.stub.CudaSharedMemoryUnregister(pb.CudaSharedMemoryUnregisterRequest())
    assert not (await served.stub.CudaSharedMemoryStatus(pb.CudaSharedMemoryStatusRequest())).regions
    assert (await regions(served)).keys() == {"r"}


async def test_system_region_is_no_cuda_region(served: Served) -> None:
    for call in (
        served.stub.CudaSharedMemoryStatus(pb.CudaSharedMemoryStatusRequest(name="r")),
        served.stub.CudaSharedMemoryUnregister(pb.CudaSharedMemoryUnregisterRequest(name="r")),
    ):
        code, text = await failure_of(call)
        assert (code, "'r', which is a system one" in text) == (Code.NOT_FOUND, True)
    await served.stub.CudaSharedMemoryUnregister(pb.CudaSharedMemoryUnregisterRequest())
    assert (await regions(served)).keys() == {"r"}
