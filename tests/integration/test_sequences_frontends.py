"""Sequences of a server whose gRPC is in several processes: a step may come through any of them, and have any size."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest

from paceline.protos import inference_pb2 as pb
from tests import models, state_models
from tests.integration.front_memory import nothing_held, through_each, two
from tests.integration.sequence_serving import KEEPS
from tests.integration.serving import Served, failure_of, serving
from tests.integration.streams import Stream
from tests.wire import Array, infer

SMALL, LARGE = 2, 16_384
"""Elements of a step: one that fronts pass on unchanged whatever the model, and one that they'd otherwise decode."""


@asynccontextmanager
async def summing(root: Path, columns: int) -> AsyncIterator[tuple[Served, Served]]:
    """A server, through each of its two fronts, that adds up what the steps of a sequence bring."""
    path = models.write(state_models.accumulator(dims=("batch", columns)), root / "m" / "1" / "model.onnx")
    (path.parents[1] / "config.pbtxt").write_text(KEEPS)
    async with serving(root, settings=two(root)) as served, through_each(served) as sides:
        yield sides
        await nothing_held(served)


def step(columns: int, sequence: int | str, value: float, *, start: bool = False) -> pb.ModelInferRequest:
    given = {"sequence_id": sequence, "sequence_start": start, "sequence_end": False}
    return infer("m", {"INPUT0": np.full((1, columns), value, np.float32)}, parameters=given)


def value_of(answer: pb.ModelInferResponse) -> float:
    """The value that all elements of its output have."""
    assert [output.name for output in answer.outputs] == ["OUTPUT0"]
    array: Array = np.frombuffer(answer.raw_output_contents[0], "<f4")
    assert (array == array[0]).all()
    return float(array[0])


@pytest.mark.parametrize("columns", [SMALL, LARGE])
async def test_sequence_goes_on_through_another_front(tmp_path: Path, columns: int) -> None:
    async with summing(tmp_path, columns) as sides:
        for number in range(6):
            answer = await sides[number % 2].infer(step(columns, "s", 1, start=number == 0))
            assert value_of(answer) == number + 1
        stream = Stream(sides[0])
        await stream.send(step(columns, "s", 10))
        assert value_of((await stream.message()).infer_response) == 16
        unknown = await failure_of(sides[1].infer(step(columns, "t", 1)))
        assert unknown[0] is grpc.StatusCode.INVALID_ARGUMENT
        assert "inference request for sequence t to model 'm' must specify the START flag" in unknown[1]


@pytest.mark.parametrize("columns", [SMALL, LARGE])
async def test_steps_of_a_stream_do_not_overtake_each_other(tmp_path: Path, columns: int) -> None:
    async with summing(tmp_path, columns) as sides:

        async def run(sequence: int) -> list[float]:
            stream = Stream(sides[sequence % 2])
            await stream.send(*(step(columns, sequence, 2**number, start=number == 0) for number in range(12)))
            return [value_of((await stream.message()).infer_response) for _ in range(12)]

        sums = await asyncio.gather(*map(run, range(1, 9)))
        assert sums == [[2**number - 1 for number in range(1, 13)]] * 8
