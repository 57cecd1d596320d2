from __future__ import annotations

from paceline.clients.load.tally import Reply, Slices, blocks, merged
from tests.unit.clients.load.counting import MS, S, counts


def test_slice_is_told_when_all_that_was_due_in_it_has_ended() -> None:
    slices = Slices(0, S)
    slow, quick = slices.begin(100 * MS), slices.begin(1_200 * MS)
    slices.succeed(quick, 1_200 * MS, 1_300 * MS, None)
    assert list(slices.settled(2 * S)) == []
    slices.succeed(slow, 100 * MS, 2_100 * MS, None)
    (first, second) = slices.settled(2 * S)
    assert [number for number, _ in (first, second)] == [0, 1]
    # The latency is where the request was due, the answer where it came.
    assert (first[1].due, first[1].answered, first[1].latencies.longest_ns) == (1, 0, 2_000 * MS)
    assert (second[1].due, second[1].answered, second[1].latencies.longest_ns) == (1, 1, 100 * MS)
    assert list(slices.settled(2 * S)) == []


def test_slice_before_its_end_is_not_told() -> None:
    slices = Slices(5 * S, S)
    assert list(slices.settled(6 * S - 1)) == []
    assert [number for number, _ in slices.settled(7 * S)] == [0, 1]


def test_rest_is_what_was_not_told() -> None:
    slices = Slices(0, S)
    for due_ns in (0, 2 * S):
        slices.succeed(slices.begin(due_ns), due_ns, due_ns + MS, None)
    assert [number for number, _ in slices.settled(S)] == [0]
    rest = list(slices.rest())
    assert [(number, one.due) for number, one in rest] == [(1, 0), (2, 1)]


def test_failed_requests_are_counted_by_status_with_a_reason() -> None:
    found = merged([counts([1.0], refused=2), counts(refused=1), counts()])
    assert (found.due, found.answered, found.failed) == (4, 1, 3)
    assert found.errors["RESOURCE_EXHAUSTED"].count == 3
    assert found.reasons == {"RESOURCE_EXHAUSTED": "the queue is full"}
    assert found.latencies.count == 1


def test_answers_of_a_stream_are_counted_by_token() -> None:
    slices = Slices(0, S)
    slices.succeed(slices.begin(0), 0, 9 * MS, Reply(answers=3, tokens=4, first_ns=5 * MS, gaps_ns=[MS, MS, 2 * MS]))
    ((_, one),) = slices.settled(S)
    assert (one.answers, one.tokens, one.first.longest_ns, one.gaps.count) == (3, 4, 5 * MS, 3)


def test_blocks_are_neighbours_and_lose_nothing() -> None:
    slices = [counts([float(number)]) for number in range(1, 8)]
    assert [(length, block.due) for length, block in blocks(slices, 3)] == [(3, 3), (3, 3), (1, 1)]
    assert [block.due for _, block in blocks(slices, 7)] == [1] * 7
    assert blocks([], 5) == []
