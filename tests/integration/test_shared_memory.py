"""System shared memory over gRPC: registering regions, and requests whose tensors are stored there."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from paceline.backends.spec import ModelSpec, TensorSpec
from paceline.protos import inference_pb2 as pb
from tests.integration.regions import ROW, in_region, regions, register, settings, unregister
from tests.integration.serving import Served, echo_model, failure_of, serving
from tests.memory_models import MemoryModel
from tests.polling import eventually_async
from tests.shared_objects import SharedObject, add_shared_input, held_by, request_shared_output, shared_object
from tests.wire import add_raw, infer, parameter, raw_bytes, rows_of_floats

Code = grpc.StatusCode
Request = pb.ModelInferRequest
BATCHED = "max_batch_size: 8 dynamic_batching { }"


@pytest.fixture
def memory() -> Iterator[SharedObject]:
    with shared_object(4096) as made:
        yield made


@pytest.fixture
async def served(tmp_path: Path, memory: SharedObject) -> AsyncIterator[Served]:
    """Model `m` returns FP32 rows, `t` BYTES, `b` BOOL; region `r` is the whole of `memory`."""
    models = {"m": echo_model("FP32"), "t": echo_model("BYTES", 1), "b": echo_model("BOOL")}
    async with serving(tmp_path, models, config=BATCHED, settings=settings(tmp_path)) as served:
        await register(served, "r", memory.key, 4096)
        yield served


# ---- Switched off ----------------------------------------------------------------------------------------------------


async def test_registering_while_switched_off_is_unimplemented_and_names_the_flag(tmp_path: Path) -> None:
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


async def test_registering_a_name_twice_fails_and_keeps_the_first_region(served: Served, memory: SharedObject) -> None:
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
    before = held_by()
    code, got = await failure_of(register(served, name, memory.key if key is None else key, size, offset))
    assert code is Code.INVALID_ARGUMENT
    assert text in got
    assert await regions(served) == {"r": (memory.key, 0, 4096)}
    assert held_by() == before


async def test_registering_more_regions_than_allowed_is_refused_until_one_is_unregistered(
    tmp_path: Path, memory: SharedObject
) -> None:
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
    await eventually_async(lambda: held_by()[0] == 1, "no descriptor but the test's own")


async def test_cuda_registration_without_a_driver_is_refused_and_the_rest_works(served: Served) -> None:
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


async def test_system_region_asked_for_as_a_cuda_one_is_not_found(served: Served) -> None:
    for call in (
        served.stub.CudaSharedMemoryStatus(pb.CudaSharedMemoryStatusRequest(name="r")),
        served.stub.CudaSharedMemoryUnregister(pb.CudaSharedMemoryUnregisterRequest(name="r")),
    ):
        code, text = await failure_of(call)
        assert (code, "'r', which is a system one" in text) == (Code.NOT_FOUND, True)
    await served.stub.CudaSharedMemoryUnregister(pb.CudaSharedMemoryUnregisterRequest())
    assert (await regions(served)).keys() == {"r"}


# ---- Inference -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3])
async def test_infer_with_input_and_output_in_shared_memory_leaves_the_message_empty(
    served: Served, memory: SharedObject, rows: int
) -> None:
    sent = rows_of_floats(rows, first=5)
    memory.put(sent, 24)
    answer = await served.infer(in_region(rows, 24, target=1001))
    assert memory.get(sent.nbytes, 1001) == sent.tobytes()
    assert memory.get(1, 1000) == memory.get(1, 1001 + sent.nbytes) == b"\0"
    assert list(answer.raw_output_contents) == [b""]
    output = answer.outputs[0]
    assert (output.name, output.datatype, list(output.shape)) == ("x", "FP32", [rows, 2])
    assert output.parameters["shared_memory_region"].string_param == "r"
    assert output.parameters["shared_memory_byte_size"].int64_param == sent.nbytes
    assert output.parameters["shared_memory_offset"].int64_param == 1001
    assert not answer.outputs[0].HasField("contents")


async def test_infer_with_typed_outputs_leaves_those_in_shared_memory_out_of_the_message(
    served: Served, memory: SharedObject
) -> None:
    memory.put(rows_of_floats(1, first=3))
    request = in_region(target=512)
    request.parameters["binary_data_output"].bool_param = False
    answer = await served.infer(request)
    assert (len(answer.raw_output_contents), answer.outputs[0].HasField("contents")) == (0, False)
    assert memory.get(ROW, 512) == rows_of_floats(1, first=3).tobytes()


async def test_infer_output_may_overwrite_its_own_input(served: Served, memory: SharedObject) -> None:
    memory.put(rows_of_floats(2, first=1))
    await served.infer(in_region(2, target=4))
    assert memory.get(20) == rows_of_floats(2, first=1).tobytes()[:4] + rows_of_floats(2, first=1).tobytes()


async def test_infer_offset_counts_from_the_regions_own_offset(served: Served, memory: SharedObject) -> None:
    await register(served, "late", memory.key, 32, 4097 - 33)
    memory.put(rows_of_floats(1, first=7), 4064 + 16)
    answer = await served.infer(in_region(offset=16, region="late", target=24))
    assert memory.get(ROW, 4088) == rows_of_floats(1, first=7).tobytes()
    assert answer.outputs[0].parameters["shared_memory_offset"].int64_param == 24


@pytest.mark.parametrize("elements", [[b""], [b"\x00a\x00"], ["grün".encode(), b"x" * 300]])
async def test_infer_bytes_tensors_pass_through_shared_memory_both_ways(
    served: Served, memory: SharedObject, elements: list[bytes]
) -> None:
    array = np.empty((len(elements), 1), object)
    array[:, 0] = elements
    data = raw_bytes(array)
    memory.put(data, 3)
    request = Request(model_name="t")
    add_shared_input(request, "a", "BYTES", array.shape, "r", len(data), 3)
    request_shared_output(request, "x", "r", 2000, 2000)
    answer = await served.infer(request)
    assert answer.outputs[0].parameters["shared_memory_byte_size"].int64_param == len(data)
    assert memory.get(len(data), 2000) == data


@pytest.mark.parametrize("length", [0, 5, 2**32 - 1])
async def test_infer_bytes_element_with_a_wrong_length_is_refused(
    served: Served, memory: SharedObject, length: int
) -> None:
    memory.put(length.to_bytes(4, "little") + b"abcd")
    request = Request(model_name="t")
    add_shared_input(request, "a", "BYTES", [1, 1], "r", 8)
    code, text = await failure_of(served.infer(request))
    assert (code, text[:23]) == (Code.INVALID_ARGUMENT, "model 't': input 'a': e")


async def test_infer_bool_that_is_neither_0_nor_1_is_refused(served: Served, memory: SharedObject) -> None:
    memory.put(b"\x01\x02")
    for size, code in ((1, Code.OK), (2, Code.INVALID_ARGUMENT)):
        request = Request(model_name="b")
        add_shared_input(request, "a", "BOOL", [1, size], "r", size)
        if code is Code.OK:
            assert (await served.infer(request)).raw_output_contents[0] == b"\x01"
        else:
            assert (await failure_of(served.infer(request)))[0] is code


def three_in_out() -> MemoryModel:
    names = "abc"
    return MemoryModel(
        ModelSpec(
            tuple(TensorSpec(name, "FP32", (-1, -1)) for name in names),
            tuple(TensorSpec(f"x{name}", "FP32", (-1, -1)) for name in names),
        )
    )


@pytest.mark.parametrize("inside", range(8))
async def test_infer_any_mixture_of_raw_and_shared_memory_tensors_keeps_their_order(
    tmp_path: Path, memory: SharedObject, inside: int
) -> None:
    sent = [rows_of_floats(1, first=10 * index) for index in range(3)]
    request = Request(model_name="m")
    for index, array in enumerate(sent):
        memory.put(array, 64 * index)
        if inside >> index & 1:
            add_shared_input(request, "abc"[index], "FP32", [1, 2], "r", ROW, 64 * index)
            request.outputs.add(name=f"x{'abc'[index]}")
        else:
            add_raw(request, "abc"[index], "FP32", [1, 2], array.tobytes())
            request_shared_output(request, f"x{'abc'[index]}", "r", ROW, 1024 + 64 * index)
    async with serving(tmp_path, {"m": three_in_out()}, config=BATCHED, settings=settings(tmp_path)) as served:
        await register(served, "r", memory.key, 4096)
        answer = await served.infer(request)
    for index, array in enumerate(sent):
        got = answer.raw_output_contents[index] or memory.get(ROW, 1024 + 64 * index)
        assert got == array.tobytes()
        assert bool(answer.raw_output_contents[index]) == bool(inside >> index & 1)


async def test_infer_shared_memory_beside_typed_contents_is_accepted(tmp_path: Path, memory: SharedObject) -> None:
    request = Request(model_name="m")
    for index, name in enumerate("abc"):
        memory.put(rows_of_floats(1, first=index), 0)
        if name == "b":
            add_shared_input(request, name, "FP32", [1, 2], "r", ROW)
        else:
            request.inputs.add(name=name, datatype="FP32", shape=[1, 2]).contents.fp32_contents.extend([index, index])
    async with serving(tmp_path, {"m": three_in_out()}, config=BATCHED, settings=settings(tmp_path)) as served:
        await register(served, "r", memory.key, 4096)
        answer = await served.infer(request)
    got = [np.frombuffer(raw, np.float32).tolist() for raw in answer.raw_output_contents]
    assert got == [[0, 0], [2, 3], [2, 2]]


async def test_infer_without_shared_memory_parameters_is_unaffected(served: Served) -> None:
    sent = rows_of_floats(2)
    answer = await served.infer(infer("m", {"a": sent}, outputs=["x"]))
    assert answer.raw_output_contents[0] == sent.tobytes()
    assert not answer.outputs[0].parameters


Change = Callable[[Request], None]


def with_parameter(key: str, value: object, where: str = "inputs") -> Change:
    def change(request: Request) -> None:
        getattr(request, where)[0].parameters[f"shared_memory_{key}"].CopyFrom(parameter(value))

    return change


def without_parameter(key: str, where: str = "inputs") -> Change:
    def change(request: Request) -> None:
        del getattr(request, where)[0].parameters[f"shared_memory_{key}"]

    return change


def with_contents(request: Request) -> None:
    request.inputs[0].contents.fp32_contents.extend([1, 2])


def with_raw(request: Request) -> None:
    request.raw_input_contents.append(b"12345678")


UINT = pb.InferParameter(uint64_param=2**64 - 1)
BAD: list[tuple[Change, str]] = [
    (with_parameter("region", 1), "input 'a': 'shared_memory_region': expected string_param, got int64_param"),
    (
        with_parameter("region", pb.InferParameter()),
        "input 'a': 'shared_memory_region': expected string_param, got no value",
    ),
    (
        with_parameter("byte_size", "8"),
        "input 'a': 'shared_memory_byte_size': expected int64_param or uint64_param, got string",
    ),
    (
        with_parameter("offset", True),
        "input 'a': 'shared_memory_offset': expected int64_param or uint64_param, got bool_param",
    ),
    (
        without_parameter("byte_size"),
        "input 'a': 'shared_memory_byte_size' must be specified along with 'shared_memory_region'",
    ),
    (
        without_parameter("region"),
        "input 'a': 'shared_memory_byte_size' can not be specified without 'shared_memory_region'",
    ),
    (with_parameter("byte_size", 7), "input 'a': expected 8 bytes for FP32 of shape [1, 2], got 7"),
    (with_parameter("byte_size", 128), "input 'a': expected 8 bytes for FP32 of shape [1, 2], got 128"),
    (with_parameter("byte_size", -8), "input 'a': Invalid offset + byte size for shared memory region: 'r'"),
    (with_parameter("byte_size", 4097), "input 'a': Invalid offset + byte size for shared memory region: 'r'"),
    (with_parameter("byte_size", UINT), "input 'a': Invalid offset + byte size for shared memory region: 'r'"),
    (with_parameter("offset", 4089), "input 'a': Invalid offset + byte size for shared memory region: 'r'"),
    (
        with_parameter("offset", 4096),
        "input 'a': Invalid offset for shared memory region: 'r': expected 0 to 4095, got 4096",
    ),
    (
        with_parameter("offset", -1),
        "input 'a': Invalid offset for shared memory region: 'r': expected 0 to 4095, got -1",
    ),
    (with_parameter("offset", 2**63 - 1), "input 'a': Invalid offset for shared memory region: 'r'"),
    (with_parameter("offset", UINT), "input 'a': Invalid offset for shared memory region: 'r'"),
    (with_contents, "input 'a': expected either contents or shared_memory_region, got both"),
    (with_raw, "expected 0 entries in raw_input_contents, one per input that is not in shared memory, got 1"),
    (
        with_parameter("byte_size", 7, "outputs"),
        "output 'x': expected 'shared_memory_byte_size' to be at least 8 bytes",
    ),
    (
        with_parameter("byte_size", -1, "outputs"),
        "output 'x': Invalid offset + byte size for shared memory region: 'r'",
    ),
    (with_parameter("offset", 4096, "outputs"), "output 'x': Invalid offset for shared memory region: 'r'"),
    (with_parameter("offset", 4089, "outputs"), "output 'x': Invalid offset + byte size for shared memory region: 'r'"),
    (without_parameter("byte_size", "outputs"), "output 'x': 'shared_memory_byte_size' must be specified along with"),
    (without_parameter("region", "outputs"), "output 'x': 'shared_memory_byte_size' can not be specified without"),
]


@pytest.mark.parametrize(
    ("model", "datatype", "text"),
    [
        ("b", "BOOL", "model 'b': input 'a': expected 2 bytes for BOOL of shape [1, 2], got 1152921504606846976"),
        ("t", "BYTES", "model 't': input 'a': expected at most 2147483647 bytes of BYTES"),
    ],
)
async def test_infer_of_impossibly_large_tensors_is_refused(
    served: Served, memory: SharedObject, model: str, datatype: str, text: str
) -> None:
    memory.resize(2**60)  # not backed by memory
    await register(served, "huge", memory.key, 2**60)
    request = pb.ModelInferRequest(model_name=model)
    add_shared_input(request, "a", datatype, [1, 2 if model == "b" else 1], "huge", 2**60)
    code, got = await failure_of(served.infer(request))
    assert code is Code.INVALID_ARGUMENT
    assert got.startswith(text)


@pytest.mark.parametrize(("change", "text"), BAD)
async def test_infer_with_an_invalid_place_of_a_tensor_is_refused_and_writes_nothing(
    served: Served, memory: SharedObject, change: Change, text: str
) -> None:
    memory.put(b"\x07" * 4096)
    request = in_region(target=2048)
    change(request)
    code, got = await failure_of(served.infer(request))
    assert code is Code.INVALID_ARGUMENT
    assert got.startswith(f"model 'm': {text}")
    assert memory.get(4096) == b"\x07" * 4096


async def test_infer_with_too_little_room_for_an_output_of_known_size_is_never_queued(
    tmp_path: Path, memory: SharedObject
) -> None:
    model = MemoryModel(ModelSpec((TensorSpec("a", "FP32", (-1, 2)),), (TensorSpec("x", "FP32", (-1, 2)),)))
    async with serving(tmp_path, {"m": model}, config=BATCHED, settings=settings(tmp_path)) as served:
        await register(served, "r", memory.key, 4096)
        before = len(model.batches)
        request = in_region(3, target=100)
        request.outputs[0].parameters["shared_memory_byte_size"].int64_param = 3 * ROW - 1
        code, text = await failure_of(served.infer(request))
        assert code is Code.INVALID_ARGUMENT
        assert "at least 24 bytes to hold the result, got 23" in text
        assert len(model.batches) == before


@pytest.mark.parametrize("where", ["inputs", "outputs"])
async def test_infer_with_an_unregistered_region_is_not_found(served: Served, where: str) -> None:
    request = in_region(target=0)
    with_parameter("region", "other", where)(request)
    code, text = await failure_of(served.infer(request))
    tensor = "input 'a'" if where == "inputs" else "output 'x'"
    assert (code, text) == (
        Code.NOT_FOUND,
        f"model 'm': {tensor}: Unable to find shared memory region: 'other'; registered are ['r']",
    )
