"""Which headers are good, and when the file of hashes counts."""

from __future__ import annotations

import hashlib
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from server.errors import StartError
from server.rpc.tokens import Tokens, line_of, new_token
from tests.rlimits import limited

SECOND = 10**9


class Now:
    """A clock that the test turns."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns


def opened(path: Path, *lines: str, now: Now | None = None) -> Tokens:
    path.write_text("\n".join(lines))
    tokens = Tokens(path, now or Now())
    tokens.open()
    return tokens


def test_token_of_the_file_is_good_however_often_and_no_other(tmp_path: Path) -> None:
    tokens = opened(tmp_path / "t", "# ours", "", line_of("edge", "abc"), f"  {line_of('ops/a@b', 'x' * 43)}  ")
    for _ in range(3):
        assert tokens.name_of("Bearer abc") == "edge"
        assert tokens.name_of("bearer  abc ") == "edge"
        assert tokens.name_of("Bearer " + "x" * 43) == "ops/a@b"
    digest = hashlib.sha256(b"abc").hexdigest()
    for header in (
        "",
        "abc",
        "Bearer",
        "Bearer ",
        "Basic abc",
        "Bearer abcd",
        "Bearer ab",
        "Bearer ABC",
        "Bearer abc x",
    ):
        assert tokens.name_of(header) is None, header
    assert tokens.name_of(f"Bearer {digest}") is None
    assert tokens.name_of("Bearer " + "y" * 100_000) is None
    assert tokens.name_of("Bearer é\udcff") is None


def test_token_new_is_one_that_a_line_of_it_makes_good(tmp_path: Path) -> None:
    first, second = new_token(), new_token()
    tokens = opened(tmp_path / "t", line_of("a", first))
    assert first != second
    assert len(first) >= 43
    assert tokens.name_of(f"Bearer {first}") == "a"
    assert tokens.name_of(f"Bearer {second}") is None


@pytest.mark.parametrize("name", ["", "a b", "a:b", "é", "a\nb"])
def test_line_of_a_name_that_no_line_can_have_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="expected a name"):
        line_of(name, "abc")


def test_file_that_has_changed_counts_within_a_second(tmp_path: Path) -> None:
    now, path = Now(), tmp_path / "t"
    tokens = opened(path, line_of("a", "one"), now=now)
    assert tokens.name_of("Bearer one") == "a"
    path.write_text(line_of("b", "another"))
    now.ns = SECOND - 1
    assert tokens.name_of("Bearer one") == "a"
    now.ns = SECOND
    assert tokens.name_of("Bearer one") is None
    assert tokens.name_of("Bearer another") == "b"


def test_file_that_could_not_be_read_is_read_later(tmp_path: Path) -> None:
    """Or a token that was taken out would stay good."""
    now, path = Now(), tmp_path / "t"
    tokens = opened(path, line_of("a", "one"), now=now)
    path.write_text(line_of("b", "another"))
    now.ns = SECOND
    with limited(resource.RLIMIT_NOFILE, 3):  # more are open
        assert tokens.name_of("Bearer one") == "a"
    now.ns = 2 * SECOND
    assert tokens.name_of("Bearer one") is None
    assert tokens.name_of("Bearer another") == "b"


def test_file_replaced_by_another_of_equal_size_and_time_counts(tmp_path: Path) -> None:
    now, path = Now(), tmp_path / "t"
    tokens = opened(path, line_of("a", "one"), now=now)
    before = path.stat()
    new = tmp_path / "new"
    new.write_text(line_of("a", "two"))
    os.utime(new, ns=(before.st_atime_ns, before.st_mtime_ns))
    new.rename(path)
    now.ns = SECOND
    assert tokens.name_of("Bearer one") is None
    assert tokens.name_of("Bearer two") == "a"


@pytest.mark.parametrize("text", ["", "# none"])
def test_file_of_which_the_last_token_was_taken_out_leaves_none_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    now, path = Now(), tmp_path / "t"
    tokens = opened(path, line_of("a", "one"), now=now)
    assert tokens.name_of("Bearer one") == "a"
    path.write_text(text)
    now.ns = SECOND
    assert tokens.name_of("Bearer one") is None
    assert caplog.messages == [f"no tokens are left in {path}: calls that need one are refused"]
    path.write_text(line_of("b", "two"))
    now.ns = 2 * SECOND
    assert tokens.name_of("Bearer two") == "b"


@pytest.mark.parametrize("text", ["a:123", "SECRET-TOKEN", f"{line_of('a', 'two')}\nSECRET-TOKEN"])
def test_file_that_is_broken_or_gone_leaves_the_old_tokens_and_says_so_without_its_words(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    now, path = Now(), tmp_path / "t"
    tokens = opened(path, line_of("a", "one"), now=now)
    path.write_text(text)
    now.ns = SECOND
    assert tokens.name_of("Bearer one") == "a"
    assert tokens.name_of("Bearer two") is None
    path.unlink()
    now.ns = 2 * SECOND
    assert tokens.name_of("Bearer one") == "a"
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert str(path) in caplog.text
    assert "SECRET" not in caplog.text
    path.write_text(line_of("b", "two"))
    now.ns = 3 * SECOND
    assert tokens.name_of("Bearer one") is None
    assert tokens.name_of("Bearer two") == "b"


@pytest.mark.parametrize("text", ["", "SECRET-TOKEN", "a:" + "g" * 64, b"\xff\xfe"])
def test_open_of_a_broken_file_is_refused_by_line_and_without_its_words(tmp_path: Path, text: str | bytes) -> None:
    path = tmp_path / "t"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(StartError, match=r"--grpc-token-file: .*: expected .*NAME:SHA256") as refusal:
        Tokens(path).open()
    assert "SECRET" not in str(refusal.value)


@pytest.mark.parametrize("put", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_not_read(tmp_path: Path, put: Callable[[Path], None]) -> None:
    path, now = tmp_path / "t", Now()
    put(path)
    with pytest.raises(StartError, match="expected a file, got something else"):
        Tokens(path).open()
    path.unlink()
    tokens = opened(path, line_of("a", "one"), now=now)
    path.unlink()
    put(path)
    now.ns = 3 * SECOND
    assert tokens.name_of("Bearer one") == "a"


def test_open_of_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="No such file"):
        Tokens(tmp_path / "t").open()
