"""The asyncio client that merges many requests into one: each caller gets its own result."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from paceline.backends.errors import OutOfMemory
from paceline.backends.spec import ModelSpec, Tensors, TensorSpec
from paceline.clients import (
    AsyncInferenceClient,
    Cancelled,
    ClientClosed,
    DeadlineExceeded,
    Internal,
    NotFound,
    ResourceExhausted,
    ResponseError,
)
from paceline.server.config import Settings
from paceline.server.limits import Limits
from tests.integration.scripted import Script, busy, marked, own, totals
from tests.integration.serving import Served, echo_model, serving
from tests.memory_models import MemoryModel
from tests.polling import eventually_async

BATCHES = "max_batch_size: 8 dynamic_batching { }"
QUEUE_OF_ONE = "dynamic_batching { default_queue_policy { max_queue_size: 1 } }"


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
async def served(tmp_path: Path, script: Script) -> AsyncIterator[Served]:
    models = {"m": script.model, "text": echo_model("BYTES", 2)}
    async with serving(tmp_path, models, config=BATCHES) as served:
        yield served


@pytest.fixture(params=["call", "stream"])
async def client(request: pytest.FixtureRequest, served: Served) -> AsyncIterator[AsyncInferenceClient]:
    async with AsyncInferenceClient(served.target, transport=request.param, coalesce=4, timeout_s=20) as client:
        yield client


async def requests_of(served: Served, model: str = "m") -> float:
    return await served.metric("nv_inference_request_success", f'model="{model}",version="1"')


async def ask(client: AsyncInferenceClient, *marks: float, **more: Any) -> list[float]:
    rows = np.concatenate([marked(mark) for mark in marks])
    result = await client.infer("m", {"a": rows}, **more)
    return [float(row[0]) for row in result["x"]]


async def test_concurrent_rows_share_requests_and_each_caller_gets_its_own(
    served: Served, client: AsyncInferenceClient
) -> None:
    answers = await asyncio.gather(*(ask(client, number) for number in range(100)))
    assert answers == [[number] for number in range(100)]
    assert await requests_of(served) == 25


async def test_calls_with_different_numbers_of_rows_share_requests_up_to_the_limit(
    served: Served, client: AsyncInferenceClient
) -> None:
    shares = [(1,), (2, 3), (4,), (5, 6, 7), (8,), (9, 10, 11, 12), (13,)]
    answers = await asyncio.gather(*(ask(client, *marks) for marks in shares))
    assert answers == [list(map(float, marks)) for marks in shares]
    # 1 + 2 + 1 rows, 3 + 1, the four that fill a request by themselves, and the last one.
    assert await requests_of(served) == 4


async def test_single_request_is_sent_at_once_with_its_id(client: AsyncInferenceClient) -> None:
    result = await client.infer("m", {"a": marked(3)}, request_id="mine")
    assert (result.id, float(result["x"][0, 0])) == ("mine", 3.0)


async def test_ids_are_returned_to_callers_that_share_a_request(client: AsyncInferenceClient) -> None:
    results = await asyncio.gather(*(client.infer("m", {"a": marked(n)}, request_id=f"r{n}") for n in range(4)))
    assert [result.id for result in results] == ["r0", "r1", "r2", "r3"]


async def test_texts_share_requests(served: Served, client: AsyncInferenceClient) -> None:
    texts = [[[f"{n}".encode(), b"\0x" * n]] for n in range(4)]
    results = await asyncio.gather(*(client.infer("text", {"a": np.array(each, object)}) for each in texts))
    assert [result["x"].tolist() for result in results] == texts
    assert await requests_of(served, "text") == 1


@pytest.mark.parametrize(
    "other",
    [
        {"parameters": {"mine": 1}},
        {"version": "1"},
        {"outputs": ["x"]},
    ],
    ids=lambda other: str(*other),
)
async def test_requests_that_differ_in_more_than_rows_are_not_merged(
    served: Served, client: AsyncInferenceClient, other: dict[str, Any]
) -> None:
    assert await asyncio.gather(ask(client, 1), ask(client, 2, **other)) == [[1], [2]]
    assert await requests_of(served) == 2


async def test_requests_of_different_shapes_are_not_merged(served: Served, client: AsyncInferenceClient) -> None:
    wide, narrow = np.ones((1, 7), np.float32), np.ones((1, 3), np.float32)
    results = await asyncio.gather(client.infer("m", {"a": wide}), client.infer("m", {"a": narrow}))
    assert [result["x"].shape for result in results] == [(1, 7), (1, 3)]
    assert await requests_of(served) == 2


async def test_poisoned_row_fails_alone(served: Served, client: AsyncInferenceClient, script: Script) -> None:
    script.errors[2] = RuntimeError("no twos")
    outcomes = await asyncio.gather(*(ask(client, number) for number in range(4)), return_exceptions=True)
    assert isinstance(outcomes[2], Internal)
    assert [outcome for number, outcome in enumerate(outcomes) if number != 2] == [[0], [1], [3]]
    counted = totals(await served.metrics())
    assert counted["BACKEND"] > 1, "others were sent with it at first"


@pytest.mark.parametrize("transport", ["call", "stream"])
async def test_rows_too_large_together_for_a_message_are_sent_in_smaller_requests(
    tmp_path: Path, transport: Literal["call", "stream"]
) -> None:
    small = Settings(paths=(tmp_path,), limits=Limits(message_bytes=10_000))
    async with (
        serving(tmp_path, {"m": echo_model("FP32", 1000)}, config=BATCHES, settings=small) as served,
        AsyncInferenceClient(served.target, transport=transport, coalesce=8, timeout_s=20) as client,
    ):
        rows = np.arange(8_000, dtype=np.float32).reshape(8, 1, 1000)
        results = await asyncio.gather(*(client.infer("m", {"a": row}) for row in rows))
        np.testing.assert_array_equal([result["x"] for result in results], rows)
        with pytest.raises(ResourceExhausted, match="larger than max"):
            await client.infer("m", {"a": np.zeros((3, 1000), np.float32)})


async def test_row_whose_answer_is_too_large_for_a_message_fails_alone(tmp_path: Path) -> None:
    def compute(inputs: Tensors) -> Tensors:
        return (np.zeros((len(inputs[0]), int(inputs[0].max())), np.float32),)

    model = MemoryModel(ModelSpec((TensorSpec("a", "INT64", (-1, 1)),), (TensorSpec("x", "FP32", (-1, -1)),)), compute)
    async with (
        serving(tmp_path, {"m": model}, config=f"max_batch_size: 4 {own(isolate_failures=False)}") as served,
        AsyncInferenceClient(
            served.target, coalesce=4, timeout_s=20, options=[("grpc.max_receive_message_length", 2_000)]
        ) as client,
    ):
        asking = [client.infer("m", {"a": np.array([[size]])}) for size in (1_000, 1, 2, 3)]
        outcomes = await asyncio.gather(*asking, return_exceptions=True)
    assert [isinstance(outcome, ResourceExhausted) for outcome in outcomes] == [True, False, False, False]


@pytest.mark.parametrize("transport", ["call", "stream"])
@pytest.mark.parametrize("bound", [{"max_queue_bytes": 100}, {"max_queue_rows": 3}], ids=lambda bound: str(*bound))
async def test_rows_beyond_the_queue_are_sent_in_smaller_requests(
    tmp_path: Path, script: Script, bound: dict[str, int], transport: Literal["call", "stream"]
) -> None:
    async with (
        serving(tmp_path, {"m": script.model}, config=f"max_batch_size: 8 {own(**bound)}") as served,
        AsyncInferenceClient(served.target, transport=transport, coalesce=16, timeout_s=20) as client,
    ):
        rows = [marked(mark, columns=8) for mark in range(8)]
        results = await asyncio.gather(*(client.infer("m", {"a": row}) for row in rows))
        assert [float(result["x"][0, 0]) for result in results] == list(range(8))
        with pytest.raises(ResourceExhausted, match="maximum queue size"):
            await client.infer("m", {"a": marked(9, rows=4, columns=8)})


async def test_requests_are_as_large_as_the_queue_has_room_for(tmp_path: Path, script: Script) -> None:
    async with (
        serving(tmp_path, {"m": script.model}, config=f"max_batch_size: 32 {own(max_queue_rows=24)}") as served,
        AsyncInferenceClient(served.target, coalesce=32, timeout_s=20) as client,
    ):
        assert await asyncio.gather(*(ask(client, number) for number in range(32))) == [[n] for n in range(32)]
        labels = 'model="m",reason="REJECTED",version="1"'
        assert await served.metric("nv_inference_request_failure", labels) == 1
        assert await requests_of(served) == 2
        # Nothing waits any more, so that the next ones try again how much there is room for.
        assert await asyncio.gather(*(ask(client, number) for number in range(24))) == [[n] for n in range(24)]
        assert await requests_of(served) == 3


async def test_cancelled_smaller_request_makes_room_for_the_next(tmp_path: Path, script: Script) -> None:
    async with (
        serving(tmp_path, {"m": script.model}, config=f"max_batch_size: 8 {own(max_queue_rows=4)}") as served,
        AsyncInferenceClient(served.target, coalesce=8, timeout_s=20) as client,
    ):
        async with busy(served, script):
            asking = [asyncio.create_task(ask(client, number)) for number in range(8)]
            await eventually_async(lambda: served.waiting("m") == 1, "half of them")
            for task in asking[:4]:
                task.cancel()
            await asyncio.wait(asking[:4])
        assert await asyncio.gather(*asking[4:]) == [[n] for n in range(4, 8)]


async def test_row_larger_than_the_queue_is_refused_alone(tmp_path: Path) -> None:
    config = f"max_batch_size: 8 {own(max_queue_bytes=100)}"
    async with (
        serving(tmp_path, {"text": echo_model("BYTES", 1)}, config=config) as served,
        AsyncInferenceClient(served.target, coalesce=8, timeout_s=20) as client,
    ):
        texts = [b"a", b"b" * 200, b"c", b"d" * 300]
        asking = [client.infer("text", {"a": np.array([[text]], object)}) for text in texts]
        outcomes = await asyncio.gather(*asking, return_exceptions=True)
    assert [isinstance(outcome, ResourceExhausted) for outcome in outcomes] == [False, True, False, True]


@pytest.mark.parametrize(
    ("bound", "requests"), [(own(max_queue_bytes=100), 4), (QUEUE_OF_ONE, 1)], ids=["bytes", "requests"]
)
async def test_full_queue_is_asked_at_most_once_more_than_without_merging(
    tmp_path: Path, script: Script, bound: str, requests: int
) -> None:
    async with (
        serving(tmp_path, {"m": script.model}, config=f"max_batch_size: 8 {bound}") as served,
        AsyncInferenceClient(served.target, coalesce=8, timeout_s=20) as client,
    ):
        async with busy(served, script):
            filling = asyncio.create_task(client.infer("m", {"a": marked(9, columns=24)}))
            await eventually_async(lambda: served.waiting("m") == 1, "a full queue")
            asking = [ask(client, number) for number in range(8)]
            outcomes = await asyncio.gather(*asking, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [ResourceExhausted] * 8
        assert len({id(outcome) for outcome in outcomes}) == 8
        labels = 'model="m",reason="REJECTED",version="1"'
        assert await served.metric("nv_inference_request_failure", labels) == requests
        await filling


async def test_rows_without_enough_memory_together_are_sent_in_smaller_requests(tmp_path: Path) -> None:
    model = echo_model()
    model.faults.raise_when(lambda inputs: len(inputs[0]) > 1, OutOfMemory("Failed to allocate memory"))
    async with (
        serving(tmp_path, {"m": model}, config=f"max_batch_size: 8 {own(isolate_failures=False)}") as served,
        AsyncInferenceClient(served.target, coalesce=8, timeout_s=20) as client,
    ):
        assert await asyncio.gather(*(ask(client, number) for number in range(8))) == [[n] for n in range(8)]


async def test_error_of_a_merged_request_is_separate_for_each_caller(client: AsyncInferenceClient) -> None:
    asking = [client.infer("nope", {"a": marked(number)}) for number in range(4)]
    outcomes = await asyncio.gather(*asking, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [NotFound] * 4
    assert len({id(outcome) for outcome in outcomes}) == 4


async def test_cancelled_caller_does_not_affect_the_others(
    served: Served, client: AsyncInferenceClient, script: Script
) -> None:
    async with busy(served, script):
        asking = [asyncio.create_task(ask(client, number)) for number in range(4)]
        await eventually_async(lambda: served.waiting("m") == 1, "one request of four")
        asking[1].cancel()
    outcomes = await asyncio.gather(*asking, return_exceptions=True)
    assert isinstance(outcomes.pop(1), asyncio.CancelledError)
    assert outcomes == [[0], [2], [3]]


async def test_request_whose_callers_have_all_cancelled_is_withdrawn(
    served: Served, client: AsyncInferenceClient, script: Script
) -> None:
    async with busy(served, script):
        asking = [asyncio.create_task(ask(client, number)) for number in range(4)]
        await eventually_async(lambda: served.waiting("m") == 1, "one request of four")
        for task in asking:
            task.cancel()
        await eventually_async(lambda: served.waiting("m") == 0, "nothing in the queue")
    assert all(isinstance(one, asyncio.CancelledError) for one in await asyncio.gather(*asking, return_exceptions=True))
    assert await ask(client, 9) == [9]


async def test_each_caller_has_its_own_timeout(served: Served, client: AsyncInferenceClient, script: Script) -> None:
    async with busy(served, script):
        patient = asyncio.create_task(ask(client, 1))
        with pytest.raises(DeadlineExceeded):
            await ask(client, 2, timeout_s=0.05)
        assert not patient.done()
    assert await patient == [1]


async def test_third_request_waits_for_an_answer_unless_it_is_full(
    served: Served, client: AsyncInferenceClient, script: Script
) -> None:
    async with busy(served, script):
        asking = [asyncio.create_task(ask(client, 0))]
        await eventually_async(lambda: served.waiting("m") == 1, "the first")
        asking.append(asyncio.create_task(ask(client, 1)))
        await eventually_async(lambda: served.waiting("m") == 2, "the second")
        asking += [asyncio.create_task(ask(client, number)) for number in (2, 3)]
        asking += [asyncio.create_task(ask(client, *range(10, 14)))]
        await eventually_async(lambda: served.waiting("m") == 3, "the one that fills a request by itself")
        asking += [asyncio.create_task(ask(client, number)) for number in (4, 5, 6)]
        await eventually_async(lambda: served.waiting("m") == 4, "2 to 5, which are as many as fit")
    assert await asyncio.gather(*asking) == [[0], [1], [2], [3], [10, 11, 12, 13], [4], [5], [6]]


async def test_answer_that_cannot_be_split_by_rows_is_an_error_for_all_callers(tmp_path: Path) -> None:
    # A model without a batch axis: two rows are one tensor to it, and it answers with one row for both.
    total = MemoryModel(
        ModelSpec((TensorSpec("a", "FP32", (-1, 3)),), (TensorSpec("x", "FP32", (1, 3)),)),
        lambda inputs: [inputs[0].sum(axis=0, keepdims=True)],
    )
    async with (
        serving(tmp_path, {"total": total}) as served,
        AsyncInferenceClient(served.target, coalesce=4) as client,
    ):
        asking = [client.infer("total", {"a": np.ones((1, 3), np.float32)}) for _ in range(2)]
        outcomes = await asyncio.gather(*asking, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [ResponseError] * 2
    assert "output 'x': expected the 2 rows that were sent" in str(outcomes[0])


async def test_close_cancels_waiting_callers(served: Served, client: AsyncInferenceClient, script: Script) -> None:
    async with busy(served, script):
        asking = [asyncio.create_task(ask(client, number)) for number in range(3)]
        await eventually_async(lambda: served.waiting("m") == 1, "one request of three")
        await client.close()
        outcomes = await asyncio.gather(*asking, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Cancelled] * 3
    with pytest.raises(ClientClosed):
        await ask(client, 1)


async def test_close_cancels_callers_whose_requests_were_not_sent_yet(
    served: Served, client: AsyncInferenceClient, script: Script
) -> None:
    async with busy(served, script):
        # Two requests of three rows are in flight, and three rows wait for one of them to be answered.
        asking = []
        for waiting in (1, 2, 2):
            asking += [asyncio.create_task(ask(client, number)) for number in range(3)]
            await asyncio.sleep(0)  # all of them have asked
            await eventually_async(lambda n=waiting: served.waiting("m") == n, f"{waiting} requests")  # type: ignore[misc]
        await client.close()
        outcomes = await asyncio.gather(*asking, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Cancelled] * 9


def test_coalesce_of_less_than_two_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="coalesce: expected 2 rows or more"):
        AsyncInferenceClient("127.0.0.1:1", coalesce=1)
