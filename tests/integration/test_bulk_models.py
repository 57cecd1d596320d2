"""What computes the rows of a bulk job: a model of this process, whose calls are executions by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from paceline.backends.errors import ExecutionError, OutOfMemory
from paceline.backends.spec import Tensors
from paceline.clients.errors import InferenceError, Internal, InvalidArgument
from paceline.server.bulk.columns import Columns
from paceline.server.bulk.execution import Calls, execute
from paceline.server.bulk.models import EngineModel, engine_model
from paceline.server.bulk.probe import Sample, choose
from paceline.server.bulk.tally import Tally
from paceline.server.bulk.values import BulkError, Chunk
from paceline.server.cpus import usable_cpus
from paceline.server.models.defaults import Offline
from paceline.server.models.offline import layouts
from tests import models
from tests.integration.serving import echo_model, write_model
from tests.memory_models import MemoryBackend, MemoryModel

BATCHED = "max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 60000000 }"


@asynccontextmanager
async def memory_model(
    root: Path, model: MemoryModel, config: str = BATCHED, instances: int = 0
) -> AsyncIterator[EngineModel]:
    folder = write_model(root, "m", config)
    backend = MemoryBackend({"m": model})
    async with engine_model(folder, max_rows=64, offline=Offline(instances), backend_of=lambda _: backend) as opened:
        yield opened


def rows(*values: float) -> dict[str, Any]:
    return {"a": np.array(values, np.float32)[:, None]}


async def failure(model: EngineModel, inputs: dict[str, Any]) -> InferenceError:
    with pytest.raises(InferenceError) as raised:
        await model.infer(inputs, ["x"])
    return raised.value


async def test_each_call_is_an_execution_of_its_own(tmp_path: Path) -> None:
    async with memory_model(tmp_path, memory := echo_model()) as model:
        given = [rows(*range(count)) for count in (1, 2, 3, 1, 8)]
        results = await asyncio.gather(*(model.infer(one, ["x"]) for one in given))
    assert sorted(memory.batches) == [(1,), (1,), (2,), (3,), (8,)]
    for one, result in zip(given, results, strict=True):
        np.testing.assert_array_equal(result["x"], one["a"])


async def test_no_call_is_refused_for_want_of_room(tmp_path: Path) -> None:
    queue = "default_queue_policy { max_queue_size: 1 default_timeout_microseconds: 1 }"
    own = 'parameters { key: "paceline.max_queue_rows" value { string_value: "1" } }'
    config = f"max_batch_size: 8 dynamic_batching {{ {queue} }} {own}"
    async with memory_model(tmp_path, memory := echo_model(), config) as model:
        memory.gate.close()
        calls = asyncio.gather(*(model.infer(rows(value), ["x"]) for value in range(20)))
        await asyncio.to_thread(memory.gate.wait_entered, 1)
        memory.gate.open()
        assert [result["x"][0, 0] for result in await calls] == list(range(20))


async def test_instances_are_as_many_as_asked_for(tmp_path: Path) -> None:
    config = BATCHED + " instance_group [ { count: 1 }, { count: 4 } ]"
    async with memory_model(tmp_path, memory := echo_model(), config, 3) as model:
        assert (memory.open_instances, model.at_once, model.max_rows) == (3, 6, 8)
        (group,) = model.description.instances
        assert group.count == 3


async def test_threads_are_those_asked_for_whatever_the_model_says(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    models.write(models.mlp(), folder / "1" / "model.onnx")
    threads = 'parameters { key: "intra_op_thread_count" value { string_value: "%s" } }'
    (folder / "config.pbtxt").write_text(threads % "none")  # refused, if it were used
    with pytest.raises(BulkError, match="intra_op_thread_count"):
        async with engine_model(folder, max_rows=64, offline=Offline()):
            raise AssertionError
    async with engine_model(folder, max_rows=64, offline=Offline(intra_op_threads=1)) as model:
        assert (await model.infer({"INPUT0": np.zeros((3, 16), np.float32)}, []))["OUTPUT0"].shape == (3, 4)


async def test_model_without_configuration_takes_the_rows_given(tmp_path: Path) -> None:
    path = models.write(models.mlp(), tmp_path / "mlp.onnx")
    async with engine_model(path, max_rows=200, offline=Offline()) as model:
        assert (model.max_rows, model.lengths, model.description.name) == (200, None, "mlp")
        x = np.random.default_rng(0).standard_normal((200, 16)).astype(np.float32)
        assert (await model.infer({"INPUT0": x}, ["OUTPUT0"]))["OUTPUT0"].shape == (200, 4)


async def test_values_and_memory_are_faults_of_the_rows(tmp_path: Path) -> None:
    async with memory_model(tmp_path, memory := echo_model()) as model:
        memory.faults.raise_next(OutOfMemory("no memory for 8 rows"))
        error = await failure(model, rows(*range(8)))
        assert type(error) is Internal
        assert "no memory for 8 rows" in error.message
        error = await failure(model, {"a": np.full((1, 1), 1e300)})
        assert type(error) is InvalidArgument
        assert "FP32 can't hold 1e+300" in error.message


async def test_row_that_fails_alone_leaves_its_neighbours(tmp_path: Path) -> None:
    def has_5(inputs: Tensors) -> bool:
        return bool((inputs[0] == 5).any())

    async with memory_model(tmp_path, memory := echo_model()) as model:
        memory.faults.raise_when(has_5, ExecutionError("5 is out of range"))
        batch = np.arange(8)
        table = pa.record_batch({"a": pa.array([[number] for number in range(8)], pa.list_(pa.float32(), 1))})
        given = Columns(model.description, table.schema).rows(Chunk(table, batch))
        results = await execute(Calls(model, ["x"]), 0, given, [batch], Tally())
    assert sorted(one.outputs["x"].ravel().tolist() for one in results.computed) == [[0, 1, 2, 3], [4], [6, 7]]
    (failed,) = results.failed
    assert failed.place == 5
    assert "5 is out of range" in failed.reason
    assert memory.batches[:5] == [(8,), (4,), (2,), (1,), (1,)]


@pytest.mark.parametrize(
    ("rows", "instances", "left_bytes"), [(0, 0, 2**50), (4, 2, 0), (0, 0, 0)], ids=["auto", "given", "no memory"]
)
async def test_probe_chooses_from_what_may_be(tmp_path: Path, rows: int, instances: int, left_bytes: int) -> None:
    path = models.write(models.mlp(), tmp_path / "mlp.onnx")
    table = pa.record_batch({"INPUT0": pa.array([[0.5] * 16] * 64, pa.list_(pa.float32(), 16))})
    opened: list[Offline] = []

    def open_model(offline: Offline) -> AbstractAsyncContextManager[EngineModel]:
        opened.append(offline)
        return engine_model(path, max_rows=32, offline=offline)

    def sample_of(model: EngineModel) -> Sample:
        given = Columns(model.description, table.schema).rows(Chunk(table, np.arange(64)))
        return Sample(given, [], lambda size: [np.arange(size)])

    choice = await choose(
        open_model, sample_of, batch_rows=rows, instances=instances, left_bytes=lambda: float(left_bytes)
    )
    assert choice.offline in opened
    possible = layouts(instances, usable_cpus().count)
    assert opened == (possible if left_bytes else possible[:1])
    assert choice.measured.batch_rows in ([rows] if rows else [1, 2, 4, 8, 16, 32])
    assert choice.measured.output_row_bytes == 16


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ("max_batch_size: 8 sequence_batching { }", "it remembers earlier requests of a sequence"),
        ("max_batch_size: 7 input { name: 'b' }", "'b'"),
    ],
    ids=["sequences", "faulty"],
)
async def test_model_that_cannot_compute_rows_is_refused(tmp_path: Path, config: str, why: str) -> None:
    with pytest.raises(BulkError, match=why):
        async with memory_model(tmp_path, echo_model(), config):
            raise AssertionError
