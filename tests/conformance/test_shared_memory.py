"""NVIDIA's client and its helpers for system shared memory, unmodified, blocking and asyncio."""

from __future__ import annotations

import secrets
import subprocess
import sys
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException, np_to_triton_dtype, serialize_byte_tensor

from tests.conformance import zoo
from tests.conformance.triton import Triton, assert_same_bits
from tests.harness import REPO, ServerProcess
from tests.shared_objects import held_by

Array = np.ndarray[Any, np.dtype[Any]]
A, B = np.arange(16, dtype=np.int32).reshape(1, 16), np.ones((1, 16), np.int32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of all models of the zoo, with shared memory switched on."""
    folder = zoo.write_repository(tmp_path_factory.mktemp("repository"))
    with ServerProcess(folder, args=["--allow-client-shm=true"]) as started:
        yield started


@pytest.fixture(params=[tritonclient.grpc, tritonclient.grpc.aio], ids=["sync", "aio"])
async def triton(request: pytest.FixtureRequest, server: ServerProcess) -> AsyncIterator[Triton]:
    client = Triton(request.param.InferenceServerClient(server.target))
    yield client
    await client.unregister_system_shared_memory()
    await client.close()


@contextmanager
def created(size: int) -> Iterator[tuple[str, Any]]:
    """A region made by the client's helper; yields its key and handle."""
    key = f"/paceline-test-{secrets.token_hex(6)}"
    handle = shm.create_shared_memory_region("data", key, size, create_only=True)
    try:
        assert key in shm.mapped_shared_memory_regions()
        yield key, handle
    finally:
        with warnings.catch_warnings():
            # Arrays from get_contents_as_numpy may outlive the mapping; that is a matter of client and helper.
            warnings.simplefilter("ignore")
            shm.destroy_shared_memory_region(handle)
    assert key not in shm.mapped_shared_memory_regions()


def in_shared_memory(name: str, array: Array, region: str, size: int, offset: int = 0) -> tritonclient.grpc.InferInput:
    tensor = tritonclient.grpc.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    return tensor.set_shared_memory(region, size, offset)


def in_message(name: str, array: Array) -> tritonclient.grpc.InferInput:
    tensor = tritonclient.grpc.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    return tensor.set_data_from_numpy(array)


def wanted(name: str, region: str, size: int, offset: int = 0) -> tritonclient.grpc.InferRequestedOutput:
    output = tritonclient.grpc.InferRequestedOutput(name)
    output.set_shared_memory(region, size, offset)
    return output


def copied(handle: Any, dtype: Any, shape: list[int], offset: int = 0) -> Array:
    """A copy of the data there, so that the mapping can be closed."""
    return np.array(shm.get_contents_as_numpy(handle, dtype, shape, offset))


async def test_extension_is_advertised(triton: Triton) -> None:
    assert "system_shared_memory" in (await triton.get_server_metadata()).extensions


async def test_unregister_all_of_both_kinds_comes_first_and_succeeds(triton: Triton) -> None:
    """perf_analyzer does this, without asking whether there is a GPU."""
    await triton.unregister_system_shared_memory()
    await triton.unregister_cuda_shared_memory()
    assert not (await triton.get_system_shared_memory_status()).regions
    assert not (await triton.get_cuda_shared_memory_status()).regions


async def test_add_sub_with_all_tensors_in_shared_memory(triton: Triton) -> None:
    with created(256) as (key, handle):
        shm.set_shared_memory_region(handle, [A, B])
        await triton.register_system_shared_memory("data", key, 256)
        inputs = [in_shared_memory("INPUT0", A, "data", 64), in_shared_memory("INPUT1", B, "data", 64, offset=64)]
        outputs = [wanted("OUTPUT0", "data", 64, offset=128), wanted("OUTPUT1", "data", 64, offset=192)]
        result = await triton.infer("simple", inputs, outputs=outputs)
        assert (result.get_output("OUTPUT0").datatype, list(result.get_output("OUTPUT0").shape)) == ("INT32", [1, 16])
        assert list(result.get_response().raw_output_contents) == [b"", b""]
        assert_same_bits({"x": copied(handle, np.int32, [1, 16], 128)}, {"x": A + B})
        assert_same_bits({"x": copied(handle, np.int32, [1, 16], 192)}, {"x": A - B})


async def test_add_sub_in_regions_of_their_own_registered_at_an_offset(triton: Triton) -> None:
    with created(10_000) as (key, handle):
        shm.set_shared_memory_region(handle, [A], offset=4999)
        await triton.register_system_shared_memory("data", key, 5001, offset=4999)
        status = (await triton.get_system_shared_memory_status("data")).regions["data"]
        assert (status.name, status.key, status.offset, status.byte_size) == ("data", key, 4999, 5001)
        result = await triton.infer(
            "simple",
            [in_shared_memory("INPUT0", A, "data", 64), in_message("INPUT1", B)],
            outputs=[wanted("OUTPUT1", "data", 64, 100), tritonclient.grpc.InferRequestedOutput("OUTPUT0")],
        )
        assert_same_bits({"x": copied(handle, np.int32, [1, 16], 5099)}, {"x": A - B})
        assert_same_bits({"x": result.as_numpy("OUTPUT0")}, {"x": A + B})


@pytest.mark.parametrize("datatype", [one for one in zoo.DATATYPES if one not in ("BYTES", "BF16")])
async def test_identity_of_each_datatype_returns_identical_bits(triton: Triton, datatype: str) -> None:
    sent = zoo.samples(datatype)
    with created(2 * sent.nbytes) as (key, handle):
        shm.set_shared_memory_region(handle, [sent])
        await triton.register_system_shared_memory("data", key, 2 * sent.nbytes)
        await triton.infer(
            zoo.identity_of(datatype),
            [in_shared_memory("INPUT0", sent, "data", sent.nbytes)],
            outputs=[wanted("OUTPUT0", "data", sent.nbytes, sent.nbytes)],
        )
        got = copied(handle, sent.dtype, list(sent.shape), sent.nbytes)
        assert_same_bits({"x": got}, {"x": sent})


async def test_texts_serialized_by_the_clients_own_helper(triton: Triton) -> None:
    sent = zoo.samples("BYTES")
    serialized = serialize_byte_tensor(sent)
    size = len(serialized.item())
    with created(10_000) as (key, handle):
        shm.set_shared_memory_region(handle, [serialized])
        await triton.register_system_shared_memory("data", key, 10_000)
        result = await triton.infer(
            "identity_bytes",
            [in_shared_memory("INPUT0", sent, "data", size)],
            outputs=[wanted("OUTPUT0", "data", 5000, 5000)],
        )
        got = copied(handle, np.object_, list(sent.shape), 5000)
        assert got.tolist() == sent.tolist()
        assert result.get_output("OUTPUT0").parameters["shared_memory_byte_size"].int64_param == size


async def test_region_created_twice_with_one_key_is_the_same_memory(triton: Triton) -> None:
    with created(64) as (key, handle):
        again = shm.create_shared_memory_region("other", key, 64)
        shm.set_shared_memory_region(again, [A])
        await triton.register_system_shared_memory("data", key, 64)
        result = await triton.infer("simple", [in_shared_memory("INPUT0", A, "data", 64), in_message("INPUT1", B)])
        assert_same_bits({"x": result.as_numpy("OUTPUT0")}, {"x": A + B})
        shm.destroy_shared_memory_region(again)
        assert_same_bits({"x": copied(handle, np.int32, [1, 16])}, {"x": A})


@pytest.mark.parametrize(
    ("size", "offset", "text"),
    [(65, 0, "invalid args"), (64, 1, "invalid args"), (1, 64, "invalid args"), (0, 65, "invalid args")],
)
async def test_register_out_of_bounds_is_refused(triton: Triton, size: int, offset: int, text: str) -> None:
    with created(64) as (key, _):
        with pytest.raises(
            InferenceServerException, match=rf"failed to register shared memory region.*{text}"
        ) as raised:
            await triton.register_system_shared_memory("data", key, size, offset=offset)
        assert raised.value.status() == "StatusCode.INVALID_ARGUMENT"
        assert not (await triton.get_system_shared_memory_status()).regions


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("/", "invalid shm key"),
        ("/triton_python_backend_shm_region_0", "reserved prefix"),
        ("/paceline-test-nosuch", "Unable to open shared memory region: '/paceline-test-nosuch'"),
    ],
)
async def test_register_of_a_bad_key_is_refused(triton: Triton, key: str, text: str) -> None:
    with pytest.raises(InferenceServerException, match=text) as raised:
        await triton.register_system_shared_memory("data", key, 64)
    assert raised.value.status() == "StatusCode.INVALID_ARGUMENT"


