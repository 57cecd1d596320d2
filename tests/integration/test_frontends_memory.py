"""The memory between a server and its fronts is bounded: requests without room are refused, answers wait for it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import numpy as np
import pytest

from paceline.backends.spec import ModelSpec, Tensors, TensorSpec
from tests.integration.front_memory import BATCHED, held_bytes, nothing_held, through_each, two
from tests.integration.serving import echo_model, failure_of, serving
from tests.integration.streams import Stream
from tests.memory_models import MemoryModel
from tests.polling import eventually_async
from tests.wire import infer, rows_of_floats

Code = grpc.StatusCode
MIB = 2**20
KIB_300 = rows_of_floats(1, 300 * 256)
"""Three of these fit into a MiB, but not four."""


def widening(columns: int) -> MemoryModel:
    """A model whose output rows consist of the first element of the input's row, `columns` times."""

    def compute(inputs: Tensors) -> Tensors:
        return [np.repeat(inputs[0][:, :1], columns, axis=1)]

    spec = ModelSpec((TensorSpec("a", "FP32", (-1, -1)),), (TensorSpec("x", "FP32", (-1, -1)),))
    return MemoryModel(spec, compute)


async def test_full_memory_refuses_requests_until_others_are_answered(tmp_path: Path) -> None:
    model = echo_model()
    request = infer("m", {"a": KIB_300})
    async with serving(tmp_path, {"m": model}, config=BATCHED, settings=two(tmp_path, memory_mb=1)) as served:
        await served.infer(request)  # the first of its kind is parsed, and kept elsewhere
        model.gate.close()
        blocker = asyncio.create_task(served.infer(request))
        await asyncio.to_thread(model.gate.wait_entered, 2)
        calls = [asyncio.create_task(served.infer(request)) for _ in range(2)]
        await eventually_async(lambda: served.waiting("m") == 2, "two requests in the queue")
        assert 3 * 300 * 1024 < await held_bytes(served, "in") < 3 * 301 * 1024
        for _ in range(2):
            code, text = await failure_of(served.infer(request))
            assert code is Code.RESOURCE_EXHAUSTED
            assert text == (
                "model 'm': Exceeds maximum queue size of 1048576 bytes of tensors in transit between processes "
                "(--frontend-memory-mb)"
            )
        # A request that needs no shared memory isn't refused.
        small = asyncio.create_task(served.infer(infer("m", {"a": rows_of_floats(1)})))
        await eventually_async(lambda: served.waiting("m") == 3, "a small request in the queue")
        model.gate.open()
        for answer in await asyncio.gather(blocker, *calls):
            assert answer.raw_output_contents[0] == request.raw_input_contents[0]
        await small
        await nothing_held(served)
        assert (await served.infer(request)).raw_output_contents[0] == request.raw_input_contents[0]
        labels = 'model="m",reason="REJECTED",version="1"'
        assert await served.metric("nv_inference_request_failure", labels) == 2


