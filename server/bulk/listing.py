"""Which files patterns mean: paths, URLs, globs and folders, through the file systems of pyarrow.

Lives here: where a file is (`Location`), and how patterns become lists of them. Must not: know formats, open files.

A pattern's files are in the order of their paths, the patterns in the order given, and what several of them mean is
taken once.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import quote

import pyarrow as pa
import pyarrow.fs as pafs

from paceline.server.bulk.values import BulkError, FlagError

__all__ = ["Location", "find_locations"]

_WILD = re.compile(r"[*?[]")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_KNOWN = (pafs.FileType.File, pafs.FileType.Directory)


@dataclass(frozen=True, slots=True)
class Location:
    """A file or a folder: `shown` is what the user would open it with, `path` what `system` calls it."""

    shown: str
    system: pafs.FileSystem
    path: str
    size_bytes: int
    changed_ns: int
    is_folder: bool

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def is_local(self) -> bool:
        return isinstance(self.system, pafs.LocalFileSystem)

    def current(self) -> Location:
        """The same place as it is now. Raises BulkError if there is nothing any more, or it can't be asked."""
        try:
            return _located(self.shown, self.system, self.system.get_file_info(self.path))
        except (OSError, pa.ArrowException) as error:
            raise BulkError(f"{self.shown} can't be read: {error}") from None


def find_locations(
    patterns: Sequence[str], wanted: Callable[[str], bool], output: str | None = None, hidden: str = "._"
) -> list[tuple[str, list[Location]]]:
    """Each pattern with what it means: the files themselves, and those below folders that have a `wanted` name.
    `output` is the job's own folder, in which nothing is found. Names that begin with one of `hidden` are left out
    where the pattern doesn't spell that. Raises FlagError for a pattern that means nothing, or comes upon another job's
    output folder that it doesn't name, and BulkError for what can't be listed."""
    left_out = None if output is None else os.path.realpath(output)
    taken: set[tuple[str, str]] = set()
    listed = []
    for pattern in patterns:
        if not pattern:
            raise FlagError("expected the path or URL of a file or folder, or a glob, got ''")
        try:
            named = list(_named(pattern, left_out, hidden))
            files = [
                file
                for place in named
                if not place.is_folder or _is_input(place, left_out)
                for file in (_below(place, wanted, left_out, hidden) if place.is_folder else (place,))
            ]
        except UnicodeDecodeError as error:
            raise FlagError(f"{pattern}: expected names in UTF-8 there, got {error.object!r}: rename it") from None
        except BulkError as error:
            raise FlagError(str(error)) from None
        except (OSError, pa.ArrowException, ValueError) as error:
            raise BulkError(f"{pattern}: can't be listed: {error}") from None
        if not files:
            own = any(place.is_folder and not _is_input(place, left_out) for place in named)
            why = "it is the output folder, which is no input" if own else "no input file in there"
            raise FlagError(f"{pattern}: {why if named else 'there is no such file'}")
        found = {
            (file.system.type_name, os.path.abspath(file.path) if file.is_local else file.path): file
            for file in sorted(files, key=lambda file: file.path)
        }
        listed.append((pattern, [file for key, file in found.items() if key not in taken]))
        taken |= found.keys()
    return listed


def _named(pattern: str, left_out: str | None, hidden: str) -> Iterator[Location]:
    """The files and folders that a pattern itself names. What exists under a name with wildcards is meant by it."""
    is_url = _URL.match(pattern) is not None
    address, mark, query = pattern.partition("?") if is_url else (pattern, "", "")
    wild = None if not is_url and os.path.lexists(pattern) else _WILD.search(address)
    cut = len(address) if wild is None else address.rfind("/", 0, wild.start()) + 1
    base = address[:cut]
    system, path = pafs.FileSystem.from_uri(base + mark + query) if is_url else (pafs.LocalFileSystem(), base or ".")
    info = system.get_file_info(path)
    if wild is None:
        yield _located(base, system, info)
    elif info.type == pafs.FileType.Directory:
        yield from _matching(_located(base, system, info), address[cut:].split("/"), left_out, hidden)


def _matching(folder: Location, parts: Sequence[str], left_out: str | None, hidden: str) -> Iterator[Location]:
    """What is below `folder` along these parts of a pattern. `**` is any number of folders, also none."""
    part, rest = parts[0], parts[1:]
    if part == "**":
        yield from _matching(folder, rest or ["*"], left_out, hidden)
    for child in _children(folder):
        if part == "**":
            if child.is_folder and child.name[0] not in hidden and _is_entered(child, left_out):
                yield from _matching(child, parts, left_out, hidden)
        elif fnmatch.fnmatchcase(child.name, part) and (child.name[0] not in hidden or part[:1] in hidden):
            if not rest:
                yield child
            elif child.is_folder and _is_input(child, left_out):
                yield from _matching(child, rest, left_out, hidden)


def _below(folder: Location, wanted: Callable[[str], bool], left_out: str | None, hidden: str) -> Iterator[Location]:
    for child in _children(folder):
        if child.is_folder:
            if child.name[0] not in hidden and _is_entered(child, left_out):
                yield from _below(child, wanted, left_out, hidden)
        elif child.name[0] not in hidden and wanted(child.name):
            yield child


def _is_input(folder: Location, left_out: str | None) -> bool:
    return not folder.is_local or os.path.realpath(folder.path) != left_out


def _is_entered(folder: Location, left_out: str | None) -> bool:
    """Whether `folder`, which no pattern names, is looked into. Raises BulkError if it is another job's output."""
    if not _is_input(folder, left_out):
        return False
    if folder.system.get_file_info(f"{folder.path}/_paceline/job.json").type == pafs.FileType.File:
        raise BulkError(
            f"{folder.shown} has another job's output: name it, as -i {folder.shown}, if that is input, and otherwise "
            "patterns that don't lead there"
        )
    return True


def _children(folder: Location) -> list[Location]:
    """The files and folders in `folder`, without links to folders that hold it, which have no end."""
    prefix = folder.shown if folder.shown.endswith("/") or not folder.shown else folder.shown + "/"
    above = os.path.realpath(folder.path) + "/" if folder.is_local else None
    children = [
        _located(prefix + (quote(info.base_name) if _URL.match(prefix) else info.base_name), folder.system, info)
        for info in folder.system.get_file_info(pafs.FileSelector(folder.path))
        if info.type in _KNOWN
    ]
    return [
        child
        for child in children
        if above is None or not child.is_folder or not above.startswith(os.path.realpath(child.path) + "/")
    ]


def _located(shown: str, system: pafs.FileSystem, info: pafs.FileInfo) -> Location:
    if info.type not in _KNOWN:
        what = "there is no such file" if info.type == pafs.FileType.NotFound else "it is neither file nor folder"
        raise BulkError(f"{shown}: {what}")
    return Location(shown, system, info.path, info.size or 0, info.mtime_ns or 0, info.type == pafs.FileType.Directory)
