"""What happens to steps of sequences at the edges: `tests/property/test_sequences.py` has the promises at large."""

from __future__ import annotations

import pytest

from paceline.scheduler.errors import (
    BacklogFull,
    DeadlineUnreachable,
    ExecutionFailed,
    ExecutionTimeout,
    NoSequence,
    NotStarted,
    QueueFull,
    QueueTimeout,
)
from paceline.scheduler.observer import Drop
from paceline.scheduler.policy import NEVER, QueueLimits, SequencePolicy
from paceline.scheduler.sequence import SequenceEnd
from paceline.scheduler.testing import StepRunner
from tests.unit.scheduler.sequence_bench import MS, Bench
from tests.unit.scheduler.workbench import one_turn


async def test_steps_go_in_order_each_with_the_state_before() -> None:
    bench = Bench()
    steps = [await bench.send(7, name, start=name == "a", end=name == "c") for name in "abc"]
    for expected in ("[a]", "[ab]", "[abc]"):
        assert bench.running == expected
        await bench.finish()
    assert [step.result() for step in steps] == ["a", "ab", "abc"]
    assert bench.batcher.sequences.ended[SequenceEnd.END] == 1
    assert bench.batcher.sequences.live == 0


async def test_steps_of_different_sequences_share_a_batch() -> None:
    bench = Bench()
    for id_ in (1, "1", 2):
        bench.refusal(id_, str(id_), start=True)
    await one_turn()
    assert bench.running == "[1, 1, 2]"
    bench.batcher.close()


async def test_start_of_a_live_sequence_resets_its_state() -> None:
    bench = Bench()
    await bench.send(7, "a", start=True)
    await bench.finish()
    await bench.send(7, "b", start=True)
    assert bench.running == "[b]"
    await bench.finish()
    await bench.send(7, "c")
    assert bench.running == "[bc]"
    bench.batcher.close()


async def test_end_frees_the_id_at_once() -> None:
    bench = Bench()
    await bench.send(7, "a", start=True, end=True)
    _, error = bench.refusal(7, "b")
    assert isinstance(error, NotStarted)
    await bench.send(7, "c", start=True)
    assert bench.batcher.sequences.live == 2
    await bench.finish()
    assert bench.running == "[c]"
    bench.batcher.close()


@pytest.mark.parametrize(("start", "then"), [(False, "[ac]"), (True, "[c]")], ids=["as it was", "initial"])
async def test_failed_step_leaves_the_state_as_before(start: bool, then: str) -> None:
    bench = Bench()
    await bench.send(7, "a", start=True)
    await bench.finish()
    failed = await bench.send(7, "b", start=start)
    bench.runners[0].fail(ValueError("no"))
    await one_turn()
    with pytest.raises(ExecutionFailed, match="no; the state of its sequence is as it was before"):
        failed.result()
    await bench.send(7, "c")
    assert bench.running == then
    bench.batcher.close()


async def test_step_that_was_given_up_leaves_nothing_though_it_ends_just_then() -> None:
    bench = Bench(execution_limit_ns=5 * MS)
    await bench.send(7, "a", start=True)
    await bench.finish()
    late = await bench.send(7, "b")
    # As on the instance's thread, before the loop learns of it.
    bench.runners[0].batches[-1][0].after = "ab"
    bench.clock.advance(10 * MS)
    await one_turn()
    with pytest.raises(ExecutionTimeout, match="the state of its sequence is as it was before"):
        late.result()
    bench.batcher.add(runner := StepRunner(bench.clock))
    await bench.send(7, "c")
    assert str(runner.batches[-1]) == "[ac]"
    bench.batcher.close()


async def test_executing_step_counts_though_its_caller_has_gone() -> None:
    bench = Bench()
    step = await bench.send(7, "a", start=True)
    assert step.cancel()
    await one_turn()
    following = await bench.send(7, "b")
    assert bench.running == "[a]"
    await bench.finish()
    await bench.finish()
    assert following.result() == "ab"
    bench.batcher.close()


