"""CUDA shared memory as far as it can be tested without a GPU: what is advertised, what is refused, with which text."""

from __future__ import annotations

import re

import grpc
import numpy as np
import pytest

from paceline.backends.errors import LoadError
from paceline.protos import inference_pb2 as pb
from paceline.server.errors import GpuLost, InvalidRequest
from paceline.server.memory.cuda_region import CudaRegion, CudaRegions
from paceline.server.memory.regions import Regions
from paceline.server.rpc.shared_memory import SharedMemory
from tests.unit.backends.cuda.fake_driver import HANDLE, Driver


def no_gpu() -> int:
    raise LoadError("no driver here")


class Aborted(Exception):
    pass


class Context:
    """gRPC's context, as far as `answering` uses it."""

    async def abort(self, code: grpc.StatusCode, text: str) -> None:
        raise Aborted(code, text)


async def test_extensions_depend_on_shared_memory_and_gpus() -> None:
    for regions, count_gpus, expected in (
        (None, lambda: 1, ()),
        (Regions(1), no_gpu, ("system_shared_memory",)),
        (Regions(1), lambda: 1, ("system_shared_memory", "cuda_shared_memory")),
    ):
        group = SharedMemory(regions, count_gpus)
        await group.look_for_gpus()
        assert group.extensions == expected


async def test_cuda_register_without_a_driver_is_refused_with_the_reason() -> None:
    group = SharedMemory(Regions(1), no_gpu)
    await group.look_for_gpus()
    request = pb.CudaSharedMemoryRegisterRequest(name="c", raw_handle=b"x" * 64, byte_size=1)
    with pytest.raises(Aborted) as aborted:
        await group.CudaSharedMemoryRegister(request, Context())
    assert aborted.value.args == (
        grpc.StatusCode.UNIMPLEMENTED,
        "failed to register CUDA shared memory region: 'c', GPUs not supported: no driver here",
    )


@pytest.mark.parametrize(
    ("device", "size", "handle", "text"),
    [
        (-1, 1, b"x" * 64, "expected a device_id of at least 0, got -1"),
        (2**40, 1, b"x" * 64, "expected a device_id of at most 2147483647, got 1099511627776"),
        (0, 0, b"x" * 64, "expected at least 1 byte, got 0"),
        (0, 1, b"x" * 63, "expected a handle of 64 bytes, got 63"),
    ],
)
def test_open_cuda_region_with_bad_arguments_is_refused(device: int, size: int, handle: bytes, text: str) -> None:
    with pytest.raises(
        InvalidRequest, match=re.escape(f"failed to register CUDA shared memory region 'c': invalid args: {text}")
    ):
        CudaRegions().open("c", handle, device, size)


@pytest.fixture
def driver() -> Driver:
    return Driver(size=100)


@pytest.fixture
def region(driver: Driver) -> CudaRegion:
    return CudaRegions(driver.load).open("c", HANDLE, 0, 100)


def test_cuda_region_reads_and_writes_the_drivers_memory(driver: Driver, region: CudaRegion) -> None:
    region.check()
    region.write(b"\1\2\3\4", 90)
    region.write(memoryview(b"\5\6\7\x08"), 94)
    target = np.empty((2, 2), "<u2")
    region.read_into(target, 90)
    assert target.tobytes() == bytes(range(1, 9)) == driver.memory.raw[90:98]
    region.write(b"", 0)
    region.read_into(np.empty(0, np.uint8), 0)


@pytest.mark.parametrize("code", [1, 101, 201])
def test_cuda_region_failure_refuses_the_request(driver: Driver, region: CudaRegion, code: int) -> None:
    driver.codes["copy"] = code
    with pytest.raises(InvalidRequest, match="shared memory region 'c' can't be read: the NVIDIA driver failed"):
        region.read_into(np.empty(1, np.uint8), 0)
    with pytest.raises(InvalidRequest, match="shared memory region 'c' can't be written: the NVIDIA driver failed"):
        region.write(b"x", 0)


@pytest.mark.parametrize("code", [700, 709, 810, 999])
def test_cuda_region_whose_gpu_is_lost_says_so_and_is_reported_once(
    driver: Driver, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    regions, losses = CudaRegions(driver.load), list[str]()
    regions.on_loss = lambda: losses.append(regions.lost)
    region = regions.open("c", HANDLE, 0, 100)
    driver.codes.update(copy=code, open=code)
    for use, what in (
        (lambda: region.read_into(np.empty(1, np.uint8), 0), "region 'c' can't be read: the NVIDIA driver failed"),
        (lambda: region.write(b"x", 0), "region 'c' can't be written: the NVIDIA driver failed"),
        (lambda: regions.open("d", HANDLE, 0, 100), "failed to register CUDA shared memory region 'd'"),
    ):
        with pytest.raises(GpuLost, match=rf"{what}.* returned {code} .*; the server has to restart"):
            use()
    assert losses == [f"the NVIDIA driver failed: cuMemcpyDtoH returned {code} (CUDA_ERROR_OF_SOME_KIND)"]
    assert caplog.messages == [f"CUDA shared memory is lost until the server restarts: {losses[0]}"]


async def test_switched_off_shared_memory_does_not_look_for_gpus() -> None:
    def asked() -> int:
        raise AssertionError("asked the driver")

    group = SharedMemory(None, asked)
    await group.look_for_gpus()
    assert group.extensions == ()
