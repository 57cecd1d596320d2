"""Python models written for Triton's Python backend that call other models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest

from tests import triton_puppet
from tests.integration.serving import Served, failure_of
from tests.integration.triton_serving import TOGETHER, asking, number, served, text
from tests.triton_puppet import TENSORS

CALL = """
def made(name, value, decoupled=False, **more):
    tensors = [pb_utils.Tensor("x", np.array([[value]], np.int64))]
    return pb_utils.InferenceRequest(model_name=name, requested_output_names=["y"], inputs=tensors, **more)

def value_of(called):
    assert not called.has_error(), called.error().message()
    return int(pb_utils.get_output_tensor_by_name(called, "y").as_numpy()[0, 0])
"""
OTHER = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            x = request.inputs()[0].as_numpy()
            sender = request.get_response_sender()
            for n in range(json.loads(request.parameters()).get("times", 1)):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", x * 10 + n)], parameters={"n": n}))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


@asynccontextmanager
async def calling(root: Path, other: str = "") -> AsyncIterator[Served]:
    """Model `m`, and model `other`, which answers with ten times its input."""
    (root / "all").mkdir()
    triton_puppet.write(root / "all", f"max_batch_size: 8 {other} {TENSORS}", OTHER).rename(root / "all" / "other")
    async with served(root / "all") as started:
        yield started


@pytest.mark.parametrize(
    "code",
    [
        "response = answer(value_of(made('other', 4).exec()))",
        "response = answer(asyncio.run(both()))",
        """
called = pb_utils.InferenceRequest(
    model_name=b"other", request_id=b"r", requested_output_names=[b"y"],
    inputs=[pb_utils.Tensor(b"x", np.array([[4]], np.int64))],
).exec()
assert called.parameters() == '{"n": 0}'
response = answer(value_of(called))
""",
    ],
    ids=["one", "two at a time", "names as bytes"],
)
async def test_model_calls_another_one(tmp_path: Path, code: str) -> None:
    both = """
async def both():
    called = await asyncio.gather(*(made("other", n).async_exec() for n in (1, 3)))
    return sum(map(value_of, called))
"""
    async with calling(tmp_path) as started:
        assert number(await started.infer(asking(CALL + both + code))) == 40
        other = started.server.repository.get("other", "")
        assert other.statistics.failed == 0


async def test_decoupled_model_is_called_as_an_iterator(tmp_path: Path) -> None:
    code = """
def told(one):
    return [value_of(one), json.loads(one.parameters())["n"]] if one.output_tensors() else []

request = made("other", 2, parameters={"times": 12})
responses = [*request.exec(decoupled=True), *asyncio.run(request.async_exec(decoupled=True))]
response = text(json.dumps([*map(told, responses)]))
"""
    async with calling(tmp_path, "model_transaction_policy { decoupled: true }") as started:
        assert await text(started, asking(CALL + code)) == [*([20 + n, n] for n in range(12)), []] * 2


@pytest.mark.parametrize(
    ("made", "code", "words"),
    [
        ("made('absent', 1)", "NOT_FOUND", "Request for unknown model: 'absent'"),
        ("made('', 1)", "NOT_FOUND", "Request for unknown model: ''"),
        ("made('other', 1, model_version=7)", "NOT_FOUND", "version 7 is not found"),
        ("made('other', 1, correlation_id=5, flags=1, parameters={'priority': 'x'})", "INVALID_ARG", "priority"),
        ("made('m', 1)", "UNAVAILABLE", "model 'm' can't answer this call"),
    ],
)
async def test_failed_call_has_the_error_in_its_response(tmp_path: Path, made: str, code: str, words: str) -> None:
    tell = f"""
error = {made}.exec().error()
response = text(json.dumps([error.code() == pb_utils.TritonError.{code}, error.message()]))
"""
    async with calling(tmp_path) as started:
        is_code, message = await text(started, asking(CALL + tell))
        assert is_code
        assert words in message


async def test_error_that_is_passed_on_keeps_its_status(tmp_path: Path) -> None:
    async with calling(tmp_path) as started:
        for made, status in (("made('m', 1)", "RESOURCE_EXHAUSTED"), ("made('absent', 1)", "NOT_FOUND")):
            code = f"response = pb_utils.InferenceResponse(error={made}.exec().error())"
            assert (await failure_of(started.infer(asking(CALL + code))))[0] is grpc.StatusCode[status]


async def test_rows_of_each_request_are_its_own(tmp_path: Path) -> None:
    code = "response = pb_utils.InferenceResponse([pb_utils.Tensor('y', request.inputs()[0].as_numpy() * 2)])"
    async with served(tmp_path, TOGETHER) as started:
        asked = []
        for rows in (1, 3):
            request = asking(code)
            request.inputs[0].shape[:] = [rows, 1]
            request.raw_input_contents[0] = np.arange(rows, dtype=np.int64).tobytes()
            asked.append(started.infer(request))
        one, three = await asyncio.gather(*asked)
        assert (list(one.outputs[0].shape), one.raw_output_contents[0]) == ([1, 1], np.array([0]).tobytes())
        assert (list(three.outputs[0].shape), three.raw_output_contents[0]) == ([3, 1], np.array([0, 2, 4]).tobytes())
