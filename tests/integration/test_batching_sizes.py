"""What a model sees of a batch and what callers learn about it: allowed sizes, padding, splitting, batch info."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from paceline.backends.errors import ExecutionError
from paceline.backends.spec import ModelSpec, TensorSpec
from paceline.protos import inference_pb2 as pb
from tests.integration.scripted import Script, busy, mark_of, own, queued, request, send, totals
from tests.integration.serving import Served, failure_of, serving
from tests.memory_models import MemoryModel
from tests.polling import eventually_async
from tests.wire import add_raw, infer, rows_of_floats

Code = grpc.StatusCode
MERGE = "max_batch_size: 8 dynamic_batching { }"
SIZES = f"{MERGE} {own(batch_sizes='1,4,8')}"


@pytest.mark.parametrize(
    ("rows", "seen"),
    [([1], 1), ([2], 4), ([1, 1, 1], 4), ([4], 4), ([3, 2], 8), ([7, 1], 8), ([8], 8)],
)
@pytest.mark.parametrize("order", [1, -1])
async def test_batch_sizes_are_the_only_ones_the_model_sees_and_answers_are_exact(
    tmp_path: Path, rows: list[int], seen: int, order: int
) -> None:
    script = Script()
    async with serving(tmp_path, {"m": script.model}, config=SIZES) as served:
        async with busy(served, script):
            calls = await queued(served, (request(mark, count) for mark, count in enumerate(rows[::order])))
        answers = await asyncio.gather(*calls)
        for mark, (count, answer) in enumerate(zip(rows[::order], answers, strict=True)):
            assert mark_of(answer) == mark
            assert list(answer.outputs[0].shape) == [count, 2]
        assert await served.metric("paceline_padding_rows") == seen - sum(rows)
        assert await served.metric("nv_inference_count") == 1 + sum(rows)
    assert [len(batch) for batch in script.served] == [seen]


async def test_batch_sizes_are_the_only_ones_the_model_sees_in_arbitrary_batches(tmp_path: Path) -> None:
    script = Script()
    async with serving(tmp_path, {"m": script.model}, config=SIZES) as served:
        calls = send(served, *(request(mark, 1 + mark % 5) for mark in range(100)))
        assert [mark_of(answer) for answer in await asyncio.gather(*calls)] == list(range(100))
        total = sum(1 + mark % 5 for mark in range(100))
        assert await served.metric("nv_inference_count") == total
        assert await served.metric("paceline_padding_rows") == sum(map(len, script.seen)) - total
    assert {len(batch) for batch in script.seen} <= {1, 4, 8}


async def test_batch_sizes_apply_to_halves_of_a_failed_batch_too(tmp_path: Path) -> None:
    script = Script()
    script.errors[2] = ExecutionError("no")
    async with serving(tmp_path, {"m": script.model}, config=SIZES) as served:
        async with busy(served, script):
            calls = await queued(served, (request(mark) for mark in range(6)))
        assert (await failure_of(calls[2]))[0] is Code.INTERNAL
        assert [mark_of(await call) for mark, call in enumerate(calls) if mark != 2] == [0, 1, 3, 4, 5]
    assert {len(batch) for batch in script.served} <= {1, 4, 8}


async def test_batch_sizes_are_padded_by_repeating_the_last_row(tmp_path: Path) -> None:
    script = Script()
    async with serving(tmp_path, {"m": script.model}, config=SIZES) as served:
        await served.infer(infer("m", {"a": rows_of_floats(3, 2)}))
    assert script.seen == [[0, 2, 4, 4]]


def two_outputs(compute: Any = None) -> MemoryModel:
    """A model of two outputs; by default, `x` = `a` and `y` = the first column of `a` as text."""
    spec = ModelSpec(
        (TensorSpec("a", "FP32", (-1, -1)),), (TensorSpec("x", "FP32", (-1, -1)), TensorSpec("y", "BYTES", (-1, 1)))
    )

    def both(inputs: Any) -> Any:
        text = np.empty((len(inputs[0]), 1), object)
        text[:, 0] = [str(value).encode() for value in inputs[0][:, 0].tolist()]
        return [inputs[0], text]

    return MemoryModel(spec, compute or both)


@pytest.mark.parametrize("instances", [1, 2])
async def test_split_of_100_rows_into_batches_of_8_is_answered_exactly(tmp_path: Path, instances: int) -> None:
    model = two_outputs()
    text = f"{MERGE} instance_group {{ count: {instances} }} {own(split_oversized=True)}"
    sent = rows_of_floats(100, 3)
    async with serving(tmp_path, {"m": model}, config=text) as served:
        answer = await served.infer(infer("m", {"a": sent}, id="big"))
        assert (answer.id, [list(one.shape) for one in answer.outputs]) == ("big", [[100, 3], [100, 1]])
        assert answer.raw_output_contents[0] == sent.tobytes()
        only_text = await served.infer(infer("m", {"a": sent}, outputs=["y"], parameters={"binary_data_output": False}))
        assert list(only_text.outputs[0].contents.bytes_contents) == [str(v).encode() for v in sent[:, 0].tolist()]
        assert await served.metric("nv_inference_count") == 200
        assert await served.metric("nv_inference_exec_count") == 26
    assert max(sum(batch) for batch in model.batches) == 8


async def test_oversized_request_is_refused_by_default_naming_the_limit(tmp_path: Path) -> None:
    script = Script()
    async with serving(tmp_path, {"m": script.model}, config=MERGE) as served:
        assert await failure_of(served.infer(request(1, rows=100))) == (
            Code.INVALID_ARGUMENT,
            "model 'm': input 'a': expected a batch of 1 to 8 rows, got 100 in shape [100, 2]",
        )
    assert script.seen == []


SPLIT = f"{MERGE} {own(split_oversized=True)}"


async def _settled(served: Served, script: Script) -> None:
    """Check that nothing is left in the queue and that the next request is answered."""
    await eventually_async(lambda: served.waiting("m") == 0, "an empty queue")
    assert mark_of(await served.infer(request(99))) == 99
    assert await served.metric("paceline_lanes") == 0


async def test_split_request_with_a_failing_part_gets_one_error_and_leaves_nothing_queued(tmp_path: Path) -> None:
    script = Script()
    async with serving(tmp_path, {"m": script.model}, config=SPLIT) as served:
        async with busy(served, script) as gate:
            (call,) = send(served, infer("m", {"a": rows_of_floats(100, 2)}))
            await eventually_async(lambda: served.waiting("m") == 13, "all parts waiting")
            script.errors[32] = ExecutionError("a bad part")  # the third part: rows 16 to 23, marked 32 to 46
            gate.open()
            assert await failure_of(call) == (Code.INTERNAL, "model 'm': a bad part")
        await _settled(served, script)
        assert totals(await served.metrics())["BACKEND"] == 1
    assert len(script.served) < 13


async def test_split_request_whose_timeout_passes_gets_one_error_and_leaves_nothing_queued(tmp_path: Path) -> None:
    script = Script()
    policy = "default_queue_policy { allow_timeout_override: true }"
    text = f"max_batch_size: 8 dynamic_batching {{ {policy} }} {own(split_oversized=True)}"
    async with serving(tmp_path, {"m": script.model}, config=text) as served:
        async with busy(served, script):
            code, text = await failure_of(served.infer(request(1, rows=100, timeout=50_000)))
            assert code is Code.DEADLINE_EXCEEDED
            assert "Request timeout expired" in text
            assert served.waiting("m") == 0
        await _settled(served, script)
        assert totals(await served.metrics())["REJECTED"] == 1
    assert script.served == [[99]]


@pytest.mark.parametrize(
    "bounded",
    [
        SPLIT + own(max_queue_rows=50),
        SPLIT.replace("{ }", "{ default_queue_policy { max_queue_size: 6 } }"),
    ],
    ids=["rows", "requests"],
)
async def test_split_request_larger_than_the_queue_queues_as_many_parts_as_have_room(
    tmp_path: Path, bounded: str
) -> None:
    script = Script()
    async with serving(tmp_path, {"m": script.model}, config=bounded) as served:
        async with busy(served, script):
            (call,) = send(served, request(2, rows=100))
            await eventually_async(lambda: served.waiting("m") == 6, "as many parts waiting as have room")
        assert mark_of(await call) == 2
        await _settled(served, script)


async def test_split_of_absurdly_many_rows_is_refused(tmp_path: Path) -> None:
    script = Script()
    absurd = pb.ModelInferRequest(model_name="m")
    add_raw(absurd, "a", "FP32", [2**31 - 1, 2], b"")
    async with serving(tmp_path, {"m": script.model}, config=SPLIT) as served:
        code, text = await failure_of(served.infer(absurd))
        assert code is Code.INVALID_ARGUMENT
        assert "expected a batch of 1 to 8192 rows" in text
        await _settled(served, script)


async def test_cancelled_split_request_takes_all_parts_out_of_the_queue(tmp_path: Path) -> None:
    script = Script()
    async with serving(tmp_path, {"m": script.model}, config=SPLIT) as served:
        async with busy(served, script):
            (call,) = send(served, request(1, rows=100))
            await eventually_async(lambda: served.waiting("m") == 13, "all parts waiting")
            call.cancel()
            await eventually_async(lambda: served.waiting("m") == 0, "all parts gone")
        await _settled(served, script)
    assert script.served == [[99]]


def parameters_of(answer: pb.ModelInferResponse) -> dict[str, object]:
    parameters = answer.parameters
    return {name: getattr(one, str(one.WhichOneof("parameter_choice"))) for name, one in parameters.items()}


async def test_batch_info_describes_the_batch_to_each_request_that_asks(tmp_path: Path) -> None:
    script = Script()
    script.model.latency = lambda rows: 0.02
    async with serving(tmp_path, {"m": script.model}, config=SIZES) as served:
        async with busy(served, script):
            calls = await queued(served, (request(mark, paceline_batch_info=mark != 1) for mark in range(3)))
        first, silent, third = [parameters_of(answer) for answer in await asyncio.gather(*calls)]
        alone = parameters_of(await served.infer(request(9, paceline_batch_info=True)))
    assert silent == {}
    assert set(first) == {
        "paceline_batch_id",
        "paceline_batch_rows",
        "paceline_batch_padded_rows",
        "paceline_queue_us",
        "paceline_compute_us",
    }
    assert first["paceline_batch_id"] == third["paceline_batch_id"] != alone["paceline_batch_id"]
    assert (first["paceline_batch_rows"], first["paceline_batch_padded_rows"]) == (3, 4)
    assert (alone["paceline_batch_rows"], alone["paceline_batch_padded_rows"]) == (1, 1)
    assert first["paceline_compute_us"] == third["paceline_compute_us"]
    assert 20_000 <= int(str(first["paceline_compute_us"])) < 60_000_000
    assert int(str(first["paceline_queue_us"])) > int(str(third["paceline_queue_us"])) >= 0
    assert int(str(alone["paceline_queue_us"])) < 60_000_000


async def test_batch_info_of_a_delayed_request_includes_the_delay(tmp_path: Path) -> None:
    script = Script()
    text = "max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 80000 }"
    async with serving(tmp_path, {"m": script.model}, config=text) as served:
        info = parameters_of(await served.infer(request(1, paceline_batch_info=True)))
    assert 80_000 <= int(str(info["paceline_queue_us"])) < 60_000_000


async def test_batch_info_of_a_split_request_describes_its_last_part(tmp_path: Path) -> None:
    script = Script()
    async with serving(tmp_path, {"m": script.model}, config=SPLIT) as served:
        info = parameters_of(await served.infer(request(1, rows=20, paceline_batch_info=True)))
    assert info["paceline_batch_rows"] == 4


async def test_batch_info_of_the_wrong_type_is_refused(tmp_path: Path) -> None:
    script = Script()
    async with serving(tmp_path, {"m": script.model}, config=MERGE) as served:
        assert await failure_of(served.infer(request(1, paceline_batch_info=1))) == (
            Code.INVALID_ARGUMENT,
            "model 'm': invalid value type for 'paceline_batch_info' parameter, expected bool_param, got int64_param",
        )
