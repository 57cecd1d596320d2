"""Which instances rest for lack of memory, judged by what others have executed."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.scheduler.shortages import LONGEST_REST_NS, SHORTEST_REST_NS, Shortages


def failed(shortages: Shortages[str], instance: str, key: str = "k", *, now_ns: int = 0, **how: Any) -> bool:
    return shortages.failed(instance, key, **{"alone": True, "instances": 2, "now_ns": now_ns, **how})


def short_of(instance: str, key: str = "k") -> Shortages[str]:
    """What is known once that instance rests from moment 0 on, as another is a witness against it."""
    shortages: Shortages[str] = Shortages()
    shortages.executed("witness", key)
    assert failed(shortages, instance, key)
    return shortages


def test_instance_rests_if_it_lacks_memory_for_a_single_request_like_others_executed() -> None:
    shortages: Shortages[str] = Shortages()
    assert not failed(shortages, "a"), "nobody has shown that it fits anywhere"
    shortages.executed("b", "other")
    assert not failed(shortages, "a"), "something else was executed"
    shortages.executed("a", "k")
    assert not failed(shortages, "a"), "it is no witness against itself"
    shortages.executed("b", "k")
    assert not failed(shortages, "a", alone=False), "several together may need too much"
    assert failed(shortages, "a")
    assert (shortages.resting, shortages.rests("a"), shortages.rests("b")) == (1, True, False)
    assert failed(shortages, "a", alone=False), "what it had begun before is for others, too"


def test_request_that_fits_nowhere_makes_no_instance_rest() -> None:
    shortages: Shortages[str] = Shortages()
    for instance in "abab" * 5:
        assert not failed(shortages, instance, "huge")
        shortages.executed("a", "k")
        shortages.executed("b", "k")
    assert not shortages.resting


def test_witness_without_memory_for_such_a_request_no_longer_counts() -> None:
    shortages = short_of("a")
    assert not failed(shortages, "witness")
    shortages.wake(SHORTEST_REST_NS, 2)
    assert not failed(shortages, "a", now_ns=SHORTEST_REST_NS)
    shortages.executed("witness", "k")
    assert failed(shortages, "a", now_ns=SHORTEST_REST_NS)


def test_witness_without_memory_for_several_requests_still_counts_for_a_single_one() -> None:
    shortages: Shortages[str] = Shortages()
    shortages.executed("witness", "k")
    assert not failed(shortages, "witness", alone=False)
    assert failed(shortages, "a")


def test_all_instances_that_executed_such_a_request_are_witnesses() -> None:
    for instance in ("first", "last"):
        shortages: Shortages[str] = Shortages()
        shortages.executed("first", "k")
        shortages.executed("last", "k")
        assert failed(shortages, instance)


def test_rests_get_longer_until_the_instance_has_executed_what_it_had_no_memory_for() -> None:
    shortages = short_of("a")
    now_ns, rests = 0, []
    for _ in range(12):
        wake_ns = shortages.wake_ns
        assert wake_ns is not None
        rests.append(wake_ns - now_ns)
        now_ns = wake_ns
        assert not shortages.wake(now_ns - 1, 2)
        assert shortages.wake(now_ns, 2) == ["a"]
        shortages.executed("a", "something small")
        assert failed(shortages, "a", "large", alone=False, now_ns=now_ns), "whatever it is, it is known to be short"
    assert rests == [*(SHORTEST_REST_NS << times for times in range(10)), LONGEST_REST_NS, LONGEST_REST_NS]
    assert shortages.wake(now_ns + LONGEST_REST_NS, 2) == ["a"]
    shortages.executed("a", "k")
    assert not failed(shortages, "a", "large", alone=False, now_ns=now_ns)


def test_instance_that_was_short_long_ago_counts_like_any_other() -> None:
    shortages = short_of("a")
    shortages.wake(SHORTEST_REST_NS, 2)
    late_ns = SHORTEST_REST_NS + LONGEST_REST_NS
    assert not failed(shortages, "a", alone=False, now_ns=late_ns + 1)
    assert failed(shortages, "a", alone=False, now_ns=late_ns)


@pytest.mark.parametrize(("instances", "most"), [(1, 0), (2, 1), (3, 1), (4, 2), (5, 2)])
def test_never_more_than_half_of_the_instances_rest(instances: int, most: int) -> None:
    shortages: Shortages[str] = Shortages()
    names = "abcde"[:instances]
    shortages.executed("none of them", "k")
    assert [failed(shortages, name, instances=instances) for name in names] == [
        place < most for place in range(instances)
    ]


def test_rests_are_cut_short_when_instances_are_lost_the_one_that_ends_next_first() -> None:
    shortages: Shortages[str] = Shortages()
    shortages.executed("c", "k")
    assert failed(shortages, "a", instances=4, now_ns=5)
    assert failed(shortages, "b", instances=4, now_ns=3)
    assert shortages.wake_ns == 3 + SHORTEST_REST_NS
    assert not shortages.wake(6, 4)
    assert shortages.wake(6, 3) == ["b"]
    assert shortages.wake(6, 1) == ["a"]


def test_forgotten_instance_leaves_nothing_to_another_of_the_same_name() -> None:
    shortages = short_of("a")
    shortages.forget("a")
    assert (shortages.resting, shortages.wake_ns) == (0, None)
    assert not failed(shortages, "a", alone=False)
    shortages.forget("witness")
    assert not failed(shortages, "a")


def test_oldest_keys_are_forgotten() -> None:
    shortages: Shortages[str] = Shortages()
    for number in range(1025):
        shortages.executed("b", str(number))
    assert not failed(shortages, "a", "0")
    assert failed(shortages, "a", "1")
