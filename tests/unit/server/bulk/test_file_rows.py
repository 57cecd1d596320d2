"""Files of any kind as rows: their paths and bytes, and which are left out, at fault, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.server.bulk.sources import find_source
from paceline.server.bulk.values import BulkError
from tests.unit.server.bulk import reading
from tests.unit.server.privileges import open_folder, unprivileged


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("b.jpg", "a.png", "deep/__init__.py", ".hidden", "out/part-00000.parquet", "empty"):
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"" if name == "empty" else name.encode())
    monkeypatch.chdir(tmp_path)
    return tmp_path / "in"


def test_each_file_is_a_row(folder: Path) -> None:
    source = find_source(["in"], "files", output="in/out")
    assert [file.path for file in source.files] == ["in"]
    assert reading.rows(source, reading.fixed(unit_rows=2)) == [
        {"path": "in/a.png", "bytes": b"a.png"},
        {"path": "in/b.jpg", "bytes": b"b.jpg"},
        {"path": "in/deep/__init__.py", "bytes": b"deep/__init__.py"},
        {"path": "in/empty", "bytes": b""},
    ]


def test_each_pattern_is_an_input_file(folder: Path) -> None:
    source = find_source(["in/*.jpg", "in/deep", "in/*.png"], "files")
    assert [file.path for file in source.files] == ["in/*.jpg", "in/deep", "in/*.png"]
    assert [row["path"] for row in reading.rows(source, reading.fixed())] == [
        "in/b.jpg",
        "in/deep/__init__.py",
        "in/a.png",
    ]
    assert source.place(source.files[2], 0) == ("in/a.png", 0)


def test_paths_alone_read_no_file(folder: Path) -> None:
    (folder / "a.png").chmod(0)
    assert reading.rows(find_source(["in/*.png"], "files"), reading.fixed(), ["path"]) == [{"path": "in/a.png"}]


def test_huge_file_is_bad_alone(folder: Path) -> None:
    (folder / "a.png").write_bytes(bytes(5000))
    source = find_source(["in/*.*g"], "files")
    (chunk,) = reading.chunks(source, reading.fixed(chunk_bytes=1000))
    assert chunk.table["path"].to_pylist() == ["in/b.jpg"]
    assert [(row.number, row.reason) for row in chunk.bad] == [
        (0, "the file has 5000 bytes, more than the 1000 that one row may have, a 16th of --memory")
    ]


def test_forbidden_file_is_bad_alone() -> None:
    with open_folder() as folder:
        for name, mode in (("a", 0o644), ("b", 0), ("c", 0o644)):
            (folder / name).touch()
            (folder / name).chmod(mode)
        source = find_source([str(folder)], "files")
        with unprivileged():
            (bad,) = reading.bad_rows(source, reading.fixed())
            assert len(reading.rows(source, reading.fixed())) == 2
        assert (bad.number, bad.reason[:24]) == (1, "the file can't be read: ")


def test_changed_file_is_refused(folder: Path) -> None:
    source = find_source(["in"], "files")
    (folder / "b.jpg").write_bytes(b"other")
    with pytest.raises(BulkError, match=r"in/b\.jpg has changed since the job began"):
        reading.rows(source, reading.fixed())


def test_file_that_is_gone_is_refused(folder: Path) -> None:
    source = find_source(["in"], "files")
    (folder / "b.jpg").unlink()
    with pytest.raises(BulkError, match=r"in/b\.jpg"):
        reading.rows(source, reading.fixed())
