"""The text of a status: as much of it as arrives, through proxies too."""

from __future__ import annotations

from urllib.parse import quote_from_bytes

import grpc
import pytest

from paceline.server.errors import InvalidRequest
from paceline.server.rpc.calls import status_and_text

MAX_BYTES = 3_000
PRINTABLE = bytes(set(range(0x20, 0x7F)) - {ord("%")}).decode()


def sent(text: str) -> str:
    code, words = status_and_text(InvalidRequest(text), None, "ModelInfer")
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    return words


def written(text: str) -> int:
    """Its bytes in a header, as gRPC writes it: each one that isn't printable, or is a percent sign, takes three."""
    return len(quote_from_bytes(text.encode(), safe=PRINTABLE))


@pytest.mark.parametrize("text", ["", "a word", "x" * MAX_BYTES, "日" * (MAX_BYTES // 9), "%" * (MAX_BYTES // 3)])
def test_text_that_fits_is_sent_unchanged(text: str) -> None:
    assert sent(text) == text


@pytest.mark.parametrize("letter", ["x", "%", "\n", "é", "日", "😀", "%x日", "\x7f"])
@pytest.mark.parametrize("times", [1_001, 3_001, 100_000])
def test_text_that_would_be_too_long_in_a_header_lacks_only_its_middle(letter: str, times: int) -> None:
    text = "begin " + letter * times + " end"
    words = sent(text)
    if words == text:
        assert written(text) <= MAX_BYTES
        return
    begin, end = words.split(" [...] ")
    assert MAX_BYTES - 40 < written(begin) + written(end) <= MAX_BYTES
    assert text.startswith(begin)
    assert text.endswith(end)
    assert begin.startswith("begin ")
    assert end.endswith(" end")


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (MemoryError("no room for 9 B"), "no room for 9 B"),
        (MemoryError(), "no room for what this request needs"),
    ],
)
def test_lack_of_memory_is_logged_in_a_line(caplog: pytest.LogCaptureFixture, error: MemoryError, what: str) -> None:
    text = f"the server is short of memory: {what}"
    assert status_and_text(error, None, "ModelInfer") == (grpc.StatusCode.RESOURCE_EXHAUSTED, text)
    (record,) = caplog.records
    assert (record.getMessage(), record.exc_info) == (f"ModelInfer failed: {text}", None)


def test_text_that_utf_8_cannot_encode_is_sent_escaped() -> None:
    assert sent("a name \ud800") == r"a name \ud800"
