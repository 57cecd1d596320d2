"""When batches leave the queue, what is in them, which instance takes them, and in which order their answers leave."""

from __future__ import annotations

import asyncio
from pathlib import Path

from paceline.protos import inference_pb2 as pb
from tests.integration.scripted import Call, Script, busy, mark_of, queued, request, send
from tests.integration.serving import Served, serving
from tests.polling import eventually_awaited

MERGE = "max_batch_size: 8 dynamic_batching { }"
LONG_US = 100_000_000


async def test_single_request_without_a_delay_does_not_wait_for_more(tmp_path: Path) -> None:
    script = Script()
    text = "max_batch_size: 8 dynamic_batching { preferred_batch_size: [ 4, 8 ] }"
    async with serving(tmp_path, {"m": script.model}, config=text) as served:
        for mark in range(3):
            assert mark_of(await served.infer(request(mark), timeout_s=60)) == mark
        assert await served.metric("nv_inference_queue_duration_us") < 60_000_000
    assert script.seen == [[0], [1], [2]]


async def test_delay_is_kept_even_while_instances_are_idle(tmp_path: Path) -> None:
    script = Script()
    text = f"max_batch_size: 8 dynamic_batching {{ max_queue_delay_microseconds: {LONG_US} }} "
    async with serving(tmp_path, {"m": script.model}, config=f"{text} instance_group {{ count: 2 }}") as served:
        calls = await queued(served, [request(1), request(2)])
        assert script.seen == []
        await asyncio.gather(*calls, *send(served, request(3, rows=6)))
    assert script.seen == [[1, 2] + [3] * 6]


async def test_delay_ends_at_once_when_the_batch_is_full(tmp_path: Path) -> None:
    script = Script()
    text = f"max_batch_size: 3 dynamic_batching {{ max_queue_delay_microseconds: {LONG_US} }}"
    async with serving(tmp_path, {"m": script.model}, config=text) as served:
        calls = await queued(served, [request(1), request(2)])
        assert script.seen == []
        await asyncio.gather(*calls, *send(served, request(3)))
    assert script.seen == [[1, 2, 3]]


async def test_delay_ends_when_the_server_stops_and_all_requests_are_answered(tmp_path: Path) -> None:
    script = Script()
    text = f"max_batch_size: 8 dynamic_batching {{ max_queue_delay_microseconds: {LONG_US} }}"
    async with serving(tmp_path, {"m": script.model}, config=text) as served:
        calls = await queued(served, [request(1), request(2)])
        stopping = asyncio.create_task(served.server.stop(20))
        assert [mark_of(answer) for answer in await asyncio.gather(*calls)] == [1, 2]
        await stopping
    assert script.seen == [[1, 2]]


async def test_batch_size_counts_rows_and_not_requests(tmp_path: Path) -> None:
    script = Script()
    async with serving(tmp_path, {"m": script.model}, config=MERGE) as served:
        async with busy(served, script):
            calls = await queued(served, (request(mark, rows) for mark, rows in enumerate([4, 4, 4, 3, 1, 1])))
        await asyncio.gather(*calls)
    assert script.served == [[0] * 4 + [1] * 4, [2] * 4 + [3] * 3 + [4], [5]]


async def test_different_shapes_never_share_a_batch_even_with_equally_many_elements(tmp_path: Path) -> None:
    script = Script()
    shapes = [(2, 3), (1, 5), (1, 6), (3, 2), (6, 1), (1, 3)]
    async with serving(tmp_path, {"m": script.model}, config=MERGE) as served:
        async with busy(served, script):
            calls = await queued(served, (request(mark, *shape) for mark, shape in enumerate(shapes)))
        answers = await asyncio.gather(*calls)
    assert [mark_of(answer) for answer in answers] == list(range(6))
    assert [tuple(answer.outputs[0].shape) for answer in answers] == shapes
    assert script.served == [[0, 0, 5], [1], [2], [3] * 3, [4] * 6]


async def test_all_instances_execute_while_there_is_work(tmp_path: Path) -> None:
    script, instances = Script(), 3
    gates = [script.hold(mark) for mark in range(instances)]
    text = f"max_batch_size: 1 dynamic_batching {{ }} instance_group {{ count: {instances} }}"
    async with serving(tmp_path, {"m": script.model}, config=text) as served:
        calls = send(served, *(request(mark) for mark in range(instances)))
        for gate in gates:
            await asyncio.to_thread(gate.wait_entered, 1)
        calls += await queued(served, [request(9)])
        gates[-1].open()  # whichever is free first takes the next
        assert mark_of(await calls[-1]) == 9
        assert not any(call.done() for call in calls[: instances - 1])
        for gate in gates:
            gate.open()
        await asyncio.gather(*calls)


async def test_models_do_not_hold_each_other_up(tmp_path: Path) -> None:
    slow, fast = Script(), Script()
    async with serving(tmp_path, {"slow": slow.model, "fast": fast.model}, config=MERGE) as served:
        async with busy(served, slow, model="slow"):
            waiting = await queued(served, (request(mark, model="slow") for mark in range(20)))
            answers = await asyncio.gather(*send(served, *(request(mark, model="fast") for mark in range(50))))
            assert [mark_of(answer) for answer in answers] == list(range(50))
            assert served.waiting("slow") == 20
        assert [mark_of(answer) for answer in await asyncio.gather(*waiting)] == list(range(20))


async def settled(served: Served) -> None:
    """Wait until all that the server has answered so far has arrived: this answer follows it on the same connection."""
    await served.stub.ServerLive(pb.ServerLiveRequest(), timeout=20)
    for _ in range(10):
        await asyncio.sleep(0)


def ordering(preserve: bool) -> str:
    batching = f"preserve_ordering: {str(preserve).lower()}"
    return f"max_batch_size: 1 instance_group {{ count: 2 }} dynamic_batching {{ {batching} }}"


async def two_of_which_the_first_is_held(served: Served, script: Script) -> list[Call]:
    """Two calls: the first one executes, the second one has been executed on the other instance."""
    gate = script.hold(1)
    first = send(served, request(1))
    await asyncio.to_thread(gate.wait_entered, 1)
    second = send(served, request(2))

    async def executed() -> bool:
        return await served.metric("nv_inference_exec_count") >= 1

    await eventually_awaited(executed, "the second executed")
    await settled(served)
    return first + second


async def test_answers_are_in_order_of_arrival_if_preserved_although_instances_overtake(tmp_path: Path) -> None:
    script = Script()
    async with serving(tmp_path, {"m": script.model}, config=ordering(True)) as served:
        calls = await two_of_which_the_first_is_held(served, script)
        assert not calls[1].done()
        script.gates[1].open()
        assert [mark_of(answer) for answer in await asyncio.gather(*calls)] == [1, 2]


async def test_answers_are_in_order_of_execution_if_order_is_not_preserved(tmp_path: Path) -> None:
    script = Script()
    async with serving(tmp_path, {"m": script.model}, config=ordering(False)) as served:
        calls = await two_of_which_the_first_is_held(served, script)
        assert mark_of(await calls[1]) == 2
        assert not calls[0].done()
        script.gates[1].open()
        await calls[0]
