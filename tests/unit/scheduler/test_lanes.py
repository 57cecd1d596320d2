"""Which lane has its turn, as requests come, leave and are put back."""

from __future__ import annotations

from collections.abc import Hashable

from paceline.scheduler.lanes import Lanes
from paceline.scheduler.policy import BatchPolicy
from paceline.scheduler.request import AnyRequest

DELAY_NS = 1_000
GREEDY = BatchPolicy(max_batch_rows=4)
PATIENT = BatchPolicy(max_batch_rows=4, preferred_batch_rows=(2,), max_queue_delay_ns=DELAY_NS)


def request(key: Hashable, order: int, rows: int = 1) -> AnyRequest:
    """A request of that order. Negative ones overtake positive ones, as a higher priority does."""
    one = AnyRequest(None, rows, key, arrived_ns=order)
    one.order = order
    return one


def filled(policy: BatchPolicy, keys: str) -> tuple[Lanes[AnyRequest], list[AnyRequest]]:
    """One request of each key, in that order."""
    lanes: Lanes[AnyRequest] = Lanes(policy)
    requests = [request(key, order) for order, key in enumerate(keys)]
    for one in requests:
        lanes.add([one])
    return lanes, requests


def keys_served(lanes: Lanes[AnyRequest], now_ns: int = 0) -> str:
    """The keys of the lanes served, one request at a time, until none is ready."""
    keys = ""
    while (lane := lanes.next_ready(now_ns)) is not None:
        keys += str(lane.key)
        lanes.take(lane, [next(iter(lane))])
    return keys


def test_lanes_alternate_by_the_age_of_their_first_requests() -> None:
    lanes, _ = filled(GREEDY, "abbac")
    assert keys_served(lanes) == "abbac"
    assert len(lanes) == 0


def test_lane_whose_first_request_has_left_is_ranked_by_the_next_one() -> None:
    lanes, (first, *_) = filled(GREEDY, "aba")
    assert first.waits
    lanes.remove(first)
    assert not first.waits
    assert keys_served(lanes) == "ba"


def test_lane_is_ranked_by_a_request_that_overtakes_its_first() -> None:
    for together in (False, True):
        lanes: Lanes[AnyRequest] = Lanes(GREEDY)
        for key, order in (("b", 1), ("a", 2)):
            lanes.add([request(key, order)])
        lanes.add([request("a", -2), request("a", -1)] if together else [request("a", -2)])
        assert keys_served(lanes).startswith("a" * (1 + together) + "b")


def test_overtaken_prefix_is_determined_again() -> None:
    lanes, _ = filled(PATIENT, "aa")
    lanes.add([request("a", -1, rows=3)])
    lane = lanes.next_ready(2)
    assert lane is not None
    assert [(one.order, one.rows) for one in lane][: lanes.releasable(lane, 2)] == [(-1, 3)]


def test_prefix_is_right_after_several_changes_before_anybody_asks_for_it() -> None:
    lanes, (_, second) = filled(PATIENT, "aa")
    lanes.add([request("a", -1)])
    lanes.remove(second)
    lane = lanes.next_ready(2)
    assert lane is not None
    assert [one.order for one in lane][: lanes.releasable(lane, 2)] == [-1, 0]


def test_chosen_lane_is_not_ready_again_until_it_is_passed_over() -> None:
    lanes, _ = filled(GREEDY, "ab")
    chosen = lanes.next_ready(0)
    assert chosen is not None
    assert keys_served(lanes) == "b"
    lanes.make_ready(chosen)
    assert keys_served(lanes) == "a"


def test_postponed_lane_is_ready_at_its_moment_with_or_without_an_overtaking_request() -> None:
    lanes, _ = filled(GREEDY, "bb")
    for waken in (lambda: None, lambda: lanes.add([request("b", -1)])):
        lane = lanes.next_ready(0)
        assert lane is not None
        lanes.make_due(lane, 10)
        assert lanes.due.first_rank() == 10
        assert lanes.next_ready(9) is None
        waken()
        again = lanes.next_ready(10)
        assert again is lane
        lanes.make_ready(lane)


def test_lane_with_a_delay_is_ready_with_a_preferred_prefix_or_when_the_delay_has_passed() -> None:
    lanes, _ = filled(PATIENT, "baa")
    assert lanes.due.first_rank() == DELAY_NS
    ready = lanes.next_ready(2)
    assert ready is not None
    assert (ready.key, lanes.releasable(ready, 2)) == ("a", 2)
    assert lanes.next_ready(DELAY_NS - 1) is None
    late = lanes.next_ready(DELAY_NS)
    assert late is not None
    assert (late.key, lanes.releasable(late, DELAY_NS)) == ("b", 1)


