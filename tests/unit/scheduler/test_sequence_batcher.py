"""What happens to steps of sequences at the edges: `tests/property/test_sequences.py` has the promises at large."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from paceline.scheduler.errors import (
    BacklogFull,
    DeadlineUnreachable,
    ExecutionFailed,
    ExecutionTimeout,
    NoInstance,
    NoSequence,
    NotStarted,
    QueueFull,
    QueueTimeout,
)
from paceline.scheduler.observer import Drop
from paceline.scheduler.policy import NEVER, BatchPolicy, QueueLimits, SequencePolicy
from paceline.scheduler.request import Request, SequenceStep
from paceline.scheduler.sequence import LOST, AnySequence, Over, SequenceEnd
from paceline.scheduler.sequence_batcher import SequenceBatcher
from paceline.scheduler.testing import ManualClock, RecordingObserver, StepRunner
from tests.unit.scheduler.workbench import _BLAMES, NeverWaits, one_turn

MS = 1_000_000
PLACES = SequencePolicy(places=2)


class Payload:
    """A step `name`, which leaves the state `state + name`."""

    def __init__(self, name: str, state: str, place: tuple[int, int]) -> None:
        self.name, self.state, self.place = name, state, place
        self.after: str | None = None

    def __repr__(self) -> str:
        return self.state + self.name


class Bench:
    """A batcher of sequences whose instances finish, and whose clock moves, when told to."""

    def __init__(self, sequences: SequencePolicy | None = None, instances: int = 1, **policy: Any) -> None:
        self.clock, self.seen, self.overs = ManualClock(now_ns=1), RecordingObserver(), list[Over]()
        self.runners = [StepRunner[Payload, str](self.clock) for _ in range(instances)]
        limits = BatchPolicy(**{"max_batch_rows": 4, **policy, "sequences": sequences or SequencePolicy()})
        self.batcher: SequenceBatcher[Any, str] = SequenceBatcher(
            "m",
            self.make_step,
            limits,
            self.runners,
            clock=self.clock,
            observer=self.seen,
            blames=lambda error: _BLAMES[type(error)],
            replacer=self,
            arrivals=NeverWaits(),
            on_over=lambda runner, over: self.overs.append(over),
            are_lost=lambda state: state in self.lost,
            failed_note=lambda error: "; the state of its sequence is as it was before",
        )
        self.lost = set[object]()
        self.batcher.start()

    def make_step(self, request: Any, sequence: AnySequence) -> Payload:
        state: Any = "" if request.step.start else sequence.state or ""
        assert sequence.place is not None
        request.payload = Payload(request.payload, state, sequence.place)
        payload: Payload = request.payload
        return payload

    def on_hang(self, runner: Any, others: Sequence[Any]) -> None:
        pass

    def on_loss(self, runner: Any, error: BaseException) -> None:
        pass

    def on_return(self, runner: Any) -> None:
        raise AssertionError("nothing hangs here")

    def refusal(self, id_: int | str, name: str, **how: Any) -> tuple[Request[Any, str], Exception | None]:
        step = SequenceStep(id_, how.pop("start", False), how.pop("end", False))
        request: Request[Any, str] = Request(name, 1, "k", **how)
        request.step = step
        (error,) = self.batcher.submit([request]) or (None,)
        return request, error

    async def send(self, id_: int | str, name: str, **how: Any) -> Request[Any, str]:
        request, error = self.refusal(id_, name, **how)
        assert error is None, error
        await one_turn()
        return request

    async def finish(self, runner: int = 0) -> None:
        self.runners[runner].finish(done)
        await one_turn()

    @property
    def running(self) -> str:
        """The batch that the first instance executes."""
        return str(self.runners[0].batches[-1]) if self.runners[0].busy else ""


def done(payload: Payload) -> str:
    payload.after = payload.state + payload.name
    return payload.after


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


async def test_failed_step_leaves_the_state_as_before() -> None:
    bench = Bench()
    await bench.send(7, "a", start=True)
    await bench.finish()
    failed = await bench.send(7, "b")
    bench.runners[0].fail(ValueError("no"))
    await one_turn()
    with pytest.raises(ExecutionFailed, match="no; the state of its sequence is as it was before"):
        failed.result()
    await bench.send(7, "c")
    assert bench.running == "[ac]"
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


async def test_lost_states_end_their_sequences_alone() -> None:
    bench = Bench(instances=2, max_batch_rows=1)
    for id_, name in ((1, "a"), (2, "b")):
        await bench.send(id_, name, start=True)
    for runner in (0, 1):
        await bench.finish(runner)
    await bench.send(3, "c", start=True)
    bench.lost.add("a")
    lost = next(number for number, runner in enumerate(bench.runners) if runner.busy)
    bench.runners[lost].fail(OSError("gone"))
    await one_turn()
    assert bench.batcher.sequences.ended[SequenceEnd.INSTANCE_LOST] == 1
    _, error = bench.refusal(1, "d")
    assert "the instance of the model that held it was lost" in str(error)
    following = [await bench.send(2, "d"), await bench.send(3, "d")]
    for _ in following:
        await bench.finish(1 - lost)
    assert [one.result() for one in following] == ["bd", "d"]
    bench.batcher.close()


async def test_step_that_finds_its_state_lost_ends_its_sequence() -> None:
    bench = Bench()
    await bench.send(7, "a", start=True)
    await bench.finish()
    await bench.send(7, "b")
    behind = await bench.send(7, "c")
    bench.runners[0].batches[-1][0].after = LOST
    bench.runners[0].finish_with([RuntimeError("gone")])
    await one_turn()
    with pytest.raises(NotStarted, match="the instance of the model that held it was lost"):
        behind.result()
    assert bench.batcher.sequences.live == 0
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


@pytest.mark.parametrize("fate", ["cancelled", "expired"])
async def test_sequence_ends_where_a_waiting_step_is_lost(fate: str) -> None:
    bench = Bench()
    await bench.send(7, "a", start=True)
    before = await bench.send(7, "b")
    lost = await bench.send(7, "c", deadline_ns=bench.clock.now_ns() + MS if fate == "expired" else NEVER)
    after = await bench.send(7, "d", end=True)
    if fate == "expired":
        bench.clock.advance(MS)
        with pytest.raises(QueueTimeout):
            lost.result()
    else:
        lost.cancel()
    await one_turn()
    with pytest.raises(NotStarted, match=f"START flag.*: a step of it {'waited' if fate == 'expired' else 'was'}"):
        after.result()
    _, error = bench.refusal(7, "e")
    assert isinstance(error, NotStarted)
    await bench.finish()
    await bench.finish()
    assert before.result() == "ab"
    why = {"cancelled": SequenceEnd.CANCELLED, "expired": SequenceEnd.EXPIRED}[fate]
    assert bench.batcher.sequences.ended[why] == 1
    assert bench.seen.count(Drop.SEQUENCE_ENDED) == 1


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


async def test_quiet_sequence_ends_after_its_idle_limit() -> None:
    bench = Bench(SequencePolicy(idle_ns=5 * MS))
    await bench.send(7, "a", start=True)
    bench.clock.advance(50 * MS)  # it executes
    await bench.finish()
    bench.clock.advance(5 * MS - 1)
    await bench.send(7, "b")
    await bench.finish()
    bench.clock.advance(5 * MS)
    _, error = bench.refusal(7, "c")
    assert "max_sequence_idle_microseconds" in str(error)
    assert bench.batcher.sequences.live == 0
    bench.batcher.close()


async def test_many_idle_sequences_end_in_turns() -> None:
    bench = Bench(SequencePolicy(idle_ns=MS), max_batch_rows=2_000)
    for id_ in range(1, 1_301):
        bench.refusal(id_, "a", start=True)
    await one_turn()
    await bench.finish()
    sequences = bench.batcher.sequences
    now_ns = bench.clock.now_ns() + MS
    assert sequences.expire(now_ns) == []
    assert sequences.live == 800
    wake_ns = sequences.wake_ns(None)
    assert wake_ns is not None
    assert wake_ns <= now_ns
    bench.clock.advance(MS)
    assert sequences.live == 0
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


async def test_waiting_step_that_will_be_late_ends_its_sequence() -> None:
    bench = Bench(max_batch_rows=1)
    for name in "abc":
        await bench.send(7, name, start=name == "a")
        bench.clock.advance(50 * MS)
        await bench.finish()
    await bench.send(7, "d")
    late = await bench.send(7, "e", deadline_ns=bench.clock.now_ns() + 60 * MS)
    behind = await bench.send(7, "f")
    bench.clock.advance(50 * MS)
    await bench.finish()
    with pytest.raises(DeadlineUnreachable):
        late.result()
    with pytest.raises(NotStarted, match="waited for too long"):
        behind.result()
    assert bench.running == ""
    bench.batcher.close()


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
    queued = await bench.send(3, "3", start=True)
    waiting = await bench.send(1, "b")
    bench.runners[0].fail(OSError("lost"))
    await one_turn()
    with pytest.raises(NotStarted, match="instance of the model that held it was lost"):
        waiting.result()
    with pytest.raises(NoInstance):
        queued.result()
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


async def test_successor_tells_why_a_sequence_is_gone() -> None:
    old, new = Bench(), Bench()
    await old.send(7, "a", start=True)
    new.batcher.sequences.remember(old.batcher.sequences.ids)
    _, error = new.refusal(7, "b")
    assert "must specify the START flag" in str(error)
    assert "loaded again" in str(error)
    old.batcher.close()
    new.batcher.close()


async def test_suspended_batcher_refuses_until_there_is_an_instance() -> None:
    bench = Bench(SequencePolicy(max_sequences=1))
    await bench.send(7, "a", start=True)
    waiting = await bench.send(8, "b", start=True)
    bench.batcher.suspend()
    await one_turn()
    with pytest.raises(NoInstance):
        waiting.result()
    _, error = bench.refusal(7, "c")
    assert isinstance(error, NoInstance)
    bench.batcher.close()