@pytest.mark.parametrize("fate", ["cancelled", "expired", "timed out"])
async def test_sequence_ends_where_a_waiting_step_is_lost(fate: str) -> None:
    bench = Bench()
    await bench.send(7, "a", start=True)
    before = await bench.send(7, "b")
    deadline_ns = bench.clock.now_ns() + MS if fate == "expired" else NEVER
    lost = await bench.send(7, "c", deadline_ns=deadline_ns, timeout_ns=MS if fate == "timed out" else 0)
    after = await bench.send(7, "d", end=True)
    if fate == "cancelled":
        lost.cancel()
    else:
        bench.clock.advance(MS - 1)
        assert not lost.ended
        bench.clock.advance(1)
        with pytest.raises(QueueTimeout):
            lost.result()
    await one_turn()
    with pytest.raises(NotStarted, match=f"START flag.*: a step of it {'was' if fate == 'cancelled' else 'waited'}"):
        after.result()
    _, error = bench.refusal(7, "e")
    assert isinstance(error, NotStarted)
    await bench.finish()
    await bench.finish()
    assert before.result() == "ab"
    why = SequenceEnd.CANCELLED if fate == "cancelled" else SequenceEnd.EXPIRED
    assert bench.batcher.sequences.ended[why] == 1
    assert bench.seen.count(Drop.SEQUENCE_ENDED) == 1


@pytest.mark.parametrize("fate", ["lost", "suspended"])
async def test_lost_steps_are_told_in_order(fate: str) -> None:
    bench = Bench()
    told: list[str] = []
    steps = [await bench.send(7, name, start=name == "a") for name in "abcd"]
    for step in steps:
        step.on_answers = lambda requests: told.extend(one.payload for one in requests)
    if fate == "lost":
        steps[1].cancel()
    else:
        bench.batcher.suspend()
    await one_turn()
    assert told == ["b", "c", "d"]
    bench.batcher.close()


async def test_first_step_of_a_passed_deadline_loses_those_behind() -> None:
    bench = Bench(SequencePolicy(max_sequences=1))
    await bench.send(1, "a", start=True)
    deadline_ns = bench.clock.now_ns() + MS
    other, first, *behind = [
        await bench.send(id_, name, start=name in "bc", deadline_ns=deadline_ns)
        for id_, name in ((2, "b"), (3, "c"), (3, "d"), (3, "e"))
    ]
    bench.clock.advance(MS)
    await one_turn()
    errors = [type(one.exception()) for one in (other, first, *behind)]
    assert errors == [QueueTimeout, QueueTimeout, NotStarted, NotStarted]
    assert bench.batcher.sequences.ended[SequenceEnd.EXPIRED] == 2
    bench.batcher.close()


@pytest.mark.parametrize("lost_at", ["sequence", "batcher"])
async def test_step_behind_a_lost_one_may_start_anew(lost_at: str) -> None:
    bench = Bench(max_batch_rows=1)
    executing = await bench.send(7 if lost_at == "sequence" else 1, "a", start=True)
    lost = await bench.send(7, "b", start=lost_at == "batcher")
    behind, *anew = [await bench.send(7, name, start=name == "d", end=name == "e") for name in "cde"]
    lost.cancel()
    await one_turn()
    with pytest.raises(NotStarted, match="cancelled"):
        behind.result()
    for _ in range(3):
        await bench.finish()
    assert [one.result() for one in (executing, *anew)] == ["a", "d", "de"]
    assert bench.batcher.sequences.ended[SequenceEnd.CANCELLED] == bench.batcher.waiting_requests == 0
    assert bench.seen.count(Drop.SEQUENCE_ENDED) == 1
    bench.batcher.close()


async def test_lost_step_that_was_at_the_batcher_ends_its_sequence() -> None:
    bench = Bench(max_batch_rows=1)
    await bench.send(1, "x", start=True)
    queued = await bench.send(7, "a", start=True)
    behind = await bench.send(7, "b")
    queued.cancel()
    await one_turn()
    with pytest.raises(NotStarted, match="cancelled"):
        behind.result()
    await bench.finish()
    assert bench.running == ""
    bench.batcher.close()


@pytest.mark.parametrize("fate", ["succeeds", "fails", "is cancelled"])
async def test_last_step_is_a_reason_only_if_it_fails(fate: str) -> None:
    bench = Bench()
    last = await bench.send(7, "a", start=True, end=True)
    if fate == "is cancelled":
        last.cancel()
    if fate == "fails":
        bench.runners[0].fail(ValueError("no"))
        await one_turn()
    else:
        await bench.finish()
    _, error = bench.refusal(7, "b")
    assert isinstance(error, NotStarted)
    assert ("the last step of it failed" in str(error)) == (fate == "fails")


async def test_suspect_that_is_cancelled_ends_its_sequence() -> None:
    bench = Bench()
    steps = [bench.refusal(id_, f"{id_}", start=True)[0] for id_ in (1, 2)]
    await one_turn()
    bench.runners[0].fail(ValueError("one of them"))
    await one_turn()
    assert bench.running == "[1]"
    steps[1].cancel()
    await one_turn()
    await bench.finish()
    _, error = bench.refusal(2, "b")
    assert isinstance(error, NotStarted)
    assert bench.running == ""
    bench.batcher.close()


