"""The output folder of a job: what is finished, who works in it, and what was fixed at the first start.

    out/part-00042.parquet        a unit's rows, in order, without those at fault
    out/_bad/part-00042.jsonl     its rows at fault: file, row, reason; of one that isn't finished, those found
    out/_paceline/job.json        fingerprint, input list, Fixed: written once, by whoever is first
    out/_paceline/files/          the index of each input file, so that a resume opens none
    out/_paceline/units/          a mark for each finished unit
    out/_paceline/locks/          who works in it
    out/_paceline/tmp/            what isn't finished
    out/_SUCCESS                  all units are finished

Lives here: the layout, and the order in which things get there. Must not: read input, compute, or know a format. The
rules: a unit's files are complete and on disk before its mark is, so whatever has a mark is never done again, and
whatever has none is done again as a whole. Only who holds the shard's lock removes what others may have left.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from enum import Enum
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar
from uuid import uuid4

import pyarrow as pa

from paceline.server.bulk.durable import Locks, explained, publish, put, remove, sync_folder
from paceline.server.bulk.fingerprint import Plain, differences, files_differ
from paceline.server.bulk.values import ALONE, BadRow, BulkError, FileIndex, Fixed, FlagError, InputFile, Shard, Unit
from paceline.server.bulk.writers import FORMATS, open_writer

__all__ = ["JobFolder", "Mark", "Part", "Start", "Totals"]

_LAYOUT = 2
"""Of what is in the folder. It rises, too, whenever `batches` or `execute` choose other calls, as outputs' bytes may
depend on them: a job that goes on would have some of each."""
_FOLDERS = ("files", "locks", "tmp", "units")
_PART = re.compile(rf"part-(\d{{5,}})\.(?:{'|'.join(FORMATS)})")

Place: TypeAlias = Callable[[InputFile, int], tuple[str, int]]
"""As `Source.place`: for people, where a row is."""

T = TypeVar("T")


class Start(Enum):
    RESUME = "goes on, or begins a new job in an empty folder"
    RETRY_BAD = "goes on, and does finished units with rows at fault again"
    ANEW = "removes what a job has written, and begins a new one"


class Mark(NamedTuple):
    """What a finished unit has: rows in its output file, and rows at fault."""

    rows: int
    bad: int


class Totals(NamedTuple):
    """Of a finished job."""

    units: int
    rows: int
    bad: int


class _Job(NamedTuple):
    """What all starts and shards have in common. Without `fixed` it hasn't begun."""

    layout: int
    fingerprint: Mapping[str, Plain]
    files: Sequence[Sequence[str | int]]
    fixed: Mapping[str, int]


class Part:
    """A unit's output file while it's written, under a temporary name. Belongs to one thread at a time."""

    def __init__(self, temporary: str, output_format: str, schema: pa.Schema, held_bytes: int) -> None:
        self.temporary = temporary
        self.rows = 0
        self._file = open(temporary, "xb")  # noqa: SIM115 - closed by `finish` or `drop`
        try:
            self._writer = open_writer(output_format, schema, self._file, held_bytes)
        except BaseException:
            self._file.close()
            os.unlink(temporary)
            raise

    def write(self, rows: pa.RecordBatch) -> None:
        """Adds rows, in order. Blocks. Raises BulkError if the disk is full or fails."""
        with explained(self.temporary):
            self._writer.write(rows)
        self.rows += rows.num_rows

    def finish(self) -> None:
        """For `JobFolder.commit`: everything is on disk then."""
        self._writer.finish()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def drop(self) -> None:
        """Removes it, unless it was committed. Never fails: what stays is removed at the next start."""
        self._writer.drop()
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            os.unlink(self.temporary)


