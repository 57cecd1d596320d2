"""Sequences that instances hold, or whose states are lost with them; how a batcher of sequences starts and ends."""

from __future__ import annotations

import asyncio

import pytest

from paceline.scheduler.errors import ExecutionFailed, NoInstance, NotStarted
from paceline.scheduler.policy import BatchPolicy, SequencePolicy
from paceline.scheduler.request import Request, SequenceStep
from paceline.scheduler.sequence import SequenceEnd
from paceline.scheduler.sequences import Sequences
from paceline.scheduler.testing import StepRunner
from paceline.scheduler.waiting import Waiting
from tests.unit.scheduler.sequence_bench import MS, Bench
from tests.unit.scheduler.workbench import one_turn

PLACES = SequencePolicy(places=2)


# ---- Instances that hold their sequences -----------------------------------------------------------------------------


async def test_sequences_stay_on_the_instance_that_holds_them() -> None:
    bench = Bench(PLACES, instances=2)
    for id_ in (1, 2, 3, 4):
        bench.refusal(id_, str(id_), start=True)
    await one_turn()
    places = [[payload.place for payload in runner.batches[-1]] for runner in bench.runners]
    assert places == [[(0, 0), (1, 0)], [(0, 1), (1, 1)]]
    await bench.finish(0)
    await bench.send(2, "b")  # of the second instance, which is busy
    assert not bench.runners[0].busy
    await bench.finish(1)
    assert bench.runners[1].busy
    bench.batcher.close()


async def test_lost_instance_takes_its_sequences_with_it() -> None:
    bench = Bench(PLACES, instances=2)
    for id_ in (1, 2):
        await bench.send(id_, str(id_), start=True)
    await bench.send(3, "3", start=True)
    for _ in range(2):
        await bench.finish(0)
    await bench.send(1, "b")
    queued = await bench.send(3, "c")
    waiting = await bench.send(1, "b")
    bench.runners[0].fail(OSError("lost"))
    await one_turn()
    for request in (waiting, queued):
        with pytest.raises(NotStarted, match="instance of the model that held it was lost"):
            request.result()
    assert bench.batcher.sequences.ended[SequenceEnd.INSTANCE_LOST] == 2
    assert bench.overs == []  # there is nobody to tell
    # The other instance goes on, and a new one is used.
    await bench.finish(1)
    await bench.send(2, "b")
    assert bench.runners[1].busy
    bench.runners[0] = StepRunner(bench.clock)
    bench.batcher.add(bench.runners[0])
    await bench.send(5, "5", start=True)
    assert bench.running == "[5]"
    bench.batcher.close()


@pytest.mark.parametrize("instances", [1, 2])
async def test_steps_that_start_anew_outlive_a_lost_instance(instances: int) -> None:
    bench = Bench(PLACES, instances=instances)
    await bench.send(1, "a", start=True)
    lost = [await bench.send(1, "b")]
    anew = [await bench.send(1, "x", start=True), await bench.send(1, "y", end=True)]
    if instances == 2:
        await bench.send(2, "other", start=True)
        await bench.finish(1)
    # At the batcher, behind what executes.
    anew += [await bench.send(3, "c", start=True), await bench.send(3, "d")]
    bench.runners[0].fail(OSError("lost"))
    await one_turn()
    for request in lost:
        with pytest.raises(NotStarted, match="instance of the model that held it was lost"):
            request.result()
    if instances == 1:
        assert (bench.batcher.sequences.waiting, bench.batcher.sequences.live) == (2, 0)
        bench.runners.append(StepRunner(bench.clock))
        bench.batcher.add(bench.runners[1])
        await one_turn()
    while bench.runners[1].busy:
        await bench.finish(1)
    assert [one.result() for one in anew] == ["x", "xy", "c", "cd"]
    assert bench.batcher.waiting_requests == 0
    bench.batcher.close()


async def test_steps_that_may_have_ended_their_instance_fail() -> None:
    bench = Bench(PLACES, instances=2)
    steps = [bench.refusal(id_, str(id_), start=True)[0] for id_ in (1, 2, 3)]
    await one_turn()
    assert bench.running == "[1, 3]"
    bench.runners[0].fail(ChildProcessError("killed"))
    await one_turn()
    for step in (steps[0], steps[2]):
        with pytest.raises(ExecutionFailed, match="killed"):
            step.result()
    # Executed again, they might have ended the sequences of the other instance, too.
    assert not bench.batcher.waiting_requests
    await bench.finish(1)
    assert steps[1].result() == "2"
    bench.batcher.close()


