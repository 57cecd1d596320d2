"""NVIDIA's client, unmodified, blocking and asyncio: successful calls. (Errors: another file.)"""

from __future__ import annotations

import asyncio
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from tests.conformance import zoo
from tests.conformance.triton import Callbacks, Triton, assert_same_bits, outputs_of, tensors, wait_for_queued, wanted
from tests.harness import ServerProcess

ONE_ROW = {name: np.arange(16, dtype=np.int32).reshape(1, 16) for name in ("INPUT0", "INPUT1")}


# ---- Health and metadata ---------------------------------------------------------------------------------------------


async def test_health_server_started_is_live_and_ready(triton: Triton) -> None:
    assert await triton.is_server_live()
    assert await triton.is_server_ready()


@pytest.mark.parametrize("version", ["", "1"])
async def test_model_ready_loaded_model_is_true(triton: Triton, version: str) -> None:
    assert await triton.is_model_ready("simple", version)


async def test_model_ready_unknown_model_is_not_found(triton: Triton) -> None:
    with pytest.raises(InferenceServerException, match="'nosuch'") as raised:
        await triton.is_model_ready("nosuch")
    assert raised.value.status() == "StatusCode.NOT_FOUND"


async def test_server_metadata_names_server_and_extensions(triton: Triton) -> None:
    message = await triton.get_server_metadata()
    assert (message.name, bool(message.version)) == ("paceline", True)
    assert "binary_tensor_data" in message.extensions
    assert await triton.get_server_metadata(as_json=True) == {
        "name": message.name,
        "version": message.version,
        "extensions": list(message.extensions),
    }


@pytest.mark.parametrize("version", ["", "1"])
async def test_model_metadata_batched_model_has_free_batch_axis(triton: Triton, version: str) -> None:
    message = await triton.get_model_metadata("simple", version)
    assert (message.name, list(message.versions), message.platform) == ("simple", ["1"], "onnxruntime_onnx")
    for direction, names in ((message.inputs, ["INPUT0", "INPUT1"]), (message.outputs, ["OUTPUT0", "OUTPUT1"])):
        found = [(tensor.name, tensor.datatype, list(tensor.shape)) for tensor in direction]
        assert found == [(name, "INT32", [-1, 16]) for name in names]


async def test_model_metadata_as_json_has_shapes_as_strings(triton: Triton) -> None:
    metadata = await triton.get_model_metadata("product", as_json=True)
    assert metadata["inputs"][1] == {"name": "INPUT1", "datatype": "FP32", "shape": ["-1", "-1", "-1"]}


@pytest.mark.parametrize(("model", "shape"), [("unbatched", [16]), ("scalar", [])])
async def test_model_metadata_of_a_model_without_batch_axis_has_its_own_shape(
    triton: Triton, model: str, shape: list[int]
) -> None:
    metadata = await triton.get_model_metadata(model)
    assert list(metadata.inputs[0].shape) == shape


@pytest.mark.parametrize("datatype", zoo.DATATYPES)
async def test_model_metadata_names_each_datatype_as_in_the_protocol(triton: Triton, datatype: str) -> None:
    metadata = await triton.get_model_metadata(zoo.identity_of(datatype))
    assert [tensor.datatype for tensor in (*metadata.inputs, *metadata.outputs)] == [datatype, datatype]


# ---- Inference -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("datatype", zoo.DATATYPES)
async def test_infer_identity_of_each_datatype_returns_the_very_bits(triton: Triton, datatype: str) -> None:
    sent = zoo.samples(datatype)
    result = await triton.infer(zoo.identity_of(datatype), tensors({"INPUT0": sent}))
    assert result.get_response().outputs[0].datatype == datatype
    assert_same_bits(outputs_of(result), {"OUTPUT0": sent})


@pytest.mark.parametrize("datatype", zoo.DATATYPES)
async def test_infer_rows_without_elements_come_back_unchanged(triton: Triton, datatype: str) -> None:
    sent = zoo.samples(datatype)[:, :0]
    result = await triton.infer(zoo.identity_of(datatype), tensors({"INPUT0": sent}))
    assert_same_bits(outputs_of(result), {"OUTPUT0": sent})


async def test_infer_text_as_numpy_strings_arrives_as_utf8(triton: Triton) -> None:
    sent = np.array([["grün", "€"]])
    result = await triton.infer("identity_bytes", tensors({"INPUT0": sent.astype(object)}))
    assert result.as_numpy("OUTPUT0").tolist() == [["grün".encode(), "€".encode()]]


async def test_infer_bf16_is_read_and_rounded_as_bfloat16(triton: Triton) -> None:
    exact = np.array([[1.5, -0.0, 3.140625, 65280.0, 1e-20, np.inf]], ml_dtypes.bfloat16)
    widened = await triton.infer("from_bf16", tensors({"INPUT0": exact}))
    assert_same_bits(outputs_of(widened), {"OUTPUT0": exact.astype(np.float32)})
    between = np.array([[1.00390625, 1.01171875, 3.1415927, 1e-20, -65535.0]], np.float32)
    rounded = await triton.infer("to_bf16", tensors({"INPUT0": between}))
    assert_same_bits(outputs_of(rounded), {"OUTPUT0": between.astype(ml_dtypes.bfloat16)})


async def test_infer_inputs_in_any_order_are_matched_by_name(triton: Triton) -> None:
    arrays = {f"INPUT{i}": np.full((1, 2), i, np.float32) for i in (2, 0, 1)}
    result = await triton.infer("three", tensors(arrays))
    assert_same_bits(outputs_of(result), {f"OUTPUT{i}": arrays[f"INPUT{i}"] for i in range(3)})


