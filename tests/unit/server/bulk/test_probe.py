"""Which sizes are tried on real rows, and which is chosen."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import cycle
from typing import Any

import grpc
import numpy as np
import pyarrow as pa
import pytest

from paceline.clients.errors import inference_error
from paceline.server.bulk.columns import Columns
from paceline.server.bulk.probe import Choice, Measured, Sample, choose, measure, sizes_of
from paceline.server.bulk.values import Chunk, Places
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

    async def best(self, rows: int, sizes: Sequence[int] = (), job_rows: float = math.inf) -> Measured:
        sample = Sample(numbers(0, rows), ["y"], partial(cut, rows), job_rows)
        return await measure(self, sample, sizes or sizes_of(self), clock=lambda: self.now_ns)

    @property
    def tried(self) -> list[int]:
        """Numbers of rows, in the order in which they were tried first."""
        return list(dict.fromkeys(map(len, self.calls)))


def cut(rows: int, size: int) -> Sequence[Places]:
    return [np.arange(begin, min(begin + size, rows)) for begin in range(0, rows, size)]


async def test_rates_are_rows_over_time() -> None:
    model = Costly(lambda rows: 10 + rows)
    best = await model.best(128)
    assert model.tried == [1, 16, 32, 64, 8]
    assert (best.batch_rows, best.rows_per_s, best.output_row_bytes) == (64, pytest.approx(64_000 / 74), 8.0)


async def test_larger_batches_are_not_tried_once_they_lose() -> None:
    model = Costly(lambda rows: rows * rows)
    assert (await model.best(512)).batch_rows == 1
    assert model.tried == [1, 16, 32, 8]


async def test_sizes_without_enough_rows_are_not_tried() -> None:
    model = Costly(lambda rows: 10)
    assert (await model.best(5)).batch_rows == 8
    assert model.tried == [1, 5, 4]


async def test_sizes_that_were_disturbed_get_another_chance() -> None:
    def cost(rows: int) -> int:
        first = rows == 16 and [len(call) for call in model.calls].count(16) < 2
        return 1_000 if first else 10 + rows + rows**2 // 16

    model = Costly(cost)
    assert (await model.best(64)).batch_rows == 16


async def test_close_sizes_take_turns_with_the_same_rows() -> None:
    """In every other turn, something else keeps the machine busy."""
    busy = cycle([1, 1, 1.4])
    model = Costly(lambda rows: round((100 + 10 * rows) * next(busy)))
    assert (await model.best(128, [32, 64])).batch_rows == 64


async def test_smallest_of_equal_sizes_is_chosen() -> None:
    assert (await Costly(lambda rows: 1_000 * rows + rows // 2).best(64, [2, 4])).batch_rows == 2


async def test_ends_of_small_jobs_are_waited_for() -> None:
    cost: Cost = lambda rows: 3 + 10 * rows  # noqa: E731
    found = [(await Costly(cost).best(64, [4, 32], job_rows)).batch_rows for job_rows in (math.inf, 200)]
    assert found == [32, 4]


async def test_slow_models_are_not_tried_for_long() -> None:
    model = Costly(lambda rows: 4_000)
    assert (await model.best(64)).batch_rows > 1
    assert model.now_ns < 20e9


async def test_first_call_that_compiles_decides_nothing() -> None:
    model = Costly(lambda rows: 2_000 if len(model.calls) == 1 else 10 + rows // 16)
    assert (await model.best(64, job_rows=10_000)).batch_rows == 64


async def test_small_jobs_are_not_tried_for_long() -> None:
    model = Costly(lambda rows: 10 + rows)
    # Eleven seconds by single rows, one and a half by the largest calls.
    assert (await model.best(64, job_rows=1_000)).batch_rows > 1
    assert model.now_ns < 0.3e9


async def test_rows_at_fault_do_not_count() -> None:
    model = Costly(lambda rows: 1, 4)
    best = await model.best(8, [2])
    assert best.rows_per_s == pytest.approx(2_000)
    assert model.calls.count([4, 5]) == 1


async def test_rows_at_fault_make_smaller_batches_best() -> None:
    """The larger a batch, the more of them fail."""
    cost: Cost = lambda rows: 20 + 10 * rows  # noqa: E731
    bad = range(30, 512, 60)
    assert [(await Costly(cost, *those).best(512)).batch_rows for those in ((), bad)] == [64, 8]


async def test_probe_goes_on_with_bad_rows_in_each_batch() -> None:
    best = await Costly(lambda rows: 1, 1, 6).best(8, [4])
    assert (best.batch_rows, best.rows_per_s) == (4, pytest.approx(1_000))


async def test_rows_that_are_all_at_fault_leave_plain_sizes() -> None:
    model = Costly(lambda rows: 1, *range(128))
    best = await model.best(128)
    assert (best.batch_rows, best.rows_per_s) == (32, 0.0)
    assert best.reason.startswith("can't double")
    assert (await model.best(128, [64])).batch_rows == 64  # as asked for
    assert (await chosen(model, 128)).measured == best


@pytest.mark.parametrize(("sizes", "most_s"), [((), 17), ((4, 8), 36)], ids=["any size", "configured"])
async def test_trying_ends_though_all_rows_fail(sizes: Sequence[int], most_s: int) -> None:
    model = Costly(lambda rows: 1_000, *range(4_096))
    best = await model.best(4_096, sizes)
    assert model.now_ns <= most_s * 1e9
    assert best.untried_rows == 4_096 - [len(call) for call in model.calls].count(1)


async def test_rows_that_fail_are_few_where_speed_changes_nothing() -> None:
    model = Costly(lambda rows: 1, *range(64))
    assert (await chosen(model, 64, batch_rows=8, rates=False)).measured.untried_rows == 62
    assert len(model.calls) == 4


@pytest.mark.parametrize(("failing", "expected"), [((2, 4), 4), ((4,), 2)], ids=["all sizes", "one size"])
async def test_sizes_that_fail_after_the_look_are_left_out(failing: Sequence[int], expected: int) -> None:
    def cost(rows: int) -> int:
        seen = [len(call) for call in model.calls].count(rows)
        if rows in failing and seen > (2 if rows == 2 else 1):
            raise inference_error(grpc.StatusCode.INTERNAL, "no more")
        return 500 * rows + 4 // rows

    model = Costly(cost)
    best = await model.best(16, [2, 4])
    assert (best.batch_rows, best.rows_per_s) == (expected, pytest.approx(2, rel=0.01))


async def test_failures_without_text_are_failures() -> None:
    def before(called: Sequence[int]) -> None:
        raise inference_error(grpc.StatusCode.INTERNAL, "")

    best = await measure(Doubling(before), Sample(numbers(0, 2), ["y"], partial(cut, 2)), [1, 2])
    assert (best.rows_per_s, best.reason) == (0.0, "no reason was given")


async def test_rows_that_all_misfit_tell_the_reason() -> None:
    unfit = Chunk(pa.record_batch({"x": pa.array([None, None], pa.int64())}), np.arange(2))
    rows = Columns(DESCRIPTION, unfit.table.schema).rows(unfit)
    best = await measure(Doubling(), Sample(rows, ["y"], partial(cut, 0)), [1, 2])
    assert best.batch_rows == 2
    assert best.reason.startswith("column 'x'")
    assert best.reason.endswith("got null")


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


async def chosen(model: Costly, rows: int, batch_rows: int = 0, rates: bool = True, **given: Any) -> Choice:
    @asynccontextmanager
    async def opened(offline: Offline) -> AsyncIterator[Costly]:
        yield model

    def sample_of(_: Costly) -> Sample:
        return Sample(numbers(0, rows), ["y"], partial(cut, rows), **given)

    clock = lambda: model.now_ns  # noqa: E731
    return await choose(opened, sample_of, batch_rows=batch_rows, rates=rates, clock=clock)  # type: ignore[arg-type]  # it has all of it


@pytest.mark.parametrize("on_cpus", [True, False])
async def test_slow_models_get_the_time_for_their_sizes(on_cpus: bool) -> None:
    model = Costly(lambda rows: 400 + 10 * rows)
    model.on_cpus = on_cpus
    assert (await chosen(model, 64)).measured.batch_rows == 64
    assert model.now_ns < 25e9


async def test_rows_are_read_while_layouts_are_compared() -> None:
    read = list[int]()
    model = Costly(lambda rows: 10 + rows)
    choice = await chosen(model, 64, read=lambda: read.append(len(model.calls)))
    assert choice.measured.batch_rows == 64
    assert read


async def test_speed_that_is_told_includes_rows_at_fault() -> None:
    choice = await chosen(Costly(lambda rows: rows, 5), 64, batch_rows=8)
    lost = 1 - (1 - 1 / 64) ** 8
    assert choice.measured.rows_per_s == pytest.approx(1_000 / (1 + 1.5 * lost), rel=0.05)
