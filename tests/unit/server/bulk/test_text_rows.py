"""Where rows of text end: the same wherever a block of the file ends, also with stray quotes and ones without end."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.server.bulk.text_rows import LineSplitter, QuoteSplitter, Splitter, text_rows

LONGEST = 12
PARTS = st.sampled_from([b'"', b'"', b'"', b",", b"\n", b"\r\n", b"\r", b"a", b"bcdef", b'""', b',"', b'",'])


def split(text: bytes, splitter: Splitter, block: int, most: int = 1 << 20) -> list[tuple[bytes, int, str | None]]:
    """The rows, their offsets and faults. A block of the file has so many bytes."""
    file = io.BytesIO(text)
    return [
        (line, offset, rows.faults.get(place))
        for rows in text_rows(lambda _: file.read(block), splitter, 0, most)
        for place, (line, offset) in enumerate(zip(rows.lines(), rows.offsets.tolist(), strict=True))
    ]


def split_slowly(text: bytes) -> list[tuple[bytes, int]]:
    """The rows and their offsets, byte by byte."""
    rows, begin, place = [], 0, 0
    may_open = True
    while place < len(text):
        byte = text[place : place + 1]
        other = text.find(b'"', place + 1)
        if byte == b'"' and may_open and 0 < other <= place + LONGEST:
            place = other + 1  # `may_open` stays: another quote right here is text of the same field
            may_open = text[place : place + 1] == b'"'
            continue
        may_open = byte in b",\r\n"
        place += 1
        if byte in b"\r\n":
            rows.append((text[begin:place], begin))
            begin = place
    rows.append((text[begin:], begin))
    return [row for row in rows if row[0].strip(b"\r\n")]


@given(st.lists(PARTS, max_size=30).map(b"".join), st.integers(1, LONGEST))
def test_quoted_rows_are_equal_for_any_blocks(text: bytes, block: int) -> None:
    found = split(text, QuoteSplitter(b",", LONGEST), block)
    assert [row[:2] for row in found] == split_slowly(text)


@given(st.lists(st.sampled_from([b"\n", b"\r\n", b"a", b"bc", b'"']), max_size=20).map(b"".join), st.integers(1, 9))
def test_lines_are_equal_for_any_blocks(text: bytes, block: int) -> None:
    lines = [line for line in text.splitlines(keepends=True) if line.strip(b"\r\n")]
    assert [row[0] for row in split(text, LineSplitter(), block)] == lines


@pytest.mark.parametrize("block", [1, 5, 100])
def test_huge_row_is_at_fault_and_counted(block: int) -> None:
    found = split(b"ab\n" + b"c" * 20 + b"\nd\n", LineSplitter(), block, most=10)
    assert [(offset, fault) for _, offset, fault in found] == [
        (0, None),
        (3, "the row has 21 bytes of text, more than the 10 that one row may have, a 16th of --memory"),
        (24, None),
    ]


@pytest.mark.parametrize("block", [1, 7])
def test_quote_without_end_is_fault_of_one_row(block: int) -> None:
    found = split(b'a,"b\n' + b"c,d\n" * 4, QuoteSplitter(b",", LONGEST), block)
    assert [(line, fault) for line, _, fault in found] == [
        (b'a,"b\n', "a quoted field begins that doesn't end"),
        *[(b"c,d\n", None)] * 4,
    ]