@pytest.mark.parametrize("names", [("OUTPUT1",), ("OUTPUT2", "OUTPUT0"), ("OUTPUT2", "OUTPUT1", "OUTPUT0")])
async def test_infer_returns_only_the_requested_outputs_in_the_order_requested(
    triton: Triton, names: tuple[str, ...]
) -> None:
    arrays = {f"INPUT{i}": np.full((1, 2), i, np.float32) for i in range(3)}
    result = await triton.infer("three", tensors(arrays), outputs=wanted(*names))
    assert_same_bits(outputs_of(result), {name: arrays[name.replace("OUT", "IN")] for name in names})


@pytest.mark.parametrize("version", ["", "1"])
async def test_infer_response_names_model_version_and_request(triton: Triton, version: str) -> None:
    result = await triton.infer("simple", tensors(ONE_ROW), model_version=version, request_id="grün/7")
    response = result.get_response()
    assert (response.model_name, response.model_version, response.id) == ("simple", "1", "grün/7")


async def test_infer_without_request_id_gets_none_in_the_response(triton: Triton) -> None:
    assert not (await triton.infer("simple", tensors(ONE_ROW))).get_response().id


@pytest.mark.parametrize(
    "options",
    [
        {"priority": 1},
        {"timeout": 10_000_000},
        {"client_timeout": 60.0},
        {"sequence_id": 7, "sequence_start": True, "sequence_end": True},
        {"parameters": {"text": "grün", "number": -3, "flag": False, "real": 0.5}},
        {"headers": {"x-request-id": "7", "some-bin": b"\x00\xff"}},
        {"compression_algorithm": "gzip"},
        {"compression_algorithm": "deflate"},
    ],
    ids=lambda options: "-".join(map(str, options)) + str(options.get("compression_algorithm", "")),
)
async def test_infer_options_of_the_client_leave_the_answer_unchanged(triton: Triton, options: dict[str, Any]) -> None:
    arrays = {name: np.arange(512, dtype=np.int32).reshape(32, 16) for name in ONE_ROW}
    result = await triton.infer("simple", tensors(arrays), **options)
    assert_same_bits(outputs_of(result), zoo.answer("simple", arrays))


async def test_health_with_headers_and_timeout_works_as_well(triton: Triton) -> None:
    assert await triton.is_server_live(headers={"authorization": "Bearer x"}, client_timeout=60)


async def test_infer_many_at_once_gets_each_its_own_answer(triton: Triton) -> None:
    async def ask(number: int) -> None:
        sent = np.full((1 + number % 3, 16), number, np.int32)
        result = await triton.infer("simple", tensors({"INPUT0": sent, "INPUT1": sent}), request_id=str(number))
        assert result.get_response().id == str(number)
        assert_same_bits(outputs_of(result), {"OUTPUT0": sent * 2, "OUTPUT1": sent * 0})

    await asyncio.gather(*map(ask, range(60)))


# ---- Timeouts and cancellation ---------------------------------------------------------------------------------------

PATIENT = {"INPUT0": np.ones((1, 16), np.float32)}


async def test_infer_client_timeout_in_the_queue_is_deadline_exceeded(triton: Triton, server: ServerProcess) -> None:
    with pytest.raises(InferenceServerException) as raised:
        await triton.infer("patient", tensors(PATIENT), client_timeout=0.2)
    assert raised.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    wait_for_queued(server, "patient", 0)


async def test_infer_timeout_parameter_in_the_queue_is_deadline_exceeded(triton: Triton) -> None:
    with pytest.raises(InferenceServerException, match=r"'patient'.*Request timeout expired") as raised:
        await triton.infer("patient", tensors(PATIENT), timeout=1_000)
    assert raised.value.status() == "StatusCode.DEADLINE_EXCEEDED"


async def test_infer_cancelled_aio_call_leaves_the_queue(server: ServerProcess) -> None:
    async with tritonclient.grpc.aio.InferenceServerClient(server.target) as client:
        asking = asyncio.create_task(client.infer("patient", tensors(PATIENT)))
        await asyncio.to_thread(wait_for_queued, server, "patient", 1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await asyncio.to_thread(wait_for_queued, server, "patient", 0)


def test_async_infer_many_at_once_each_callback_gets_its_own_answer(server: ServerProcess) -> None:
    called = Callbacks()
    sent = {str(number): np.full((1, 16), number, np.int32) for number in range(30)}
    with tritonclient.grpc.InferenceServerClient(server.target) as client:
        for number, array in sent.items():
            client.async_infer("simple", tensors({"INPUT0": array, "INPUT1": array}), called, request_id=number)
        for _ in range(len(sent)):
            result, error = called.next()
            assert error is None
            array = sent.pop(result.get_response().id)
            assert_same_bits(outputs_of(result), {"OUTPUT0": array * 2, "OUTPUT1": array * 0})
    assert not sent


def test_async_infer_refused_passes_the_error_to_the_callback(server: ServerProcess) -> None:
    called = Callbacks()
    with tritonclient.grpc.InferenceServerClient(server.target) as client:
        client.async_infer("nosuch", tensors(ONE_ROW), called)
        result, error = called.next()
    assert (result, error.status()) == (None, "StatusCode.NOT_FOUND")


def test_async_infer_cancelled_leaves_the_queue_and_reports_it(server: ServerProcess) -> None:
    called = Callbacks()
    with tritonclient.grpc.InferenceServerClient(server.target) as client:
        call = client.async_infer("patient", tensors(PATIENT), called)
        wait_for_queued(server, "patient", 1)
        call.cancel()
        result, error = called.next()
        assert (result, error.status()) == (None, "StatusCode.CANCELLED")
        wait_for_queued(server, "patient", 0)
