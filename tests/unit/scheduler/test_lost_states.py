"""What becomes of sequences whose states are lost with an instance or a GPU."""

from __future__ import annotations

import pytest

from paceline.scheduler.errors import NotStarted
from paceline.scheduler.sequence import LOST, SequenceEnd
from tests.unit.scheduler.sequence_bench import Bench
from tests.unit.scheduler.workbench import one_turn


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


@pytest.mark.parametrize("waits", [False, True])
async def test_step_that_starts_anew_outlives_lost_states(waits: bool) -> None:
    bench = Bench(instances=2, max_batch_rows=1)
    await bench.send(1, "a", start=True)
    await bench.finish(next(number for number, runner in enumerate(bench.runners) if runner.busy))
    await bench.send(3, "other", start=True)
    lost = next(number for number, runner in enumerate(bench.runners) if runner.busy)
    before = await bench.send(1, "b") if waits else None
    anew = await bench.send(1, "x", start=True)
    behind = await bench.send(1, "y")
    bench.lost.add("a")
    bench.runners[lost].fail(OSError("gone"))
    for _ in range(4):
        await one_turn()
        if bench.runners[1 - lost].busy:
            await bench.finish(1 - lost)
    assert before is None or before.ended
    assert (anew.result(), behind.result()) == ("x", "xy")


async def test_failed_step_at_the_batcher_is_followed_by_none_without_the_lost_state() -> None:
    bench = Bench(instances=2, max_batch_rows=1)
    await bench.send(1, "a", start=True)
    await bench.finish(next(number for number, runner in enumerate(bench.runners) if runner.busy))
    await bench.send(3, "other", start=True)
    lost = next(number for number, runner in enumerate(bench.runners) if runner.busy)
    await bench.send(1, "b")
    behind = await bench.send(1, "c")
    bench.lost.add("a")
    bench.runners[lost].fail(OSError("gone"))
    await one_turn()
    bench.runners[1 - lost].fail(ValueError("no"))
    await one_turn()
    with pytest.raises(NotStarted, match="the instance of the model that held it was lost"):
        behind.result()
    assert bench.batcher.sequences.ended[SequenceEnd.INSTANCE_LOST] == 1
    bench.batcher.close()


async def test_second_loss_finds_a_sequence_whose_state_was_lost_before() -> None:
    bench = Bench(instances=2, max_batch_rows=1)
    await bench.send(1, "a", start=True)
    await bench.finish(next(number for number, runner in enumerate(bench.runners) if runner.busy))
    await bench.send(1, "b")
    anew = await bench.send(1, "x", start=True)
    first = next(number for number, runner in enumerate(bench.runners) if runner.busy)
    bench.runners[first].batches[-1][0].after = LOST
    bench.runners[first].finish_with([OSError("lost")])
    await one_turn()
    first = next(number for number, runner in enumerate(bench.runners) if runner.busy)
    other = await bench.send(3, "c", start=True)
    bench.runners[1 - first].fail(OSError("gone"))
    await one_turn()
    await bench.finish(first)
    assert anew.result() == "x"
    if bench.runners[first].busy:
        await bench.finish(first)
    assert other.ended


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
