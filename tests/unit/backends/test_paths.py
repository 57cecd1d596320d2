"""What is at a path: existing files and folders, missing ones, and what can't be examined."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.backends.paths import exists, is_file, is_folder
from tests.unit.server.privileges import open_folder, unprivileged

QUESTIONS = [exists, is_file, is_folder]


def answers(path: Path) -> list[bool]:
    return [question(path) for question in QUESTIONS]


def test_existing_paths_are_what_their_links_lead_to(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "there").symlink_to(tmp_path)
    assert answers(tmp_path / "file") == answers(tmp_path / "link") == [True, True, False]
    assert answers(tmp_path) == answers(tmp_path / "there") == [True, False, True]
    assert answers(Path("/dev/null")) == [True, False, False]


@pytest.mark.parametrize("name", ["gone", "gone/x", "file/x", "dangling", "round", "a\0b"])
def test_missing_and_impossible_paths_do_not_exist(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("gone")
    (tmp_path / "round").symlink_to("round")
    assert answers(tmp_path / name) == [False, False, False]


@pytest.mark.parametrize("question", QUESTIONS)
def test_paths_that_cannot_be_examined_are_an_error_and_not_missing(
    tmp_path: Path, question: Callable[[Path], bool]
) -> None:
    with open_folder() as folder:
        (folder / "locked").mkdir()
        (folder / "locked" / "file").touch()
        (folder / "locked").chmod(0o444)
        with unprivileged(), pytest.raises(PermissionError):
            question(folder / "locked" / "file")
    with pytest.raises(OSError, match="File name too long"):
        question(tmp_path / ("x" * 300))
