"""Numbers as people read them."""

from __future__ import annotations

import pytest

from paceline.server.bulk.amounts import amount, duration, several, size


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.6, "1 min 0 s"), (62, "1 min 2 s"), (3_700, "1 h 1 min"), (90_000, "1 d 1 h")],
)
def test_durations_have_two_units_at_most(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 bytes"), (1023, "1,023 bytes"), (1536, "1.5 KiB"), (300 << 20, "300 MiB"), (5_000 << 40, "5,000 TiB")],
)
def test_sizes_have_three_digits_or_so(size_bytes: int, text: str) -> None:
    assert size(size_bytes) == text


def test_decimals_stand_where_they_say_something() -> None:
    assert [amount(number) for number in (0.25, 99.94, 100.4, 12_345.6)] == ["0.2", "99.9", "100", "12,346"]


def test_one_of_something_is_no_plural() -> None:
    assert [several(count, "part") for count in (0, 1, 1_000)] == ["0 parts", "1 part", "1,000 parts"]