def test_delay_is_that_of_the_oldest_request_though_a_younger_one_overtook_it() -> None:
    lanes: Lanes[AnyRequest] = Lanes(BatchPolicy(max_batch_rows=4, max_queue_delay_ns=DELAY_NS))
    for order, arrived_ns in ((1, 10), (-1, 20)):
        one = request("a", order)
        one.arrived_ns = arrived_ns
        lanes.add([one])
    assert lanes.next_ready(10 + DELAY_NS - 1) is None
    lane = lanes.next_ready(10 + DELAY_NS)
    assert lane is not None
    assert lanes.releasable(lane, 10 + DELAY_NS) == 2


def test_lane_with_an_overdue_request_releases_all() -> None:
    lanes, _ = filled(PATIENT, "aaa")
    lane = lanes.next_ready(DELAY_NS)
    assert lane is not None
    assert [lanes.releasable(lane, now_ns) for now_ns in (DELAY_NS - 1, DELAY_NS)] == [2, 3]


def test_lane_without_delay_releases_the_preferred_prefix_else_all() -> None:
    lanes, _ = filled(BatchPolicy(max_batch_rows=4, preferred_batch_rows=(2,)), "aaab")
    released = []
    while (lane := lanes.next_ready(0)) is not None:
        count = lanes.releasable(lane, 0)
        released.append((lane.key, count))
        lanes.take(lane, list(lane)[:count])
    assert released == [("a", 2), ("a", 1), ("b", 1)]


def test_prefix_that_lost_an_request_is_no_longer_preferred() -> None:
    lanes, (_, second) = filled(PATIENT, "aa")
    lanes.remove(second)
    assert lanes.next_ready(2) is None
    assert lanes.due.first_rank() == DELAY_NS


def test_allowed_size_is_preferred_in_place_of_larger_preferred_sizes() -> None:
    lanes, _ = filled(PATIENT, "a")
    lanes.prefer(1)
    lane = lanes.next_ready(0)
    assert lane is not None
    assert lanes.releasable(lane, 0) == 1


def test_requests_put_back_keep_their_place() -> None:
    for policy in (GREEDY, PATIENT):
        lanes, (first, *_) = filled(policy, "abc")
        lane = lanes.next_ready(DELAY_NS)
        assert lane is not None
        lanes.take(lane, [first])
        assert (first.waits, lanes._by_key.get("a")) == (False, None)
        lanes.put_back([first])
        assert first.waits
        assert [*(lanes._by_key.get("a") or ())] == [first]
        assert keys_served(lanes, 3 * DELAY_NS) == "abc"


def test_requests_put_back_are_in_the_order_of_arrival_whichever_returns_first() -> None:
    for returning in ((0, 1), (1, 0)):
        lanes, requests = filled(GREEDY, "aaa")
        for one in requests[:2]:
            lanes.remove(one)
        for place in returning:
            lanes.put_back([requests[place]])
        lane = lanes._by_key.get("a")
        assert lane is not None
        assert list(lane) == requests


def test_requests_put_back_wait_for_more_requests_until_their_delay_has_passed() -> None:
    lanes, (first,) = filled(PATIENT, "a")
    lanes.remove(first)
    lanes.put_back([first])
    assert lanes.next_ready(DELAY_NS - 1) is None
    lane = lanes.next_ready(DELAY_NS)
    assert lane is not None
    assert next(iter(lane)) is first


def test_lane_emptied_before_anybody_asks_for_it_is_gone() -> None:
    lanes, (first, second) = filled(PATIENT, "aa")
    overtaking = request("a", -1)
    lanes.add([overtaking])
    for one in (overtaking, first, second):
        lanes.remove(one)
    assert lanes.next_ready(2 * DELAY_NS) is None
    assert lanes.due.first_rank() is None


def test_largest_allowed_size_can_be_preferred() -> None:
    lanes, _ = filled(BatchPolicy(max_batch_rows=4, preferred_batch_rows=(2, 4), max_queue_delay_ns=DELAY_NS), "aaaa")
    lane = lanes.next_ready(3)
    assert lane is not None
    assert lanes.releasable(lane, 3) == 4


def test_flush_makes_every_lane_ready() -> None:
    lanes, _ = filled(PATIENT, "ab")
    assert lanes.next_ready(0) is None
    lanes.flush()
    assert lanes.due.first_rank() is None
    assert keys_served(lanes) == "ab"


def test_lane_created_after_a_flush_is_ready_at_once() -> None:
    lanes, _ = filled(PATIENT, "")
    lanes.flush()
    lanes.add([request("a", 1)])
    assert lanes.due.first_rank() is None
    assert keys_served(lanes) == "a"


def test_emptied_lanes_leave_little_behind_in_the_heaps() -> None:
    for policy in (GREEDY, PATIENT):
        lanes: Lanes[AnyRequest] = Lanes(policy)
        for number in range(10_000):
            one = request(number, number)
            lanes.add([one])
            lanes.remove(one)
        assert len(lanes.due.items) + len(lanes._ready.items) < 200
