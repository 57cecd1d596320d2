"""Folders for clients' files: when they are removed, and that nothing is written later."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

from paceline.server.models import load_request
from paceline.server.models.load_request import Scratch, remove_all

FILE = PurePosixPath("1/model.onnx")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(load_request, "_there", set())
    yield tmp_path
    remove_all()


def test_folder_stays_until_all_have_released_it(folder: Path) -> None:
    one = Scratch()
    one.write(FILE, b"weights")
    one.keep()
    one.release()
    assert (one.path / FILE).read_bytes() == b"weights"
    one.release()
    assert list(folder.iterdir()) == []


def test_all_are_removed_at_the_end_even_if_needed_and_none_is_made_later(folder: Path) -> None:
    kept, given_back = Scratch(), Scratch()
    kept.write(FILE, b"weights")
    given_back.release()
    remove_all()
    assert list(folder.iterdir()) == []
    with pytest.raises(OSError, match="the server is ending"):
        kept.write(PurePosixPath("2/model.onnx"), b"")
    with pytest.raises(OSError, match="the server is ending"):
        Scratch()
    kept.release()
    assert list(folder.iterdir()) == []


def test_nothing_is_left_of_files_being_written_at_the_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_request, "_PATIENCE_S", 60.0)
    one, has_begun = Scratch(), threading.Event()

    def write() -> None:
        for number in range(10_000):
            has_begun.set()
            one.write(PurePosixPath(f"{number}/model.onnx"), bytes(1000))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda _: None)  # the writer ends with the error that refuses it
        writer = threading.Thread(target=write)
        writer.start()
        assert has_begun.wait(30)
        remove_all()
        writer.join(30)
    assert list(folder.iterdir()) == []


def test_folder_that_cannot_be_removed_does_not_keep_others(folder: Path) -> None:
    stays, goes = Scratch(), Scratch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stays, "remove", lambda: (_ for _ in ()).throw(RecursionError()))
        remove_all()
    assert list(folder.iterdir()) == [stays.path]
    assert not goes.path.exists()
    stays.remove()
