"""The driver of a job on Ray: how many actors, who does which unit, and what follows when actors end. Without Ray."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from paceline.server.bulk.folder import Mark
from paceline.server.bulk.on_ray import OnRay, RayUnits, Room, room
from paceline.server.bulk.ray_actor import Done
from paceline.server.bulk.settings import BulkSettings, MaxBad
from paceline.server.bulk.tally import Judge, Tally
from paceline.server.bulk.values import BadRow, BulkError, Fixed, InputFile, Unit
from tests.ports import free_port

FILE = InputFile(0, "in.parquet", 1, 1)
UNITS = [Unit(number, FILE, 10 * number, 10 * number + 10) for number in range(6)]
FIXED = Fixed(unit_rows=10, chunk_rows=10, chunk_bytes=1000, batch_rows=1, intra_op_threads=1)


class Input:
    """As much of a source as a judge asks for."""

    files: Sequence[InputFile] = (FILE,)
    schema = pa.schema([])

    def place(self, file: InputFile, number: int) -> tuple[str, int]:
        return file.path, number


class Handle:
    """As Ray's of an actor. For each call of `do` the next of `outcomes` is raised, or what the unit becomes if there
    are no more; for calls of `ready`, those of `comebacks`."""

    def __init__(
        self,
        outcomes: Sequence[Exception] = (),
        comebacks: Sequence[Exception] = (),
        bad: int = 0,
        warnings: Sequence[logging.LogRecord] = (),
    ) -> None:
        self.outcomes, self.comebacks, self.bad, self.warnings = list(outcomes), list(comebacks), bad, warnings
        self.asked: list[int] = []
        self.do, self.ready = _Method(self._do), _Method(self._ready)

    async def _do(self, fixed: Fixed, sign: str, unit: Unit) -> Done:
        self.asked.append(unit.number)
        await asyncio.sleep(0)
        if self.outcomes:
            raise self.outcomes.pop(0)
        tally = Tally(rows_read=10)
        rows = [BadRow(unit.begin + number, "odd") for number in range(self.bad)]
        tally.add_bad(rows)
        return Done(Mark(10 - self.bad, self.bad), tally, rows[0] if rows else None, self.warnings)

    async def _ready(self) -> None:
        if self.comebacks:
            raise self.comebacks.pop(0)


class _Method:
    def __init__(self, call: object) -> None:
        self.remote = call


async def done_by(*handles: Handle, tally: Tally | None = None, max_bad: MaxBad | None = None) -> list[Mark]:
    tally = tally or Tally()
    settings = BulkSettings("m", ("in",), Path("out"), max_bad=max_bad or MaxBad())
    units = RayUnits(handles, 2, FIXED, "sign", Judge(settings, tally, Input()))
    try:
        return await asyncio.gather(*(units.do(unit, tally) for unit in UNITS))
    finally:
        units.stop()


async def test_units_of_lost_actor_are_done_by_others() -> None:
    gone = Handle([RayActorError(), RayActorError()])
    other = Handle()
    tally = Tally()
    assert await done_by(gone, other, tally=tally) == [Mark(10, 0)] * 6
    assert sorted({*gone.asked, *other.asked}) == list(range(6))
    assert len(gone.asked) + len(other.asked) == 8
    assert tally.rows_read == 60


async def test_restarted_actor_gets_units_once_it_is_there() -> None:
    handle = Handle([RayActorError()])
    judge = Judge(BulkSettings("m", (), Path("o")), Tally(), Input())
    units = RayUnits([handle], 1, FIXED, "sign", judge, again_s=0)
    await units.first()
    handle.comebacks = [ActorUnavailableError("restarting", None)] * 3
    assert await units.do(UNITS[0], Tally()) == Mark(10, 0)
    assert (handle.asked, handle.comebacks) == ([0, 0], [])


async def test_unit_that_ends_all_actors_ends_job() -> None:
    with pytest.raises(BulkError, match=r"5 times, an actor has ended while it did part \d, which is in.parquet, rows"):
        await done_by(Handle([RayActorError()] * 100))


async def test_actor_that_never_comes_back_ends_job() -> None:
    class Dead(RayActorError):
        pass

    with pytest.raises(BulkError, match="an actor has ended for good: no such module"):
        await done_by(Handle([], [Dead(error_msg="no such module")]))


async def test_actors_refusal_is_told_in_its_words() -> None:
    refusal = RayTaskError("do", "trace", BulkError("in.parquet has changed"))
    with pytest.raises(BulkError, match=r"^in.parquet has changed$"):
        await done_by(Handle([refusal]))


async def test_rows_at_fault_of_all_actors_end_job() -> None:
    with pytest.raises(BulkError, match=r"more rows are at fault than the 3 .*; one of them, in.parquet, row \d+: odd"):
        await done_by(Handle(bad=1), Handle(bad=1), max_bad=MaxBad(rows=3))


async def test_actors_warnings_are_the_drivers(caplog: pytest.LogCaptureFixture) -> None:
    warning = logging.LogRecord("paceline.model", logging.WARNING, "", 0, "slow on this node", (), None)
    await done_by(Handle(warnings=[warning]))
    assert ("paceline.model", logging.WARNING, "slow on this node") in caplog.record_tuples


@pytest.mark.parametrize(
    ("nodes", "asked", "expected"),
    [
        ([{"CPU": 8.0}, {"CPU": 8.0}], (0, 0, 0.0), Room(2, 8, 0.0)),
        ([{"CPU": 4.0}, {"CPU": 16.0}, {"CPU": 0.0}], (0, 0, 0.0), Room(5, 4, 0.0)),
        ([{"CPU": 8.0}, {"CPU": 3.0}], (0, 3, 0.0), Room(3, 3, 0.0)),
        ([{"CPU": 32.0, "GPU": 4.0}, {"CPU": 8.0}], (0, 0, 1.0), Room(4, 8, 1.0)),
        ([{"CPU": 32.0, "GPU": 4.0}, {"CPU": 8.0, "GPU": 1.0}], (0, 2, 0.5), Room(10, 2, 0.5)),
        ([{"CPU": 2.0, "GPU": 4.0}], (0, 0, 1.0), Room(2, 1, 1.0)),
        ([{"CPU": 8.0}], (3, 0, 0.0), Room(3, 8, 0.0)),
        ([], (3, 0, 1.0), Room(3, 1, 1.0)),
    ],
)
def test_actors_fill_the_nodes(
    nodes: Sequence[Mapping[str, float]], asked: tuple[int, int, float], expected: Room
) -> None:
    assert room(nodes, *asked) == expected


@pytest.mark.parametrize("asked", [(0, 16, 0.0), (0, 0, 1.0)])
def test_actors_that_fit_nowhere_are_refused(asked: tuple[int, int, float]) -> None:
    with pytest.raises(BulkError, match=r"no node of the Ray cluster has \d+ CPUs and [01] GPUs: say less by"):
        room([{"CPU": 8.0}], *asked)


async def test_unreachable_address_is_told_at_once() -> None:
    address = f"127.0.0.1:{free_port()}"
    on_ray = OnRay(BulkSettings("m", ("in",), Path("out"), ray=address), {}, Tally())
    with pytest.raises(BulkError, match=f"--ray {address}: nobody answers there"):
        await on_ray.choose(Input())
    await on_ray.close()
