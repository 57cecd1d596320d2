"""Requests whose tensors are stored in system shared memory, over gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from paceline.backends.spec import ModelSpec, TensorSpec
from paceline.protos import inference_pb2 as pb
from tests.integration.regions import ROW, in_region, register, settings
from tests.integration.serving import Served, echo_model, failure_of, serving
from tests.memory_models import MemoryModel
from tests.shared_objects import SharedObject, add_shared_input, request_shared_output, shared_object
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


@pytest.mark.parametrize("rows", [1, 3])
async def test_infer_in_shared_memory_leaves_message_empty(served: Served, memory: SharedObject, rows: int) -> None:
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


async def test_infer_typed_output_in_shared_memory_leaves_message(served: Served, memory: SharedObject) -> None:
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


async def test_infer_bool_of_other_byte_is_refused(served: Served, memory: SharedObject) -> None:
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
async def test_infer_mixture_of_tensors_keeps_their_order(tmp_path: Path, memory: SharedObject, inside: int) -> None:
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
async def test_infer_with_invalid_place_writes_nothing(
    served: Served, memory: SharedObject, change: Change, text: str
) -> None:
    memory.put(b"\x07" * 4096)
    request = in_region(target=2048)
    change(request)
    code, got = await failure_of(served.infer(request))
    assert code is Code.INVALID_ARGUMENT
    assert got.startswith(f"model 'm': {text}")
    assert memory.get(4096) == b"\x07" * 4096


async def test_infer_with_too_little_room_is_never_queued(tmp_path: Path, memory: SharedObject) -> None:
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