async def test_new_sequence_waits_until_there_is_room() -> None:
    bench = Bench(SequencePolicy(max_sequences=1))
    await bench.send(1, "a", start=True)
    second, third = [await bench.send(id_, f"{id_}", start=True, end=True) for id_ in (2, 3)]
    assert bench.batcher.sequences.waiting == bench.batcher.waiting_requests == 2
    await bench.finish()
    assert bench.running == ""
    await bench.send(1, "b", end=True)
    await bench.finish()
    assert bench.running == "[2]"
    await bench.finish()
    await bench.finish()
    assert (second.result(), third.result()) == ("2", "3")
    assert bench.batcher.sequences.live == 0


async def test_full_backlog_refuses_and_ends_a_sequence_with_steps_under_way() -> None:
    bench = Bench(SequencePolicy(backlog=1))
    await bench.send(7, "a", start=True)
    second = await bench.send(7, "b")
    _, error = bench.refusal(7, "c")
    assert isinstance(error, BacklogFull)
    assert bench.seen.drops == [Drop.FULL_REQUESTS]
    await bench.finish()
    await bench.finish()
    assert second.result() == "ab"
    _, error = bench.refusal(7, "d")
    assert isinstance(error, NotStarted)
    assert "refused" in str(error)


async def test_refused_step_may_be_sent_again_if_none_is_under_way() -> None:
    bench = Bench(max_batch_rows=1, limits=QueueLimits(max_rows=1))
    await bench.send(7, "a", start=True)
    await bench.finish()
    await bench.send(1, "x", start=True)
    await bench.send(2, "y", start=True)
    _, error = bench.refusal(7, "b", end=True)
    assert isinstance(error, QueueFull)
    assert bench.batcher.sequences.live == 3
    await bench.finish()
    await bench.finish()
    again = await bench.send(7, "b", end=True)
    await bench.finish()
    assert again.result() == "ab"
    assert bench.batcher.sequences.ended[SequenceEnd.END] == 1
    bench.batcher.close()


async def test_refused_start_leaves_a_live_sequence_as_it_was() -> None:
    bench = Bench(max_batch_rows=1, limits=QueueLimits(max_rows=1))
    await bench.send(7, "a", start=True)
    await bench.finish()
    await bench.send(1, "x", start=True)
    await bench.send(2, "y", start=True)
    _, error = bench.refusal(7, "b", start=True)
    assert isinstance(error, QueueFull)
    await bench.finish()
    await bench.finish()
    await bench.send(7, "c")
    assert bench.running == "[ac]"
    bench.batcher.close()


async def test_refused_first_step_begins_no_sequence() -> None:
    bench = Bench(max_batch_rows=1, limits=QueueLimits(max_rows=1))
    await bench.send(1, "x", start=True)
    await bench.send(2, "y", start=True)
    _, error = bench.refusal(7, "a", start=True)
    assert isinstance(error, QueueFull)
    _, error = bench.refusal(7, "b")
    assert isinstance(error, NotStarted)
    assert bench.batcher.sequences.live == 2
    bench.batcher.close()


async def test_request_in_no_sequence_is_refused() -> None:
    bench = Bench()
    for id_ in (0, ""):
        _, error = bench.refusal(id_, "a", start=True)
        assert isinstance(error, NoSequence)
    bench.batcher.close()


async def test_unreachable_deadline_is_refused_without_harm() -> None:
    bench = Bench(max_batch_rows=1)
    for name in "abc":
        await bench.send(7, name, start=name == "a")
        bench.clock.advance(50 * MS)
        await bench.finish()
    _, error = bench.refusal(7, "d", deadline_ns=bench.clock.now_ns() + MS)
    assert isinstance(error, DeadlineUnreachable)
    await bench.send(7, "e")
    assert bench.running == "[abce]"
    bench.batcher.close()


@pytest.mark.parametrize("others", [False, True], ids=["alone", "behind another"])
async def test_waiting_step_that_will_be_late_ends_its_sequence(others: bool) -> None:
    bench = Bench(max_batch_rows=1)
    for name in "abc":
        await bench.send(7, name, start=name == "a")
        bench.clock.advance(50 * MS)
        await bench.finish()
    await bench.send(7, "d")
    late = await bench.send(7, "e", deadline_ns=bench.clock.now_ns() + (110 if others else 60) * MS)
    behind = await bench.send(7, "f")
    if others:
        await bench.send(8, "x", start=True)
    bench.clock.advance(50 * MS)
    await bench.finish()
    with pytest.raises(DeadlineUnreachable):
        late.result()
    with pytest.raises(NotStarted, match="waited for too long"):
        behind.result()
    assert bench.running == ("[x]" if others else "")
    bench.batcher.close()
