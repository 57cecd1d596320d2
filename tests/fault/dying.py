"""The command `paceline`, in a process that dies at a chosen moment of its work in a folder.

    python -m tests.fault.dying FOLDER POINT ARGUMENTS…

POINT is "change N": it is killed right before it opens, renames or removes a file of the folder for the N-th time;
"byte N": in the middle of writing, as soon as a file would be larger than that; or "count FILE": never, and FILE gets
a byte for each change that it could have been killed at.

Lives here: such deaths. Must not: say what should follow.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable

from paceline.server.__main__ import main

__all__: list[str] = []

_CHANGES = {"open", "os.mkdir", "os.rename", "os.remove"}


def each_change(folder: str, then: Callable[[], object]) -> None:
    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in _CHANGES and any(isinstance(one, str) and one.startswith(folder) for one in arguments):
            then()

    sys.addaudithook(hook)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(folder: str, kind: str, where: str) -> None:
    if kind == "byte":
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(where), int(where)))
    elif kind == "count":
        changes = os.open(where, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        each_change(folder, lambda: os.write(changes, b"."))
    else:
        left = iter([lambda: None] * (int(where) - 1))
        each_change(folder, lambda: next(left, die)())


if __name__ == "__main__":
    arm(sys.argv[1], *sys.argv[2].split(" ", 1))
    sys.argv[1:] = sys.argv[3:]
    main()