class JobFolder:
    """Where a job, or one of its shards, writes. Everything blocks; `part`, `index` and `commit` may be called from any
    thread, also at once, and also without `open`, by a process that works for one that has opened the folder."""

    done: dict[int, Mark]
    """This shard's finished units: those that were when it was opened, and those that it has committed since."""
    finished: Totals | None
    """If the whole job was finished when it was opened. Then there is nothing to do."""

    def __init__(self, path: str, output_format: str = "parquet", shard: Shard = ALONE) -> None:
        self.path = path
        self.shard = shard
        self.done = {}
        self.finished = None
        self._format = output_format
        self._own = os.path.join(path, "_paceline")
        self._locks = Locks(os.path.join(self._own, "locks"))

    def open(
        self,
        fingerprint: Mapping[str, Plain],
        files: Sequence[InputFile],
        choose: Callable[[], Fixed],
        start: Start = Start.RESUME,
    ) -> Fixed:
        """Takes the shard's lock and returns what was fixed for the job. `choose` is called, in this thread, if nothing
        was; should others have been faster meanwhile, theirs holds.

        Raises BulkError, and holds no lock then, if the folder can't be written, has files but no job, if the shard is
        being done by somebody else, or if fingerprint or files differ from those that the job was begun with.
        """
        job = self._job(fingerprint, files)
        try:
            with explained(self.path):
                begun = self._enter(start)
            if begun is None:
                job = job._replace(fixed=asdict(choose()))
                with explained(self.path), self._locks.beginning():
                    begun = self._begun() or self._begin(job)
            self._compare(begun, job)
            with explained(self.path):
                self._take_stock(start)
            return Fixed(**begun.fixed)
        except BaseException:
            self.close()
            raise

    def look(self, fingerprint: Mapping[str, Plain], files: Sequence[InputFile]) -> tuple[Fixed, int] | None:
        """What was fixed for the job, and how many units of all shards are finished; None if it hasn't begun. Changes
        nothing, and takes no lock. Raises BulkError if `open` would, because of what is in the folder."""
        with explained(self.path):
            self._refuse_foreign()
            begun = self._begun()
        if begun is None:
            return None
        self._compare(begun, self._job(fingerprint, files))
        with explained(self.path):
            return Fixed(**begun.fixed), len(self._finished_units())

    def close(self) -> None:
        """Gives up the lock."""
        self._locks.give_up()

    def index(self, file: InputFile, measure: Callable[[], FileIndex]) -> FileIndex:
        """The file's index, which is measured once for all starts and shards."""
        path = self._at("files", f"{file.index:05d}.json")
        with explained(self.path):
            known = _read(path, FileIndex)
        if known is not None:
            return FileIndex(known.rows, tuple(known.offsets))
        measured = measure()
        with explained(self.path):
            self._put(path, asdict(measured))
        return measured

    def part(self, unit: Unit, schema: pa.Schema, fixed: Fixed) -> Part:
        """A new output file for the unit, to be committed or dropped. Holds less than `chunk_bytes` of rows."""
        with explained(self.path):
            return Part(self._temporary(f"part-{unit.number:05d}"), self._format, schema, fixed.chunk_bytes)

    def commit(self, unit: Unit, part: Part, bad: Sequence[BadRow], place: Place) -> Mark:
        """The unit is finished: its rows are those of `part`, and `place` says for people where the others were."""
        mark = Mark(part.rows, len(bad))
        with explained(self.path):
            part.finish()
            self._put_bad(unit, bad, place)
            publish(part.temporary, self._part_path(unit.number))
            self._put(self._mark_path(unit.number), mark._asdict())
        self.done[unit.number] = mark
        return mark

    def record(self, unit: Unit, bad: Sequence[BadRow], place: Place) -> None:
        """Has rows at fault of a unit that has ended early, instead of those recorded before: they count once it is
        finished. If it is, as others have done it meanwhile, theirs are all, and stay."""
        with explained(self.path):
            if not all(map(os.path.exists, (self._mark_path(unit.number), self._part_path(unit.number)))):
                self._put_bad(unit, bad, place)

    def _put_bad(self, unit: Unit, bad: Sequence[BadRow], place: Place) -> None:
        name = f"part-{unit.number:05d}.jsonl"
        path = os.path.join(self.path, "_bad", name)
        if bad:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            put(self._temporary(name), path, b"".join(_told(unit.file, row, place) for row in sorted(bad)))
        else:
            remove([path])

    def sign(self) -> str:
        """A new file, for those who work for this shard elsewhere. Who doesn't see it doesn't see this folder, or works
        for a process that has lost the shard to another, as whoever opens it removes the file."""
        path = self._temporary("sign")
        with explained(self.path), open(path, "xb"):
            return path

    def finish(self, units: int, judge: Callable[[int, int], None] = lambda bad, rows: None) -> Totals | None:
        """If all units of all shards are finished, of which there are `units`, says so in the folder, for good, unless
        `judge` raises, which is told how many of all rows are at fault. Of shards that end at the same moment at least
        one finds that, or all: they write the same."""
        with explained(self.path):
            if not self._finished_units().issuperset(range(units)):
                return None
            marks = [self.done.get(number) or self._mark(number) for number in range(units)]
            if None in marks:  # another shard has begun to do some again
                return None
            totals = Totals(units, sum(mark.rows for mark in marks if mark), sum(mark.bad for mark in marks if mark))
            judge(totals.bad, totals.rows + totals.bad)
            self._put(self._success, totals._asdict())
        return totals

    def _job(self, fingerprint: Mapping[str, Plain], files: Sequence[InputFile]) -> _Job:
        """As it is before it begins."""
        named = {**fingerprint, "output-format": self._format}
        facts: list[list[str | int]] = []
        for file in files:  # by their whole paths, as the job may go on in another folder
            path = file.path if "://" in file.path else os.path.abspath(file.path)
            facts.append([path, file.size_bytes, file.changed_ns])
        return _Job(_LAYOUT, named, facts, {})

    def _enter(self, start: Start) -> _Job | None:
        """Takes the lock. What the job was begun with, if it was."""
        if start is Start.ANEW and self.shard != ALONE:
            raise FlagError("--no-resume removes what all shards wrote, so it can't go with --shard")
        self._refuse_foreign()
        for name in _FOLDERS:
            os.makedirs(self._at(name), exist_ok=True)
        for folder in (self._own, self.path, os.path.dirname(os.path.abspath(self.path))):
            sync_folder(folder)
        with self._locks.beginning():
            self._locks.take(self.shard)
            if start is Start.ANEW:
                self._remove_all()
            return self._begun()

    def _refuse_foreign(self) -> None:
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return
        visible = sorted(name for name in names if not name.startswith(".") and name not in ("_paceline", "lost+found"))
        if visible and not os.path.exists(self._at("job.json")):
            named = ", ".join(visible[:3]) + (f" and {len(visible) - 3} more" if len(visible) > 3 else "")
            # Another shard's parts may be seen before its job is, over a network: the next start sees both.
            kind = FlagError if self.shard == ALONE else BulkError
            raise kind(f"{self._name} has files and no job: {named}; expected a new or an empty folder")

    def _begun(self) -> _Job | None:
        begun = _read(self._at("job.json"), _Job)
        if begun is None or not begun.fixed:
            return None
        if begun.layout != _LAYOUT or begun.fixed.keys() != {field.name for field in fields(Fixed)}:
            raise BulkError(f"the job in {self._name} was begun by another version of paceline: name another folder")
        return begun

    def _begin(self, job: _Job) -> _Job:
        self._put(self._at("job.json"), job._asdict())
        return job

    def _compare(self, begun: _Job, job: _Job) -> None:
        asked = differences(begun.fingerprint, job.fingerprint)
        if found := asked + files_differ(begun.files, job.files):
            # An input that has changed is no flag's fault, and may be what another machine sees late.
            kind = FlagError if asked else BulkError
            raise kind(
                f"the job in {self._name} was begun {'; '.join(found)}: start it as it was, name another folder,"
                f" or begin anew with --no-resume"
            )

    def _take_stock(self, start: Start) -> None:
        """Finds out what is done already, and removes what killed runs left."""
        of_others = f"-of-{self.shard.count}."
        left = [name for name in os.listdir(self._at("tmp"))
                if of_others not in name or name.startswith(f"{self.shard.file_name}.")]  # fmt: skip
        remove([self._at("tmp", name) for name in left])
        finished = _read(self._success, Totals)
        if finished is not None and not (start is Start.RETRY_BAD and finished.bad):
            self.finished = finished
            return
        mine = [number for number in sorted(self._finished_units()) if self.shard.has(number)]
        self.done = {number: mark for number in mine if (mark := self._mark(number)) is not None}
        again = [number for number, mark in self.done.items() if mark.bad and start is Start.RETRY_BAD]
        if again:
            remove([self._success])
            remove([self._mark_path(number) for number in again])
            self.done = {number: mark for number, mark in self.done.items() if not mark.bad}

    def _remove_all(self) -> None:
        """What a job has written, and nothing else. Marks go before what they stand for, and the job itself last: if
        this ends halfway, the folder has a job that isn't finished."""
        remove([self._success])
        bad = os.path.join(self.path, "_bad")
        for folder in (self._at("units"), self.path, bad, self._at("files"), self._at("tmp")):
            if os.path.isdir(folder):
                whole = os.path.dirname(folder) == self._own
                remove([os.path.join(folder, name) for name in os.listdir(folder) if whole or _PART.fullmatch(name)])
        self._begin(_Job(_LAYOUT, {}, [], {}))

    def _finished_units(self) -> set[int]:
        """Those with a mark and a part: who removes a part wants it done again."""
        marks = {int(name.removesuffix(".json")) for name in os.listdir(self._at("units"))}
        return marks & {int(part[1]) for name in os.listdir(self.path) if (part := _PART.fullmatch(name))}

    def _mark(self, number: int) -> Mark | None:
        return _read(self._mark_path(number), Mark)

    def _part_path(self, number: int) -> str:
        return os.path.join(self.path, f"part-{number:05d}.{self._format}")

    def _mark_path(self, number: int) -> str:
        return self._at("units", f"{number:05d}.json")

    @property
    def _success(self) -> str:
        return os.path.join(self.path, "_SUCCESS")

    @property
    def _name(self) -> str:
        return os.path.join(self.path, "")

    def _at(self, *names: str) -> str:
        return "/".join((self._own, *names))

    def _temporary(self, name: str) -> str:
        """Unlike any other, and tells whose it is: what works for a shard that was killed may live on for a while."""
        return self._at("tmp", f"{self.shard.file_name}.{name}.{uuid4().hex}")

    def _put(self, path: str, content: Mapping[str, Plain]) -> None:
        put(self._temporary(os.path.basename(path)), path, json.dumps(content).encode() + b"\n")


def _read(path: str, kind: Callable[..., T]) -> T | None:
    """What a file says, None if there is none. Files appear whole, so what is damaged was damaged by something else."""
    # There may be ten thousand of them to read before anything else is done: `open` takes twice as long.
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        content = b"".join(iter(partial(os.read, handle, 1 << 16), b""))
    finally:
        os.close(handle)
    try:
        return kind(**json.loads(content))
    except (ValueError, TypeError) as error:
        raise BulkError(f"{path} is damaged: {error}; remove it, and what it stands for is done again") from error


def _told(file: InputFile, row: BadRow, place: Place) -> bytes:
    path, number = place(file, row.number)
    told = json.dumps({"file": path, "row": number, "reason": row.reason}, ensure_ascii=False)
    return told.encode(errors="backslashreplace") + b"\n"  # which is JSON's own form of what isn't UTF-8
