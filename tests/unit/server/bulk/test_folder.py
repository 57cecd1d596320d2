"""The output folder: what is finished stays so, what isn't is done again, and nothing else is touched."""

from __future__ import annotations

import itertools
import json
import os
import resource
import shutil
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Thread
from types import FrameType

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paceline.server.bulk.durable import explained
from paceline.server.bulk.folder import JobFolder, Mark, Start, Totals
from paceline.server.bulk.values import BadRow, BulkError, FileIndex, Fixed, FlagError, Shard
from tests.rlimits import limited
from tests.unit.server.bulk.folders import FILES, FINGERPRINT, FIXED, SCHEMA, UNITS, contents, do, never, opened
from tests.unit.server.privileges import open_folder, unprivileged


def finish(path: Path) -> None:
    """Whatever is left to do."""
    with opened(path) as folder:
        for unit in UNITS:
            if not folder.finished and unit.number not in folder.done:
                do(folder, unit, [0] if unit.number == 0 else [])
        assert folder.finish(len(UNITS)) is not None


class Death(BaseException):
    pass


@contextmanager
def death_before(change: int) -> Iterator[None]:
    """In place of the change of that number, from 1, which removes a file or gives it its name."""
    left = change

    def count(frame: FrameType, event: str, called: object) -> None:
        nonlocal left
        left -= event == "c_call" and called in (os.replace, os.unlink)
        if left == 0:
            raise Death

    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)


def test_job_is_done_unit_by_unit(tmp_path: Path) -> None:
    out = tmp_path / "made" / "out"
    with opened(out) as folder:
        assert folder.done == {}
        assert [do(folder, unit) for unit in UNITS[:-1]] == [Mark(2, 0), Mark(1, 0), Mark(2, 0)]
        assert folder.finish(len(UNITS)) is None
        assert not (out / "_SUCCESS").exists()
        assert do(folder, UNITS[-1], [3]) == Mark(1, 1)
        assert folder.finish(len(UNITS)) == Totals(units=4, rows=6, bad=1)
    assert sorted(contents(out)) == [
        "_SUCCESS",
        "_bad/part-00003.jsonl",
        "_paceline/job.json",
        *(f"_paceline/units/{number:05d}.json" for number in range(4)),
        *(f"part-{number:05d}.parquet" for number in range(4)),
    ]
    assert os.listdir(out / "_paceline" / "tmp") == []
    assert pq.read_table(out / "part-00003.parquet")["x"].to_pylist() == [2]
    assert json.loads((out / "_bad" / "part-00003.jsonl").read_text()) == {
        "file": "/in/b.parquet",
        "row": 3,
        "reason": "odd",
    }


def test_resume_knows_what_is_finished(tmp_path: Path) -> None:
    with opened(tmp_path) as first:
        do(first, UNITS[0])
        do(first, UNITS[2], [1])
    with closing(JobFolder(str(tmp_path))) as second:
        assert second.open(FINGERPRINT, FILES, never) == FIXED
        assert second.done == {0: Mark(2, 0), 2: Mark(1, 1)}
        assert second.finished is None


def test_finished_job_says_so_at_once(tmp_path: Path) -> None:
    finish(tmp_path)
    with opened(tmp_path) as second:
        assert second.finished == Totals(units=4, rows=6, bad=1)


