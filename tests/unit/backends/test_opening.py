"""Which files are inside a folder, links followed, and what becomes of the others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.backends.paths import open_inside
from tests.mounts import seen_through_a_process


def content(folder: Path, name: str, beside: str = "") -> bytes | None:
    file = open_inside(folder, name, beside)
    if file is None:
        return None
    with file:
        return file.read()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder `m` with links of all kinds, beside a secret."""
    folder = tmp_path / "m"
    (folder / "sub").mkdir(parents=True)
    (folder / "file").write_bytes(b"inside")
    (tmp_path / "secret").write_bytes(b"outside")
    links = {
        "near": "file",
        "sub/up": "../near",
        "absolute": str(folder / "file"),
        "out": "../secret",
        "out_and_back": "../m/sub/up",
        "far": str(tmp_path / "secret"),
        "elsewhere": "..",
        "round": "round",
        "dangling": "../none",
    }
    for name, target in links.items():
        (folder / name).symlink_to(target)
    return folder


@pytest.mark.parametrize(
    "name",
    ["file", "./file", "sub/../file", "near", "sub/up", "absolute", "out_and_back", "../m/file", "elsewhere/m/file"],
)
def test_file_inside_the_folder_is_opened_however_it_is_named(folder: Path, name: str) -> None:
    assert content(folder, name) == b"inside"


@pytest.mark.parametrize(
    "name",
    ["../secret", "out", "far", "elsewhere/secret", "/etc/hostname", "../none", "dangling", "sub/../../none", "a\0b"],
)
def test_nothing_outside_is_opened_or_told_apart_from_what_is_missing(folder: Path, name: str) -> None:
    assert content(folder, name) is None


@pytest.mark.parametrize("name", ["none", "file/x", "round", "sub", ".", "", "sub/..", "pipe"])
def test_what_is_no_file_inside_the_folder_is_an_error(folder: Path, name: str) -> None:
    os.mkfifo(folder / "pipe")
    with pytest.raises(OSError, match=r".+"):
        content(folder, name)


def test_file_beside_the_one_that_a_link_leads_to_is_inside(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for name in ("model", "weights"):
        (blobs / name).write_bytes(name.encode())
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    assert content(snapshot, "weights") is None
    assert content(snapshot, "weights", beside="model") == b"weights"


def test_folder_that_only_the_kernel_can_reach_is_as_strict(folder: Path) -> None:
    with seen_through_a_process(folder.parent, folder.parent / "mounted") as place:
        assert [content(place / "m", name) for name in ("file", "sub/up", "out_and_back")] == [b"inside"] * 3
        assert [content(place / "m", name) for name in ("out", "../secret", "dangling")] == [None] * 3
