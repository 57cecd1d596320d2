"""The input of a job: which format it has, and that all formats give every row once, in the same chunks; and files of
any kind as rows: which are left out, at fault, or refused.
"""

from __future__ import annotations

import csv
import gc
import json
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.server.bulk.array_files import ArrayFormat
from paceline.server.bulk.arrow_files import ArrowFormat
from paceline.server.bulk.csv_files import Csv
from paceline.server.bulk.json_files import JsonLines
from paceline.server.bulk.listing import Location
from paceline.server.bulk.parquet_files import ParquetFormat
from paceline.server.bulk.sources import FileSource, Format, find_source
from paceline.server.bulk.text_files import TextFormat
from paceline.server.bulk.values import BulkError, Fixed
from tests.unit.server.bulk import reading
from tests.unit.server.privileges import open_folder, unprivileged


def _parquet(path: Path, table: pa.Table) -> None:
    pq.write_table(table, path, row_group_size=5)


def _arrow(path: Path, table: pa.Table) -> None:
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=4)


def _csv(path: Path, table: pa.Table) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(table.column_names)
        writer.writerows(row.values() for row in table.to_pylist())


def _json_lines(path: Path, table: pa.Table) -> None:
    with pa.output_stream(path, compression="detect") as file:
        for row in table.to_pylist():
            file.write(json.dumps(row).encode() + b"\n")


def _npz(path: Path, table: pa.Table) -> None:
    np.savez(
        path, **{name: np.array(table[name].to_pylist() or ["?"])[: table.num_rows] for name in table.column_names}
    )


WRITERS: dict[str, Callable[[Path, pa.Table], None]] = {
    "a.parquet": _parquet,
    "a.arrow": _arrow,
    "a.csv": _csv,
    "a.jsonl": _json_lines,
    "a.jsonl.gz": _json_lines,
    "a.npz": _npz,
}
FORMATS: dict[str, Callable[[], Format]] = {
    "a.parquet": ParquetFormat,
    "a.arrow": ArrowFormat,
    "a.csv": lambda: TextFormat(lambda name: Csv(",")),
    "a.jsonl": lambda: TextFormat(lambda name: JsonLines()),
    "a.jsonl.gz": lambda: TextFormat(lambda name: JsonLines()),
    "a.npz": ArrayFormat,
}
SCHEMA = pa.schema({"n": pa.int64(), "s": pa.string()})
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12).map(lambda text: text + "x")
ROWS = st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), TEXTS), min_size=1, max_size=25)
LIMITS = st.builds(reading.fixed, st.integers(1, 30), st.integers(1, 9), st.integers(150, 300))


@pytest.mark.parametrize("name", WRITERS)
@given(rows=ROWS, limits=LIMITS)
@settings(max_examples=40)
def test_every_format_gives_rows_once(
    tmp_path_factory: pytest.TempPathFactory, name: str, rows: list[tuple[int, str]], limits: Fixed
) -> None:
    path = tmp_path_factory.mktemp("in") / name
    table = pa.table({"n": [row[0] for row in rows], "s": [row[1] for row in rows]}, SCHEMA)
    WRITERS[name](path, table)
    source = find_source([str(path)])
    found = reading.chunks(source, limits)
    assert [row for chunk in found for row in chunk.table.to_pylist()] == table.to_pylist()
    assert [number for chunk in found for number in chunk.numbers.tolist()] == list(range(len(rows)))
    other = path.with_name("b.parquet")
    _parquet(other, table)
    expected = reading.chunks(find_source([str(other)]), limits)
    assert [chunk.numbers.tolist() for chunk in found] == [chunk.numbers.tolist() for chunk in expected]


@pytest.mark.parametrize("name", WRITERS)
def test_files_elsewhere_give_the_same(tmp_path: Path, name: str) -> None:
    table = pa.table({"n": range(100), "s": ["some text"] * 100}, SCHEMA)
    WRITERS[name](tmp_path / name, table)
    system = pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem())  # which isn't taken for one of this machine
    info = system.get_file_info(name)
    place = Location(f"far://{name}", system, name, info.size, info.mtime_ns, is_folder=False)
    source = FileSource(FORMATS[name](), [place])
    assert reading.rows(source, reading.fixed(unit_rows=30)) == table.to_pylist()
    assert source.files[0].path == f"far://{name}"


