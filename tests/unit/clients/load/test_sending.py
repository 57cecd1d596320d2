"""A process's share of a load, sent within the test, to a scripted peer: which requests, counted as what."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from multiprocessing import Pipe
from threading import Thread
from typing import Any

import grpc
import numpy as np
import pytest

from paceline.clients.answers import enable_empty_final
from paceline.clients.load.arrivals import Recorded
from paceline.clients.load.sending import EMPTY
from paceline.clients.load.tally import Counts, merged
from paceline.clients.load.worker import NOT_SENT, Load, Said, Sender, Share, main
from paceline.clients.messages import infer_request
from paceline.protos import inference_pb2 as pb
from tests.unit.clients.load.counting import S
from tests.unit.clients.peer import Peer, echo, refuse, serving
from tests.unit.clients.sequence_peer import Sums, Talking, answer, final, flags


def message(value: float) -> bytes:
    request = infer_request("m", {"x": np.array([value], np.float32)})
    enable_empty_final(request)
    return request.SerializeToString()


MESSAGES = tuple(message(value) for value in (1, 2, 3))


async def sent(peer: Peer, *, began_s: float = 0.0, part: int = 0, parts: int = 1, **load: Any) -> Counts:
    """What is counted of a share of this load, which began `began_s` ago."""
    whole = Load(peer.target, load.pop("messages", MESSAGES), load.pop("timeout_s", 60.0), **load)
    sender = Sender(Share(whole, S, part, parts))
    async with AsyncExitStack() as stack:
        await sender.connect(stack)
        await sender.run(time.monotonic_ns() - round(began_s * S))
    return merged(counts for _, counts in (*sender.settled(), *sender.slices.rest()))


def values(peer: Peer) -> list[float]:
    return [np.frombuffer(one.raw_input_contents[0], "<f4")[0] for one in inferred(peer)]


def inferred(peer: Peer) -> list[pb.ModelInferRequest]:
    return [one for one in peer.requests if isinstance(one, pb.ModelInferRequest)]


async def test_client_sends_the_messages_in_turn(peer: Peer) -> None:
    found = await sent(peer, clients=1, count=7)
    assert values(peer) == [1, 2, 3, 1, 2, 3, 1]
    assert (found.due, found.answered, found.failed, found.latencies.count, found.lags.count) == (7, 7, 0, 7, 0)


async def test_clients_of_several_processes_send_the_count_together(peer: Peer) -> None:
    found = [await sent(peer, clients=5, count=11, part=part, parts=2) for part in (0, 1)]
    assert [one.due for one in found] == [6, 5]


async def test_refused_requests_are_counted_by_status(peer: Peer) -> None:
    peer.answer = refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
    found = await sent(peer, clients=2, count=3)
    assert {status: one.count for status, one in found.errors.items()} == {"RESOURCE_EXHAUSTED": 3}
    assert found.reasons == {"RESOURCE_EXHAUSTED": "the queue is full"}
    assert (found.answered, found.latencies.count) == (0, 0)


async def test_answers_without_any_bytes_are_errors(peer: Peer) -> None:
    peer.answer = lambda request, context: pb.ModelInferResponse()
    assert set((await sent(peer, clients=1, count=2)).errors) == {EMPTY}


async def test_arrivals_are_sent_when_due_with_what_they_contain(peer: Peer) -> None:
    came_ns: dict[float, int] = {}

    def answering(request: pb.ModelInferRequest, context: Any) -> pb.ModelInferResponse:
        came_ns[np.frombuffer(request.raw_input_contents[0], "<f4")[0]] = time.monotonic_ns()
        return echo(request, context)

    peer.answer, began_ns = answering, time.monotonic_ns()
    found = await sent(peer, arrivals=Recorded((0, 1_000, 1_000, 50_000_000), (2, 2, 0, 1)))
    assert Counter(values(peer)) == {3: 2, 1: 1, 2: 1}
    # That it comes last can't be told: all are late together if this process stands still.
    assert came_ns[2] - began_ns >= 50_000_000
    assert (found.due, found.answered, found.lags.count) == (4, 4, 4)


async def test_processes_share_the_arrivals(peer: Peer) -> None:
    for part in (0, 1, 2):
        await sent(peer, arrivals=Recorded((0, 1, 2, 3), (0, 1, 2, 0)), part=part, parts=3)
    assert sorted(values(peer)) == [1, 1, 2, 3]


async def test_requests_that_are_sent_late_count_from_when_they_were_due(peer: Peer) -> None:
    found = await sent(peer, began_s=5.0, arrivals=Recorded((0, S), (0, 1)))
    assert found.latencies.percentile_ns(50) >= 4 * S  # type: ignore[operator]
    assert found.latencies.longest_ns >= 5 * S
    assert found.lags.longest_ns >= 5 * S


async def test_deadline_of_an_arrival_counts_from_when_it_was_due(peer: Peer) -> None:
    found = await sent(peer, began_s=50.0, arrivals=Recorded((0, 40 * S), (0, 1)), timeout_s=40.0)
    assert set(found.errors) == {NOT_SENT}
    assert values(peer) == [2]
    (left_s,) = (left_s for left_s, one in zip(peer.time_left_s, peer.requests, strict=True) if one in inferred(peer))
    assert left_s is not None
    assert left_s < 35


async def test_sequences_have_ids_of_their_own_and_all_their_flags(peer: Peer) -> None:
    sums = Sums()
    peer.answer = sums
    found = await sent(peer, clients=2, count=4, steps=(3, 3), first_sequence_id=2**62)
    assert (found.due, found.answered) == (12, 12)
    assert sums.live == {}
    by_id: dict[int, str] = {}
    for request in inferred(peer):
        own_id = request.parameters["sequence_id"].int64_param
        by_id[own_id] = by_id.get(own_id, "") + (flags(request) or "-")
    assert by_id == dict.fromkeys(range(2**62, 2**62 + 4), "S-E")


async def test_sequence_ends_with_the_step_that_fails(peer: Peer) -> None:
    sums = Sums()
    sums.failures = {2.0: grpc.StatusCode.INTERNAL}
    peer.answer = sums
    found = await sent(peer, clients=1, count=1, steps=(3, 3))
    assert (found.due, found.answered, set(found.errors)) == (2, 1, {"INTERNAL"})


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("expected a step to leave states of at most 8 bytes", ["S", "E"]),
        ("in ensemble 'e', step 1 ('second'): Exceeds maximum queue size of 1", ["S", "E"]),
        ("Exceeds maximum queue size of 1", ["S"]),
    ],
)
async def test_sequence_whose_first_step_fails_is_ended_unless_refused(peer: Peer, text: str, steps: list[str]) -> None:
    sums = Sums()
    sums.failures, sums.text = {1.0: grpc.StatusCode.RESOURCE_EXHAUSTED}, text
    peer.answer = sums
    found = await sent(peer, clients=1, count=1, steps=(3, 3))
    assert [flags for flags, _ in sums.seen] == steps
    assert (found.due, found.answered, set(found.errors)) == (1, 0, {"RESOURCE_EXHAUSTED"})


@pytest.mark.parametrize(
    "loop", [{"clients": 2}, {"arrivals": Recorded((0, 0, 9_999 * S), (0, 1, 2))}], ids=["closed", "open"]
)
async def test_sequences_under_way_are_ended_uncounted(peer: Peer, loop: dict[str, Any]) -> None:
    sums, both, here = Sums(), asyncio.Event(), asyncio.get_running_loop()

    def answering(request: pb.ModelInferRequest, context: Any) -> pb.ModelInferResponse:
        if len(sums.live) == 2:
            here.call_soon_threadsafe(both.set)
        return sums(request, context)

    peer.answer = answering
    sender = Sender(Share(Load(peer.target, MESSAGES, 60.0, steps=(9_999, 9_999), **loop), S))
    async with AsyncExitStack() as stack:
        await sender.connect(stack)
        running = asyncio.create_task(sender.run(time.monotonic_ns()))
        await both.wait()
        sender.finish()
        await running
    assert sums.live == {}
    assert merged(counts for _, counts in (*sender.settled(), *sender.slices.rest())).due == len(sums.seen) - 2


async def test_lengths_of_sequences_depend_on_the_seed_alone(peer: Peer) -> None:
    peer.answer = Sums()
    dues = [(await sent(peer, clients=1, count=5, steps=(1, 100), seed=seed)).due for seed in (1, 1, 2)]
    assert dues[0] == dues[1] != dues[2]


# ---- over streams ----------------------------------------------------------------------------------------------------


@pytest.fixture
def talking() -> Iterator[Talking]:
    with serving(Talking()) as served:
        assert isinstance(served, Talking)
        yield served


async def test_request_over_a_stream_ends_with_its_final_answer(talking: Talking) -> None:
    found = await sent(talking, clients=2, count=6, is_stream=True)
    # Of each, the peer sends an answer and a final one, both with outputs.
    assert (found.due, found.answered, found.answers, found.gaps.count) == (6, 6, 12, 6)
    assert found.first.longest_ns <= found.latencies.longest_ns
    assert sorted(values(talking))[:2] == [1, 1]


async def test_empty_final_answer_is_no_token(talking: Talking) -> None:
    def script(request: pb.ModelInferRequest, context: Any) -> Iterator[pb.ModelStreamInferResponse]:
        tokens = answer(request)
        tokens.infer_response.outputs[0].name = "output_ids"
        tokens.infer_response.outputs[0].shape[:] = [3]
        yield tokens
        yield tokens
        yield final(pb.ModelStreamInferResponse(infer_response=pb.ModelInferResponse(id=request.id)))

    talking.script = script
    found = await sent(talking, clients=1, count=1, is_stream=True)
    assert (found.answers, found.tokens, found.gaps.count) == (2, 6, 3)


async def test_server_that_marks_no_final_answer_gives_one(talking: Talking) -> None:
    def script(request: pb.ModelInferRequest, context: Any) -> Iterator[pb.ModelStreamInferResponse]:
        one = answer(request)
        del one.infer_response.parameters["triton_final_response"]
        yield one

    talking.script = script
    found = await sent(talking, clients=1, count=3, is_stream=True)
    assert (found.answered, found.answers, found.failed) == (3, 3, 0)


async def test_error_on_a_stream_is_one_requests_own(talking: Talking) -> None:
    def script(request: pb.ModelInferRequest, context: Any) -> Iterator[pb.ModelStreamInferResponse]:
        if np.frombuffer(request.raw_input_contents[0], "<f4")[0] == 2:
            yield pb.ModelStreamInferResponse(error_message="no twos")
            # What comes after an error is not the next request's.
            yield answer(request)
        else:
            yield final(answer(request))

    talking.script = script
    found = await sent(talking, clients=1, count=6, is_stream=True)
    assert (found.answered, {status: one.count for status, one in found.errors.items()}) == (4, {"UNKNOWN": 2})
    assert found.reasons == {"UNKNOWN": "no twos"}
    assert found.answers == 4


@pytest.mark.parametrize("status", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.OK])
async def test_stream_that_ends_early_is_opened_again(talking: Talking, status: grpc.StatusCode) -> None:
    def script(request: pb.ModelInferRequest, context: Any) -> Iterator[pb.ModelStreamInferResponse]:
        if status is not grpc.StatusCode.OK:
            context.abort(status, "no more")
        return iter(())

    class Ending(Talking):
        def ModelStreamInfer(self, requests: Any, context: Any) -> Iterator[pb.ModelStreamInferResponse]:
            yield from script(next(requests), context)

    with serving(Ending()) as peer:
        found = await sent(peer, clients=1, count=3, is_stream=True)
    expected = "UNAVAILABLE" if status is grpc.StatusCode.OK else status.name
    assert {name: one.count for name, one in found.errors.items()} == {expected: 3}


async def test_stream_without_an_answer_in_time_is_given_up(talking: Talking) -> None:
    def script(request: pb.ModelInferRequest, context: Any) -> Iterator[pb.ModelStreamInferResponse]:
        if np.frombuffer(request.raw_input_contents[0], "<f4")[0] == 1:
            return iter([answer(request)])
        return iter([final(answer(request))])

    talking.script = script
    for _ in range(20):  # the second is too late as well if this process stands still
        found = await sent(talking, clients=1, count=2, is_stream=True, timeout_s=0.5)
        assert (found.due, set(found.errors)) == (2, {"DEADLINE_EXCEEDED"})
        if found.answered:
            break
    assert found.answered == 1


def test_process_waits_while_nobody_reads_what_it_says(peer: Peer) -> None:
    """If writing failed instead, the load would end as soon as whoever adds up is slower than those who send."""
    ours, theirs = Pipe()
    working = Thread(target=main, args=(os.dup(theirs.fileno()),))
    with theirs, ours:
        ours.send(Share(Load(peer.target, MESSAGES, 60.0, clients=1), S // 100))
        working.start()
        assert ours.recv() == Said()
        ours.send(time.monotonic_ns())
        ours.recv()
        assert os.get_blocking(theirs.fileno())
        ours.close()
        working.join()
