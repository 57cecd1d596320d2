"""What is said of a model after each sequence of loads and unloads."""

from __future__ import annotations

import pytest

from server.models.entry import DUPLICATE_NAME, UNLOADED, Entry, IndexLine, ModelState, version_order

READY, LOADING = ModelState.READY, ModelState.LOADING
UNAVAILABLE, UNLOADING = ModelState.UNAVAILABLE, ModelState.UNLOADING


@pytest.fixture
def entry() -> Entry[int]:
    return Entry("m")


def lines(entry: Entry[int]) -> list[tuple[str, ModelState | None, str]]:
    found = entry.lines()
    assert {line.name for line in found} == {"m"}
    return [(line.version, line.state, line.reason) for line in found]


def serve(entry: Entry[int], *versions: int) -> list[int]:
    """A load that succeeds; what served before."""
    entry.begin_load()
    entry.loading_versions([str(version) for version in versions])
    return entry.end_load({str(version): version for version in versions})


def fail(entry: Entry[int], *versions: int, reason: str = "broken") -> None:
    """A load that fails; without versions, before it was known which."""
    entry.begin_load()
    entry.loading_versions([str(version) for version in versions])
    entry.fail_load(reason)


def test_of_a_long_reason_the_end_is_forgotten(entry: Entry[int]) -> None:
    fail(entry, reason="x" * 2000)
    assert entry.lines()[0].reason == "x" * 2000
    fail(entry, 1, reason="x" * 2001)
    assert [line.reason for line in entry.lines()] == ["x" * 2000 + " [...]"]


def test_never_loaded_has_a_name_and_nothing_else(entry: Entry[int]) -> None:
    assert entry.lines() == [IndexLine("m")]
    assert (entry.state, entry.missing, entry.forgettable) == (None, False, True)


def test_load_goes_through_loading_to_ready_with_versions_by_number(entry: Entry[int]) -> None:
    entry.begin_load()
    assert lines(entry) == [("", LOADING, "")]
    assert entry.missing
    entry.loading_versions(["9", "10"])
    assert lines(entry) == [("9", LOADING, ""), ("10", LOADING, "")]
    assert entry.end_load({"9": 9, "10": 10}) == []
    assert lines(entry) == [("9", READY, ""), ("10", READY, "")]
    assert (entry.state, entry.missing, entry.forgettable) == (READY, False, False)


def test_versions_told_too_late_are_not_loading(entry: Entry[int]) -> None:
    serve(entry, 1)
    entry.loading_versions(["2"])
    assert lines(entry) == [("1", READY, "")]


def test_reload_shows_new_versions_coming_and_old_ones_leaving(entry: Entry[int]) -> None:
    serve(entry, 1, 2)
    entry.begin_load()
    entry.loading_versions(["2", "3"])
    assert lines(entry) == [("1", READY, ""), ("2", READY, ""), ("3", LOADING, "")]
    assert (entry.state, entry.missing) == (READY, False)
    assert entry.end_load({"2": 22, "3": 33}) == [1, 2]
    assert lines(entry) == [("1", UNLOADING, ""), ("2", READY, ""), ("3", READY, "")]
    entry.drained("2")
    entry.drained("1")
    assert lines(entry) == [("1", UNAVAILABLE, UNLOADED), ("2", READY, ""), ("3", READY, "")]


def test_versions_of_loads_long_ago_are_forgotten(entry: Entry[int]) -> None:
    for version in range(1, 10):
        for before in serve(entry, version):
            entry.drained(str(before))
    assert lines(entry) == [("8", UNAVAILABLE, UNLOADED), ("9", READY, "")]


def test_failed_first_load_is_missed_with_its_reason(entry: Entry[int]) -> None:
    fail(entry, 1, 2)
    assert lines(entry) == [("1", UNAVAILABLE, "broken"), ("2", UNAVAILABLE, "broken")]
    assert (entry.state, entry.missing, entry.forgettable) == (UNAVAILABLE, True, False)


def test_failed_load_of_unknown_versions_has_one_line(entry: Entry[int]) -> None:
    fail(entry)
    assert lines(entry) == [("", UNAVAILABLE, "broken")]


