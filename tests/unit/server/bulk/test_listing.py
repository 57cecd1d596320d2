"""What patterns mean: files, folders, globs and URLs, in which order, and what is left out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.server.bulk.listing import find_locations
from paceline.server.bulk.values import BulkError

FILES = ("b.parquet", "a.parquet", "deep/c.parquet", "deep/er/d.parquet", "note.txt", "_SUCCESS.parquet", ".a.parquet")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (*FILES, "_temporary/e.parquet", ".hidden/f.parquet"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "in"


def listed(*patterns: str, output: str | None = None) -> list[str]:
    found = find_locations(patterns, lambda name: name.endswith(".parquet"), output)
    return [place.shown for _, places in found for place in places]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("in/a.parquet", ["in/a.parquet"]),
        ("in", ["in/a.parquet", "in/b.parquet", "in/deep/c.parquet", "in/deep/er/d.parquet"]),
        ("in/", ["in/a.parquet", "in/b.parquet", "in/deep/c.parquet", "in/deep/er/d.parquet"]),
        ("in/*.parquet", ["in/a.parquet", "in/b.parquet"]),
        ("in/[b-z].parquet", ["in/b.parquet"]),
        ("*/?.parquet", ["in/a.parquet", "in/b.parquet"]),
        ("in/deep/**/*.parquet", ["in/deep/c.parquet", "in/deep/er/d.parquet"]),
        ("in/**", ["in/a.parquet", "in/b.parquet", "in/deep/c.parquet", "in/deep/er/d.parquet", "in/note.txt"]),
        ("in/*/er", ["in/deep/er/d.parquet"]),
        ("in/_*/*", ["in/_temporary/e.parquet"]),
        ("in/_temporary", ["in/_temporary/e.parquet"]),
        ("in/_SUCCESS.parquet", ["in/_SUCCESS.parquet"]),
    ],
)
def test_pattern_means_sorted_visible_files(folder: Path, pattern: str, names: list[str]) -> None:
    assert listed(pattern) == names


def test_patterns_keep_order_and_files_come_once(folder: Path) -> None:
    found = listed("in/b.parquet", "in/*.parquet", str(folder / "a.parquet"), "./in/deep", "in")
    assert found == ["in/b.parquet", "in/a.parquet", "./in/deep/c.parquet", "./in/deep/er/d.parquet"]


def test_url_shows_files_as_urls(folder: Path) -> None:
    (folder / "x y.parquet").write_text("")
    assert listed(f"file://{folder}/[x]*") == [f"file://{folder}/x%20y.parquet"]


def test_name_with_wildcards_means_itself(folder: Path) -> None:
    (folder / "a[1].parquet").write_text("")
    assert listed("in/a[1].parquet") == ["in/a[1].parquet"]


def test_output_folder_is_never_input(folder: Path) -> None:
    assert listed("in", output="in/deep") == ["in/a.parquet", "in/b.parquet"]
    assert listed("in/*", output="in/deep") == ["in/a.parquet", "in/b.parquet", "in/note.txt"]


@pytest.mark.parametrize("pattern", ["in/**", "in/**/*.parquet", "in/*/*.parquet"])
def test_no_wildcard_leads_into_the_output(folder: Path, pattern: str) -> None:
    (folder / "near").mkdir()
    (folder / "near" / "g.parquet").write_text("")
    assert "in/near/g.parquet" in (found := listed(pattern, output="in/deep"))
    assert not [name for name in found if "deep" in name]
    with pytest.raises(BulkError, match="in/deep: it is the output folder, which is no input"):
        listed("in/deep", output="in/deep")


@pytest.mark.parametrize("pattern", ["in", "in/**", "in/**/*.parquet"])
def test_output_of_another_job_has_to_be_named(folder: Path, pattern: str) -> None:
    (folder / "deep" / "_paceline").mkdir()
    (folder / "deep" / "_paceline" / "job.json").write_text("{}")
    with pytest.raises(BulkError, match="in/deep has another job's output: name it, as -i in/deep, if"):
        listed(pattern, output="out")
    assert listed("in/deep", output="out") == ["in/deep/c.parquet", "in/deep/er/d.parquet"]
    assert listed("in/d*/*.parquet", output="out") == ["in/deep/c.parquet"]


def test_links_that_lead_back_end(folder: Path) -> None:
    (folder / "deep" / "back").symlink_to(folder)
    assert len(listed("in")) == 4


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("in/none.parquet", "there is no such file"),
        ("in/none/*", "there is no such file"),
        ("in/*.csv", "there is no such file"),
        ("nosuch://bucket/a", "nosuch://bucket/a"),
        ("/dev/null", "neither file nor folder"),
    ],
)
def test_pattern_without_files_is_refused(folder: Path, pattern: str, words: str) -> None:
    with pytest.raises(BulkError, match=words):
        listed(pattern)


def test_folder_without_input_is_refused(folder: Path) -> None:
    (folder / "empty").mkdir()
    with pytest.raises(BulkError, match="in/empty: no input file in there"):
        listed("in/*.parquet", "in/empty")


def test_empty_pattern_and_names_outside_utf8_are_refused(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff.csv")).touch()
    with pytest.raises(BulkError, match="expected the path or URL of a file or folder, or a glob, got ''"):
        find_locations([""], lambda name: True)
    with pytest.raises(BulkError, match=r"expected names in UTF-8 there, got b'\\xff.csv': rename it"):
        find_locations([str(tmp_path)], lambda name: True)