async def test_register_twice_is_refused_and_unregister_works_before_and_after(triton: Triton) -> None:
    with created(64) as (key, handle):
        await triton.unregister_system_shared_memory("data")
        shm.set_shared_memory_region(handle, [A])
        await triton.register_system_shared_memory("data", key, 64)
        with pytest.raises(InferenceServerException, match="shared memory region 'data' already in manager") as raised:
            await triton.register_system_shared_memory("data", key, 64)
        assert raised.value.status() == "StatusCode.ALREADY_EXISTS"
        assert len((await triton.get_system_shared_memory_status()).regions) == 1
        await triton.infer("simple", [in_shared_memory("INPUT0", A, "data", 64), in_message("INPUT1", B)])
        await triton.register_system_shared_memory("more", key, 64)
        assert len((await triton.get_system_shared_memory_status(as_json=True))["regions"]) == 2
        await triton.unregister_system_shared_memory("data")
        with pytest.raises(InferenceServerException, match="Unable to find system shared memory region: 'data'"):
            await triton.get_system_shared_memory_status("data")


@pytest.mark.parametrize(
    ("size", "offset", "text"),
    [
        (64, 128, "Invalid offset for shared memory region"),
        (64, 2**63 - 1, "Invalid offset for shared memory region"),
        (64, 65, "Invalid offset . byte size for shared memory region"),
        (2**63 - 1, 0, "Invalid offset . byte size for shared memory region"),
        (128, 0, "expected 64 bytes for INT32 of shape"),
    ],
)
async def test_infer_out_of_bounds_is_refused(triton: Triton, size: int, offset: int, text: str) -> None:
    with created(128) as (key, _):
        await triton.register_system_shared_memory("data", key, 128)
        inputs = [in_shared_memory("INPUT0", A, "data", size, offset), in_message("INPUT1", B)]
        with pytest.raises(InferenceServerException, match=text) as raised:
            await triton.infer("simple", inputs)
        assert raised.value.status() == "StatusCode.INVALID_ARGUMENT"
        if size != 128:
            inputs = [in_message("INPUT0", A), in_message("INPUT1", B)]
            with pytest.raises(InferenceServerException, match=text):
                await triton.infer("simple", inputs, outputs=[wanted("OUTPUT0", "data", size, offset)])


