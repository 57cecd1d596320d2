"""Models exported for batches of one size, served to requests of any number of rows up to that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import numpy as np
import onnx
import onnxruntime as ort  # type: ignore[import-untyped,unused-ignore]
import pytest
from onnx import helper, numpy_helper

from paceline.protos import inference_pb2 as pb
from paceline.server.config import Settings
from tests import models
from tests.integration.regions import register
from tests.integration.scripted import own
from tests.integration.serving import Served, failure_of, serving
from tests.integration.streams import Stream
from tests.shared_objects import add_shared_input, request_shared_output, shared_object
from tests.wire import Array, infer, rows_of_floats

ROWS, COLUMNS = 16, 3
DELAYED = "dynamic_batching { max_queue_delay_microseconds: 100000000 }"
OWN_PROCESS = own(own_process="true")


def squares() -> onnx.ModelProto:
    """OUTPUT0 = INPUT0 * INPUT0 + SHIFT, FP32 [16, 3], where SHIFT has one number a row."""
    return models.model(
        [
            helper.make_node("Mul", ["INPUT0", "INPUT0"], ["square"]),
            helper.make_node("Add", ["square", "SHIFT"], ["OUTPUT0"]),
        ],
        [models.tensor("INPUT0", "FP32", [ROWS, COLUMNS]), models.tensor("SHIFT", "FP32", [ROWS, 1])],
        [models.tensor("OUTPUT0", "FP32", [ROWS, COLUMNS])],
    )


def by_place() -> onnx.ModelProto:
    """OUTPUT0 = INPUT0 + the number of the row."""
    places = np.arange(ROWS, dtype=np.float32).reshape(ROWS, 1)
    return models.model(
        [helper.make_node("Add", ["INPUT0", "places"], ["OUTPUT0"])],
        [models.tensor("INPUT0", "FP32", [ROWS, COLUMNS])],
        [models.tensor("OUTPUT0", "FP32", [ROWS, COLUMNS])],
        [numpy_helper.from_array(places, "places")],
    )


def request(first: int, rows: int = 1) -> tuple[pb.ModelInferRequest, Array]:
    """A request with its answer."""
    given, shift = rows_of_floats(rows, COLUMNS, first=first), rows_of_floats(rows, 1, first=first) * 7
    return infer("m", {"INPUT0": given, "SHIFT": shift}), given * given + shift


def result(answer: pb.ModelInferResponse) -> Array:
    return np.frombuffer(answer.raw_output_contents[0], np.float32).reshape(answer.outputs[0].shape)


@asynccontextmanager
async def served_with(
    root: Path, model: onnx.ModelProto, config: str = "", settings: Settings | None = None
) -> AsyncIterator[Served]:
    path = models.write(model, root / "m" / "1" / "model.onnx")
    if config:
        (path.parents[1] / "config.pbtxt").write_text(config)
    async with serving(root, settings=settings) as served:
        yield served


async def shapes(served: Served) -> Sequence[Sequence[int]]:
    metadata = await served.stub.ModelMetadata(pb.ModelMetadataRequest(name="m"))
    return [list(one.shape) for one in (*metadata.inputs, *metadata.outputs)]


@pytest.mark.parametrize(
    "config",
    ["", own(batch_sizes=ROWS), f"max_batch_size: {ROWS} {DELAYED}", f"{DELAYED} {OWN_PROCESS}"],
    ids=["none", "sizes", "configured", "own-process"],
)
async def test_fixed_batch_answers_concurrent_rows_exactly(tmp_path: Path, config: str) -> None:
    async with served_with(tmp_path, squares(), config) as served:
        requests = [request(first) for first in range(64)]
        answers = await asyncio.gather(*(served.infer(one) for one, _ in requests))
        for answer, (_, expected) in zip(answers, requests, strict=True):
            np.testing.assert_array_equal(result(answer), expected)
        executed = await served.metric("nv_inference_exec_count")
        assert await served.metric("paceline_padding_rows") == ROWS * executed - 64
        assert executed == 4 or "delay" not in config


async def test_fixed_batch_answers_requests_of_several_rows_exactly(tmp_path: Path) -> None:
    async with served_with(tmp_path, squares()) as served:
        requests = [request(17 * rows, rows) for rows in range(1, ROWS + 1)]
        answers = await asyncio.gather(*(served.infer(one) for one, _ in requests))
        for answer, (_, expected) in zip(answers, requests, strict=True):
            np.testing.assert_array_equal(result(answer), expected)


async def test_fixed_batch_is_a_free_dimension_to_clients(tmp_path: Path) -> None:
    async with served_with(tmp_path, squares()) as served:
        assert await shapes(served) == [[-1, COLUMNS], [-1, 1], [-1, COLUMNS]]
        code, text = await failure_of(served.stub.ModelInfer(request(0, ROWS + 1)[0]))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "17" in text
        assert "16" in text


async def test_fixed_batch_splits_larger_requests_where_that_is_on(tmp_path: Path) -> None:
    config = f"max_batch_size: {ROWS} dynamic_batching {{ }} {own(split_oversized='true')}"
    async with served_with(tmp_path, squares(), config) as served:
        given, expected = request(0, 3 * ROWS + 5)
        np.testing.assert_array_equal(result(await served.infer(given)), expected)


async def test_fixed_batch_without_batching_pads_each_request(tmp_path: Path) -> None:
    tensors = (
        'input [ { name: "INPUT0" data_type: TYPE_FP32 dims: 3 }, { name: "SHIFT" data_type: TYPE_FP32 dims: 1 } ] '
        'output { name: "OUTPUT0" data_type: TYPE_FP32 dims: 3 }'
    )
    async with served_with(tmp_path, squares(), f"max_batch_size: {ROWS} {tensors}") as served:
        given, expected = request(0, 2)
        np.testing.assert_array_equal(result(await served.infer(given)), expected)
        assert await served.metric("paceline_padding_rows") == ROWS - 2


@pytest.mark.parametrize("config", ["", OWN_PROCESS], ids=["", "own-process"])
async def test_fixed_batch_answers_in_shared_memory(tmp_path: Path, config: str) -> None:
    settings = Settings(paths=(tmp_path,), allow_client_shm=True)
    row = 4 * COLUMNS
    given = rows_of_floats(32, COLUMNS)
    with shared_object(2 * given.nbytes) as memory:
        memory.put(given)
        async with served_with(tmp_path, models.fixed_batch(ROWS, COLUMNS), config, settings) as served:
            await register(served, "r", memory.key, 2 * given.nbytes)
            requests = []
            for number in range(16):
                message = pb.ModelInferRequest(model_name="m")
                add_shared_input(message, "INPUT0", "FP32", [2, COLUMNS], "r", 2 * row, 2 * row * number)
                request_shared_output(message, "OUTPUT0", "r", 2 * row, given.nbytes + 2 * row * number)
                requests.append(message)
            await asyncio.gather(*map(served.infer, requests))
            answers = np.frombuffer(memory.get(given.nbytes, given.nbytes), np.float32)
            np.testing.assert_array_equal(answers.reshape(32, COLUMNS), -given)


async def test_fixed_batch_answers_streams_in_order(tmp_path: Path) -> None:
    async with served_with(tmp_path, squares()) as served:
        stream, requests = Stream(served), [request(first) for first in range(40)]
        await stream.send(*(one for one, _ in requests))
        await stream.end()
        for _, expected in requests:
            np.testing.assert_array_equal(result((await stream.message()).infer_response), expected)


@pytest.mark.parametrize("model", [by_place(), models.over_rows("softmax", ROWS), models.over_rows("cumulate", ROWS)])
async def test_fixed_batch_of_rows_that_depend_on_each_other_keeps_its_shape(
    tmp_path: Path, model: onnx.ModelProto, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    given = rows_of_floats(ROWS, COLUMNS) / 10
    (expected,) = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(
        None, {"INPUT0": given}
    )
    async with served_with(tmp_path, model) as served:
        assert await shapes(served) == [[ROWS, COLUMNS]] * 2
        np.testing.assert_allclose(result(await served.infer(infer("m", {"INPUT0": given}))), expected, rtol=1e-6)
        code, _ = await failure_of(served.stub.ModelInfer(infer("m", {"INPUT0": given[:1]})))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert (
        "all its tensors have a fixed first dimension of 16; output 'OUTPUT0' of a row depends on rows" in caplog.text
    )
