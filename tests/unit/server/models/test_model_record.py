"""What is reported about a model after each sequence of loads and unloads."""

from __future__ import annotations

import pytest

from paceline.server.models.model_record import (
    DUPLICATE_NAME,
    UNLOADED,
    IndexLine,
    ModelRecord,
    ModelState,
    version_order,
)

READY, LOADING = ModelState.READY, ModelState.LOADING
UNAVAILABLE, UNLOADING = ModelState.UNAVAILABLE, ModelState.UNLOADING


@pytest.fixture
def record() -> ModelRecord[int]:
    return ModelRecord("m")


def lines(record: ModelRecord[int]) -> list[tuple[str, ModelState | None, str]]:
    found = record.lines()
    assert {line.name for line in found} == {"m"}
    return [(line.version, line.state, line.reason) for line in found]


def serve(record: ModelRecord[int], *versions: int) -> list[int]:
    """A load that succeeds. Returns what served before."""
    record.loading = []
    record.loading_versions([str(version) for version in versions])
    return record.end_load({str(version): version for version in versions})


def fail(record: ModelRecord[int], *versions: int, reason: str = "broken") -> None:
    """A load that fails; without `versions`, before it was known which."""
    record.loading = []
    record.loading_versions([str(version) for version in versions])
    record.fail_load(reason)


def test_long_reason_loses_its_end(record: ModelRecord[int]) -> None:
    fail(record, reason="x" * 2000)
    assert record.lines()[0].reason == "x" * 2000
    fail(record, 1, reason="x" * 2001)
    assert [line.reason for line in record.lines()] == ["x" * 2000 + " [...]"]


def test_model_never_loaded_has_only_a_name(record: ModelRecord[int]) -> None:
    assert record.lines() == [IndexLine("m")]
    assert (record.state, record.missing, record.forgettable) == (None, False, True)


def test_load_goes_through_loading_to_ready_with_versions_by_number(record: ModelRecord[int]) -> None:
    record.loading = []
    assert lines(record) == [("", LOADING, "")]
    assert record.missing
    record.loading_versions(["9", "10"])
    assert lines(record) == [("9", LOADING, ""), ("10", LOADING, "")]
    assert record.end_load({"9": 9, "10": 10}) == []
    assert lines(record) == [("9", READY, ""), ("10", READY, "")]
    assert (record.state, record.missing, record.forgettable) == (READY, False, False)


def test_versions_reported_too_late_are_not_loading(record: ModelRecord[int]) -> None:
    serve(record, 1)
    record.loading_versions(["2"])
    assert lines(record) == [("1", READY, "")]


def test_reload_shows_new_versions_coming_and_old_ones_leaving(record: ModelRecord[int]) -> None:
    serve(record, 1, 2)
    record.loading = []
    record.loading_versions(["2", "3"])
    assert lines(record) == [("1", READY, ""), ("2", READY, ""), ("3", LOADING, "")]
    assert (record.state, record.missing) == (READY, False)
    assert record.end_load({"2": 22, "3": 33}) == [1, 2]
    assert lines(record) == [("1", UNLOADING, ""), ("2", READY, ""), ("3", READY, "")]
    record.drained("2")
    record.drained("1")
    assert lines(record) == [("1", UNAVAILABLE, UNLOADED), ("2", READY, ""), ("3", READY, "")]


def test_versions_of_loads_long_ago_are_forgotten(record: ModelRecord[int]) -> None:
    for version in range(1, 10):
        for before in serve(record, version):
            record.drained(str(before))
    assert lines(record) == [("8", UNAVAILABLE, UNLOADED), ("9", READY, "")]


def test_failed_first_load_is_missing_with_its_reason(record: ModelRecord[int]) -> None:
    fail(record, 1, 2)
    assert lines(record) == [("1", UNAVAILABLE, "broken"), ("2", UNAVAILABLE, "broken")]
    assert (record.state, record.missing, record.forgettable) == (UNAVAILABLE, True, False)


def test_failed_load_of_unknown_versions_has_one_line(record: ModelRecord[int]) -> None:
    fail(record)
    assert lines(record) == [("", UNAVAILABLE, "broken")]


