"""Requests of many callers share batches, over the wire. How they are grouped is read from the model's own record."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.backends.spec import ModelSpec, TensorSpec
from paceline.protos import inference_pb2 as pb
from tests.integration import scripted
from tests.integration.scripted import Script
from tests.integration.serving import Served, echo_model, serving, write_model
from tests.memory_models import MemoryModel
from tests.polling import eventually_async
from tests.wire import infer, rows_of_floats

MERGE = "max_batch_size: 8 dynamic_batching { }"


def send(served: Served, *requests: pb.ModelInferRequest) -> list[asyncio.Task[Any]]:
    """Calls in flight."""
    return [asyncio.create_task(served.infer(request)) for request in requests]


async def busy(served: Served, model: MemoryModel, columns: int = 2) -> list[asyncio.Task[Any]]:
    """One request that occupies the model until its gate is opened."""
    model.gate.close()
    before = model.gate.entered
    blocker = send(served, infer("m", {"a": rows_of_floats(1, columns)}))
    await asyncio.to_thread(model.gate.wait_entered, before + 1)
    return blocker


def echoes(requests: Sequence[pb.ModelInferRequest], responses: Sequence[pb.ModelInferResponse]) -> bool:
    return [list(one.raw_input_contents) for one in requests] == [list(one.raw_output_contents) for one in responses]


async def test_batch_of_64_clients_averages_above_8_rows(tmp_path: Path) -> None:
    model = echo_model()
    async with serving(tmp_path, {"m": model}, config="max_batch_size: 64 dynamic_batching { }") as served:
        # Each time in a shape of its own: where durations are known, the next batch may begin to form before the end.
        for columns in range(16, 21):
            blocker = await busy(served, model, columns)
            requests = [infer("m", {"a": rows_of_floats(1, columns, first=i * 100)}) for i in range(64)]
            calls = send(served, *requests)
            await eventually_async(lambda: served.waiting("m") == 64, "64 requests waiting")
            model.gate.open()
            assert echoes(requests, await asyncio.gather(*calls))
            await asyncio.gather(*blocker)
        rows, executions = await served.metric("nv_inference_count"), await served.metric("nv_inference_exec_count")
        assert rows == 65 * 5
        assert executions == 2 * 5
        assert rows / executions > 8
        assert await served.metric("nv_inference_request_success") == 65 * 5
        assert await served.metric("paceline_batch_rows_count") == executions


async def test_batch_forms_up_to_its_limit_while_the_model_is_busy(tmp_path: Path) -> None:
    model = echo_model()
    async with serving(tmp_path, {"m": model}, config=MERGE) as served:
        blocker = await busy(served, model)
        requests = [infer("m", {"a": rows_of_floats(1 + i % 2, first=i * 10)}) for i in range(10)]  # 15 rows
        calls = send(served, *requests)
        await eventually_async(lambda: served.waiting("m") == 10, "ten requests waiting")
        model.gate.open()
        assert echoes(requests, await asyncio.gather(*calls))
        await asyncio.gather(*blocker)
    sizes = [sum(batch) for batch in model.batches]
    assert sizes[0] == 1
    assert sizes[1:] in ([8, 7], [7, 8])


async def test_batch_without_dynamic_batching_is_always_one_request(tmp_path: Path) -> None:
    model = echo_model()
    tensor = 'name: "{}" data_type: TYPE_FP32 dims: [ -1 ]'
    config = f"max_batch_size: 8 input {{ {tensor.format('a')} }} output {{ {tensor.format('x')} }}"
    async with serving(tmp_path, {"m": model}, config=config) as served:
        blocker = await busy(served, model)
        requests = [infer("m", {"a": rows_of_floats(rows)}) for rows in (1, 2, 3, 8)]
        calls = send(served, *requests)
        await eventually_async(lambda: served.waiting("m") == 4, "four requests waiting")
        model.gate.open()
        assert echoes(requests, await asyncio.gather(*calls))
        await asyncio.gather(*blocker)
    assert sorted(model.batches) == [(1,), (1,), (2,), (3,), (8,)]


_TENSOR = 'name: "{}" data_type: TYPE_FP32 dims: [ -1, 3 ]'


@pytest.mark.parametrize(
    ("first", "config"),
    [
        (-1, f"input {{ {_TENSOR.format('a')} }} output {{ {_TENSOR.format('x')} }} dynamic_batching {{ }}"),
        (2, ""),  # the first dimension of the output isn't free
    ],
    ids=["configured", "not all free"],
)
async def test_batch_of_a_model_without_batch_axis_is_always_one_request(
    tmp_path: Path, first: int, config: str
) -> None:
    model = MemoryModel(ModelSpec((TensorSpec("a", "FP32", (-1, 3)),), (TensorSpec("x", "FP32", (first, 3)),)))
    async with serving(tmp_path, {"m": model}, config=config) as served:
        model.gate.close()
        requests = [infer("m", {"a": rows_of_floats(2, 3, first=10 * i)}) for i in range(4)]
        calls = send(served, requests[0])
        await asyncio.to_thread(model.gate.wait_entered, 1)
        calls += send(served, *requests[1:])
        await eventually_async(lambda: served.waiting("m") == 3, "three requests waiting")
        model.gate.open()
        assert echoes(requests, await asyncio.gather(*calls))
    assert model.batches == [(1,)] * 4


async def test_batches_of_mixed_shapes_group_equal_ones_and_starve_none(tmp_path: Path) -> None:
    model = echo_model("FP32", -1)
    async with serving(tmp_path, {"m": model}, config=MERGE) as served:
        model.gate.close()
        blocker = send(served, infer("m", {"a": rows_of_floats(1, 9)}))
        await asyncio.to_thread(model.gate.wait_entered, 1)
        requests = [infer("m", {"a": rows_of_floats(1, 2 + i % 3, first=i * 10)}) for i in range(12)]
        calls = send(served, *requests)
        await eventually_async(lambda: served.waiting("m") == 12, "twelve requests waiting")
        assert await served.metric("paceline_lanes") == 3
        model.gate.open()
        assert echoes(requests, await asyncio.gather(*calls))
        await asyncio.gather(*blocker)
    assert model.batches == [(1,), (1,) * 4, (1,) * 4, (1,) * 4]


async def test_requests_of_a_batch_each_get_the_outputs_they_asked_for(tmp_path: Path) -> None:
    two = tuple(TensorSpec(name, "FP32", (-1, -1)) for name in ("x", "y"))
    model = MemoryModel(ModelSpec((TensorSpec("a", "FP32", (-1, -1)),), two), lambda inputs: [inputs[0], -inputs[0]])
    async with serving(tmp_path, {"m": model}, config=MERGE) as served:
        blocker = await busy(served, model)
        wanted = (["y"], ["x"], ["y", "x"], [])
        calls = send(served, *(infer("m", {"a": rows_of_floats(1)}, outputs=names) for names in wanted))
        await eventually_async(lambda: served.waiting("m") == 4, "four requests waiting")
        model.gate.open()
        responses = await asyncio.gather(*calls)
        await asyncio.gather(*blocker)
    assert model.batches[1] == (1,) * 4
    x, y = rows_of_floats(1).tobytes(), (-rows_of_floats(1)).tobytes()
    assert [list(one.raw_output_contents) for one in responses] == [[y], [x], [y, x], [x, y]]
    assert [[output.name for output in one.outputs] for one in responses] == [["y"], ["x"], ["y", "x"], ["x", "y"]]


PREFERRED = """
    max_batch_size: 8
    dynamic_batching {{ preferred_batch_size: [ 2, 6 ] max_queue_delay_microseconds: {us} }}
