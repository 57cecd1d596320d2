"""What lies at a path, links followed; and opening a file that a model names, inside a folder.

Lives here: the questions that pathlib, from Python 3.14 on, answers with False where it can't tell: a model whose
folder may not be read, or whose file system fails for a moment, must not be taken for one that is gone. And following
links one by one, so that the kernel itself says where a file lies. Must not: canonical paths. A folder may lie behind a
link that only the kernel can follow, such as `/proc/PID/root`, whose text leads elsewhere.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from contextlib import ExitStack, suppress
from pathlib import Path, PurePosixPath

_NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def exists(path: Path) -> bool:
    """Whether anything is at `path`. Raises OSError if that can't be found out, as all of these do."""
    return _mode(path) != 0


def is_file(path: Path) -> bool:
    """Whether a regular file is at `path`."""
    return stat.S_ISREG(_mode(path))


def is_folder(path: Path) -> bool:
    """Whether a folder is at `path`."""
    return stat.S_ISDIR(_mode(path))


def _mode(path: Path) -> int:
    """0 if nothing is there."""
    try:
        return path.stat().st_mode
    except ValueError:  # a NUL, which no name has
        return 0
    except OSError as error:
        if error.errno in _NOTHING_THERE:
            return 0
        raise


_MAX_LINKS = 40
"""As in the kernel."""
_FOLDER = os.O_DIRECTORY | getattr(os, "O_PATH", os.O_RDONLY)
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
"""Without O_NONBLOCK, opening a pipe would wait for its other end."""


def open_inside(folder: Path, name: str, beside: str = "") -> io.FileIO | None:
    """The file `name` of `folder`, links followed, open for reading; None if it isn't inside `folder`. With `beside`, a
    file of `folder`, it may also be inside the folder where that file itself lies.

    Raises OSError if it can't be opened or isn't a regular file.
    """
    with ExitStack() as stack:
        homes = {_identity(_open_folder(folder, None, stack))}
        way: list[int] = []
        if beside:
            _follow(folder, beside, way, stack)
            homes.add(_identity(way[-1]))
        try:
            last = _follow(folder, name, way, stack)
        except ValueError:  # a NUL, which no name has
            return None
        except OSError:
            if homes.isdisjoint(map(_identity, way)):
                return None  # nobody is told what is outside
            raise
        if homes.isdisjoint(map(_identity, way)):
            return None
        opened = os.open(last, _FILE, dir_fd=way[-1])
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise OSError(errno.EINVAL, "expected a file, got something else", name)
    return io.FileIO(opened)


def open_beside(file: Path, name: str) -> io.FileIO | None:
    """The file `name` in the folder of the model's `file`, or if that is one of a version or an export's `onnx`, in
    the folder around it; None if neither has it. Raises as `open_inside`."""
    is_inside = file.parent.name.isdecimal() or file.parent.name == "onnx"
    for folder in (file.parent, *([file.parent.parent] if is_inside else [])):
        with suppress(FileNotFoundError):
            if (opened := open_inside(folder, name)) is not None:
                return opened
    return None


def _follow(folder: Path, name: str, way: list[int], stack: ExitStack) -> str:
    """What the file is called where it lies. `way` becomes the folders on the way there, the last of which it is in.
    They begin anew where a link leads to the root, or `..` out of the first of them."""
    way[:] = [_open_folder(folder, None, stack)]
    left, links = list(reversed(PurePosixPath(name).parts)), 0
    while left:
        part = left.pop()
        if part.startswith("/"):
            way[:] = [_open_folder(part, None, stack)]
        elif part == "..":
            way[:] = way[:-1] or [_open_folder(part, way[-1], stack)]
        elif stat.S_ISLNK(os.stat(part, dir_fd=way[-1], follow_symlinks=False).st_mode):
            links += 1
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name)
            left.extend(reversed(PurePosixPath(os.readlink(part, dir_fd=way[-1])).parts))
        elif left:
            way.append(_open_folder(part, way[-1], stack))
        else:
            return part
    raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), name)


def _open_folder(path: Path | str, within: int | None, stack: ExitStack) -> int:
    # Within another folder, links have been followed: one that appears now is refused.
    opened = os.open(path, _FOLDER | (0 if within is None else os.O_NOFOLLOW), dir_fd=within)
    stack.callback(os.close, opened)
    return opened


def _identity(opened: int) -> tuple[int, int]:
    about = os.fstat(opened)
    return about.st_dev, about.st_ino
