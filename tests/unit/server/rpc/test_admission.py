"""Places for calls, and who gives one up. integration/test_limits shows what callers get."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from paceline.server.rpc.gate import Calls, Ended, Probes, Usage


class Call:
    """Stands for a call's task."""

    def __init__(self, connection: str) -> None:
        self.connection = connection
        self.ended: Ended | None = None
        self._callbacks: list[Callable[[Any], object]] = []

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        self._callbacks.append(callback)

    def remove_done_callback(self, callback: Callable[[Any], object]) -> int:
        before = len(self._callbacks)
        self._callbacks = [one for one in self._callbacks if one != callback]
        return before - len(self._callbacks)

    def cancel(self, why: Ended) -> None:
        assert self.ended is None
        self.ended = why

    def finish(self) -> None:
        for callback in self._callbacks:
            callback(self)


def entered(calls: Calls, connection: str, now_ns: int = 0) -> Call | None:
    call: Any = Call(connection)
    return call if calls.enter(call, connection, now_ns) else None


def arrived(calls: Calls, call: Any) -> None:
    calls.arrived(call, call.connection)


def test_usage_of_several_processes_is_their_sum() -> None:
    one, other = Usage(1, 2, (1, 0, 0, 3, 2, 0), 7), Usage(4, 8, (0, 5, 0, 1, 4, 9), 8)
    both = one.plus(other)
    assert both == other.plus(one) == Usage(5, 10, (1, 5, 0, 4, 6, 9), 15)
    assert both.refused_by_reason == {
        "unauthenticated": 1,
        "restricted": 5,
        "rpcs": 0,
        "streams": 4,
        "no_message": 6,
        "unread": 9,
    }
    assert both.plus(Usage()) == both


def test_connection_with_most_calls_unsent_gives_way() -> None:
    calls = Calls(6)
    first = [entered(calls, "a") for _ in range(4)]
    second = [entered(calls, "b") for _ in range(2)]
    assert entered(calls, "a") is None
    third = [entered(calls, "c") for _ in range(3)]
    # Two each: nobody gains anything from another one's place any more.
    assert [call is not None for call in third] == [True, True, False]
    assert [call and call.ended for call in first] == [None, None, Ended.GAVE_WAY, Ended.GAVE_WAY]
    assert [call and call.ended for call in second] == [None, None]
    assert calls.count == 6


def test_calls_with_a_message_keep_their_places() -> None:
    calls = Calls(2)
    both = [entered(calls, "a") for _ in range(2)]
    for call in both:
        arrived(calls, call)
    assert entered(calls, "b") is None
    assert both[0] is not None
    both[0].finish()
    assert entered(calls, "b") is not None


def test_calls_unsent_for_too_long_are_ended() -> None:
    calls = Calls(8)
    early, sent, late = entered(calls, "a", 10), entered(calls, "b", 10), entered(calls, "a", 20)
    arrived(calls, sent)
    calls.end_overdue(20)
    assert [call and call.ended for call in (early, sent, late)] == [Ended.TOO_LATE, None, None]
    calls.end_overdue(20)
    arrived(calls, early)
    calls.end_overdue(21)
    assert late is not None
    assert late.ended is Ended.TOO_LATE


def test_probes_have_places_only_until_their_message() -> None:
    probes = Probes(2)
    for _ in range(5):
        call = entered(probes, "a")
        assert call is not None
        arrived(probes, call)
        assert probes.count == 0
    unsent = [entered(probes, "a") for _ in range(2)]
    assert entered(probes, "b") is not None
    assert entered(probes, "b") is None
    for call in unsent:
        arrived(probes, call)
    assert probes.count == 1


@given(st.lists(st.tuples(st.sampled_from(("enter", "arrive", "finish")), st.integers(0, 3)), max_size=60))
def test_places_are_shared_whatever_calls_do(steps: list[tuple[str, int]]) -> None:
    """Calls without a message never keep out a connection that has fewer of them than another one."""
    calls, alive, unsent = Calls(4), list[Call](), list[Call]()
    for what, number in steps:
        if what == "enter":
            held = Counter(call.connection for call in unsent)
            call = entered(calls, str(number))
            full = len(alive) == 4
            assert (call is None) == (full and max(held.values(), default=0) < held[str(number)] + 2)
            alive = [*(one for one in alive if one.ended is None), *([call] if call else [])]
            unsent = [*(one for one in unsent if one.ended is None), *([call] if call else [])]
        elif what == "arrive" and unsent:
            arrived(calls, unsent.pop(number % len(unsent)))
        elif what == "finish" and (ready := [one for one in alive if one not in unsent]):
            ready[number % len(ready)].finish()
            alive.remove(ready[number % len(ready)])
        assert calls.count == len(alive) <= 4
