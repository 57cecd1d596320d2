"""Sequences of both clients over calls: which step carries what, and what an error means for those after it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest

from paceline.clients import (
    AsyncInferenceClient,
    AsyncInferenceSequence,
    Cancelled,
    DeadlineExceeded,
    InferenceClient,
    Internal,
    ResourceExhausted,
    SequenceLost,
)
from paceline.protos import inference_pb2 as pb
from tests.unit.clients.conftest import Twin
from tests.unit.clients.peer import Peer, Stall
from tests.unit.clients.sequence_peer import Sums


@pytest.fixture
def sums(peer: Peer) -> Sums:
    peer.answer = sums = Sums()
    return sums


def x(value: float) -> dict[str, np.ndarray[Any, Any]]:
    return {"x": np.array([value], np.float32)}


async def begin(twin: Twin, *arguments: Any, **more: Any) -> Twin:
    return Twin(await twin.sequence("m", *arguments, **more))


async def step(sequence: Any, value: float, **more: Any) -> float:
    return float((await sequence.infer(x(value), **more))["sum"][0])


def inferences(peer: Peer) -> list[pb.ModelInferRequest]:
    return [request for request in peer.requests if isinstance(request, pb.ModelInferRequest)]


async def test_first_step_starts_and_last_step_ends(twin: Twin, sums: Sums) -> None:
    sequence = await begin(twin)
    assert [await step(sequence, value, last=value == 3) for value in (1, 2, 3)] == [1, 3, 6]
    assert sums.seen == [("S", 1), ("", 2), ("E", 3)]
    assert not sums.live


async def test_sequence_of_one_step_starts_and_ends(twin: Twin, sums: Sums) -> None:
    assert await step(await begin(twin), 5, last=True) == 5
    assert sums.seen == [("SE", 5)]


async def test_options_come_with_every_step(twin: Twin, peer: Peer, sums: Sums) -> None:
    sequence = await begin(
        twin, 7, version="2", outputs=("sum",), parameters={"priority": 1}, metadata=[("x-one", "1")]
    )
    await sequence.infer(x(1), request_id="a")
    await sequence.infer({"x": [2]}, request_id="b", datatypes={"x": "FP32"}, timeout_s=500)
    for request in inferences(peer):
        assert (request.model_version, [output.name for output in request.outputs]) == ("2", ["sum"])
        assert (request.parameters["priority"].int64_param, request.parameters["sequence_id"].int64_param) == (1, 7)
    assert [request.id for request in inferences(peer)] == ["a", "b"]
    assert [metadata["x-one"] for metadata in peer.metadata] == ["1", "1"]
    assert 100 < (peer.time_left_s[-1] or 0) < 1000


@pytest.mark.parametrize(
    ("own_id", "kind"),
    [(1, "int64_param"), (2**63 - 1, "int64_param"), (-(2**63), "int64_param"), ("grün", "string_param")],
)
async def test_given_id_is_sent_as_it_is(twin: Twin, peer: Peer, sums: Sums, own_id: int | str, kind: str) -> None:
    await step(await begin(twin, own_id), 1)
    parameter = inferences(peer)[0].parameters["sequence_id"]
    assert (parameter.WhichOneof("parameter_choice"), getattr(parameter, kind)) == (kind, own_id)


async def test_sequences_without_an_id_get_different_numbers(twin: Twin, peer: Peer, sums: Sums) -> None:
    for _ in range(3):
        await step(await begin(twin), 1)
    ids = {request.parameters["sequence_id"].int64_param for request in inferences(peer)}
    assert len(ids) == 3
    assert min(ids) > 0


@pytest.mark.parametrize(
    ("own_id", "error", "text"),
    [
        (0, ValueError, "id: expected a 64-bit signed integer other than 0, got 0"),
        (2**63, ValueError, "id: expected a 64-bit signed integer other than 0, got 9223372036854775808"),
        ("", ValueError, "id: expected text of 1 to 128 bytes without NUL, got ''"),
        ("ü" * 65, ValueError, "id: expected text of 1 to 128 bytes"),
        ("a\0", ValueError, "id: expected text of 1 to 128 bytes"),
        (True, TypeError, "id: expected an int, a str, or None for a fresh one, got True"),
        (1.0, TypeError, "id: expected an int, a str, or None for a fresh one, got 1.0"),
    ],
)
async def test_unusable_id_is_refused_by_name(twin: Twin, own_id: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as refusal:
        await begin(twin, own_id)
    assert str(refusal.value).startswith(text)


async def test_failed_first_step_leaves_start_to_the_next(twin: Twin, sums: Sums) -> None:
    sums.failures = {1: grpc.StatusCode.RESOURCE_EXHAUSTED}
    sequence = await begin(twin)
    with pytest.raises(ResourceExhausted):
        await step(sequence, 1)
    assert [await step(sequence, value) for value in (2, 3)] == [2, 5]
    assert [flag for flag, _ in sums.seen] == ["S", "S", ""]


async def test_failed_later_step_is_left_out_of_the_sequence(twin: Twin, sums: Sums) -> None:
    sums.failures = {2: grpc.StatusCode.INTERNAL}
    sequence = await begin(twin)
    assert await step(sequence, 1) == 1
    with pytest.raises(Internal):
        await step(sequence, 2)
    assert await step(sequence, 3) == 4
    assert [flag for flag, _ in sums.seen] == ["S", "", ""]


async def test_lost_sequence_is_told_and_started_afresh(twin: Twin, sums: Sums) -> None:
    sequence = await begin(twin)
    await step(sequence, 1)
    sums.live.clear()
    with pytest.raises(SequenceLost, match="must specify the START flag"):
        await step(sequence, 2)
    assert await step(sequence, 3) == 3
    assert [flag for flag, _ in sums.seen] == ["S", "", "S"]


async def test_step_after_the_last_is_refused_before_sending(twin: Twin, sums: Sums) -> None:
    sequence = await begin(twin, 7)
    await step(sequence, 1, last=True)
    with pytest.raises(RuntimeError, match=r"^sequence 7 is over: begin another one"):
        await step(sequence, 2)
    assert len(sums.seen) == 1


async def test_failed_last_step_can_be_sent_again(twin: Twin, sums: Sums) -> None:
    sums.failures = {2: grpc.StatusCode.INTERNAL}
    sequence = await begin(twin)
    await step(sequence, 1)
    with pytest.raises(Internal):
        await step(sequence, 2, last=True)
    sums.failures = {}
    assert await step(sequence, 2, last=True) == 3
    assert not sums.live


async def test_unusable_step_raises_and_changes_nothing(twin: Twin, sums: Sums) -> None:
    sequence = await begin(twin)
    with pytest.raises(TypeError, match="input 'x'"):
        await sequence.infer({"x": np.array([1j])}, last=True)
    assert await step(sequence, 1) == 1
    assert sums.seen == [("S", 1)]


def test_left_sequence_takes_no_more_steps(peer: Peer, sums: Sums) -> None:
    with InferenceClient(peer.target) as client:
        with client.sequence("m") as sequence:
            sequence.infer(x(1))
        with pytest.raises(RuntimeError, match="is over"):
            sequence.infer(x(2))
    assert sums.seen == [("S", 1)]


async def test_left_async_sequence_takes_no_more_steps(peer: Peer, sums: Sums) -> None:
    async with AsyncInferenceClient(peer.target) as client:
        async with client.sequence("m") as sequence:
            await sequence.infer(x(1))
        with pytest.raises(RuntimeError, match="is over"):
            await sequence.infer(x(2))
    assert sums.seen == [("S", 1)]


@pytest.mark.parametrize(
    ("values", "flags"), [((), []), ((4,), ["SE"]), ((1, 2), ["S", "E"]), ((1, 2, 3), ["S", "", "E"])]
)
async def test_infer_all_ends_with_the_last_step(
    peer: Peer, sums: Sums, values: tuple[float, ...], flags: list[str]
) -> None:
    async def arriving() -> AsyncIterator[dict[str, Any]]:
        for value in values:
            yield x(value)

    expected = list(np.cumsum(values))
    with InferenceClient(peer.target) as client:
        assert [float(each["sum"][0]) for each in client.sequence("m").infer_all(map(x, values))] == expected
    assert [flag for flag, _ in sums.seen] == flags
    async with AsyncInferenceClient(peer.target) as asynchronous:
        for steps in (map(x, values), arriving()):
            answers = asynchronous.sequence("m").infer_all(steps)
            assert [float(each["sum"][0]) async for each in answers] == expected
    assert [flag for flag, _ in sums.seen] == 3 * flags


def test_blocking_client_refuses_asynchronous_steps(peer: Peer) -> None:
    async def arriving() -> AsyncIterator[dict[str, Any]]:
        yield x(1)
        await asyncio.sleep(0)

    with InferenceClient(peer.target) as client, pytest.raises(TypeError, match="not iterable"):
        list(client.sequence("m").infer_all(arriving()))


def test_steps_of_several_threads_go_one_at_a_time(peer: Peer) -> None:
    sums, busy = Sums(), threading.Lock()

    def alone(request: pb.ModelInferRequest, context: grpc.ServicerContext) -> pb.ModelInferResponse:
        assert busy.acquire(blocking=False)
        try:
            return sums(request, context)
        finally:
            busy.release()

    peer.answer = alone
    with InferenceClient(peer.target) as client:
        sequence = client.sequence("m")
        threads = [threading.Thread(target=lambda: [sequence.infer(x(1)) for _ in range(10)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sequence.infer(x(0))["sum"].tolist() == [40]


async def gathered(sequence: AsyncInferenceSequence, values: range) -> list[float]:
    return list(await asyncio.gather(*(step(sequence, value) for value in values)))


@pytest.mark.parametrize("settings", [{}, {"coalesce": 8}], ids=str)
async def test_steps_called_together_are_sent_in_order(peer: Peer, sums: Sums, settings: dict[str, Any]) -> None:
    async with AsyncInferenceClient(peer.target, **settings) as client:
        assert await gathered(client.sequence("m"), range(20)) == list(np.cumsum(range(20)))
    assert [value for _, value in sums.seen] == list(range(20))


async def test_step_that_waits_for_those_before_keeps_its_timeout(peer: Peer) -> None:
    peer.answer = stall = Stall()
    async with AsyncInferenceClient(peer.target) as client:
        sequence = client.sequence("m")
        first = asyncio.create_task(step(sequence, 1, timeout_s=None))
        assert await asyncio.to_thread(stall.started.wait, 60)
        with pytest.raises(DeadlineExceeded):
            await step(sequence, 2, timeout_s=0.05)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        peer.answer = Sums()
        assert await step(sequence, 3) == 3
    assert len(inferences(peer)) == 2


def test_threads_step_that_waits_keeps_its_timeout(peer: Peer) -> None:
    peer.answer = stall = Stall()
    with InferenceClient(peer.target) as client:
        sequence = client.sequence("m")

        def given_up() -> None:
            with pytest.raises(Cancelled):
                sequence.infer(x(1), timeout_s=None)

        first = threading.Thread(target=given_up)
        first.start()
        assert stall.started.wait(60)
        with pytest.raises(DeadlineExceeded):
            sequence.infer(x(2), timeout_s=0.05)
        client.close()
        first.join()
    assert len(inferences(peer)) == 1
