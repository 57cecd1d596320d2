"""The batcher in front of models that don't declare their tensors, such as custom predictors."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from paceline.protos import inference_pb2 as pb
from paceline.server.config import Settings
from paceline.server.models.defaults import BatchDefaults
from tests.integration.scripted import marked, request
from tests.integration.serving import Served, failure_of
from tests.integration.upstreams import Upstream, behind, calls_behind_a_busy_upstream, double, tensors_of
from tests.wire import add_raw

pytestmark = pytest.mark.usefixtures("frontends")

Code = grpc.StatusCode


@asynccontextmanager
async def behind_silent(tmp_path: Path, stub: Upstream, **given: Any) -> AsyncIterator[Served]:
    stub.inputs, stub.outputs = {}, {}
    async with behind(tmp_path, stub, **given) as served:
        yield served


async def test_requests_that_look_alike_are_sent_together(tmp_path: Path) -> None:
    stub = Upstream()
    async with behind_silent(tmp_path, stub) as served:
        told = await served.stub.ModelMetadata(pb.ModelMetadataRequest(name="m"))
        assert not told.inputs
        other = request(9)
        other.inputs[0].name = "b"
        few = request(4)
        few.outputs.add(name="y")
        calls = await calls_behind_a_busy_upstream(
            served, stub, request(1), request(2, rows=2), request(3, columns=3), other, few
        )
        stub.gate.set()
        answers = [tensors_of(await call) for call in calls]
        assert sorted(map(tuple, stub.marks)) == [(-1,), (1, 2, 2), (3,), (4,), (9,)]
        np.testing.assert_array_equal(answers[2]["x"], 2 * marked(2, 2))
        np.testing.assert_array_equal(answers[2]["y"], -marked(2, 2))
        assert list(answers[5]) == ["y"]
        assert [[one.name for one in call.outputs] for call in stub.calls if call.outputs] == [["y"]]


def constant(call: pb.ModelInferRequest) -> pb.ModelInferResponse:
    answer = pb.ModelInferResponse(model_name=call.model_name, id=call.id)
    answer.outputs.add(name="x", datatype="FP32", shape=[2])
    answer.raw_output_contents.append(np.array([3, 4], np.float32).tobytes())
    return answer


@pytest.mark.parametrize("outputs", [{}, {"x": ("FP32", [2])}], ids=["silent", "outputs"])
async def test_requests_without_tensors_are_sent_alone(tmp_path: Path, outputs: Any) -> None:
    stub = Upstream()
    stub.answer = constant
    stub.inputs, stub.outputs = {}, outputs
    async with behind(tmp_path, stub) as served:
        asked = [pb.ModelInferRequest(model_name="m", id=str(number)) for number in range(3)]
        answers = await asyncio.gather(*map(served.infer, asked))
        assert [answer.id for answer in answers] == ["0", "1", "2"]
        assert [tensors_of(answer)["x"].tolist() for answer in answers] == [[3, 4]] * 3
        assert len(stub.calls) == 3


async def test_requests_whose_tensors_differ_in_rows_are_sent_alone(tmp_path: Path) -> None:
    stub = Upstream()
    async with behind_silent(tmp_path, stub) as served:
        odd = []
        for mark in (1, 2):
            one = request(mark, rows=2)
            add_raw(one, "scale", "FP32", [], np.float32(1).tobytes())
            odd.append(one)
        calls = await calls_behind_a_busy_upstream(served, stub, *odd)
        stub.gate.set()
        await asyncio.gather(*calls)
        assert sorted(map(tuple, stub.marks)) == [(-1,), (1, 1), (2, 2)]


def summed(call: pb.ModelInferRequest) -> pb.ModelInferResponse:
    """The answer of `double`, but with `x` summed over all rows."""
    answer = double(call)
    total = tensors_of(answer)["x"].sum(axis=0)
    answer.outputs[0].shape[:] = [2]
    answer.raw_output_contents[0] = total.tobytes()
    return answer


async def test_requests_are_sent_again_alone_if_the_answer_lacks_the_rows_of_the_batch(tmp_path: Path) -> None:
    stub = Upstream()
    stub.answer = summed
    async with behind_silent(tmp_path, stub) as served:
        calls = await calls_behind_a_busy_upstream(served, stub, request(1, rows=3), request(2, rows=3))
        stub.gate.set()
        answers = [tensors_of(await call)["x"].tolist() for call in calls]
        assert answers == [[-2, -2], [6, 6], [12, 12]]


async def test_request_with_more_rows_than_a_batch_is_sent_in_parts(tmp_path: Path) -> None:
    stub = Upstream()
    settings = Settings(paths=(), batching=BatchDefaults(4))
    async with behind_silent(tmp_path, stub, settings=settings) as served:
        answer = tensors_of(await served.infer(request(3, rows=9)))
        np.testing.assert_array_equal(answer["x"], 2 * marked(3, 9))
        np.testing.assert_array_equal(answer["y"], -marked(3, 9))
        assert [len(marks) for marks in stub.marks] == [4, 4, 1]


def one_output_less(answer: pb.ModelInferResponse) -> None:
    del answer.outputs[1], answer.raw_output_contents[1]


def renamed_output(answer: pb.ModelInferResponse) -> None:
    answer.outputs[0].name = "other"


def integers(answer: pb.ModelInferResponse) -> None:
    answer.outputs[0].datatype = "INT32"


@pytest.mark.parametrize("spoil", [one_output_less, renamed_output, integers])
@pytest.mark.parametrize("spoilt", [0, 1], ids=["first", "second"])
async def test_parts_answered_with_different_outputs_are_an_error(tmp_path: Path, spoil: Any, spoilt: int) -> None:
    stub = Upstream()

    def answer(call: pb.ModelInferRequest) -> pb.ModelInferResponse:
        whole = double(call)
        if len(stub.calls) == spoilt + 1:
            spoil(whole)
        return whole

    stub.answer = answer
    settings = Settings(paths=(), batching=BatchDefaults(max_batch_rows=2))
    async with behind_silent(tmp_path, stub, settings=settings) as served:
        code, text = await failure_of(served.infer(request(1, rows=4)))
        assert code is Code.INTERNAL
        assert "the parts of a split request have different outputs: [" in text
        assert tensors_of(await served.infer(request(1, rows=4)))["x"][3, 0] == 2


def repeated(call: pb.ModelInferRequest) -> pb.ModelInferResponse:
    """The answer of `double`, but with each row of `x` twice."""
    answer = double(call)
    twice = tensors_of(answer)["x"].repeat(2, axis=0)
    answer.outputs[0].shape[:] = twice.shape
    answer.raw_output_contents[0] = twice.tobytes()
    return answer


@pytest.mark.parametrize(("answer", "shape"), [(summed, (2,)), (repeated, (8, 2))], ids=["fewer", "more"])
async def test_parts_answered_without_their_rows_are_an_error(tmp_path: Path, answer: Any, shape: Any) -> None:
    stub = Upstream()
    stub.answer = answer
    settings = Settings(paths=(), batching=BatchDefaults(max_batch_rows=4))
    async with behind_silent(tmp_path, stub, settings=settings) as served:
        code, text = await failure_of(served.infer(request(1, rows=8)))
        assert code is Code.INTERNAL
        assert f"output 'x' has shape {list(shape)} for a part of a request with 4 rows; if the model doesn't" in text
        assert tensors_of(await served.infer(request(1, rows=4)))["x"].shape == shape


async def test_requests_of_unbatched_models_are_sent_alone(tmp_path: Path) -> None:
    stub = Upstream()
    async with behind_silent(tmp_path, stub, unbatched=("m",), calls=1) as served:
        calls = await calls_behind_a_busy_upstream(served, stub, request(1), request(2))
        stub.gate.set()
        await asyncio.gather(*calls)
        assert stub.marks == [[-1], [1], [2]]


async def test_typed_contents_are_returned_if_requested(tmp_path: Path) -> None:
    stub = Upstream()
    async with behind_silent(tmp_path, stub) as served:
        answer = await served.infer(request(1, binary_data_output=False))
        assert list(answer.outputs[0].contents.fp32_contents) == [2, 2]
        assert not answer.raw_output_contents


def nothing(one: pb.ModelInferRequest) -> None:
    del one.inputs[:]


def strange(one: pb.ModelInferRequest) -> None:
    one.inputs[0].datatype = "FP12"


def cut(one: pb.ModelInferRequest) -> None:
    one.raw_input_contents[0] = one.raw_input_contents[0][:-1]


def crowded(one: pb.ModelInferRequest) -> None:
    for number in range(1024):
        one.inputs.add(name=f"{number}", datatype="BOOL", shape=[1, 1])
        one.raw_input_contents.append(b"\0")


def greedy(one: pb.ModelInferRequest) -> None:
    for number in range(1025):
        one.outputs.add(name=f"{number}")


@pytest.mark.parametrize("spoil", [nothing, strange, cut, crowded, greedy])
async def test_invalid_requests_are_refused_without_an_upstream_call(tmp_path: Path, spoil: Any) -> None:
    stub = Upstream()
    async with behind_silent(tmp_path, stub) as served:
        bad = request(1)
        spoil(bad)
        assert (await failure_of(served.infer(bad)))[0] is Code.INVALID_ARGUMENT
        assert not stub.calls
        assert tensors_of(await served.infer(request(1)))["x"][0, 0] == 2


async def test_tensors_with_huge_names_are_served_and_not_remembered(tmp_path: Path) -> None:
    """A hundred layouts are remembered; of a MB each, they would take up memory for good."""
    stub = Upstream()
    stub.gate.set()
    async with behind_silent(tmp_path, stub) as served:
        tracemalloc.start()
        try:
            before_bytes, _ = tracemalloc.get_traced_memory()
            for number in range(20):
                one = request(1)
                one.inputs[0].name = f"{number}" + "x" * 1_000_000
                assert (await served.infer(one)).outputs
            stub.calls.clear()
            gc.collect()
            assert tracemalloc.get_traced_memory()[0] - before_bytes < 5_000_000
        finally:
            tracemalloc.stop()