def test_failed_reload_keeps_what_serves_and_gives_the_reason(record: ModelRecord[int]) -> None:
    serve(record, 1)
    fail(record, 1, 2)
    assert lines(record) == [("1", READY, "the last load failed: broken"), ("2", UNAVAILABLE, "broken")]
    assert not record.missing
    serve(record, 1)
    assert lines(record) == [("1", READY, "")]


def test_load_that_was_given_up_changes_nothing(record: ModelRecord[int]) -> None:
    fail(record, 1)
    before = lines(record)
    record.loading = []
    assert record.missing
    record.loading = None
    assert lines(record) == before


def test_unloaded_model_is_not_missing(record: ModelRecord[int]) -> None:
    serve(record, 1)
    assert record.unload() == [1]
    assert lines(record) == [("1", UNLOADING, "")]
    assert (record.state, record.missing, record.forgettable) == (UNLOADING, False, False)
    record.drained("1")
    assert lines(record) == [("1", UNAVAILABLE, UNLOADED)]
    assert (record.state, record.missing, record.forgettable) == (UNAVAILABLE, False, True)


def test_unloaded_model_that_had_failed_is_not_missing(record: ModelRecord[int]) -> None:
    fail(record, 1)
    assert record.unload() == []
    assert lines(record) == [("1", UNAVAILABLE, UNLOADED)]
    assert not record.missing


def test_unload_of_a_model_never_loaded_changes_nothing(record: ModelRecord[int]) -> None:
    record.unload()
    assert record.lines() == [IndexLine("m")]


def test_version_that_serves_again_before_it_has_drained_is_ready(record: ModelRecord[int]) -> None:
    serve(record, 1)
    record.unload()
    serve(record, 1)
    assert lines(record) == [("1", READY, "")]
    record.drained("1")
    assert lines(record) == [("1", READY, "")]


def test_version_that_leaves_twice_is_unavailable_when_both_have_drained(record: ModelRecord[int]) -> None:
    serve(record, 1)
    serve(record, 1)
    record.unload()
    record.drained("1")
    assert lines(record) == [("1", UNLOADING, "")]
    record.drained("1")
    assert lines(record) == [("1", UNAVAILABLE, UNLOADED)]


def test_failed_load_after_an_unload_is_missing(record: ModelRecord[int]) -> None:
    serve(record, 1)
    record.unload()
    record.drained("1")
    fail(record)
    assert lines(record) == [("1", UNAVAILABLE, "broken")]
    assert record.missing


def test_duplicates_are_one_line_unless_something_serves(record: ModelRecord[int]) -> None:
    record.duplicates = True
    assert lines(record) == [("", UNAVAILABLE, DUPLICATE_NAME)]
    fail(record, reason="two of them")
    assert lines(record) == [("", UNAVAILABLE, DUPLICATE_NAME)]
    serve(record, 1)
    assert lines(record) == [("1", READY, "")]


def test_entry_on_disk_or_with_operations_is_not_forgettable(record: ModelRecord[int]) -> None:
    record.on_disk = True
    assert not record.forgettable
    record.on_disk, record.operations = False, 1
    assert not record.forgettable


def test_unreachable_model_is_missing_with_the_reason_until_it_is_back(record: ModelRecord[int]) -> None:
    serve(record, 1, 2)
    record.unreachable_reason = "gone"
    assert (record.state, record.missing) == (UNAVAILABLE, True)
    assert lines(record) == [("1", UNAVAILABLE, "gone"), ("2", UNAVAILABLE, "gone")]
    record.unreachable_reason = ""
    assert (record.state, record.missing) == (READY, False)


def test_unreachable_state_ends_with_a_load_or_an_unload(record: ModelRecord[int]) -> None:
    serve(record, 1)
    record.unreachable_reason = "gone"
    assert serve(record, 2) == [1]
    assert (record.unreachable_reason, record.state) == ("", READY)
    record.unreachable_reason = "gone"
    assert record.unload() == [2]
    assert (record.unreachable_reason, record.missing) == ("", False)


def test_versions_sort_as_numbers_before_all_others() -> None:
    assert sorted(["v2", "10", "9", "", "v10"], key=version_order) == ["9", "10", "", "v10", "v2"]
    assert sorted(["v2", "1" * 5000, "9" * 20], key=version_order) == ["9" * 20, "1" * 5000, "v2"]
