"""Batches assembled directly where a Python model's process reads them, from messages and from shared memory."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import numpy as np
import pytest

from paceline.backends.python.instance import PythonInstance
from paceline.protos import inference_pb2 as pb
from tests.integration.regions import register, settings, unregister
from tests.integration.scripted import queued
from tests.integration.serving import Served, failure_of, serving
from tests.shared_objects import SharedObject, add_shared_input, shared_object
from tests.wire import Array, infer

INVALID = grpc.StatusCode.INVALID_ARGUMENT
WIDTH = 10_000
ROW = 4 * WIDTH
ROWS = 6
MODEL = """
class Model:
    inputs = {"x": ("FP32", [-1, 10000]), "n": ("INT32", [-1, 1])}
    outputs = {"y": ("FP32", [-1, 10000]), "first": ("FP32", [-1, 1])}

    def load(self, context):
        self.kept = []

    def execute(self, inputs):
        self.kept.append(inputs["x"])
        total = sum(float(one[0, 0]) for one in self.kept)
        return {"y": inputs["x"] * 2 + inputs["n"].astype("f4"), "first": inputs["x"][:, :1] * 0 + total}
"""
CONFIG = 'backend: "python" max_batch_size: %d dynamic_batching { max_queue_delay_microseconds: 100000000 }'
FULL = CONFIG % ROWS


def write(root: Path, config: str) -> None:
    folder = root / "m" / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(MODEL)
    folder.with_name("config.pbtxt").write_text(config)


def wide(rows: int, first: float) -> Array:
    return np.arange(rows * WIDTH, dtype=np.float32).reshape(rows, WIDTH) % 1000 + np.float32(first)


def numbered(rows: int) -> Array:
    return np.arange(rows, dtype=np.int32).reshape(rows, 1)


def of_message(x: Array) -> pb.ModelInferRequest:
    return infer("m", {"x": x, "n": numbered(len(x))})


def of_region(rows: int, offset: int, name: str = "r") -> pb.ModelInferRequest:
    request = infer("m", {"n": numbered(rows)})
    add_shared_input(request, "x", "FP32", [rows, WIDTH], name, rows * ROW, offset)
    return request


def check(answer: pb.ModelInferResponse, x: Array) -> None:
    y = np.frombuffer(answer.raw_output_contents[0], np.float32).reshape(-1, WIDTH)
    np.testing.assert_array_equal(y, x * 2 + numbered(len(x)).astype(np.float32))


async def batch(served: Served, *requests: pb.ModelInferRequest) -> list[pb.ModelInferResponse]:
    return list(await asyncio.gather(*(served.infer(request) for request in requests)))


async def executions(served: Served) -> int:
    statistics = await served.stub.ModelStatistics(pb.ModelStatisticsRequest(name="m"), timeout=20)
    count: int = statistics.model_stats[0].execution_count
    return count


@pytest.mark.parametrize("frontends", [1, 2])
async def test_batches_of_wide_rows_give_each_request_its_own_answer(tmp_path: Path, frontends: int) -> None:
    write(tmp_path, FULL)
    async with serving(tmp_path, settings=settings(tmp_path, allow_python_models=True, frontends=frontends)) as served:
        for rows in ([2, 2, 2], [1, 2, 3], [ROWS]):
            given = [wide(count, 10.0 * count) for count in rows]
            for answer, x in zip(await batch(served, *map(of_message, given)), given, strict=True):
                check(answer, x)
        assert await executions(served) == 3


async def test_inputs_kept_by_a_model_are_not_overwritten(tmp_path: Path) -> None:
    write(tmp_path, FULL)
    async with serving(tmp_path, settings=settings(tmp_path, allow_python_models=True)) as served:
        for number in range(5):
            answers = await batch(served, *[of_message(wide(2, 7.0 + number))] * 3)
            totals = [np.frombuffer(one.raw_output_contents[1], np.float32)[0] for one in answers]
            assert totals == [sum(7.0 + before for before in range(number + 1))] * 3


@pytest.fixture
def memory() -> SharedObject:  # type: ignore[misc]
    with shared_object(ROWS * ROW) as made:
        yield made


async def test_requests_in_shared_memory_and_messages_share_one_batch(tmp_path: Path, memory: SharedObject) -> None:
    write(tmp_path, FULL)
    given = [wide(1, 3.0), wide(3, 50.0), wide(2, 900.0)]
    memory.put(given[0])
    memory.put(given[2], ROW)
    async with serving(tmp_path, settings=settings(tmp_path, allow_python_models=True)) as served:
        await register(served, "r", memory.key, ROWS * ROW)
        answers = await batch(served, of_region(1, 0), of_message(given[1]), of_region(2, ROW))
        for answer, x in zip(answers, given, strict=True):
            check(answer, x)
        assert await executions(served) == 1


@pytest.mark.parametrize("rows", [1, 3])
async def test_lone_request_in_shared_memory_is_padded_and_answered(
    tmp_path: Path, memory: SharedObject, rows: int
) -> None:
    sizes = 'parameters { key: "paceline.batch_sizes" value { string_value: "4" } }'
    write(tmp_path, f'backend: "python" max_batch_size: 4 dynamic_batching {{ }} {sizes}')
    memory.put(wide(rows, 5.0))
    async with serving(tmp_path, settings=settings(tmp_path, allow_python_models=True)) as served:
        await register(served, "r", memory.key, ROWS * ROW)
        for _ in range(2):
            (answer,) = await batch(served, of_region(rows, 0))
            check(answer, wide(rows, 5.0))


@pytest.mark.parametrize("rows", [[ROWS], [4, 2]], ids=str)
async def test_tensors_in_shared_memory_are_read_into_a_buffer_of_the_instance(
    tmp_path: Path, memory: SharedObject, monkeypatch: pytest.MonkeyPatch, rows: list[int]
) -> None:
    shapes: list[tuple[int, ...]] = []
    buffer_of = PythonInstance.buffer

    def counted(instance: PythonInstance, index: int, shape: tuple[int, ...]) -> Array | None:
        buffer = buffer_of(instance, index, shape)
        shapes.extend([shape] if buffer is not None else [])
        return buffer

    monkeypatch.setattr(PythonInstance, "buffer", counted)
    write(tmp_path, FULL)
    memory.put(wide(ROWS, 5.0))
    async with serving(tmp_path, settings=settings(tmp_path, allow_python_models=True)) as served:
        await register(served, "r", memory.key, ROWS * ROW)
        shapes.clear()
        begins = [0, *rows[:-1]]
        answers = await batch(served, *(of_region(count, ROW * one) for count, one in zip(rows, begins, strict=True)))
        for answer, count, begin in zip(answers, rows, begins, strict=True):
            check(answer, wide(ROWS, 5.0)[begin : begin + count])
    assert shapes == [(ROWS, WIDTH)]


async def test_request_whose_shared_memory_is_gone_fails_alone(tmp_path: Path, memory: SharedObject) -> None:
    write(tmp_path, FULL)
    given = wide(3, 40.0)
    memory.put(given)
    async with serving(tmp_path, settings=settings(tmp_path, allow_python_models=True)) as served:
        await register(served, "r", memory.key, ROWS * ROW)
        for _ in range(3):
            with shared_object(2 * ROW) as short:
                await register(served, "short", short.key, 2 * ROW)
                calls = await queued(served, [of_region(2, 0, "short"), of_region(3, 0)])
                short.resize(0)
                (last,) = await batch(served, of_message(given[:1]))
                assert (await failure_of(calls[0]))[0] is INVALID
                check(await calls[1], given)
                check(last, given[:1])
                await unregister(served, "short")
