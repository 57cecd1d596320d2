"""What is finished is on disk before it is said to be: the order of calls that reach the disk."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from tests.unit.server.bulk.folders import UNITS, do, opened

SYNCED_AND_NAMED = ["fsync", "replace", "fsync"]


@contextmanager
def calls_to_disk() -> Iterator[list[str]]:
    calls: list[str] = []

    def note(frame: FrameType, event: str, called: object) -> None:
        if event == "c_call" and called in (os.fsync, os.replace, os.unlink):
            calls.append(getattr(called, "__name__", ""))

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def test_part_is_on_disk_before_its_mark(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        with calls_to_disk() as calls:
            do(folder, UNITS[0])
        assert calls == SYNCED_AND_NAMED * 2
        with calls_to_disk() as calls:
            do(folder, UNITS[1], [0])
        # The part first, which gets its name when the rows at fault have theirs.
        assert calls == ["fsync", *SYNCED_AND_NAMED, "replace", "fsync", *SYNCED_AND_NAMED]
        with calls_to_disk() as calls:
            do(folder, UNITS[1])
        assert calls == ["fsync", "unlink", "fsync", "replace", "fsync", *SYNCED_AND_NAMED]
