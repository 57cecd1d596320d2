"""Whether a start is of the job that a folder has: what may not differ, and how a difference is told."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.server.bulk.fingerprint import Plain, differences, fingerprint
from paceline.server.bulk.folder import JobFolder
from paceline.server.bulk.settings import BulkSettings
from paceline.server.bulk.values import BulkError, FlagError, InputFile
from tests.unit.server.bulk.folders import FILES, FINGERPRINT, FIXED, never, opened


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"batch": 64},
            "begun with --batch 32, got 64: start it as it was, name another folder, or begin anew with",
        ),
        (
            {"map": {"ids": "words", "more": "x"}},
            "with --map ids=tokens, got words; with --map mask=mask, got none; without --map more=x:",
        ),
        ({"keep": ["id", "title"]}, "with --keep id, got id,title"),
        ({"note": "a" * 100}, "without --note a{60}…:"),
    ],
    ids=["value", "nested", "list", "long"],
)
def test_other_configuration_is_refused_by_name(tmp_path: Path, change: dict[str, Plain], reason: str) -> None:
    with opened(tmp_path):
        pass
    folder = JobFolder(str(tmp_path))
    with pytest.raises(FlagError, match=reason):
        folder.open({**FINGERPRINT, **change}, FILES, never)
    with opened(tmp_path):  # the lock was given up
        pass


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ({"keep": ["a", "b"]}, {"keep": ["a,b"]}, 'with --keep ["a", "b"], got ["a,b"]'),
        ({"parameter": {"p": 1}}, {"parameter": {"p": "1"}}, 'with --parameter p=1, got "1"'),
        ({"map": {"x": "a" * 99}}, {"map": {"x": f"{'a' * 99}b"}}, f"--map x=…{'a' * 30}, got …{'a' * 30}b"),
    ],
    ids=["list", "type", "long"],
)
def test_values_that_look_alike_are_told_apart(old: dict[str, Plain], new: dict[str, Plain], told: str) -> None:
    (found,) = differences(old, new)
    assert found.endswith(told)
    assert not differences(old, old)


def test_order_of_outputs_is_a_jobs() -> None:
    one = BulkSettings("m", ("in.csv",), Path("out"), outputs={"a": "y", "b": "y"}, server="host:8001")
    other = replace(one, outputs={"b": "y", "a": "y"})
    assert differences(fingerprint(one), fingerprint(other)) == ["with --output a=y,b=y, got b=y,a=y"]


def test_same_model_of_a_server_goes_on(tmp_path: Path) -> None:
    facts: dict[str, Plain] = {**FINGERPRINT, "model": {"server's": "m"}}
    for choose in (lambda: FIXED, never):
        with closing(JobFolder(str(tmp_path))) as folder:
            assert folder.open(facts, FILES, choose) == FIXED


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (
            [replace(FILES[0], size_bytes=11), FILES[1]],
            r"a.parquet of 10 bytes, changed at 1970-\S*01Z, got 11 bytes, changed at \S*01Z:",
        ),
        (
            [replace(FILES[0], changed_ns=9), FILES[1]],
            r"a.parquet of 10 bytes, .*01Z, got 10 bytes, .*09Z; only the time of its last change differs:",
        ),
        ([FILES[0]], "with input /in/b.parquet, which is gone"),
        ([*FILES, InputFile(2, "/in/c.parquet", 1, 1)], "without input /in/c.parquet"),
        (FILES[::-1], "with its inputs in another order"),
        (
            [InputFile(place, f"/{place}", 1, 1) for place in range(4)],
            "without input /2; with 3 more inputs that dif",
        ),
    ],
    ids=["size", "time", "gone", "new", "order", "many"],
)
def test_other_input_is_refused_by_name(tmp_path: Path, files: list[InputFile], reason: str) -> None:
    with opened(tmp_path):
        pass
    with pytest.raises(BulkError, match=reason) as raised:
        JobFolder(str(tmp_path)).open(FINGERPRINT, files, never)
    assert raised.type is BulkError


def test_other_output_format_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path):
        pass
    with pytest.raises(BulkError, match="with --output-format parquet, got jsonl"):
        JobFolder(str(tmp_path), "jsonl").open(FINGERPRINT, FILES, never)


@pytest.mark.parametrize(("ours", "theirs"), [('"chunk_rows"', '"block_rows"'), ('"layout": 2', '"layout": 1')])
def test_job_of_another_version_is_refused(tmp_path: Path, ours: str, theirs: str) -> None:
    with opened(tmp_path):
        pass
    job = tmp_path / "_paceline" / "job.json"
    job.write_text(job.read_text().replace(ours, theirs))
    with pytest.raises(BulkError, match="begun by another version of paceline"):
        JobFolder(str(tmp_path)).open(FINGERPRINT, FILES, never)