@pytest.mark.parametrize("name", WRITERS)
def test_what_has_been_read_is_given_back(tmp_path: Path, name: str) -> None:
    table = pa.table({"n": range(9000), "s": ["text"] * 8999 + ["x" * 999]}, SCHEMA)
    WRITERS[name](tmp_path / name, table)
    source, limits = find_source([str(tmp_path)]), reading.fixed(9000, 1000, 60_000)
    before = pa.total_allocated_bytes()
    gc.disable()  # a cycle of references would keep it until garbage is collected
    try:
        assert sum(chunk.read_rows for chunk in reading.chunks(source, limits)) == 9000
        assert pa.total_allocated_bytes() - before < 10_000
    finally:
        gc.enable()


def test_several_units_at_once_are_right(tmp_path: Path) -> None:
    table = pa.table({"n": range(5000), "s": ["text"] * 5000}, SCHEMA)
    _json_lines(tmp_path / "a.jsonl.gz", table)
    source, limits = find_source([str(tmp_path)]), reading.fixed(unit_rows=100, chunk_rows=30)
    units = list(reading.units(source, 100))
    found: dict[int, list[int]] = {}

    def read(first: int) -> None:
        for unit in units[first::3]:
            tables = [chunk.table for chunk in source.chunks(unit, ["n"], limits)]
            found[unit.number] = [n for table in tables for n in table["n"].to_pylist()]

    threads = [Thread(target=read, args=(first,)) for first in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [n for number in sorted(found) for n in found[number]] == list(range(5000))


def test_files_of_a_url_are_read(tmp_path: Path) -> None:
    for name in ("b.parquet", "a.parquet"):
        _parquet(tmp_path / name, pa.table({"s": [name]}))
    source = find_source([f"file://{tmp_path}/*.parquet"])
    assert [file.path for file in source.files] == [f"file://{tmp_path}/a.parquet", f"file://{tmp_path}/b.parquet"]
    assert [row["s"] for row in reading.rows(source, reading.fixed())] == ["a.parquet", "b.parquet"]


def test_folder_gives_files_of_the_format(tmp_path: Path) -> None:
    for name in ("a.csv", "part-0", "README.txt", "b.parquet", "_SUCCESS", "c.CSV.gz"):
        _csv(tmp_path / name, pa.table({"s": [name]}))
    source = find_source([str(tmp_path)], "csv")
    assert [file.path.rpartition("/")[2] for file in source.files] == ["a.csv", "c.CSV.gz", "part-0"]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["a.csv", "b.parquet"], "the input has files of several formats, csv, parquet: choose by --format"),
        (
            ["a.txt"],
            r"a\.txt: its name tells no format: give one by --format, of parquet, arrow, npy, csv, jsonl, files",
        ),
        (["a.parquet.gz"], r"a\.parquet\.gz: its name tells no format"),
    ],
)
def test_format_that_is_unclear_is_refused(tmp_path: Path, names: list[str], words: str) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(BulkError, match=words):
        find_source([str(tmp_path / "*")])


def test_unread_rest_of_a_unit_costs_no_rows(tmp_path: Path) -> None:
    _arrow(tmp_path / "a.arrow", pa.table({"n": range(50), "s": [""] * 50}, SCHEMA))
    source, limits = find_source([str(tmp_path)]), reading.fixed(unit_rows=10)
    first, second, *_ = reading.units(source, 10)
    found = source.chunks(first, ["n"], limits)
    next(found)
    found.close()  # type: ignore[attr-defined]
    assert [n for chunk in source.chunks(first, ["n"], limits) for n in chunk.table["n"].to_pylist()] == [*range(10)]
    assert [n for chunk in source.chunks(second, ["n"], limits) for n in chunk.table["n"].to_pylist()] == [
        *range(10, 20)
    ]


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