async def test_suspect_that_starts_anew_outlives_its_instance() -> None:
    bench = Bench(PLACES, instances=2)
    steps = [bench.refusal(id_, str(id_), start=True)[0] for id_ in (1, 2, 3)]
    await one_turn()
    await bench.finish(1)
    bench.runners[0].fail(ValueError("one of them is bad"))
    await one_turn()
    assert bench.running == "[1]"
    bench.runners[0].fail(OSError("lost"))
    await one_turn()
    await bench.finish(1)
    assert steps[2].result() == "3"
    assert not bench.batcher.waiting_requests
    bench.batcher.close()


async def test_step_taken_back_of_a_lost_instance_may_be_cancelled() -> None:
    bench = Bench(PLACES)
    await bench.send(1, "a", start=True)
    taken_back = await bench.send(2, "b", start=True)
    bench.runners[0].fail(OSError("lost"))
    await one_turn()
    assert bench.batcher.sequences.waiting == bench.batcher.waiting_requests == 1
    taken_back.cancel()
    await one_turn()
    assert bench.batcher.sequences.waiting == bench.batcher.waiting_requests == 0
    bench.batcher.close()


async def test_id_of_a_refused_sequence_is_free() -> None:
    bench = Bench(SequencePolicy(places=1))
    await bench.send(1, "a", start=True)
    refused = [await bench.send(2, name, start=name != "d", end=name == "b") for name in "bcd"]  # and one that follows
    bench.runners[0].fail(OSError("lost"))
    await one_turn()
    bench.batcher.suspend()
    await one_turn()
    for request in refused:
        with pytest.raises(NoInstance):
            request.result()
    ended = bench.batcher.sequences.ended
    assert (ended[SequenceEnd.INSTANCE_LOST], ended[SequenceEnd.REFUSED]) == (1, 2)
    bench.runners[0] = StepRunner(bench.clock)
    bench.batcher.add(bench.runners[0])
    again = await bench.send(2, "e", start=True)
    await bench.finish()
    assert again.result() == "e"
    assert (bench.batcher.sequences.live, bench.batcher.sequences.waiting) == (1, 0)
    bench.batcher.close()


def bare(policy: SequencePolicy) -> tuple[Sequences[Request[str, str]], list[Request[str, str]]]:
    """Without a batcher; and first steps of three sequences."""
    requests: list[Request[str, str]] = [Request("", 1, "k") for _ in range(3)]
    for number, request in enumerate(requests, 1):
        request.step = SequenceStep(number, start=True)
    return Sequences(policy, "m", Waiting(BatchPolicy())), requests


def test_free_places_of_a_lost_instance_are_gone() -> None:
    sequences, requests = bare(PLACES)
    for instance in (0, 1):
        sequences.add_instance(instance, 0)
    sequences.lose_instance(0, 0)
    assert [sequences.arrive(request) for request in requests] == [None] * 3
    assert (sequences.live, sequences.waiting) == (2, 1)


def test_idle_sequences_of_a_lost_instance_are_over() -> None:
    sequences, (request, *_) = bare(PLACES)
    sequences.add_instance(0, 0)
    assert sequences.arrive(request) is None
    sequences.left(request, 0, None)
    sequences.lose_instance(0, 0)
    assert (sequences.live, sequences.ids) == (0, [])
    assert sequences.ended[SequenceEnd.INSTANCE_LOST] == 1


def test_late_end_leaves_the_successors_places_alone() -> None:
    sequences, requests = bare(SequencePolicy(places=1))
    sequences.add_instance(0, 0)
    for number, request in enumerate(requests):
        assert sequences.arrive(request) is None
        if not number:
            # A second slot of the instance still executes when its successor is there.
            sequences.lose_instance(0, 0)
            sequences.add_instance(0, 0)
    sequences.left(requests[0], 0, None)
    assert (sequences.live, sequences.waiting) == (1, 1)


async def test_holder_is_told_how_its_sequences_end() -> None:
    bench = Bench(SequencePolicy(places=2, idle_ns=MS))
    await bench.send(1, "a", start=True, end=True)
    await bench.finish()
    await bench.send(2, "a", start=True)
    await bench.finish()
    bench.clock.advance(MS)
    assert [(over.sequence, over.why) for over in bench.overs] == [(1, SequenceEnd.END), (2, SequenceEnd.IDLE)]
    bench.batcher.close()


