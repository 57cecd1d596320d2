"""CUDA shared memory between processes, on machines that have a GPU: the client is a process that calls the driver."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline.backends.cuda.driver import count_gpus
from paceline.backends.errors import LoadError
from paceline.protos import inference_pb2 as pb
from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests import models
from tests.harness import REPO, ServerProcess, write_identity
from tests.shared_objects import add_shared_input, request_shared_output

pytestmark = pytest.mark.gpu

_CLIENT = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
def do(code):
    assert code == 0, code
device, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
handle = (ctypes.c_ubyte * 64)()
do(cuda.cuInit(0))
do(cuda.cuDeviceGet(ctypes.byref(device), 0))
do(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
do(cuda.cuCtxSetCurrent(context))
do(cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(4096)))
do(cuda.cuIpcGetMemHandle(ctypes.byref(handle), address))
data = (ctypes.c_float * 16)(*range(16))
do(cuda.cuMemcpyHtoD_v2(address, data, ctypes.c_size_t(64)))
do(cuda.cuCtxSynchronize())
print(bytes(handle).hex(), flush=True)
for line in sys.stdin:
    back = (ctypes.c_float * 16)()
    do(cuda.cuMemcpyDtoH_v2(back, ctypes.c_uint64(address.value + int(line)), ctypes.c_size_t(64)))
    print(*back, flush=True)
"""


class Client:
    """A process with 0 to 15 as floats at the beginning of 4096 bytes on GPU 0."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CLIENT], cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.handle = bytes.fromhex(self._read())

    def floats(self, offset: int) -> list[float]:
        """The 16 floats that the process finds at `offset`."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{offset}\n")
        self._process.stdin.flush()
        return [float(word) for word in self._read().split()]

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


@pytest.fixture
def client() -> Iterator[Client]:
    try:
        count_gpus()
    except LoadError as reason:
        pytest.skip(str(reason))
    client = Client()
    yield client
    client.end()


@pytest.fixture
def stub(client: Client, tmp_path: Path) -> Iterator[Any]:
    """A server with a model on the CPU, `echo`, and one on the GPU, `neg`."""
    write_identity(tmp_path)
    tensors = [models.tensor(name, "FP32", ["batch", 16]) for name in ("INPUT0", "OUTPUT0")]
    node = models.helper.make_node("Neg", ["INPUT0"], ["OUTPUT0"])
    models.write(models.model([node], tensors[:1], tensors[1:]), tmp_path / "neg" / "1" / "model.onnx")
    (tmp_path / "neg" / "config.pbtxt").write_text("max_batch_size: 8 instance_group { kind: KIND_GPU gpus: 0 }")
    with (
        ServerProcess(tmp_path, args=["--allow-client-shm=true", "--exit-on-error=true"]) as server,
        grpc.insecure_channel(server.target) as channel,
    ):
        yield GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]


def test_tensors_of_another_process_on_the_gpu_are_read_and_written(stub: Any, client: Client) -> None:
    def register(name: str, size: int) -> None:
        request = pb.CudaSharedMemoryRegisterRequest(name=name, raw_handle=client.handle, byte_size=size)
        stub.CudaSharedMemoryRegister(request, timeout=60)

    assert "cuda_shared_memory" in stub.ServerMetadata(pb.ServerMetadataRequest(), timeout=60).extensions
    with pytest.raises(grpc.RpcError, match="invalid args"):
        register("far", 2**40)
    register("c", 4096)
    status = stub.CudaSharedMemoryStatus(pb.CudaSharedMemoryStatusRequest(), timeout=60)
    assert status.regions["c"].byte_size == 4096
    for model, sign, offset in (("echo", 1, 1024), ("neg", -1, 2048)):
        for _ in range(2):
            request = pb.ModelInferRequest(model_name=model)
            add_shared_input(request, "INPUT0", "FP32", [1, 16], "c", 64)
            request_shared_output(request, "OUTPUT0", "c", 64, offset)
            stub.ModelInfer(request, timeout=60)
            assert client.floats(offset) == [sign * value for value in range(16)]
    stub.CudaSharedMemoryUnregister(pb.CudaSharedMemoryUnregisterRequest(), timeout=60)
    assert not stub.CudaSharedMemoryStatus(pb.CudaSharedMemoryStatusRequest(), timeout=60).regions
