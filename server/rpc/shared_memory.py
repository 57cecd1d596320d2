"""The RPCs of Triton's "shared memory" extensions: clients register memory, and requests then name it.

Lives here: the RPCs, which convert, call and convert back, and the answers if this is switched off or there is no GPU.
Must not: the registry (`regions`), the memory (`system_region`, `cuda_region`), or inference.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from paceline.backends.errors import LoadError
from paceline.protos import inference_pb2 as pb
from paceline.server.errors import NotSupported, RegionNotFound
from paceline.server.memory.cuda_region import CudaRegion, CudaRegions
from paceline.server.memory.regions import Region, Regions
from paceline.server.memory.system_region import SystemRegion, open_system_region
from paceline.server.rpc.calls import Context, answering

_log = logging.getLogger("paceline.server.shared_memory")

_SystemStatus = pb.SystemSharedMemoryStatusResponse.RegionStatus
_CudaStatus = pb.CudaSharedMemoryStatusResponse.RegionStatus


class SharedMemory:
    """An `RpcGroup` over `regions`. None switches it off; then only the status RPCs work.

    `count_gpus` returns how many GPUs there are, or raises LoadError; `cuda` opens CUDA memory.
    """

    def __init__(self, regions: Regions | None, count_gpus: Callable[[], int], cuda: CudaRegions | None = None) -> None:
        self._regions = regions
        self._count_gpus = count_gpus
        self._cuda = cuda or CudaRegions()
        self._no_gpu = "GPUs haven't been looked for yet"

    @property
    def extensions(self) -> tuple[str, ...]:
        if self._regions is None:
            return ()
        return ("system_shared_memory",) if self._no_gpu else ("system_shared_memory", "cuda_shared_memory")

    async def look_for_gpus(self) -> None:
        """Find out whether CUDA shared memory can be had, if shared memory is on at all. Asking the driver takes up to
        a second."""
        if self._regions is None:
            return
        try:
            await asyncio.to_thread(self._count_gpus)
        except LoadError as error:
            self._no_gpu = str(error)
            _log.info("clients may register system shared memory, but not CUDA shared memory: %s", error)
        else:
            self._no_gpu = ""
            _log.info("clients may register system and CUDA shared memory")

    @answering
    async def SystemSharedMemoryStatus(
        self, request: pb.SystemSharedMemoryStatusRequest, context: Context
    ) -> pb.SystemSharedMemoryStatusResponse:
        response = pb.SystemSharedMemoryStatusResponse()
        for one in self._of_kind("system", request.name):
            assert isinstance(one, SystemRegion)
            status = _SystemStatus(name=one.name, key=one.key, offset=one.offset, byte_size=one.byte_size)
            response.regions[one.name].CopyFrom(status)
        return response

    @answering
    async def SystemSharedMemoryRegister(
        self, request: pb.SystemSharedMemoryRegisterRequest, context: Context
    ) -> pb.SystemSharedMemoryRegisterResponse:
        regions = self._switched_on()
        regions.refuse_unless_free(request.name)
        regions.add(open_system_region(request.name, request.key, request.offset, request.byte_size))
        return pb.SystemSharedMemoryRegisterResponse()

    @answering
    async def SystemSharedMemoryUnregister(
        self, request: pb.SystemSharedMemoryUnregisterRequest, context: Context
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        self._switched_on().remove("system", request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    @answering
    async def CudaSharedMemoryStatus(
        self, request: pb.CudaSharedMemoryStatusRequest, context: Context
    ) -> pb.CudaSharedMemoryStatusResponse:
        response = pb.CudaSharedMemoryStatusResponse()
        for one in self._of_kind("cuda", request.name):
            assert isinstance(one, CudaRegion)
            status = _CudaStatus(name=one.name, device_id=one.device, byte_size=one.byte_size)
            response.regions[one.name].CopyFrom(status)
        return response

    @answering
    async def CudaSharedMemoryRegister(
        self, request: pb.CudaSharedMemoryRegisterRequest, context: Context
    ) -> pb.CudaSharedMemoryRegisterResponse:
        regions = self._switched_on()
        regions.refuse_unless_free(request.name)
        if self._no_gpu:
            raise NotSupported(
                f"failed to register CUDA shared memory region: '{request.name}', GPUs not supported: {self._no_gpu}"
            )
        # Creating a context and opening a handle takes the driver from a millisecond to a second.
        region = await asyncio.to_thread(
            self._cuda.open, request.name, request.raw_handle, request.device_id, request.byte_size
        )
        regions.add(region)
        return pb.CudaSharedMemoryRegisterResponse()

    @answering
    async def CudaSharedMemoryUnregister(
        self, request: pb.CudaSharedMemoryUnregisterRequest, context: Context
    ) -> pb.CudaSharedMemoryUnregisterResponse:
        self._switched_on().remove("cuda", request.name)
        return pb.CudaSharedMemoryUnregisterResponse()

    def _of_kind(self, kind: str, name: str) -> list[Region]:
        if self._regions is not None:
            return self._regions.of_kind(kind, name)
        if name:
            raise RegionNotFound(f"Unable to find {kind} shared memory region: '{name}'; there are none")
        return []

    def _switched_on(self) -> Regions:
        if self._regions is None:
            raise NotSupported(
                "Client shared memory is disabled: start the server with --allow-client-shm=true to switch it on"
            )
        return self._regions
