"""Which sizes are tried on real rows, and which is chosen."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import numpy as np
import pyarrow as pa
import pytest

from paceline.server.bulk.columns import Columns
from paceline.server.bulk.probe import Measured, Sample, best, choose, measure, sizes_of
from paceline.server.bulk.values import BulkError, Chunk, Places
from paceline.server.models.defaults import Offline
from paceline.server.models.offline import layouts
from tests.unit.server.bulk.computing import DESCRIPTION, Doubling, failing_on, numbers

Cost = Callable[[int], int]


class Costly(Doubling):
    """Its calls take as many milliseconds of its own time as `cost_ms` says of their rows."""

    on_cpus = False

    def __init__(self, cost_ms: Cost, *bad: int) -> None:
        self.now_ns = 0
        fail = failing_on(*bad)

        def before(called: Sequence[int]) -> None:
            self.now_ns += cost_ms(len(called)) * 1_000_000
            fail(called)

        super().__init__(before)

    async def tried(self, rows: int, sizes: Sequence[int] = (), job_rows: float = math.inf) -> Sequence[Measured]:
        sample = Sample(numbers(0, rows), ["y"], partial(cut, rows), job_rows)
        return await measure(self, sample, sizes or sizes_of(self), clock=lambda: self.now_ns)


def cut(rows: int, size: int) -> Sequence[Places]:
    return [np.arange(begin, min(begin + size, rows)) for begin in range(0, rows, size)]


async def test_rates_are_rows_over_time() -> None:
    tried = await Costly(lambda rows: 10 + rows).tried(100)
    expected = [(size, pytest.approx(1_000 * size / (10 + size), rel=0.1), 8.0) for size in (1, 8, 16, 32, 64)]
    assert [(one.batch_rows, one.rows_per_s, one.output_row_bytes) for one in tried] == expected


async def test_larger_batches_are_not_tried_once_they_lose() -> None:
    tried = await Costly(lambda rows: rows * rows).tried(512)
    assert [one.batch_rows for one in tried] == [1, 2, 4, 8, 16, 32]


async def test_sizes_without_enough_rows_are_not_tried() -> None:
    tried = await Costly(lambda rows: 10).tried(5)
    assert [one.batch_rows for one in tried] == [1, 4, 8]


async def test_sizes_that_were_disturbed_get_another_chance() -> None:
    first = list(range(16))
    model = Costly(lambda rows: 300 if rows == 16 and model.calls.count(first) < 2 else 10 + rows)
    tried = {one.batch_rows: one.rows_per_s for one in await model.tried(64)}
    assert tried[16] == pytest.approx(16_000 / 26, rel=0.1)


async def test_slow_models_are_not_tried_for_long() -> None:
    tried = await Costly(lambda rows: 4_000).tried(64)
    assert [one.batch_rows for one in tried] == [1, 2]


async def test_small_jobs_are_not_tried_for_long() -> None:
    model = Costly(lambda rows: 10 + rows)
    tried = await model.tried(64, job_rows=1_000)  # eleven seconds by single rows, one and a half by the largest calls
    assert best(tried).batch_rows > 1
    assert model.now_ns < 1.5e9


async def test_rows_at_fault_do_not_count() -> None:
    model = Costly(lambda rows: 1, 3)
    (tried,) = await model.tried(8, [2])
    assert tried.rows_per_s / tried.kept == pytest.approx(2_000, rel=0.02)
    assert model.calls.count([2, 3]) == 1


async def test_rows_at_fault_make_smaller_batches_best() -> None:
    """The larger a batch, the more of them fail."""
    cost: Cost = lambda rows: 20 + 10 * rows  # noqa: E731
    bad = range(30, 512, 60)
    assert [best(await Costly(cost, *those).tried(512)).batch_rows for those in ((), bad)] == [32, 8]


async def test_probe_goes_on_with_bad_rows_in_each_batch() -> None:
    (tried,) = await Costly(lambda rows: 1, 1, 6).tried(8, [4])
    assert tried.batch_rows == 4
    assert tried.rows_per_s == pytest.approx(1_000, rel=0.02)


async def test_rows_that_are_all_at_fault_end_the_probe() -> None:
    with pytest.raises(BulkError, match="none of the first 4 rows could be computed: can't double"):
        await Costly(lambda rows: 1, 0, 1, 2, 3).tried(4)
    with pytest.raises(BulkError, match="none of the first 0 rows could be computed: there are none"):
        await Costly(lambda rows: 1).tried(0)


async def test_rows_that_all_misfit_end_the_probe_with_reason() -> None:
    unfit = Chunk(pa.record_batch({"x": pa.array([None, None], pa.int64())}), np.arange(2))
    rows = Columns(DESCRIPTION, unfit.table.schema).rows(unfit)
    with pytest.raises(BulkError, match=r"none of the first 2 rows could be computed: column 'x'.* got null"):
        await measure(Doubling(), Sample(rows, ["y"], partial(cut, 0)), [1, 2])


def test_smallest_batch_that_is_nearly_best_is_chosen() -> None:
    rates = {1: 50.0, 2: 96.9, 4: 97.0, 8: 100.0, 16: 99.0}
    tried = [Measured(size, rate, 0.0) for size, rate in rates.items()]
    assert best(tried).batch_rows == 4


@pytest.mark.parametrize(
    ("most", "sizes", "expected"),
    [(0, (), [1]), (1, (), [1]), (12, (), [1, 2, 4, 8, 12]), (16, (4, 16), [4, 16])],
    ids=["no batch axis", "one row", "no power of two", "configured"],
)
def test_sizes_to_try_are_those_the_model_knows(most: int, sizes: Sequence[int], expected: list[int]) -> None:
    model = Doubling()
    model.max_rows, model.batch_sizes = most, sizes
    assert list(sizes_of(model)) == expected


@pytest.mark.parametrize(
    ("instances", "cpus", "expected"),
    [
        (0, 1, [(0, 0)]),
        (0, 2, [(0, 0), (2, 1)]),
        (0, 8, [(0, 0), (8, 1), (4, 2), (4, 1), (2, 4)]),
        (1, 8, [(1, 0)]),
        (3, 8, [(3, 2)]),
        (16, 8, [(16, 1)]),
    ],
)
def test_layouts_share_the_cpus(instances: int, cpus: int, expected: list[tuple[int, int]]) -> None:
    assert layouts(instances, cpus) == [Offline(*one) for one in expected]


def test_process_with_some_cpus_has_no_more_threads() -> None:
    assert layouts(0, 4, whole_threads=4) == [Offline(0, 4), *layouts(0, 4)[1:]]
    assert layouts(1, 4, whole_threads=4) == [Offline(1, 4)]
    assert layouts(2, 4, whole_threads=4) == [Offline(2, 2)]


async def test_rows_are_read_while_layouts_are_compared() -> None:
    read = list[int]()
    model = Costly(lambda rows: 10 + rows)

    @asynccontextmanager
    async def opened(offline: Offline) -> AsyncIterator[Costly]:
        yield model

    def sample_of(_: Costly) -> Sample:
        return Sample(numbers(0, 64), ["y"], partial(cut, 64), read=lambda: read.append(len(model.calls)))

    choice = await choose(opened, sample_of, clock=lambda: model.now_ns)  # type: ignore[arg-type]  # it has all of it
    assert choice.measured.batch_rows == 64
    assert read
