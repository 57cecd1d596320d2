"""Units: how files become them, and whose they are."""

from __future__ import annotations

import pytest

from paceline.server.bulk.values import BulkError, FileIndex, InputFile, Shard, Unit, units_of

FILES = [InputFile(place, f"in/{place}.csv", 10, 1) for place in range(3)]


def test_units_of_files_are_numbered_on() -> None:
    first = units_of(FILES[0], FileIndex(5, (0, 20, 40)), 2, 0)
    assert first == [
        Unit(0, FILES[0], 0, 2, 0),
        Unit(1, FILES[0], 2, 4, 20),
        Unit(2, FILES[0], 4, 5, 40),
    ]
    assert units_of(FILES[1], FileIndex(0), 2, 3) == []
    assert units_of(FILES[2], FileIndex(4), 2, 3) == [Unit(3, FILES[2], 0, 2), Unit(4, FILES[2], 2, 4)]


def test_shards_share_units_without_rest() -> None:
    shards = [Shard(number, 3) for number in range(3)]
    owners = [[shard.number for shard in shards if shard.has(unit)] for unit in range(7)]
    assert owners == [[0], [1], [2], [0], [1], [2], [0]]


@pytest.mark.parametrize(("number", "count"), [(3, 3), (-1, 3), (0, 0)])
def test_shard_beyond_its_count_is_refused(number: int, count: int) -> None:
    with pytest.raises(BulkError, match=f"shard {number} of {count}"):
        Shard(number, count)
