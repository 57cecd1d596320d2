"""Which headers are accepted, and when the file of hashes takes effect."""

from __future__ import annotations

import hashlib
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.server.errors import StartError
from paceline.server.rpc.credentials import Tokens, line_of, new_token
from tests.rlimits import limited

SECOND = 10**9


class Now:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns


def opened(path: Path, *lines: str, now: Now | None = None) -> Tokens:
    path.write_text("\n".join(lines))
    tokens = Tokens(path, now or Now())
    tokens.open()
    return tokens


def test_tokens_of_the_file_are_accepted_each_time_and_no_others(tmp_path: Path) -> None:
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


def test_tokens_of_a_file_with_a_byte_order_mark_are_accepted(tmp_path: Path) -> None:
    tokens = opened(tmp_path / "t", "\ufeff" + line_of("edge", "abc"))
    assert tokens.name_of("Bearer abc") == "edge"


def test_new_token_is_accepted_with_its_line_in_the_file(tmp_path: Path) -> None:
    first, second = new_token(), new_token()
    tokens = opened(tmp_path / "t", line_of("a", first))
    assert first != second
    assert len(first) >= 43
    assert tokens.name_of(f"Bearer {first}") == "a"
    assert tokens.name_of(f"Bearer {second}") is None


@pytest.mark.parametrize("name", ["", "a b", "a:b", "é", "a\nb"])
def test_line_of_an_invalid_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="expected a name"):
        line_of(name, "abc")


def test_changed_file_takes_effect_within_a_second(tmp_path: Path) -> None:
    now, path = Now(), tmp_path / "t"
    tokens = opened(path, line_of("a", "one"), now=now)
    assert tokens.name_of("Bearer one") == "a"
    path.write_text(line_of("bb", "another"))  # another size: times of files are coarse
    now.ns = SECOND - 1
    assert tokens.name_of("Bearer one") == "a"
    now.ns = SECOND
    assert tokens.name_of("Bearer one") is None
    assert tokens.name_of("Bearer another") == "bb"


def test_file_that_could_not_be_read_is_read_again_later(tmp_path: Path) -> None:
    """Otherwise a token that was removed would stay valid."""
    now, path = Now(), tmp_path / "t"
    tokens = opened(path, line_of("a", "one"), now=now)
    path.write_text(line_of("bb", "another"))  # another size: times of files are coarse
    now.ns = SECOND
    with limited(resource.RLIMIT_NOFILE, 3):  # more are open
        assert tokens.name_of("Bearer one") == "a"
    now.ns = 2 * SECOND
    assert tokens.name_of("Bearer one") is None
    assert tokens.name_of("Bearer another") == "bb"


def test_file_replaced_by_another_of_equal_size_and_time_takes_effect(tmp_path: Path) -> None:
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
def test_file_without_its_last_token_leaves_none_and_is_logged(
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
def test_broken_or_missing_file_keeps_the_old_tokens_and_is_logged_without_its_text(
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
def test_open_of_a_broken_file_is_refused_without_its_text(tmp_path: Path, text: str | bytes) -> None:
    path = tmp_path / "t"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(StartError, match=r"--grpc-token-file: .*: expected .*NAME:SHA256") as refusal:
        Tokens(path).open()
    assert "SECRET" not in str(refusal.value)


@pytest.mark.parametrize("put", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_pipe_or_device_in_place_of_the_file_is_not_read(tmp_path: Path, put: Callable[[Path], None]) -> None:
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


def test_open_of_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="No such file"):
        Tokens(tmp_path / "t").open()