def test_unit_is_numbered_beyond_five_digits(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        do(folder, replace(UNITS[0], number=123_456))
    assert (tmp_path / "part-123456.parquet").exists()
    with opened(tmp_path) as folder:
        assert folder.done == {123_456: Mark(2, 0)}


def test_file_is_indexed_once_for_all(tmp_path: Path) -> None:
    found = FileIndex(7, (0, 100))
    with opened(tmp_path, shard=Shard(0, 2)) as one, opened(tmp_path, shard=Shard(1, 2)) as other:
        assert one.index(FILES[0], lambda: found) == found
        assert other.index(FILES[0], lambda: FileIndex(-1)) == found
        assert other.index(FILES[1], lambda: FileIndex(3)) == FileIndex(3)


def test_unit_whose_part_was_removed_is_done_again(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        do(folder, UNITS[0])
        do(folder, UNITS[1])
    (tmp_path / "part-00000.parquet").unlink()
    with opened(tmp_path) as folder:
        assert folder.done.keys() == {1}


def test_retry_does_units_with_bad_rows_again(tmp_path: Path) -> None:
    finish(tmp_path)
    with opened(tmp_path, Start.RETRY_BAD) as folder:
        assert folder.finished is None
        assert folder.done.keys() == {1, 2, 3}
        assert not (tmp_path / "_SUCCESS").exists()
        do(folder, UNITS[0])
        assert folder.finish(len(UNITS)) == Totals(units=4, rows=7, bad=0)
    assert list((tmp_path / "_bad").iterdir()) == []
    with opened(tmp_path, Start.RETRY_BAD) as folder:
        assert folder.finished == Totals(units=4, rows=7, bad=0)


def test_damaged_mark_is_named(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        do(folder, UNITS[0])
    (tmp_path / "_paceline" / "units" / "00000.json").write_text('{"rows"')
    with pytest.raises(BulkError, match=r"units/00000.json is damaged: .*; remove it"), opened(tmp_path):
        pass


def test_shards_that_begin_together_agree(tmp_path: Path) -> None:
    shards, fixed = 4, {}
    together = Barrier(shards)

    def begin(number: int) -> None:
        def choose() -> Fixed:
            together.wait()  # so all of them find that nothing was fixed
            return replace(FIXED, batch_rows=number + 1)

        with closing(JobFolder(str(tmp_path), shard=Shard(number, shards))) as folder:
            fixed[number] = folder.open(FINGERPRINT, FILES, choose)

    threads = [Thread(target=begin, args=(number,)) for number in range(shards)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fixed) == shards
    assert len(set(fixed.values())) == 1


def test_shards_finish_a_job_together(tmp_path: Path) -> None:
    with opened(tmp_path, shard=Shard(0, 2)) as one, opened(tmp_path, shard=Shard(1, 2)) as other:
        for unit in UNITS:
            do(one if one.shard.has(unit.number) else other, unit)
        assert one.finish(len(UNITS)) == other.finish(len(UNITS)) == Totals(units=4, rows=7, bad=0)
    with opened(tmp_path, shard=Shard(0, 2)) as one:
        assert one.finished == Totals(units=4, rows=7, bad=0)


@pytest.mark.parametrize("shard", [Shard(0, 2), Shard(0, 3), Shard(1, 3)], ids=str)
def test_shard_of_somebody_else_is_refused(tmp_path: Path, shard: Shard) -> None:
    with opened(tmp_path, shard=Shard(0, 2)):
        other = JobFolder(str(tmp_path), shard=shard)
        with pytest.raises(BulkError, match=f"shard 0 of 2 is being done by process {os.getpid()} on .* since 20"):
            other.open(FINGERPRINT, FILES, never)
    with opened(tmp_path, shard=shard):
        pass


def test_leftovers_of_killed_runs_are_removed(tmp_path: Path) -> None:
    with opened(tmp_path, shard=Shard(1, 2)) as other:
        part = other.part(UNITS[1], SCHEMA, FIXED)
        temporary = Path(part.temporary)
        for left in ("0-of-2.part-00000.1", "0-of-2.00000.json.1", "1-of-3.part-00001.1"):
            temporary.with_name(left).write_text("half")
        with opened(tmp_path, shard=Shard(0, 2)):
            assert list(temporary.parent.iterdir()) == [temporary]
        part.drop()


def test_dropped_part_is_removed(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        folder.part(UNITS[0], SCHEMA, FIXED).drop()
        assert os.listdir(tmp_path / "_paceline" / "tmp") == []


def test_worker_commits_without_a_lock(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        do(JobFolder(str(tmp_path)), UNITS[0])
        assert folder.finish(1) == Totals(units=1, rows=2, bad=0)


def test_finished_unit_keeps_its_bad_rows(tmp_path: Path) -> None:
    found = [BadRow(0, "odd")]  # of two, when whoever did it, too, has ended
    with opened(tmp_path) as folder:
        folder.record(UNITS[0], found, lambda file, row: (file.path, row))
        before = contents(tmp_path)
        do(folder, UNITS[0], bad=[0, 1])
        whole = contents(tmp_path)
        JobFolder(str(tmp_path)).record(UNITS[0], found, lambda file, row: (file.path, row))
    assert before["_bad/part-00000.jsonl"] == whole["_bad/part-00000.jsonl"].splitlines(keepends=True)[0]
    assert contents(tmp_path) == whole


def test_new_job_removes_only_what_a_job_wrote(tmp_path: Path) -> None:
    finish(tmp_path)
    (tmp_path / "README").write_text("mine")
    (tmp_path / "_bad" / "notes").write_text("mine")
    (tmp_path / "part-of-mine.parquet").write_text("mine")
    with closing(JobFolder(str(tmp_path), "jsonl")) as folder:
        folder.open({"batch": 64}, FILES[:1], lambda: FIXED, Start.ANEW)
        assert (folder.done, folder.finished) == ({}, None)
    assert sorted(contents(tmp_path)) == ["README", "_bad/notes", "_paceline/job.json", "part-of-mine.parquet"]


def test_new_job_that_was_never_begun_can_be_resumed(tmp_path: Path) -> None:
    finish(tmp_path)

    def interrupted() -> Fixed:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        JobFolder(str(tmp_path)).open({"batch": 64}, FILES, interrupted, Start.ANEW)
    with closing(JobFolder(str(tmp_path))) as folder:
        assert folder.open({"batch": 16}, FILES, lambda: FIXED) == FIXED
        assert folder.done == {}


def test_new_job_that_died_is_finished_by_others(tmp_path: Path) -> None:
    finish(tmp_path / "old")
    expected = contents(tmp_path / "old")
    for change in itertools.count(1):
        out = tmp_path / str(change)
        shutil.copytree(tmp_path / "old", out)
        try:
            with death_before(change), opened(out, Start.ANEW):
                break
        except Death:
            finish(out)
            assert contents(out) == expected
    assert change > len(expected)  # each file has been removed


def test_new_job_is_refused_while_another_works(tmp_path: Path) -> None:
    with opened(tmp_path, shard=Shard(1, 2)), pytest.raises(BulkError, match=r"shard 1 of 2 is being done by"):
        JobFolder(str(tmp_path)).open(FINGERPRINT, FILES, never, Start.ANEW)
    with pytest.raises(BulkError, match="--no-resume removes what all shards wrote, so it can't go with --shard"):
        JobFolder(str(tmp_path), shard=Shard(1, 2)).open(FINGERPRINT, FILES, never, Start.ANEW)


@pytest.mark.parametrize("start", Start)
def test_folder_of_somebody_else_is_refused(tmp_path: Path, start: Start) -> None:
    for name in ("a.txt", "b", "c", "d", ".hidden", "lost+found"):
        (tmp_path / name).mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(BulkError, match=r"has files and no job: a.txt, b, c and 1 more; expected a new"):
        JobFolder(str(tmp_path)).open(FINGERPRINT, FILES, never, start)
    assert sorted(tmp_path.rglob("*")) == before


def test_shards_that_see_no_job_yet_may_try_again(tmp_path: Path) -> None:
    (tmp_path / "part-00001.parquet").touch()
    for shard, kind in ((Shard(0, 1), FlagError), (Shard(0, 2), BulkError)):
        with pytest.raises(BulkError) as raised:
            JobFolder(str(tmp_path), shard=shard).open(FINGERPRINT, FILES, never, Start.RESUME)
        assert raised.type is kind


def test_folder_that_looks_empty_is_taken(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    (tmp_path / ".cache").write_text("")
    with opened(tmp_path):
        pass


@pytest.mark.parametrize("path", ["out", "out/inside"])
def test_file_in_place_of_a_folder_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(BulkError, match=r"out.*: expected a folder to write to, found a file"):
        JobFolder(str(tmp_path / path)).open(FINGERPRINT, FILES, never)


def test_folder_without_permission_is_refused() -> None:
    with open_folder() as path:
        path.chmod(0o555)
        with unprivileged(), pytest.raises(BulkError, match="out can't be written: Permission denied"):
            JobFolder(str(path / "out")).open(FINGERPRINT, FILES, never)


def test_full_disk_costs_the_unit_alone(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        do(folder, UNITS[0])
        part = folder.part(UNITS[1], SCHEMA, FIXED)
        part.write(pa.record_batch([pa.array(range(1000))], schema=SCHEMA))
        with limited(resource.RLIMIT_FSIZE, 1000), pytest.raises(BulkError, match="make room and start the job again"):
            folder.commit(UNITS[1], part, [], lambda file, row: (file.path, row))
        part.drop()
        assert os.listdir(tmp_path / "_paceline" / "tmp") == []
    with opened(tmp_path) as folder:
        assert folder.done.keys() == {0}


def test_full_device_is_told_as_such() -> None:
    with (
        pytest.raises(BulkError, match="/dev/full: No space left on device; make room"),
        explained("/dev/full"),
        open("/dev/full", "wb", buffering=0) as file,
    ):
        file.write(b"a")


def test_sign_is_there_until_next_start(tmp_path: Path) -> None:
    with opened(tmp_path, shard=Shard(0, 2)) as folder:
        sign = Path(folder.sign())
    with opened(tmp_path, shard=Shard(1, 2)):
        assert sign.exists()
    with opened(tmp_path, shard=Shard(0, 2)):
        assert not sign.exists()
