"""Rows at fault are found, and only these; what isn't about the rows is waited out; units take turns."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import grpc
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.backends.lengths import Lengths
from paceline.backends.spec import Length, ModelSpec, TensorSpec
from paceline.clients.errors import inference_error
from paceline.clients.messages import TensorMetadata
from paceline.server.bulk.columns import Columns
from paceline.server.bulk.execution import Calls, execute
from paceline.server.bulk.tally import Tally
from paceline.server.bulk.values import BulkError, Chunk, Results
from tests.unit.server.bulk.computing import DESCRIPTION, Doubling, failing_on, numbers, places

UNAVAILABLE = inference_error(grpc.StatusCode.UNAVAILABLE, "no instance")
FULL = inference_error(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")


async def executed(model: Doubling, sizes: Sequence[int], patience_s: float = 60.0) -> Results:
    """What became of as many numbers from 0 on as `sizes`, those of batches, have together."""
    count = sum(sizes)
    batches = np.split(np.arange(count), np.cumsum(sizes)[:-1]) if sizes else []
    calls = Calls(model, ["y"], patience_s=patience_s, first_wait_s=0.0)
    return await execute(calls, 0, numbers(0, count), batches, Tally())


def doubles(results: Results) -> dict[int, int]:
    """By place, of which each is there once."""
    found = np.concatenate([one.places for one in results.computed]).tolist()
    values = np.concatenate([one.outputs["y"] for one in results.computed]).tolist()
    assert len(set(found)) == len(found)
    return dict(zip(found, values, strict=True))


def first(times: int, error: Exception) -> Callable[[Sequence[int]], None]:
    """For `Doubling`: the first calls fail."""
    errors = [error] * times

    def before(_: Sequence[int]) -> None:
        if errors:
            raise errors.pop()

    return before


async def test_each_batch_is_one_call_with_its_rows() -> None:
    model = Doubling()
    results = await executed(model, [3, 2, 1])
    assert model.calls == [[0, 1, 2], [3, 4], [5]]
    assert doubles(results) == {number: 2 * number for number in range(6)}


async def test_chunk_without_rows_makes_no_call() -> None:
    model = Doubling()
    assert await executed(model, []) == Results()
    assert not model.calls


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.data())
def test_exactly_the_rows_at_fault_fail(batches: list[int], data: st.DataObject) -> None:
    count = sum(batches)
    bad = data.draw(st.sets(st.integers(0, count - 1), max_size=max(0, count - 1)))
    results = asyncio.run(executed(Doubling(failing_on(*bad), at_once=3), batches, Tally()))
    assert sorted(results.failed) == [(number, f"can't double {number}") for number in sorted(bad)]
    assert doubles(results) == {number: 2 * number for number in range(count) if number not in bad}


async def test_search_for_one_row_takes_few_calls() -> None:
    calls = rows = 0
    for bad in range(0, 256, 5):
        model = Doubling(failing_on(bad))
        assert [one.place for one in (await executed(model, [256])).failed] == [bad]
        calls, rows = calls + len(model.calls) / 52, rows + sum(map(len, model.calls)) / 52
    assert calls < 13
    assert rows < 2.2 * 256


@pytest.mark.parametrize(("every", "quarters"), [(1, 341), (2, 341), (4, 341), (10, 189)])
async def test_dense_faults_take_few_calls_of_each(every: int, quarters: int) -> None:
    """Hardly more than if what fails were divided into `quarters` at once; and no row is tried alone twice."""
    bad = range(0, 256, every)
    model = Doubling(failing_on(*bad))
    assert len((await executed(model, [256])).failed) == len(bad)
    assert len(model.calls) <= 1.05 * quarters
    alone = [called for called in model.calls if len(called) == 1]
    assert len({number for (number,) in alone}) == len(alone)


@pytest.mark.parametrize("error", [UNAVAILABLE, FULL], ids=["unavailable", "full"])
async def test_faults_of_nobody_are_waited_out(error: Exception) -> None:
    model = Doubling(first(30, error))
    results = await executed(model, [3, 1])
    assert (len(doubles(results)), results.failed) == (4, [])
    assert model.calls == [[0, 1, 2]] * 31 + [[3]]


async def test_what_succeeds_is_counted_as_it_does() -> None:
    tally = Tally()
    calls = Calls(Doubling(failing_on(5)), ["y"])
    await execute(calls, 0, numbers(0, 8), [np.arange(4), np.arange(4, 8)], tally)
    assert (tally.executions, tally.rows_executed, tally.elements, tally.filled_elements) == (3, 7, 7, 0)


async def test_elements_that_only_fill_up_are_counted() -> None:
    tally, values = Tally(), pa.array([[1], [2, 3, 4], [5, 6]])
    (axis,) = (TensorSpec("x", "INT64", (-1,)),)
    spec = ModelSpec((axis,), (replace(axis, name="y"),), batched=True, lengths=(Length("n", ((0, 1),), ((0, 1),)),))
    table = pa.record_batch({"x": values})
    model = Doubling()
    model.description = replace(DESCRIPTION, inputs=(TensorMetadata("x", "INT64", (-1, -1)),))
    rows = Columns(model.description, table.schema, lengths=Lengths(spec)).rows(Chunk(table, np.arange(3)))
    (computed,) = (await execute(Calls(model, ["y"]), 0, rows, [np.arange(3)], tally)).computed
    assert (computed.outputs["y"].shape, computed.sizes) == ((3, 3), (3,))
    assert (tally.elements, tally.filled_elements) == (9, 3)


async def test_model_that_stays_silent_ends_the_job() -> None:
    model = Doubling(first(1, UNAVAILABLE), at_once=2)
    with pytest.raises(BulkError, match="model 'm' has answered nothing for 0 s; its last error: UNAVAILABLE: no inst"):
        await executed(model, [1, 1, 1], patience_s=0.0)
    assert model.running == 0


async def test_refused_caller_ends_the_job_at_once() -> None:
    error = inference_error(grpc.StatusCode.PERMISSION_DENIED, "no token")
    model = Doubling(first(1, error))
    with pytest.raises(BulkError, match="PERMISSION_DENIED: no token"):
        await executed(model, [1] * 9)
    assert len(model.calls) < 9


async def test_call_that_alone_is_too_much_is_divided() -> None:
    """While others are answered, the model isn't full of somebody else's requests."""

    def before(called: Sequence[int]) -> None:
        if len(called) > 2:
            raise FULL

    model = Doubling(before, at_once=2)
    results = await executed(model, [4] + [1] * 60)
    assert (len(doubles(results)), results.failed) == (64, [])


async def test_units_share_the_places_and_the_earliest_goes_first() -> None:
    may_go = asyncio.Event()

    def before(_: Sequence[int]) -> Awaitable[object]:
        return may_go.wait()

    model = Doubling(before, at_once=2)
    calls = Calls(model, ["y"])
    batches = [places(0), places(1), places(2), places(3)]
    units = []
    for unit in (2, 1, 0):
        units.append(asyncio.ensure_future(execute(calls, unit, numbers(10 * unit, 10 * unit + 4), batches, Tally())))
        await asyncio.sleep(0)
    may_go.set()
    assert [len(doubles(one)) for one in await asyncio.gather(*units)] == [4, 4, 4]
    assert model.most_running == 2
    order = [called[0] // 10 for called in model.calls]
    assert order == [2, 2, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2]


async def test_cancelled_unit_gives_its_places_back() -> None:
    never = asyncio.Event()

    def before(called: Sequence[int]) -> Awaitable[object] | None:
        return never.wait() if called[0] < 4 else None

    model = Doubling(before, at_once=2)
    calls, batches = Calls(model, ["y"]), [places(0), places(1), places(2), places(3)]
    unit = asyncio.ensure_future(execute(calls, 0, numbers(0, 4), batches, Tally()))
    other = asyncio.ensure_future(execute(calls, 1, numbers(4, 8), batches, Tally()))
    while model.running < 2:
        await asyncio.sleep(0)
    unit.cancel()
    assert len(doubles(await other)) == 4
    assert (unit.cancelled(), model.running, len(model.calls)) == (True, 0, 6)


async def test_results_go_without_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        results = await executed(Doubling(failing_on(1)), [3, 2])
        kept = [weakref.ref(one.outputs["y"]) for one in results.computed]
        del results
        assert [one() for one in kept] == [None] * len(kept)
    finally:
        gc.enable()
