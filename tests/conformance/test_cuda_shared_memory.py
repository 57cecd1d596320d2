"""CUDA shared memory between processes, on machines that have a GPU: the client is a process that calls the driver."""

from __future__ import annotations

import base64
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from backends.cuda_driver import count_gpus
from backends.errors import LoadError
from tests.harness import REPO, ServerProcess, write_identity

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
sys.stdin.readline()
back = (ctypes.c_float * 16)()
do(cuda.cuMemcpyDtoH_v2(back, ctypes.c_uint64(address.value + 1024), ctypes.c_size_t(64)))
print(list(back), flush=True)
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    try:
        count_gpus()
    except LoadError as reason:
        pytest.skip(str(reason))
    write_identity(tmp_path)
    with ServerProcess(tmp_path, args=["--allow-client-shm=true"]) as started:
        yield started


def test_tensors_of_another_process_on_the_gpu_are_read_and_written(server: ServerProcess) -> None:
    client = subprocess.Popen(
        [sys.executable, "-c", _CLIENT], cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert client.stdin is not None
        assert client.stdout is not None
        handle = bytes.fromhex(client.stdout.readline())
        with tritonclient.grpc.InferenceServerClient(server.target) as triton:
            assert "cuda_shared_memory" in triton.get_server_metadata().extensions
            # The client's library passes the handle on as base64.
            encoded = base64.b64encode(handle)
            with pytest.raises(InferenceServerException, match="invalid args"):
                triton.register_cuda_shared_memory("far", encoded, 0, 2**40)
            triton.register_cuda_shared_memory("c", encoded, 0, 4096)
            assert triton.get_cuda_shared_memory_status().regions["c"].byte_size == 4096
            tensor = tritonclient.grpc.InferInput("INPUT0", [1, 16], "FP32").set_shared_memory("c", 64)
            output = tritonclient.grpc.InferRequestedOutput("OUTPUT0")
            output.set_shared_memory("c", 64, 1024)
            triton.infer("echo", [tensor], outputs=[output])
            result = triton.infer("echo", [tensor])
            assert result.as_numpy("OUTPUT0").tolist() == [np.arange(16).tolist()]
            triton.unregister_cuda_shared_memory()
        assert client.communicate("\n", timeout=60)[0] == f"{[float(i) for i in range(16)]}\n"
    finally:
        client.kill()
        client.wait()
