"""Outputs of models written for Triton that aren't as configured: they are sent as the model gives them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import numpy as np
import pytest

from paceline.protos.datatypes import by_dtype
from paceline.protos.tensors import encode_raw
from tests.ensembles import ensemble_config, write_ensemble
from tests.integration.regions import register
from tests.integration.serving import failure_of
from tests.integration.triton_serving import BATCHED, TOGETHER, asking, number, served, text
from tests.shared_objects import request_shared_output, shared_object

INVALID = grpc.StatusCode.INVALID_ARGUMENT
GIVES = "response = pb_utils.InferenceResponse([pb_utils.Tensor('y', {})])"


@pytest.mark.parametrize(
    "given",
    [
        ["np.int64([7, 8, 9])", "np.int64([4, 5, 6])", "np.int64([[1, 2], [3, 4]])", "np.int64([[5]])"],
        ["np.float16([[1]])", "np.float16([[2]])", "np.float16([[3], [4]])", "np.float16([[5]])"],
        ["np.bool_([[True]])", "np.array([['word']])", "np.float64([[0.5]])", "np.int64([[3]])"],
    ],
    ids=["other axes", "another datatype", "datatypes"],
)
async def test_outputs_of_a_batch_are_sent_as_given(tmp_path: Path, given: list[str]) -> None:
    async with served(tmp_path, TOGETHER) as started:
        answers = await asyncio.gather(*(started.infer(asking(GIVES.format(one))) for one in given))
        for code, answer in zip(given, answers, strict=True):
            output, expected = answer.outputs[0], eval(code)
            datatype = by_dtype(expected.dtype)
            assert (output.datatype, tuple(output.shape)) == (datatype.name, expected.shape)
            assert answer.raw_output_contents[0] == encode_raw(expected, datatype)


async def test_other_datatype_reaches_memory_and_cache(tmp_path: Path) -> None:
    config = f"{BATCHED} response_cache {{ enable: true }}"
    async with served(tmp_path, config, cache_bytes=1_000_000, allow_client_shm=True) as started:
        with shared_object(8) as memory:
            await register(started, "r", memory.key, 8)
            request = asking(GIVES.format("np.float32([[2.5]])"), outputs=())
            request_shared_output(request, "y", "r", 8)
            for _ in range(2):
                output = (await started.infer(request)).outputs[0]
                assert (output.datatype, output.parameters["shared_memory_byte_size"].int64_param) == ("FP32", 4)
                assert memory.get(4) == np.float32(2.5).tobytes()
                memory.put(bytes(8))
            large = asking(GIVES.format("np.array([['many words']])"), outputs=())
            request_shared_output(large, "y", "r", 8)
            status, said = await failure_of(started.infer(large))
            assert status is INVALID
            assert "expected 'shared_memory_byte_size' to be at least 14 bytes" in said


async def test_classes_are_made_of_numbers_alone(tmp_path: Path) -> None:
    async with served(tmp_path) as started:
        for given, expected in (("np.float32([[0.5, 2]])", b"2.000000:1"), ("np.array([['word']])", b"")):
            request = asking(GIVES.format(given))
            request.outputs[0].parameters["classification"].int64_param = 1
            if expected:
                assert (await started.infer(request)).raw_output_contents[0][4:] == expected
                continue
            status, said = await failure_of(started.infer(request))
            assert status is INVALID
            assert "output 'y': parameter 'classification': expected one of UINT8" in said


async def test_caller_gets_the_datatype_given(tmp_path: Path) -> None:
    code = f"""
called = pb_utils.InferenceRequest(
    model_name="m", requested_output_names=["y"], inputs=request.inputs(),
    parameters={{"run": {GIVES.format("np.float32([[2.5]])")!r}}},
).exec()
y = pb_utils.get_output_tensor_by_name(called, "y")
response = text(json.dumps([y.triton_dtype() == pb_utils.numpy_to_triton_type(np.float32), y.as_numpy().tolist()]))
"""
    async with served(tmp_path, f"{BATCHED} instance_group {{ count: 2 }}") as started:
        assert await text(started, asking(code)) == [True, [[2.5]]]


async def test_ensemble_refuses_another_datatype_than_declared(tmp_path: Path) -> None:
    steps = [("m", {"x": "in"}, {"y": "mid"}), ("m", {"x": "mid"}, {"y": "out"})]
    config = ensemble_config(steps, {"in": "INT64 1"}, {"mid": "INT64 1", "out": "INT64 1"})
    write_ensemble(tmp_path, "e", config)
    async with served(tmp_path) as started:
        for output, words in (
            ("out", "in ensemble 'e', step 1 ('m'): model 'm': input 'x': expected datatype INT64, got 'FP64'"),
            ("mid", "in ensemble 'e', output 'mid': expected INT64, got numpy's float64"),
        ):
            request = asking(GIVES.format("np.float64([[1]])"), outputs=(output,))
            request.model_name, request.inputs[0].name = "e", "in"
            assert (await failure_of(started.infer(request)))[1] == words
        request.parameters.clear()
        assert number(await started.infer(request)) == 1