"""
LONG_US = 100_000_000


@pytest.mark.parametrize(
    ("rows", "batches"),
    [
        ([2], [(2,)]),
        ([6], [(6,)]),
        ([7], [(7,)]),
        ([8], [(8,)]),
        ([1, 1], [(1, 1)]),
        ([3, 7], [(3,), (7,)]),
        ([1, 1, 1, 1, 1, 1], [(1, 1), (1, 1), (1, 1)]),
    ],
)
async def test_preferred_sizes_leave_without_waiting_for_the_delay(
    tmp_path: Path, rows: list[int], batches: list[tuple[int, ...]]
) -> None:
    """Requests are sent one by one, each when the last one has arrived; the delay is far longer than the test waits."""
    model = echo_model()
    async with serving(tmp_path, {"m": model}, config=PREFERRED.format(us=LONG_US)) as served:
        calls: list[asyncio.Task[Any]] = []
        for count in rows:
            seen = len(calls)
            calls += send(served, infer("m", {"a": rows_of_floats(count)}))
            await eventually_async(lambda seen=seen: _known(served, model) == seen + 1, "the request received")
        await asyncio.gather(*calls)
    assert model.batches == batches


def _known(served: Served, model: MemoryModel) -> int:
    """Requests that have arrived: waiting, or in a batch."""
    return served.waiting("m") + sum(len(batch) for batch in model.batches)


async def test_other_sizes_wait_for_the_delay_and_no_longer(tmp_path: Path) -> None:
    model = echo_model()
    async with serving(tmp_path, {"m": model}, config=PREFERRED.format(us=150_000)) as served:
        began = time.monotonic()
        await asyncio.gather(*send(served, infer("m", {"a": rows_of_floats(3)})))
        assert time.monotonic() - began >= 0.15
        waited_us = await served.metric("nv_inference_queue_duration_us")
    assert model.batches == [(3,)]
    assert 150_000 <= waited_us < 60_000_000


async def test_preferred_size_completed_by_a_second_request_leaves_at_once(tmp_path: Path) -> None:
    model = echo_model()
    async with serving(tmp_path, {"m": model}, config=PREFERRED.format(us=LONG_US)) as served:
        calls = send(served, infer("m", {"a": rows_of_floats(1)}))
        await eventually_async(lambda: served.waiting("m") == 1, "the first request waiting")
        calls += send(served, infer("m", {"a": rows_of_floats(1)}))
        await asyncio.gather(*calls)
    assert model.batches == [(1, 1)]


async def test_delay_can_be_the_largest_possible_number(tmp_path: Path) -> None:
    model = echo_model()
    async with serving(tmp_path, {"m": model}, config=PREFERRED.format(us=2**64 - 1)) as served:
        calls = send(served, infer("m", {"a": rows_of_floats(1)}))
        await eventually_async(lambda: served.waiting("m") == 1, "the first request waiting")
        calls += send(served, infer("m", {"a": rows_of_floats(1)}))
        await asyncio.gather(*calls)


async def test_versions_of_a_model_have_separate_queues(tmp_path: Path) -> None:
    """While one version is busy and requests wait for it, those for the other are answered."""
    script = Script()
    (write_model(tmp_path, "m", f"{MERGE} version_policy {{ all {{ }} }}") / "2").mkdir()
    async with serving(tmp_path, {"m": script.model}) as served:
        async with scripted.busy(served, script):  # version 2, the latest
            waiting = await scripted.queued(served, (scripted.request(mark) for mark in range(3)))
            for mark in (7, 8):
                other = scripted.request(mark)
                other.model_version = "1"
                assert (await served.infer(other)).model_version == "1"
            assert (served.waiting("m", "2"), served.waiting("m", "1")) == (3, 0)
        assert [one.model_version for one in await asyncio.gather(*waiting)] == ["2"] * 3
    assert script.served == [[7], [8], [0, 1, 2]]
