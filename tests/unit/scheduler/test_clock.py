from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from paceline.scheduler.clock import Alarm, MonotonicClock, _LoopAlarm
from paceline.scheduler.testing import ManualClock


def loop_alarm(ring: Callable[[], None]) -> Alarm:
    return _LoopAlarm(asyncio.get_running_loop(), ring)


@pytest.mark.parametrize("make", [MonotonicClock().alarm, loop_alarm], ids=["native", "loop"])
class TestAlarms:
    async def test_alarm_does_not_ring_before_its_moment(self, make: Callable[[Callable[[], None]], Alarm]) -> None:
        clock = MonotonicClock()
        rung: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        alarm = make(lambda: rung.set_result(clock.now_ns()))
        at_ns = clock.now_ns() + 300_000
        alarm.set(at_ns)
        assert await asyncio.wait_for(rung, 60) >= at_ns
        alarm.close()

    async def test_alarm_set_to_the_past_rings(self, make: Callable[[Callable[[], None]], Alarm]) -> None:
        rung = asyncio.Event()
        alarm = make(rung.set)
        alarm.set(0)
        await asyncio.wait_for(rung.wait(), 60)
        alarm.close()

    async def test_alarm_set_again_rings_once(self, make: Callable[[Callable[[], None]], Alarm]) -> None:
        clock = MonotonicClock()
        rings: list[int] = []
        second = asyncio.Event()
        alarm = make(lambda: rings.append(clock.now_ns()))
        follower = make(second.set)
        alarm.set(clock.now_ns() + 10**12)
        alarm.set(clock.now_ns() + 1_000)
        follower.set(clock.now_ns() + 5_000_000)
        await asyncio.wait_for(second.wait(), 60)
        assert len(rings) == 1
        alarm.close()
        follower.close()

    async def test_alarm_cleared_stays_silent(self, make: Callable[[Callable[[], None]], Alarm]) -> None:
        clock = MonotonicClock()
        rings: list[int] = []
        later = asyncio.Event()
        alarm = make(lambda: rings.append(1))
        follower = make(later.set)
        alarm.set(clock.now_ns() + 1_000_000)
        alarm.clear()
        follower.set(clock.now_ns() + 3_000_000)
        await asyncio.wait_for(later.wait(), 60)
        assert rings == []
        alarm.close()
        follower.close()


def test_manual_clock_rings_alarms_in_order_each_at_its_moment() -> None:
    clock = ManualClock()
    rung: list[tuple[str, int]] = []
    first = clock.alarm(lambda: rung.append(("first", clock.now_ns())))
    second = clock.alarm(lambda: rung.append(("second", clock.now_ns())))
    second.set(20)
    first.set(10)
    clock.advance(15)
    assert rung == [("first", 10)]
    clock.advance(15)
    assert rung == [("first", 10), ("second", 20)]
    assert clock.now_ns() == 30


def test_frozen_manual_clock_rings_alarms_in_order_at_the_end() -> None:
    clock = ManualClock()
    rung: list[tuple[str, int]] = []
    for name, at_ns in (("second", 20), ("first", 10), ("later", 31)):
        clock.alarm(lambda name=name: rung.append((name, clock.now_ns()))).set(at_ns)  # type: ignore[misc]
    clock.freeze(30)
    assert rung == [("first", 30), ("second", 30)]
    assert clock.now_ns() == 30