def test_failed_reload_leaves_what_serves_and_tells(entry: Entry[int]) -> None:
    serve(entry, 1)
    fail(entry, 1, 2)
    assert lines(entry) == [("1", READY, "the last load failed: broken"), ("2", UNAVAILABLE, "broken")]
    assert not entry.missing
    serve(entry, 1)
    assert lines(entry) == [("1", READY, "")]


def test_load_that_was_given_up_leaves_everything_as_it_was(entry: Entry[int]) -> None:
    fail(entry, 1)
    before = lines(entry)
    entry.begin_load()
    assert entry.missing
    entry.give_up_load()
    assert lines(entry) == before


def test_unload_is_wished_for_and_not_missed(entry: Entry[int]) -> None:
    serve(entry, 1)
    assert entry.unload() == [1]
    assert lines(entry) == [("1", UNLOADING, "")]
    assert (entry.state, entry.missing, entry.forgettable) == (UNLOADING, False, False)
    entry.drained("1")
    assert lines(entry) == [("1", UNAVAILABLE, UNLOADED)]
    assert (entry.state, entry.missing, entry.forgettable) == (UNAVAILABLE, False, True)


def test_unload_of_what_failed_ends_the_missing(entry: Entry[int]) -> None:
    fail(entry, 1)
    assert entry.unload() == []
    assert lines(entry) == [("1", UNAVAILABLE, UNLOADED)]
    assert not entry.missing


def test_unload_of_what_was_never_loaded_changes_nothing(entry: Entry[int]) -> None:
    entry.unload()
    assert entry.lines() == [IndexLine("m")]


def test_version_that_serves_again_before_it_has_left_is_ready(entry: Entry[int]) -> None:
    serve(entry, 1)
    entry.unload()
    serve(entry, 1)
    assert lines(entry) == [("1", READY, "")]
    entry.drained("1")
    assert lines(entry) == [("1", READY, "")]


def test_version_that_leaves_twice_is_gone_when_both_have_left(entry: Entry[int]) -> None:
    serve(entry, 1)
    serve(entry, 1)
    entry.unload()
    entry.drained("1")
    assert lines(entry) == [("1", UNLOADING, "")]
    entry.drained("1")
    assert lines(entry) == [("1", UNAVAILABLE, UNLOADED)]


def test_failed_load_after_an_unload_is_missed(entry: Entry[int]) -> None:
    serve(entry, 1)
    entry.unload()
    entry.drained("1")
    fail(entry)
    assert lines(entry) == [("1", UNAVAILABLE, "broken")]
    assert entry.missing


def test_rivals_are_one_line_unless_something_serves(entry: Entry[int]) -> None:
    entry.duplicates = True
    assert lines(entry) == [("", UNAVAILABLE, DUPLICATE_NAME)]
    fail(entry, reason="two of them")
    assert lines(entry) == [("", UNAVAILABLE, DUPLICATE_NAME)]
    serve(entry, 1)
    assert lines(entry) == [("1", READY, "")]


def test_entry_of_what_is_on_disk_or_has_work_to_do_is_not_forgotten(entry: Entry[int]) -> None:
    entry.on_disk = True
    assert not entry.forgettable
    entry.on_disk, entry.operations = False, 1
    assert not entry.forgettable


def test_away_is_missing_with_the_reason_until_it_is_back(entry: Entry[int]) -> None:
    serve(entry, 1, 2)
    entry.unreachable_reason = "gone"
    assert (entry.state, entry.missing) == (UNAVAILABLE, True)
    assert lines(entry) == [("1", UNAVAILABLE, "gone"), ("2", UNAVAILABLE, "gone")]
    entry.unreachable_reason = ""
    assert (entry.state, entry.missing) == (READY, False)


def test_away_ends_with_a_load_or_an_unload(entry: Entry[int]) -> None:
    serve(entry, 1)
    entry.unreachable_reason = "gone"
    assert serve(entry, 2) == [1]
    assert (entry.unreachable_reason, entry.state) == ("", READY)
    entry.unreachable_reason = "gone"
    assert entry.unload() == [2]
    assert (entry.unreachable_reason, entry.missing) == ("", False)


def test_versions_sort_as_numbers_and_others_behind() -> None:
    assert sorted(["v2", "10", "9", "", "v10"], key=version_order) == ["9", "10", "", "v10", "v2"]
    assert sorted(["v2", "1" * 5000, "9" * 20], key=version_order) == ["9" * 20, "1" * 5000, "v2"]
