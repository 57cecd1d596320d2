"""The asyncio client over streams: for its user, the same as over calls."""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.clients import (
    AsyncInferenceClient,
    Cancelled,
    ClientClosed,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from paceline.server.config import Settings
from paceline.server.limits import Limits
from tests.integration.relay import relaying
from tests.integration.scripted import Script, busy, marked
from tests.integration.serving import Served, serving
from tests.polling import eventually_async

MERGE = "max_batch_size: 8 dynamic_batching { default_queue_policy { max_queue_size: 40 } }"


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
async def served(tmp_path: Path, script: Script) -> AsyncIterator[Served]:
    async with serving(tmp_path, {"m": script.model}, config=MERGE) as served:
        yield served


@pytest.fixture
async def client(served: Served) -> AsyncIterator[AsyncInferenceClient]:
    async with AsyncInferenceClient(served.target, transport="stream", timeout_s=20) as client:
        yield client


async def ask(client: AsyncInferenceClient, mark: float, **more: Any) -> float:
    result = await client.infer("m", {"a": marked(mark)}, **more)
    return float(result["x"][0, 0])


async def test_infer_over_streams_answers_as_a_call_does(served: Served, client: AsyncInferenceClient) -> None:
    options: dict[str, Any] = {"request_id": "grün/7", "outputs": ["x"], "parameters": {"binary_data_output": False}}
    async with AsyncInferenceClient(served.target) as calling:
        expected = await calling.infer("m", {"a": marked(3, 2)}, **options)
    got = await client.infer("m", {"a": marked(3, 2)}, **options)
    np.testing.assert_array_equal(got["x"], expected["x"])
    assert (got.id, got.model_name, got.model_version) == ("grün/7", "m", "1")
    assert (got.parameters, got.datatypes) == (expected.parameters, expected.datatypes) == ({}, {"x": "FP32"})


async def test_infer_over_streams_gives_each_of_many_requests_its_own_answer(
    client: AsyncInferenceClient, script: Script
) -> None:
    async def use(number: int) -> list[float]:
        return [await ask(client, number * 100 + each) for each in range(10)]

    answers = await asyncio.gather(*map(use, range(30)))
    assert answers == [[number * 100 + each for each in range(10)] for number in range(30)]
    assert max(map(len, script.seen)) > 1


async def test_infer_over_streams_lets_answers_overtake_each_other(
    client: AsyncInferenceClient, script: Script
) -> None:
    gate = script.hold(1)
    first = asyncio.create_task(ask(client, 1))
    await asyncio.to_thread(gate.wait_entered, 1)
    # As many as there are streams, so that one of them shares the first one's; the unknown model isn't held up.
    for _ in range(20):
        with pytest.raises(NotFound):
            await client.infer("nope", {"a": marked(2)})
    gate.open()
    assert await first == 1


async def test_infer_over_streams_fails_as_a_call_does(
    served: Served, client: AsyncInferenceClient, script: Script
) -> None:
    script.errors[5] = RuntimeError("no fives")
    for kind, inputs, more in (
        (NotFound, marked(1), {"version": "7"}),
        (InvalidArgument, np.zeros((1, 2), np.int32), {}),
        (Internal, marked(5), {}),
    ):
        async with AsyncInferenceClient(served.target) as calling:
            with pytest.raises(kind) as expected:
                await calling.infer("m", {"a": inputs}, **more)
        with pytest.raises(kind) as got:
            await client.infer("m", {"a": inputs}, **more)
        assert (got.value.status, got.value.message) == (expected.value.status, expected.value.message)
    assert await ask(client, 1) == 1


async def test_infer_over_streams_fails_only_for_requests_beyond_the_full_queue(
    served: Served, client: AsyncInferenceClient, script: Script
) -> None:
    async with busy(served, script):
        asking = [asyncio.create_task(ask(client, mark)) for mark in range(50)]
        await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        await eventually_async(lambda: sum(task.done() for task in asking) == 10, "ten refusals")
    outcomes = await asyncio.gather(*asking, return_exceptions=True)
    assert sum(isinstance(outcome, ResourceExhausted) for outcome in outcomes) == 10
    assert all(outcome == mark for mark, outcome in enumerate(outcomes) if isinstance(outcome, float))


async def test_infer_over_streams_removes_only_cancelled_requests_from_the_queue(
    served: Served, client: AsyncInferenceClient, script: Script
) -> None:
    async with busy(served, script):
        asking = [asyncio.create_task(ask(client, mark)) for mark in range(30)]
        await eventually_async(lambda: served.waiting("m") == 30, "thirty requests waiting")
        for task in asking[::2]:
            task.cancel()
        await eventually_async(lambda: served.waiting("m") == 15, "fifteen requests waiting")
    outcomes = await asyncio.gather(*asking, return_exceptions=True)
    for mark, outcome in enumerate(outcomes):
        assert isinstance(outcome, asyncio.CancelledError) if mark % 2 == 0 else outcome == mark
    assert sorted(mark for batch in script.served for mark in batch) == list(range(1, 30, 2))


async def test_infer_over_streams_timeout_applies_in_the_server_and_in_the_client(
    served: Served, client: AsyncInferenceClient, script: Script
) -> None:
    async with busy(served, script):
        with pytest.raises(DeadlineExceeded):
            await ask(client, 1, timeout_s=0.1)
        await eventually_async(lambda: served.failed() == 1, "the request gone")
    assert script.served == []
    gate = script.hold(2)
    # Executing: the server doesn't answer before the model does.
    with pytest.raises(DeadlineExceeded, match=r"no answer within 0\.3 s"):
        await ask(client, 2, timeout_s=0.3)
    gate.open()
    assert await ask(client, 3, timeout_s=None) == 3


@pytest.mark.parametrize(
    ("deadline_us", "timeout_s"), [(50_000, None), (50_000, 20), (0, 0.1), (20_000_000, 0.1), (2**63, 0.1)]
)
async def test_infer_over_streams_uses_the_earlier_of_two_deadlines(
    served: Served, client: AsyncInferenceClient, script: Script, deadline_us: int, timeout_s: float | None
) -> None:
    async with busy(served, script):
        with pytest.raises(DeadlineExceeded):
            await ask(client, 1, parameters={"paceline_deadline_us": deadline_us}, timeout_s=timeout_s)
        await eventually_async(lambda: served.failed() == 1, "the request gone")
    assert script.served == []
    assert await ask(client, 2, parameters={"paceline_deadline_us": 20_000_000}) == 2


@pytest.mark.parametrize("deadline_us", [-1, 0.5, "soon"])
async def test_infer_over_streams_refuses_an_invalid_deadline_as_a_call_does(
    served: Served, client: AsyncInferenceClient, deadline_us: float | str
) -> None:
    parameters = {"paceline_deadline_us": deadline_us}
    async with AsyncInferenceClient(served.target) as calling:
        with pytest.raises(InvalidArgument) as expected:
            await ask(calling, 1, parameters=parameters)
    with pytest.raises(InvalidArgument) as got:
        await ask(client, 1, parameters=parameters)
    assert got.value.message == expected.value.message


@pytest.mark.parametrize("coalesce", [None, 4])
async def test_infer_over_streams_refuses_the_parameter_that_cancels(served: Served, coalesce: int | None) -> None:
    async with AsyncInferenceClient(served.target, transport="stream", coalesce=coalesce, timeout_s=20) as client:
        with pytest.raises(ValueError, match="'paceline_cancel': reserved for the client"):
            await ask(client, 1, parameters={"paceline_cancel": True})
        assert await ask(client, 1, parameters={"paceline_cancel": False}) == 1


@pytest.mark.parametrize("coalesce", [None, 4])
async def test_infer_over_streams_accepts_infinite_and_huge_timeouts(served: Served, coalesce: int | None) -> None:
    async with AsyncInferenceClient(served.target, transport="stream", coalesce=coalesce) as client:
        for timeout_s in (math.inf, 1e10, 1e13, 1e300):
            assert await ask(client, 1, timeout_s=timeout_s) == 1


async def test_infer_over_streams_refuses_a_nan_timeout_and_leaves_nothing_behind(served: Served) -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
    async with AsyncInferenceClient(served.target, transport="stream") as client:
        with pytest.raises(ValueError, match="got nan"):
            await ask(client, 1, timeout_s=math.nan)
    del client
    gc.collect()
    assert complaints == []


@pytest.mark.parametrize("timeout_s", [0, -1])
@pytest.mark.parametrize("coalesce", [None, 4])
async def test_infer_over_streams_without_time_left_is_deadline_exceeded(
    served: Served, timeout_s: float, coalesce: int | None
) -> None:
    async with AsyncInferenceClient(served.target, transport="stream", coalesce=coalesce, timeout_s=20) as client:
        for _ in range(20):
            with pytest.raises(DeadlineExceeded):
                await ask(client, 1, timeout_s=timeout_s)
        assert await ask(client, 1) == 1


async def test_infer_over_streams_refuses_metadata_of_a_single_request(client: AsyncInferenceClient) -> None:
    with pytest.raises(ValueError, match="give it to the client"):
        await ask(client, 1, metadata=[("x", "y")])


async def test_infer_over_streams_sends_the_clients_metadata(tmp_path: Path, script: Script) -> None:
    settings = Settings(paths=(tmp_path,), grpc_header_forward_pattern="^timeout$")
    async with serving(tmp_path, {"m": script.model}, settings=settings) as served:
        headers = [("timeout", "1")]
        async with AsyncInferenceClient(served.target, transport="stream", metadata=headers) as client:
            with pytest.raises(InvalidArgument, match="'timeout' is reserved"):
                await ask(client, 1)


async def test_infer_over_streams_that_break_fails_waiting_requests_and_serves_new_ones(
    served: Served, script: Script
) -> None:
    async with (
        relaying(served.server.grpc_port) as relay,
        AsyncInferenceClient(f"127.0.0.1:{relay.port}", transport="stream", timeout_s=20) as client,
    ):
        async with busy(served, script):
            asking = [asyncio.create_task(ask(client, mark)) for mark in range(20)]
            await eventually_async(lambda: served.waiting("m") == 20, "twenty requests waiting")
            relay.cut()
            outcomes = await asyncio.gather(*asking, return_exceptions=True)
            assert {type(outcome) for outcome in outcomes} == {Unavailable}
            await eventually_async(lambda: served.waiting("m") == 0, "an empty queue")
        await client.wait_ready(60)
        assert await asyncio.gather(*(ask(client, mark) for mark in range(20))) == list(range(20))


async def test_infer_over_streams_without_a_server_is_unavailable() -> None:
    async with AsyncInferenceClient("127.0.0.1:1", transport="stream") as client:
        for _ in range(2):
            with pytest.raises(Unavailable):
                await ask(client, 1)


async def test_infer_over_streams_of_a_stopped_server_is_unavailable(
    served: Served, client: AsyncInferenceClient
) -> None:
    assert await ask(client, 1) == 1
    await served.server.stop(5)
    with pytest.raises(Unavailable):
        await ask(client, 1)


async def test_infer_over_streams_is_cancelled_when_the_client_is_closed(
    served: Served, client: AsyncInferenceClient, script: Script
) -> None:
    async with busy(served, script):
        asking = asyncio.create_task(ask(client, 1))
        await eventually_async(lambda: served.waiting("m") == 1, "one request waiting")
        await client.close()
        with pytest.raises(Cancelled):
            await asking
        await eventually_async(lambda: served.waiting("m") == 0, "an empty queue")
    with pytest.raises(ClientClosed):
        await ask(client, 1)


def test_unknown_transport_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 'call' or 'stream', got 'pigeon'"):
        AsyncInferenceClient("x", transport="pigeon")  # type: ignore[arg-type]


async def test_infer_over_streams_opens_as_many_streams_as_needed(
    served: Served, client: AsyncInferenceClient, script: Script
) -> None:
    async def streams() -> float:
        return await served.metric("paceline_limit_used", 'limit="streams"')

    for mark in range(5):
        assert await ask(client, mark) == mark
    assert await streams() == 1
    async with busy(served, script):
        asking = [asyncio.create_task(ask(client, mark)) for mark in range(100)]
        await eventually_async(lambda: served.waiting("m") == 40, "all that fit in the queue")
    await asyncio.gather(*asking, return_exceptions=True)
    assert await streams() == 16


@pytest.mark.parametrize("room", [0, 1, 5])
async def test_infer_over_streams_without_room_for_more_uses_existing_ones_or_calls(
    tmp_path: Path, script: Script, room: int
) -> None:
    settings = Settings(paths=(tmp_path,), limits=Limits(streams=max(1, room)))
    async with (
        serving(tmp_path, {"m": script.model}, settings=settings, config="max_batch_size: 8") as served,
        AsyncInferenceClient(served.target, transport="stream", timeout_s=20) as client,
        AsyncInferenceClient(served.target, transport="stream", timeout_s=20) as other,
    ):
        if not room:
            assert await ask(other, 1) == 1
        for _ in range(5):
            assert await asyncio.gather(*(ask(client, mark) for mark in range(100))) == list(range(100))
        assert len([one for batch in script.served for one in batch]) == 500 + (not room), "each was executed once"
        assert await served.metric("paceline_limit_used", 'limit="streams"') == max(1, room)


async def test_infer_over_streams_sends_large_tensors_as_calls(tmp_path: Path, script: Script) -> None:
    small = Settings(paths=(tmp_path,), limits=Limits(message_bytes=2 * 2**20))
    large = np.zeros((1, 2**18 + 1), np.float32)
    async with (
        serving(tmp_path, {"m": script.model}, config=MERGE, settings=small) as served,
        AsyncInferenceClient(served.target, transport="stream", timeout_s=20) as client,
    ):
        for sent, streams in ((large, 0), (large[:, 1:], 1)):  # the latter is just a MiB
            result = await client.infer("m", {"a": sent}, request_id="mine")
            assert (result.id, result["x"].shape) == ("mine", sent.shape)
            assert await served.metric("paceline_limit_used", 'limit="streams"') == streams
        async with busy(served, script):
            waiting = asyncio.create_task(ask(client, 1))
            await eventually_async(lambda: served.waiting("m") == 1, "a request of the stream waiting")
            with pytest.raises(ResourceExhausted, match="larger than max"):
                await client.infer("m", {"a": np.repeat(large, 2, axis=1)})
        assert await waiting == 1
