"""System shared memory and batching: who shares a batch, memory that is taken away, tensors that are adapted."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from paceline.backends.spec import ModelSpec, TensorSpec
from paceline.protos import inference_pb2 as pb
from tests.integration.regions import ROW, in_region, regions, register, settings, unregister
from tests.integration.scripted import Script, busy, marked, own, queued, totals
from tests.integration.serving import Served, echo_model, failure_of, serving, write_model
from tests.integration.streams import Stream
from tests.memory_models import MemoryModel
from tests.polling import eventually_async
from tests.shared_objects import SharedObject, add_shared_input, held_by, request_shared_output, shared_object
from tests.wire import add_raw, infer, rows_of_floats

Code = grpc.StatusCode
Request = pb.ModelInferRequest
BATCHED = "max_batch_size: 8 dynamic_batching { }"


@pytest.fixture
def memory() -> Iterator[SharedObject]:
    with shared_object(4096) as made:
        yield made


@pytest.fixture
async def served(tmp_path: Path, memory: SharedObject) -> AsyncIterator[Served]:
    """Model `m` returns FP32 rows, `t` BYTES, `b` BOOL, `twice` its BYTES as `x` and `y`; region `r` is the whole of
    `memory`."""
    whole = (-1, 1)
    twice = ModelSpec(
        (TensorSpec("a", "BYTES", whole),), (TensorSpec("x", "BYTES", whole), TensorSpec("y", "BYTES", whole))
    )
    models = {
        "m": echo_model("FP32"),
        "t": echo_model("BYTES", 1),
        "b": echo_model("BOOL"),
        "twice": MemoryModel(twice, lambda inputs: (*inputs, *inputs)),
    }
    async with serving(tmp_path, models, config=BATCHED, settings=settings(tmp_path)) as served:
        await register(served, "r", memory.key, 4096)
        yield served


async def test_requests_in_messages_and_shared_memory_share_a_batch_and_get_their_answers(
    tmp_path: Path, memory: SharedObject
) -> None:
    script = Script()
    async with serving(tmp_path, {"m": script.model}, config=BATCHED, settings=settings(tmp_path)) as served:
        await register(served, "r", memory.key, 4096)
        memory.put(marked(1, 2), 0)
        memory.put(marked(3, 1), 64)
        requests = [in_region(2, 0, target=512), infer("m", {"a": marked(2, 3)}), in_region(1, 64, target=640)]
        async with busy(served, script):
            calls = await queued(served, requests)
        answers = await asyncio.gather(*calls)
    assert script.served == [[1, 1, 2, 2, 2, 3]]
    assert memory.get(16, 512) == marked(1, 2).tobytes()
    assert answers[1].raw_output_contents[0] == marked(2, 3).tobytes()
    assert memory.get(8, 640) == marked(3).tobytes()


async def test_batch_reads_shared_memory_when_it_executes_and_not_before(tmp_path: Path, memory: SharedObject) -> None:
    script = Script()
    async with serving(tmp_path, {"m": script.model}, config=BATCHED, settings=settings(tmp_path)) as served:
        await register(served, "r", memory.key, 4096)
        memory.put(marked(1))
        async with busy(served, script):
            (call,) = await queued(served, [in_region()])
            memory.put(marked(2))
        assert (await call).raw_output_contents[0] == marked(2).tobytes()


async def test_batch_overwritten_while_it_executes_answers_what_it_read(tmp_path: Path, memory: SharedObject) -> None:
    model = echo_model()
    async with serving(tmp_path, {"m": model}, config=BATCHED, settings=settings(tmp_path)) as served:
        await register(served, "r", memory.key, 4096)
        memory.put(marked(1))
        model.gate.close()
        call = asyncio.ensure_future(served.infer(in_region()))
        await asyncio.to_thread(model.gate.wait_entered, 1)
        memory.put(marked(2))
        model.gate.open()
        assert (await call).raw_output_contents[0] == marked(1).tobytes()


@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize("victims", [[0], [1], [3], [0, 2], [0, 1, 2, 3]])
async def test_truncating_a_region_fails_its_queued_requests_and_not_their_batch_mates(
    tmp_path: Path, memory: SharedObject, isolate: bool, victims: list[int]
) -> None:
    script = Script()
    text = f"{BATCHED} {own(isolate_failures=isolate)}"
    async with serving(tmp_path, {"m": script.model}, config=text, settings=settings(tmp_path)) as served:
        with shared_object(64) as short:
            await register(served, "r", memory.key, 4096)
            await register(served, "short", short.key, 64)
            memory.put(b"".join(marked(mark).tobytes() for mark in range(4)))
            short.put(b"".join(marked(mark).tobytes() for mark in range(4)))
            regions = ["short" if mark in victims else "r" for mark in range(4)]
            async with busy(served, script):
                calls = await queued(served, [in_region(1, ROW * mark, regions[mark]) for mark in range(4)])
                short.resize(0)
            for mark, call in enumerate(calls):
                if mark in victims:
                    code, got = await failure_of(call)
                    assert code is Code.INVALID_ARGUMENT
                    assert got.startswith("model 'm': input 'a': shared memory region 'short': expected ")
                else:
                    assert (await call).raw_output_contents[0] == marked(mark).tobytes()
            left = [mark for mark in range(4) if mark not in victims]
            # Missing rows are filled like padding, as the batch may need one of the allowed sizes.
            assert script.served == ([left + left[-1:] * len(victims)] if left else [])
            counted = totals(await served.metrics())
            assert (counted["success"], counted["OTHER"]) == (5 - len(victims), len(victims))
            code, _ = await failure_of(served.infer(in_region(region="short")))
            assert code is Code.INVALID_ARGUMENT
        assert (await served.infer(in_region())).raw_output_contents[0] == marked(0).tobytes()


async def test_truncating_a_region_before_its_output_is_written_fails_the_request(
    tmp_path: Path, memory: SharedObject
) -> None:
    model = echo_model()
    async with serving(tmp_path, {"m": model}, config=BATCHED, settings=settings(tmp_path)) as served:
        await register(served, "r", memory.key, 4096)
        model.gate.close()
        call = asyncio.ensure_future(served.infer(in_region(target=2048)))
        await asyncio.to_thread(model.gate.wait_entered, 1)
        memory.resize(100)
        model.gate.open()
        code, text = await failure_of(call)
        assert code is Code.INVALID_ARGUMENT
        assert text.startswith("model 'm': output 'x': shared memory region 'r': expected ")
        memory.resize(4096)
        await served.infer(in_region(target=2048))


async def test_too_little_room_for_a_size_known_only_after_execution_writes_nothing(
    served: Served, memory: SharedObject
) -> None:
    text = np.array([[b"x" * 50]], object)
    request = infer("twice", {"a": text})
    request_shared_output(request, "x", "r", 54)
    request_shared_output(request, "y", "r", 53, 64)
    code, got = await failure_of(served.infer(request))
    assert (code, "at least 54 bytes to hold the result, got 53" in got) == (Code.INVALID_ARGUMENT, True)
    assert memory.get(4096) == bytes(4096)
    asked = pb.ModelStatisticsRequest(name="twice")
    (counted,) = (await served.stub.ModelStatistics(asked, timeout=20)).model_stats
    assert (counted.inference_stats.success.count, counted.inference_stats.fail.count) == (0, 1)
    assert (counted.inference_count, counted.execution_count) == (1, 1)


async def test_unlinked_shared_memory_keeps_serving_requests(tmp_path: Path, memory: SharedObject) -> None:
    script = Script()
    async with serving(tmp_path, {"m": script.model}, config=BATCHED, settings=settings(tmp_path)) as served:
        await register(served, "r", memory.key, 4096)
        memory.put(marked(1))
        async with busy(served, script):
            calls = await queued(served, [in_region(target=64)])
            memory.unlink()
        await asyncio.gather(*calls)
        assert memory.get(ROW, 64) == marked(1).tobytes()
        await served.infer(in_region(target=128))
        assert memory.get(ROW, 128) == marked(1).tobytes()


@pytest.mark.parametrize("name", ["r", ""])
async def test_region_unregistered_in_use_stays_until_the_last_request_that_uses_it_ends(
    tmp_path: Path, memory: SharedObject, name: str
) -> None:
    script = Script()
    async with serving(tmp_path, {"m": script.model}, config=BATCHED, settings=settings(tmp_path)) as served:
        await register(served, "r", memory.key, 4096)
        memory.put(marked(1))
        async with busy(served, script):
            calls = await queued(served, [in_region(target=64)])
            await unregister(served, name)
            assert (await regions(served)).keys() == {"r"}
            calls += await queued(served, [in_region(target=128)])
        await asyncio.gather(*calls)
        assert memory.get(ROW, 64) == memory.get(ROW, 128) == marked(1).tobytes()
        await eventually_gone(served, memory)


async def eventually_gone(served: Served, memory: SharedObject) -> None:
    """The thread that read for a request lets go of the region a moment after its answer."""
    await eventually_async(lambda: held_by(key=memory.key)[0] == 1, "no descriptor but the test's own")
    assert await regions(served) == {}
    assert (await failure_of(served.infer(in_region())))[0] is Code.NOT_FOUND


async def test_region_registered_again_while_the_old_one_is_in_use_leaves_both_working(
    tmp_path: Path, memory: SharedObject
) -> None:
    script = Script()
    async with serving(tmp_path, {"m": script.model}, config=BATCHED, settings=settings(tmp_path)) as served:
        with shared_object(4096) as other:
            await register(served, "r", memory.key, 4096)
            memory.put(marked(1))
            other.put(marked(2))
            async with busy(served, script):
                calls = await queued(served, [in_region(target=64)])
                await unregister(served, "r")
                await register(served, "r", other.key, 4096)
                calls += await queued(served, [in_region(target=64)])
            await asyncio.gather(*calls)
            assert memory.get(ROW, 64) == marked(1).tobytes()
            assert other.get(ROW, 64) == marked(2).tobytes()
            assert (await regions(served))["r"][0] == other.key


async def test_failed_and_cancelled_requests_hold_nothing_open(tmp_path: Path, memory: SharedObject) -> None:
    """Not even until the next garbage collection."""
    model = echo_model()
    async with serving(tmp_path, {"m": model}, config=BATCHED, settings=settings(tmp_path)) as served:
        gc.disable()
        try:
            await register(served, "r", memory.key, 4096)
            model.faults.distort_next(lambda outputs: [])
            assert (await failure_of(served.infer(in_region())))[0] is Code.INTERNAL
            model.gate.close()
            running = asyncio.ensure_future(served.infer(in_region()))
            await asyncio.to_thread(model.gate.wait_entered, 2)
            waiting = served.stub.ModelInfer(in_region())
            await eventually_async(lambda: served.waiting("m") == 1, "a request in the queue")
            waiting.cancel()
            await eventually_async(lambda: served.waiting("m") == 0, "an empty queue")
            memory.resize(10)
            refused = served.stub.ModelInfer(in_region(target=512))
            assert (await failure_of(refused))[0] is Code.INVALID_ARGUMENT
            await unregister(served)
            model.gate.open()
            await running
            await eventually_async(lambda: held_by(key=memory.key)[0] == 1, "no descriptor but the test's own")
        finally:
            gc.enable()


async def test_failed_and_cancelled_requests_of_a_stream_hold_nothing_open(
    tmp_path: Path, memory: SharedObject
) -> None:
    model = echo_model()
    async with serving(tmp_path, {"m": model}, config=BATCHED, settings=settings(tmp_path)) as served:
        gc.disable()
        try:
            await register(served, "r", memory.key, 4096)
            stream = Stream(served)
            for _ in range(3):  # from the second on, each is like the one before
                model.faults.distort_next(lambda outputs: [])
                await stream.send(in_region())
                assert (await stream.message()).error_message
            model.gate.close()
            await stream.send(in_region())
            await asyncio.to_thread(model.gate.wait_entered, 2)
            await stream.send(in_region())
            await eventually_async(lambda: served.waiting("m") == 1, "a request in the queue")
            stream.call.cancel()
            await eventually_async(lambda: served.waiting("m") == 0, "an empty queue")
            await unregister(served)
            model.gate.open()
            await eventually_async(lambda: held_by(key=memory.key)[0] == 1, "no descriptor but the test's own")
        finally:
            gc.enable()


async def test_failed_split_request_holds_nothing_open(tmp_path: Path, memory: SharedObject) -> None:
    model = echo_model()
    text = f"{BATCHED} {own(split_oversized=True)}"
    async with serving(tmp_path, {"m": model}, config=text, settings=settings(tmp_path)) as served:
        gc.disable()
        try:
            await register(served, "r", memory.key, 4096)
            model.faults.distort_next(lambda outputs: [], 9)
            assert (await failure_of(served.infer(in_region(100))))[0] is Code.INTERNAL
            await unregister(served)
            await eventually_async(lambda: held_by(key=memory.key)[0] == 1, "no descriptor but the test's own")
        finally:
            gc.enable()


# ---- Models that see other tensors than their clients, and other ways to batch ---------------------------------------


async def test_split_request_in_shared_memory_is_answered_exactly(tmp_path: Path) -> None:
    script = Script()
    text = f"{BATCHED} {own(split_oversized=True)}"
    sent = rows_of_floats(100, 2)
    async with serving(tmp_path, {"m": script.model}, config=text, settings=settings(tmp_path)) as served:
        with shared_object(2 * sent.nbytes) as memory:
            await register(served, "r", memory.key, 2 * sent.nbytes)
            memory.put(sent)
            answer = await served.infer(in_region(100, target=sent.nbytes))
            assert list(answer.outputs[0].shape) == [100, 2]
            assert memory.get(sent.nbytes, sent.nbytes) == sent.tobytes()
    assert max(map(len, script.seen)) == 8


async def test_padded_batch_from_shared_memory_repeats_its_last_row(tmp_path: Path, memory: SharedObject) -> None:
    script = Script()
    text = f"{BATCHED} {own(batch_sizes='1,4,8')}"
    async with serving(tmp_path, {"m": script.model}, config=text, settings=settings(tmp_path)) as served:
        await register(served, "r", memory.key, 4096)
        memory.put(marked(1, 2))
        memory.put(marked(2), 64)
        async with busy(served, script):
            calls = await queued(served, [in_region(2, target=128), in_region(1, 64, target=256)])
        await asyncio.gather(*calls)
        assert memory.get(16, 128) + memory.get(8, 256) == marked(1, 2).tobytes() + marked(2).tobytes()
    assert script.served == [[1, 1, 2, 2]]


async def test_max_queue_bytes_counts_tensors_in_shared_memory(tmp_path: Path, memory: SharedObject) -> None:
    text = f"{BATCHED} {own(max_queue_bytes=16)}"
    async with serving(tmp_path, {"m": echo_model()}, config=text, settings=settings(tmp_path)) as served:
        await register(served, "r", memory.key, 4096)
        assert (await failure_of(served.infer(in_region(3))))[0] is Code.RESOURCE_EXHAUSTED
        await served.infer(in_region(2))


IDENTITY = """
    backend: "identity" max_batch_size: 8
    input {{ name: "a" data_type: TYPE_{0} dims: {1} {2} }}
    output {{ name: "x" data_type: TYPE_{0} dims: {1} {3} }}
    {4}