async def test_request_that_can_never_fit_is_refused_and_the_next_is_served(tmp_path: Path) -> None:
    async with serving(tmp_path, {"m": echo_model()}, settings=two(tmp_path, memory_mb=1)) as served:
        huge = infer("m", {"a": rows_of_floats(1, MIB // 4 + 1)})
        assert (await failure_of(served.infer(huge)))[0] is Code.RESOURCE_EXHAUSTED
        exact = infer("m", {"a": rows_of_floats(1, MIB // 4 - 64)})
        assert (await served.infer(exact)).raw_output_contents[0] == exact.raw_input_contents[0]
        await nothing_held(served)


async def test_requests_cancelled_in_the_queue_release_their_memory(tmp_path: Path) -> None:
    model = echo_model()
    request = infer("m", {"a": KIB_300})
    async with serving(tmp_path, {"m": model}, config=BATCHED, settings=two(tmp_path, memory_mb=1)) as served:
        model.gate.close()
        blocker = asyncio.create_task(served.infer(infer("m", {"a": rows_of_floats(1)})))
        await asyncio.to_thread(model.gate.wait_entered, 1)
        for _ in range(3):
            calls = [asyncio.create_task(served.infer(request)) for _ in range(3)]
            await eventually_async(lambda: served.waiting("m") == 3, "three requests in the queue")
            for call in calls:
                call.cancel()
            await eventually_async(lambda: served.waiting("m") == 0, "an empty queue")
        await nothing_held(served)
        model.gate.open()
        await blocker
        assert model.batches == [(1,)]


async def test_answers_that_do_not_fit_together_wait_for_room(tmp_path: Path) -> None:
    model = widening(KIB_300.size)
    async with serving(tmp_path, {"m": model}, config=BATCHED, settings=two(tmp_path, memory_mb=1)) as served:
        model.gate.close()
        calls = [
            asyncio.create_task(served.infer(infer("m", {"a": rows_of_floats(1, 1, first=number)})))
            for number in range(16)
        ]
        await eventually_async(lambda: served.waiting("m") >= 8, "requests in the queue")
        model.gate.open()
        for number, answer in enumerate(await asyncio.gather(*calls)):
            assert answer.raw_output_contents[0] == np.full(KIB_300.size, number, np.float32).tobytes()
        await nothing_held(served)
        assert await served.metric("nv_inference_request_success") == 16


async def test_stream_with_unread_answers_leaves_room_for_others(tmp_path: Path) -> None:
    models = {"wide": widening(KIB_300.size), "m": echo_model()}
    async with (
        serving(tmp_path, models, config=BATCHED, settings=two(tmp_path, memory_mb=4)) as served,
        through_each(served) as (first, second),
    ):
        unread = Stream(first)
        sent = [infer("wide", {"a": rows_of_floats(1, 1, first=number)}) for number in range(60)]
        await unread.send(*sent)
        labels = 'model="wide",version="1"'
        while await served.metric("nv_inference_request_success", labels) < 60:
            await asyncio.sleep(0.01)
        for side in (first, second) * 3:
            for request in (infer("m", {"a": KIB_300}), infer("m", {"a": rows_of_floats(1)})):
                assert (await side.infer(request)).raw_output_contents[0] == request.raw_input_contents[0]
        await unread.end()
        for number in range(60):
            answer = (await unread.message()).infer_response
            assert answer.raw_output_contents[0] == np.full(KIB_300.size, number, np.float32).tobytes()
        await nothing_held(served)


@pytest.mark.parametrize("columns", [2040, 3000, 2**15], ids=["8 KB", "12 KB", "128 KB"])
async def test_small_requests_have_answers_of_any_size_alone_and_together(tmp_path: Path, columns: int) -> None:
    model = widening(columns)
    async with serving(tmp_path, {"m": model}, config=BATCHED, settings=two(tmp_path, memory_mb=1)) as served:
        for crowd in (1, 1, 1, 40):
            answers = await asyncio.gather(
                *(served.infer(infer("m", {"a": rows_of_floats(1, 1, first=number)})) for number in range(crowd))
            )
            for number, answer in enumerate(answers):
                assert answer.raw_output_contents[0] == np.full(columns, number, np.float32).tobytes()
        await nothing_held(served)
        assert await served.metric("nv_inference_request_success") == 43


def long_text(inputs: Tensors) -> Tensors:
    """An element that alone exceeds a MiB, per row. Its array has no more than a reference to it."""
    return [np.full(inputs[0].shape, b"x" * (MIB + 1), object)]


LONG_TEXT = MemoryModel(
    ModelSpec((TensorSpec("a", "FP32", (-1, -1)),), (TensorSpec("x", "BYTES", (-1, -1)),)), long_text
)


@pytest.mark.parametrize("wide", [widening(MIB // 4 + 1), LONG_TEXT], ids=["numbers", "text"])
async def test_answer_beyond_the_memory_is_refused_each_time(tmp_path: Path, wide: MemoryModel) -> None:
    models = {"wide": wide, "m": echo_model()}
    async with serving(tmp_path, models, config=BATCHED, settings=two(tmp_path, memory_mb=1)) as served:
        too_large = infer("wide", {"a": rows_of_floats(1)})
        for together in (1, 1, 2):
            calls = [failure_of(served.infer(too_large)) for _ in range(together)]
            for code, text in await asyncio.gather(*calls):
                assert code is Code.RESOURCE_EXHAUSTED
                assert text == (
                    "model 'wide': expected outputs that one message can carry, at most 1048576 bytes in all "
                    "(--frontend-memory-mb), got more; request fewer rows or outputs, or use shared memory"
                )
        request = infer("m", {"a": KIB_300})
        assert (await served.infer(request)).raw_output_contents[0] == request.raw_input_contents[0]
        await nothing_held(served)
        labels = 'model="wide",reason="BACKEND",version="1"'
        assert await served.metric("nv_inference_request_failure", labels) == 4
        assert await served.metric("nv_inference_request_success", 'model="wide",version="1"') == 0


@pytest.mark.parametrize("raw", [True, False], ids=["raw", "typed"])
async def test_answer_of_all_of_the_memory_is_sent_each_time(tmp_path: Path, raw: bool) -> None:
    columns = MIB // 4 - 64
    models = {"m": widening(columns)}
    async with serving(tmp_path, models, config=BATCHED, settings=two(tmp_path, memory_mb=1)) as served:
        for number in range(3):
            request = infer("m", {"a": rows_of_floats(1, 1, first=number)}, parameters={"binary_data_output": raw})
            answer = await served.infer(request)
            typed = np.array(answer.outputs[0].contents.fp32_contents, np.float32).tobytes()
            sent = answer.raw_output_contents[0] if raw else typed
            assert sent == np.full(columns, number, np.float32).tobytes()
            await nothing_held(served)
