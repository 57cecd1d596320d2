"""When the loop's thread rests while a crowd is waited for: only once nothing else goes on."""

from __future__ import annotations

from scheduler.rests import Rests, Slept


class Time:
    """Moves on when told; sleeps take as long as Linux makes them take."""

    def __init__(self) -> None:
        self.now_ns = 1_000
        self.slept = 0
        self.shared = Slept()
        self.rests = self.new()

    def new(self) -> Rests:
        return Rests(lambda: self.now_ns, self._sleep, self.shared)

    def _sleep(self, seconds: float) -> None:
        assert 0 < seconds < 100e-6
        self.slept += 1
        self.now_ns += 80_000

    def look(self, took_ns: int) -> bool:
        """After an iteration of that length: whether it rested."""
        before = self.slept
        self.now_ns += took_ns
        counts_for = self.rests()
        assert (counts_for > 1) == (self.slept > before)
        return self.slept > before


def _used_to(took_ns: int) -> Time:
    time = Time()
    for _ in range(10):
        time.look(took_ns)
    time.rests.restart()
    return time


def test_rests_when_several_iterations_had_nothing_to_do() -> None:
    time = _used_to(2_000)
    assert [time.look(2_000) for _ in range(5)] == [False, False, True, True, True]


def test_does_not_rest_while_there_is_work() -> None:
    time = _used_to(2_000)
    assert not any(time.look(took_ns) for took_ns in (50_000, 2_000, 2_000, 50_000, 2_000, 2_000, 50_000))


def test_does_not_rest_right_after_somebody_came() -> None:
    time = _used_to(2_000)
    assert [time.look(2_000) for _ in range(3)] == [False, False, True]
    time.rests.restart()
    assert [time.look(2_000) for _ in range(3)] == [False, False, True]


def test_what_is_short_follows_the_machine() -> None:
    slow = _used_to(20_000)
    assert [slow.look(took_ns) for took_ns in (21_000, 25_000, 22_000)] == [False, False, True]
    fast = _used_to(1_000)
    assert not any(fast.look(took_ns) for took_ns in (21_000, 25_000, 22_000))


def test_where_every_iteration_has_work_there_is_no_rest() -> None:
    time = Time()
    assert not any(time.look(100_000) for _ in range(100))


def test_the_rest_of_one_is_that_of_all_who_wait() -> None:
    time = Time()
    others = [time.new() for _ in range(20)]
    for _ in range(3):
        time.look(2_000)
        counted = [other() for other in others]
    assert time.slept == 1
    # The first iteration is from the beginning of time.
    assert len(set(counted)) == 1
    assert counted[0] > 1


def test_work_beside_the_rest_of_another_is_work() -> None:
    time = _used_to(2_000)
    other = time.new()
    other.restart()
    for _ in range(3):
        time.look(2_000)
    time.now_ns += 300_000
    assert time.slept > 0
    assert other() == 1


def test_one_odd_iteration_is_not_the_measure_for_ever() -> None:
    time = _used_to(2_000)
    time.look(10)  # a clock may do that
    assert not any(time.look(2_000) for _ in range(5))
    for _ in range(400):
        time.look(2_000)
    assert time.look(2_000)