"""


@pytest.mark.parametrize(
    ("datatype", "dims", "of_input", "of_output", "more"),
    [
        ("FP32", [2], "reshape { shape: [ 1, 2, 1 ] }", "reshape { shape: [ 1, 2, 1 ] }", "dynamic_batching { }"),
        ("FP32", [-1], "allow_ragged_batch: true", "", "RAGGED"),
        ("FP32", [2], "optional: true", "", "dynamic_batching { }"),
        ("INT32", [2], "is_shape_tensor: true", "is_shape_tensor: true", "SHAPE"),
    ],
)
async def test_adapted_tensors_are_read_from_and_written_to_shared_memory(
    tmp_path: Path, memory: SharedObject, datatype: str, dims: list[int], of_input: str, of_output: str, more: str
) -> None:
    scatter = 'batch_output { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "x" source_input: "a" }'
    beside = (
        'input { name: "b" data_type: TYPE_FP32 dims: [ 1 ] } output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] }'
    )
    text = IDENTITY.format(datatype, dims, of_input, of_output, {"RAGGED": scatter, "SHAPE": beside}.get(more, more))
    (write_model(tmp_path, "m") / "config.pbtxt").write_text(text)
    shape = [2] if more == "SHAPE" else [1, 2]
    memory.put(b"12345678" * 3)
    requests = []
    for number in range(3):
        request = Request(model_name="m")
        add_shared_input(request, "a", datatype, shape, "r", 8, 8 * number)
        request_shared_output(request, "x", "r", 8, 512 + 8 * number)
        if more == "SHAPE":
            add_raw(request, "b", "FP32", [1, 1], b"abcd")
        requests.append(request)
    async with serving(tmp_path, settings=settings(tmp_path)) as served:
        await register(served, "r", memory.key, 4096)
        answers = await asyncio.gather(*map(served.infer, requests))
    assert [list(answer.outputs[0].shape) for answer in answers] == [shape] * 3
    assert memory.get(24, 512) == b"12345678" * 3
