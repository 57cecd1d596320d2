"""Sequences that are idle for too long."""

from __future__ import annotations

from paceline.scheduler.policy import SequencePolicy
from paceline.scheduler.sequence import SequenceEnd
from tests.unit.scheduler.sequence_bench import MS, Bench
from tests.unit.scheduler.workbench import one_turn


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


async def test_idle_limit_holds_though_a_step_waited_with_a_far_deadline() -> None:
    bench = Bench(SequencePolicy(idle_ns=5 * MS, max_sequences=2))
    await bench.send(7, "a", start=True)
    await bench.send(7, "b", deadline_ns=bench.clock.now_ns() + 30_000 * MS)
    for _ in "ab":
        await bench.finish()
    bench.clock.advance(2 * MS)
    await bench.send(8, "a", start=True)
    await bench.finish()
    following = await bench.send(9, "a", start=True)
    bench.clock.advance(3 * MS)
    assert sorted(bench.batcher.sequences.ids) == [8, 9]
    await one_turn()
    await bench.finish()
    assert following.result() == "a"
    bench.clock.advance(5 * MS)
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
    wake_ns = sequences.wake_ns()
    assert wake_ns is not None
    assert wake_ns <= now_ns
    bench.clock.advance(MS)
    assert sequences.live == 0
    bench.batcher.close()


async def test_step_that_came_while_nothing_ran_goes_on() -> None:
    bench = Bench(SequencePolicy(idle_ns=5 * MS))
    for id_ in (7, 8):
        await bench.send(id_, "a", start=True)
        await bench.finish()
    bench.clock.freeze(1_000 * MS)
    await bench.send(9, "a", start=True)
    await bench.finish()
    bench.clock.advance(50 * MS)
    await bench.send(7, "b")
    assert bench.running == "[ab]"
    bench.clock.advance(50 * MS)
    assert bench.batcher.sequences.ids == [7]
    assert bench.batcher.sequences.ended[SequenceEnd.IDLE] == 2
    bench.batcher.close()


async def test_idle_sequences_are_put_off_once_and_deadlines_never() -> None:
    bench = Bench(SequencePolicy(idle_ns=5 * MS))
    await bench.send(7, "a", start=True)
    await bench.finish()
    for id_ in (8, 9):
        bench.refusal(id_, "a", start=True)
    await one_turn()
    late = [await bench.send(id_, "b", timeout_ns=timeout_ns) for id_, timeout_ns in ((8, 8 * MS), (9, 60 * MS))]
    bench.clock.freeze(10 * MS)
    assert [one.ended for one in late] == [True, False]
    assert bench.batcher.sequences.ids == [7, 9]
    bench.clock.advance(50 * MS)
    assert late[1].ended
    assert bench.batcher.sequences.ids == [7]
    await bench.finish()
    await bench.send(10, "a", start=True)
    await bench.finish()
    bench.clock.freeze(1_000 * MS)
    assert bench.batcher.sequences.ids == [10]
    bench.clock.advance(100 * MS)
    assert bench.batcher.sequences.ids == []
    bench.batcher.close()