async def test_unset_shared_memory_brings_the_output_back_into_the_response(triton: Triton) -> None:
    output = wanted("OUTPUT0", "nosuch", 64)
    output.unset_shared_memory()
    result = await triton.infer("simple", [in_message("INPUT0", A), in_message("INPUT1", B)], outputs=[output])
    assert_same_bits({"x": result.as_numpy("OUTPUT0")}, {"x": A + B})


_CLIENT = """
import sys, time
import numpy as np
import tritonclient.grpc as grpc
import tritonclient.utils.shared_memory as shm
target, key = sys.argv[1:]
client = grpc.InferenceServerClient(target)
handle = shm.create_shared_memory_region("doomed", key, 128, create_only=True)
client.register_system_shared_memory("doomed", key, 128)
print("registered", flush=True)
time.sleep(600)
"""


async def test_killed_clients_region_stays_registered_until_it_is_unregistered(
    triton: Triton, server: ServerProcess
) -> None:
    key = f"/paceline-test-{secrets.token_hex(6)}"
    client = subprocess.Popen([sys.executable, "-c", _CLIENT, server.target, key], cwd=REPO, stdout=subprocess.PIPE)
    try:
        assert client.stdout is not None
        assert client.stdout.readline() == b"registered\n"
        client.kill()
        client.wait()
        # The client's own resource tracker unlinks the name of the memory as well.
        assert "doomed" in (await triton.get_system_shared_memory_status()).regions
        result = await triton.infer("simple", [in_shared_memory("INPUT0", A, "doomed", 64), in_message("INPUT1", B)])
        assert_same_bits({"x": result.as_numpy("OUTPUT0")}, {"x": B})
        assert held_by(server.pid)[0] == 1
        await triton.unregister_system_shared_memory()
        assert held_by(server.pid) == (0, 0)
    finally:
        client.kill()
        client.wait()
        assert client.stdout is not None
        client.stdout.close()
        Path("/dev/shm", key[1:]).unlink(missing_ok=True)
