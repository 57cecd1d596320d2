"""What clients get when nothing is wrong: answers and metadata, from models on disk and in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from paceline.backends.spec import ModelSpec, Tensors, TensorSpec
from paceline.clients import AsyncInferenceClient
from paceline.protos import inference_pb2 as pb
from paceline.server.app import product_version
from paceline.server.config import ControlMode, Settings
from paceline.server.telemetry.trace_settings import TraceConfig
from tests import models
from tests.integration.serving import Served, echo_model, failure_of, serving, write_model
from tests.integration.streams import Stream
from tests.memory_models import MemoryModel
from tests.wire import bytes_element, infer, rows_of_floats


@pytest.fixture
async def zoo(tmp_path: Path) -> AsyncIterator[Served]:
    """ONNX models: `simple` with two versions, `text`, `whole` without a batch axis, `scalar`."""
    models.write(models.add_sub(), tmp_path / "simple" / "1" / "model.onnx")
    models.write(models.add_sub(size=4), tmp_path / "simple" / "3" / "model.onnx")
    (tmp_path / "simple" / "config.pbtxt").write_text("version_policy { all { } } max_batch_size: 8")
    models.write(models.identity("BYTES"), tmp_path / "text" / "1" / "model.onnx")
    models.write(models.add_sub("FP32", 2, batched=False), tmp_path / "whole" / "1" / "model.onnx")
    tensors = [f'{kind} {{ name: "{kind.upper()}{at}" dims: 2 }}' for kind in ("input", "output") for at in (0, 1)]
    (tmp_path / "whole" / "config.pbtxt").write_text(" ".join(tensors))
    models.write(models.scalar(), tmp_path / "scalar" / "model.onnx")
    async with serving(tmp_path) as served:
        yield served


@pytest.fixture
async def client(zoo: Served) -> AsyncIterator[AsyncInferenceClient]:
    async with AsyncInferenceClient(zoo.target) as client:
        yield client


async def test_infer_gives_sums_and_differences(client: AsyncInferenceClient) -> None:
    a, b = np.arange(32, dtype=np.int32).reshape(2, 16), np.full((2, 16), 3, np.int32)
    result = await client.infer("simple", {"INPUT0": a, "INPUT1": b}, version="1", request_id="r")
    assert (result.model_name, result.model_version, result.id) == ("simple", "1", "r")
    assert np.array_equal(result["OUTPUT0"], a + b)
    assert np.array_equal(result["OUTPUT1"], a - b)


@pytest.mark.parametrize(("version", "size", "answers"), [("", 4, "3"), ("-1", 4, "3"), ("3", 4, "3"), ("1", 16, "1")])
async def test_infer_answers_from_the_named_or_the_latest_version(
    client: AsyncInferenceClient, version: str, size: int, answers: str
) -> None:
    ones = np.ones((1, size), np.int32)
    result = await client.infer("simple", {"INPUT0": ones, "INPUT1": ones}, version=version)
    assert result.model_version == answers
    assert result["OUTPUT0"].tolist() == [[2] * size]


async def test_infer_takes_inputs_in_any_order_and_returns_outputs_as_requested(client: AsyncInferenceClient) -> None:
    two, one = np.full((1, 4), 2, np.int32), np.ones((1, 4), np.int32)
    result = await client.infer("simple", {"INPUT1": one, "INPUT0": two}, outputs=["OUTPUT1", "OUTPUT0"])
    assert list(result.outputs) == ["OUTPUT1", "OUTPUT0"]
    assert (result["OUTPUT1"].tolist(), result["OUTPUT0"].tolist()) == ([[1] * 4], [[3] * 4])


async def test_infer_returns_text_byte_for_byte(client: AsyncInferenceClient) -> None:
    text = np.array([["", "gr\u00fc\u00df\x00", "\U0001f600" * 100]])
    result = await client.infer("text", {"INPUT0": text})
    assert result["OUTPUT0"].tolist() == [[element.encode() for element in text[0]]]


async def test_infer_refuses_text_that_is_not_utf8_before_the_model_sees_it(client: AsyncInferenceClient) -> None:
    bad = np.array([[b"fine", b"\xff\xfe"]], object)
    with pytest.raises(
        Exception,
        match="model 'text': input 'INPUT0': expected UTF-8 text in each element, got invalid start byte in element 1",
    ):
        await client.infer("text", {"INPUT0": bad})
    good = await client.infer("text", {"INPUT0": np.array([["fine"]])})
    assert good["OUTPUT0"].tolist() == [[b"fine"]]


async def test_infer_of_a_model_that_returns_text_that_is_not_utf8_is_internal(tmp_path: Path) -> None:
    bad = models.helper.make_tensor("bad", models.TensorProto.STRING, [1], [b"\xff\xfe"])
    node = models.helper.make_node("Constant", [], ["OUTPUT0"], value=bad)
    models.write(models.model([node], [], [models.tensor("OUTPUT0", "BYTES", [1])]), tmp_path / "m" / "model.onnx")
    async with serving(tmp_path) as served:
        code, text = await failure_of(served.infer(infer("m")))
    assert (code, "'utf-8' codec can't decode byte 0xff" in text) == (grpc.StatusCode.INTERNAL, True)


async def test_infer_without_batch_axis_uses_the_shape_unchanged(client: AsyncInferenceClient) -> None:
    ones = np.ones(2, np.float32)
    assert (await client.infer("whole", {"INPUT0": ones, "INPUT1": ones}))["OUTPUT0"].tolist() == [2, 2]
    assert float((await client.infer("scalar", {"INPUT0": np.float32(4)}))["OUTPUT0"]) == 8


async def test_infer_of_several_models_at_once_gives_each_request_its_own_answer(client: AsyncInferenceClient) -> None:
    async def one(number: int) -> bool:
        if number % 2:
            value = np.full((1, 4), number, np.int32)
            result = await client.infer("simple", {"INPUT0": value, "INPUT1": value})
            return bool((result["OUTPUT0"] == 2 * number).all())
        text = np.array([[str(number)]])
        return (await client.infer("text", {"INPUT0": text}))["OUTPUT0"].tolist() == [[str(number).encode()]]

    assert all(await asyncio.gather(*(one(number) for number in range(60))))


async def test_metadata_of_a_batched_model_has_the_batch_axis_in_front(client: AsyncInferenceClient) -> None:
    found = await client.model_metadata("simple", "1")
    assert (found.name, found.versions, found.platform) == ("simple", ("1",), "onnxruntime_onnx")
    assert [(one.name, one.datatype, one.shape) for one in found.inputs] == [
        ("INPUT0", "INT32", (-1, 16)),
        ("INPUT1", "INT32", (-1, 16)),
    ]
    assert [one.name for one in found.outputs] == ["OUTPUT0", "OUTPUT1"]


async def test_metadata_of_a_model_without_batch_axis_has_its_own_dims(client: AsyncInferenceClient) -> None:
    assert (await client.model_metadata("whole")).inputs[0].shape == (2,)
    assert (await client.model_metadata("scalar")).inputs[0].shape == ()


@pytest.mark.parametrize(("version", "versions"), [("", ("1", "3")), ("1", ("1",)), ("3", ("3",)), ("-1", ("3",))])
async def test_metadata_lists_all_versions_or_the_one_asked_for(
    client: AsyncInferenceClient, version: str, versions: tuple[str, ...]
) -> None:
    found = await client.model_metadata("simple", version)
    assert found.versions == versions
    assert found.inputs[0].shape == ((-1, 16) if version == "1" else (-1, 4))


async def test_metadata_of_unknown_models_and_versions_is_refused(zoo: Served) -> None:
    for request, code in (
        (pb.ModelMetadataRequest(name="nope"), grpc.StatusCode.NOT_FOUND),
        (pb.ModelMetadataRequest(name="simple", version="2"), grpc.StatusCode.NOT_FOUND),
        (pb.ModelMetadataRequest(name="simple", version="x"), grpc.StatusCode.INVALID_ARGUMENT),
    ):
        assert (await failure_of(zoo.stub.ModelMetadata(request)))[0] is code


async def test_ready_and_live_while_serving(client: AsyncInferenceClient) -> None:
    assert await client.server_live()
    assert await client.server_ready()
    assert await client.model_ready("simple")
    assert await client.model_ready("simple", "1")
    assert await client.health() == await client.health("inference.GRPCInferenceService") == "SERVING"


async def test_model_ready_of_unknown_models_and_versions_is_not_found(zoo: Served) -> None:
    for request in (pb.ModelReadyRequest(name="nope"), pb.ModelReadyRequest(name="simple", version="2")):
        assert (await failure_of(zoo.stub.ModelReady(request)))[0] is grpc.StatusCode.NOT_FOUND


async def test_server_metadata_names_server_and_version(tmp_path: Path) -> None:
    settings = Settings(paths=(tmp_path,), server_id="edge-7")
    async with serving(tmp_path, {"m": echo_model()}, settings=settings) as served:
        said = await served.stub.ServerMetadata(pb.ServerMetadataRequest())
    assert (said.name, said.version) == ("edge-7", product_version())


ALWAYS = {
    "binary_tensor_data",
    "classification",
    "schedule_policy",
    "sequence",
    "sequence(string_id)",
    "model_configuration",
    "statistics",
}


@pytest.mark.parametrize("everything", [False, True], ids=["defaults", "everything switched on"])
async def test_server_metadata_advertises_what_works_and_nothing_else(tmp_path: Path, everything: bool) -> None:
    settings, more = Settings(paths=(tmp_path,)), set[str]()
    if everything:
        more = {"model_repository", "model_repository(unload_dependents)", "system_shared_memory", "logging", "trace"}
        settings = Settings(
            paths=(tmp_path,),
            allow_client_shm=True,
            allow_remote_settings=True,
            model_control_mode=ControlMode.EXPLICIT,
            trace=TraceConfig(file=tmp_path / "trace.json"),
        )
    async with serving(tmp_path, {"m": echo_model()}, settings=settings) as served:
        said = (await served.stub.ServerMetadata(pb.ServerMetadataRequest())).extensions
    assert len(said) == len(set(said))
    # The one that needs a GPU.
    assert set(said) - {"cuda_shared_memory"} == ALWAYS | more


async def test_infer_with_typed_inputs_and_outputs(tmp_path: Path) -> None:
    async with serving(tmp_path, {"m": echo_model()}) as served:
        request = infer("m", parameters={"binary_data_output": False})
        request.inputs.add(name="a", datatype="FP32", shape=[1, 2]).contents.fp32_contents.extend([1.5, 2])
        response = await served.infer(request)
    assert not response.raw_output_contents
    assert list(response.outputs[0].contents.fp32_contents) == [1.5, 2]


async def test_infer_returns_tensors_without_elements_as_empty(tmp_path: Path) -> None:
    async with serving(tmp_path, {"m": echo_model("FP32", -1, 3)}) as served:
        response = await served.infer(infer("m", {"a": np.zeros((2, 0, 3), np.float32)}))
    assert list(response.outputs[0].shape) == [2, 0, 3]
    assert list(response.raw_output_contents) == [b""]


async def test_infer_accepts_tensors_far_beyond_grpcs_default_limit(tmp_path: Path) -> None:
    big = rows_of_floats(4, 2_000_000)
    async with serving(tmp_path, {"m": echo_model("FP32", -1)}) as served:
        response = await served.infer(infer("m", {"a": big}))
    assert response.raw_output_contents[0] == big.tobytes()


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_infer_understands_compressed_requests(tmp_path: Path, compression: grpc.Compression) -> None:
    async with serving(tmp_path, {"m": echo_model()}) as served:
        response = await served.stub.ModelInfer(infer("m", {"a": rows_of_floats(3)}), compression=compression)
    assert response.raw_output_contents[0] == rows_of_floats(3).tobytes()


async def test_infer_of_a_model_without_inputs_is_answered(tmp_path: Path) -> None:
    spec = ModelSpec((), (TensorSpec("x", "BYTES", (1,)),))
    model = MemoryModel(spec, compute=lambda inputs: [np.array([b"constant"], object)])
    async with serving(tmp_path, {"m": model}) as served:
        response = await served.infer(infer("m"))
    assert list(response.raw_output_contents) == [bytes_element(b"constant")]


async def test_infer_accepts_any_model_name_that_a_folder_can_have(tmp_path: Path) -> None:
    name = "\u6a21\u578b v1.2 (new)"
    write_model(tmp_path, name)
    async with serving(tmp_path, {name: echo_model()}) as served:
        assert (await served.infer(infer(name, {"a": rows_of_floats(1)}))).model_name == name


async def test_outputs_beyond_one_message_are_refused_while_calls_and_streams_keep_working(tmp_path: Path) -> None:
    def compute(inputs: Tensors) -> Tensors:
        # Zeros that nobody touches take no memory.
        size = int(inputs[0].max())
        return (np.zeros((len(inputs[0]), size), np.uint8),)

    spec = ModelSpec((TensorSpec("a", "INT64", (-1, -1)),), (TensorSpec("x", "UINT8", (-1, -1)),))
    async with serving(tmp_path, {"m": MemoryModel(spec, compute)}, config="max_batch_size: 4") as served:

        def wanted(size: int) -> pb.ModelInferRequest:
            return infer("m", {"a": np.full((1, 1), size)}, id=str(size))

        refused = (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "model 'm': expected outputs that one message can carry, at most 2147483647 bytes in all, got more; "
            "request fewer rows or outputs, or use shared memory",
        )
        assert await failure_of(served.infer(wanted(2**31))) == refused
        stream = Stream(served)
        await stream.send(wanted(2**31), wanted(3))
        assert (await stream.message()).error_message == refused[1]
        assert (await stream.message()).infer_response.raw_output_contents[0] == bytes(3)
        await stream.end()
        assert (await served.infer(wanted(5))).raw_output_contents[0] == bytes(5)
        assert await served.metric("nv_inference_request_success") == 2