async def test_id_begins_anew_once_its_holder_is_told() -> None:
    bench = Bench(PLACES)
    steps = [await bench.send(7, name, start=name in "ac", end=name in "bd") for name in "abcd"]
    steps.append(await bench.send(8, "e", start=True))  # another sequence goes on meanwhile
    told: list[int] = []
    for _ in "abcde":
        told.append(len(bench.overs))
        if bench.runners[0].busy:
            await bench.finish()
    assert [step.result() for step in steps] == ["a", "ab", "c", "cd", "e"]
    batches = [[str(payload) for payload in batch] for batch in bench.runners[0].batches]
    assert batches == [["a"], ["e", "ab"], ["c"], ["cd"]]
    assert told == [0, 0, 1, 1, 2]  # the first is over before `c` executes
    bench.batcher.close()


async def test_lost_followers_of_an_id_are_over_with_it() -> None:
    bench = Bench(PLACES)
    first = await bench.send(7, "a", start=True, end=True)
    behind = [await bench.send(7, "b", start=True, end=True) for _ in range(2_000)]
    for request in behind:
        request.cancel()
    last = await bench.send(7, "c", start=True, end=True)
    await bench.finish()
    await bench.finish()
    assert (first.result(), last.result()) == ("a", "c")
    assert bench.batcher.sequences.ended[SequenceEnd.CANCELLED] == 2_000
    assert bench.batcher.sequences.live == bench.batcher.sequences.waiting == bench.batcher.waiting_requests == 0
    bench.batcher.close()


# ---- Start and end ---------------------------------------------------------------------------------------------------


async def test_drain_executes_what_has_arrived_and_ends_sequences() -> None:
    bench = Bench(SequencePolicy(max_sequences=1))
    steps = [await bench.send(7, name, start=name == "a") for name in "ab"]
    steps.append(await bench.send(8, "c", start=True))
    draining = asyncio.ensure_future(bench.batcher.drain())
    await one_turn()
    for _ in steps:
        await bench.finish()
    await draining
    assert [step.result() for step in steps] == ["a", "ab", "c"]
    assert bench.batcher.sequences.live == 0
    assert bench.batcher.sequences.ended[SequenceEnd.REPLACED] == 2
    bench.batcher.close()


async def test_sequence_that_is_ended_makes_room() -> None:
    bench = Bench(SequencePolicy(max_sequences=1))
    await bench.send(7, "a", start=True)
    await bench.finish()
    waiting = await bench.send(8, "b", start=True)
    bench.batcher.end_sequence(7)
    await one_turn()
    assert bench.running == "[b]"
    await bench.finish()
    assert waiting.result() == "b"
    assert bench.batcher.sequences.ended[SequenceEnd.END] == 1
    bench.batcher.close()


async def test_successor_tells_why_a_sequence_is_gone() -> None:
    old, new = Bench(), Bench()
    await old.send(7, "a", start=True)
    new.batcher.sequences.remember(old.batcher.sequences.ids)
    _, error = new.refusal(7, "b")
    assert "must specify the START flag" in str(error)
    assert "loaded again" in str(error)
    # Until another one has begun.
    await new.send(7, "c", start=True, end=True)
    _, error = new.refusal(7, "d")
    assert "must specify the START flag" in str(error)
    assert "loaded again" not in str(error)
    old.batcher.close()
    new.batcher.close()


async def test_why_sequences_are_gone_is_remembered_of_the_last_ones() -> None:
    bench = Bench()
    bench.batcher.sequences.remember(range(1, 5_000))
    told = ["loaded again" in str(bench.refusal(id_, "b")[1]) for id_ in (1, 4_999)]
    assert told == [False, True]
    bench.batcher.close()


@pytest.mark.parametrize("policy", [SequencePolicy(max_sequences=1), SequencePolicy(places=1)], ids=["all", "held"])
@pytest.mark.parametrize("id_", [7, 8], ids=["follower", "other"])
async def test_suspended_batcher_refuses_until_there_is_an_instance(policy: SequencePolicy, id_: int) -> None:
    bench = Bench(policy)
    await bench.send(7, "a", start=True, end=id_ == 7)
    waiting = await bench.send(id_, "b", start=True)
    bench.batcher.suspend()
    await one_turn()
    with pytest.raises(NoInstance):
        waiting.result()
    assert bench.batcher.sequences.waiting == 0
    _, error = bench.refusal(7, "c")
    assert isinstance(error, NoInstance)
    await bench.finish()
    assert bench.batcher.sequences.ended[SequenceEnd.REFUSED] == 1
    bench.batcher.close()
