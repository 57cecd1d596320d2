"""Processes that the product starts by itself, which run Python models, trials and fronts: forked from a process that
has imported what they need, where the product would start Python.

They are the children of the process that starts them, as the product expects, run the code of the command that the
product gives, and get its arguments, environment, folder, limits and descriptors. A command that isn't the product's
own, that names another interpreter or has another environment is started as usual.

Lives here: noticing such a command, and becoming the process that it describes. Must not: fork (`tests.nursery`).
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import fcntl
import io
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["READ_WHEN_USED", "Command", "become", "fork_children", "started_as_usual"]

READ_WHEN_USED = re.compile(
    "PACELINE_|OTEL_|TESTS_|PYTEST_|STAND_IN_|RAY_|KMP_|(TMPDIR|PATH|STORAGE_URI|INFERENCE_SERVICE_NAME)$"
)
"""Environment variables that Python and the libraries that are imported don't read when they start. Ray and
scikit-learn set some when tests import them."""
_PYTHON = sys.executable
_OURS = re.compile("paceline:|paceline-front$")
_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 15, 36
_LIMITS = [number for name, number in vars(resource).items() if name.startswith("RLIMIT_")]
_libc = ctypes.CDLL(None)
_adopting = threading.Lock()


@dataclass(frozen=True, slots=True)
class Command:
    """`python FLAGS -c CODE ARGUMENTS`, and what a process inherits from `parent`, which starts it. `descriptors` are
    the numbers that it has those under that are sent along, in their order."""

    arguments: tuple[str, ...]
    environment: dict[str, str]
    folder: str
    parent: int
    descriptors: tuple[int, ...]


class _Child:
    """What `subprocess.Popen` gives for a command, as far as the product uses it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin: io.FileIO | None = None
        self.stdout: io.BufferedReader | None = None

    def wait(self) -> int:
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class _Front:
    """The same, of `asyncio.create_subprocess_exec`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = loop.create_future()
        self._descriptor = os.pidfd_open(pid)
        loop.add_reader(self._descriptor, self._reap)

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        self._ended.set_result(self.returncode)


class _Popen(subprocess.Popen):  # type: ignore[type-arg]
    """As ever, except for the product's own commands."""

    def __new__(cls, args: Any, **options: Any) -> Any:
        environment = options.get("env") or dict(os.environ)
        if not _is_ours(args, environment):
            return super().__new__(cls)
        (theirs_in, stdin), (stdout, theirs_out) = os.pipe(), os.pipe()
        numbered = {0: theirs_in, 1: theirs_out, 2: theirs_out, **{each: each for each in options["pass_fds"]}}
        try:
            child = _Child(_forked(args, environment, numbered))
        except BaseException:
            os.close(stdin)
            os.close(stdout)
            raise
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        child.stdin, child.stdout = os.fdopen(stdin, "wb", 0), os.fdopen(stdout, "rb")
        return child


async def _create_subprocess_exec(*args: str, **options: Any) -> Any:
    """As ever, except for the product's own commands."""
    if not _is_ours(args, os.environ):
        return await _as_usual(*args, **options)
    numbered = {number: number for number in (1, 2, *options["pass_fds"])}
    return _Front(await asyncio.to_thread(_forked, args, dict(os.environ), numbered))


_as_usual = asyncio.create_subprocess_exec
_fork: Callable[[Command, Sequence[int]], int] | None = None
_born_with: Mapping[str, str] = {}


def fork_children(fork: Callable[[Command, Sequence[int]], int], born_with: Mapping[str, str]) -> None:
    """From now on, have `fork` make the product's processes, which a process does that was born with that environment.
    It sends the descriptors along, and returns a pid once that process is an orphan."""
    global _fork, _born_with
    _fork, _born_with = fork, born_with
    subprocess.Popen = _Popen  # type: ignore[misc]
    asyncio.create_subprocess_exec = _create_subprocess_exec  # type: ignore[assignment]


@contextmanager
def started_as_usual() -> Iterator[None]:
    """Meanwhile, the product's processes are started as the product says."""
    global _fork
    before, _fork = _fork, None
    try:
        yield
    finally:
        _fork = before


def _is_ours(args: Any, environment: Mapping[str, str]) -> bool:
    if (
        _fork is None
        or not isinstance(args, list | tuple)
        or args[0] != _PYTHON
        or not _OURS.match(os.fsdecode(args[-1]))
    ):
        return False
    changed = environment.items() ^ _born_with.items()
    return all(READ_WHEN_USED.match(name) for name, _ in changed)


def _forked(args: Sequence[str], environment: dict[str, str], numbered: Mapping[int, int]) -> int:
    """The pid of a child that has the values of `numbered` as its descriptors of those numbers."""
    assert _fork is not None
    command = Command(tuple(args), environment, os.getcwd(), os.getpid(), tuple(numbered))
    with _adopting:  # orphans among its descendants become this process's children
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            return _fork(command, list(numbered.values()))
        finally:
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)


# ---- In that process -------------------------------------------------------------------------------------------------


def become(command: Command, given: Sequence[int]) -> None:
    """Be what the system and Python make of `command`, with the descriptors `given`; to be called in a new fork, which
    leads a session, and whose signals are as Python has them at its start. Doesn't return."""
    for limit in _LIMITS:
        resource.setrlimit(limit, resource.prlimit(command.parent, limit))
    os.sched_setaffinity(0, os.sched_getaffinity(command.parent))
    _place(dict(zip(command.descriptors, given, strict=True)))
    os.environ.clear()
    os.environ.update(command.environment)
    os.chdir(command.folder)
    flags = next(each for each in command.arguments if each.startswith("-"))
    code = command.arguments.index("-c") + 1
    sys.argv[:] = ["-c", *command.arguments[code + 1 :]]
    sys.orig_argv[:] = command.arguments
    _be_called(command.arguments)
    if "B" in flags:
        sys.dont_write_bytecode = True
    for number, name in ((1, "stdout"), (2, "stderr")):
        raw = os.fdopen(number, "wb", 0, closefd=False)
        errors = "strict" if number == 1 else "backslashreplace"
        text = io.TextIOWrapper(raw, "utf-8", errors, write_through=True)  # type: ignore[type-var]
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
    exec(command.arguments[code], {"__name__": "__main__", "__builtins__": __builtins__})
    # As Python ends, without destroying all that was imported, which costs more than the rest of a short life.
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    os._exit(0)


def _place(numbered: Mapping[int, int]) -> None:
    """Give each descriptor its number, and close all others."""
    above = max(*numbered, *numbered.values()) + 1
    high = {number: fcntl.fcntl(each, fcntl.F_DUPFD, above) for number, each in numbered.items()}
    if 0 not in high:
        high[0] = fcntl.fcntl(os.open(os.devnull, os.O_RDONLY), fcntl.F_DUPFD, above)
    for number, each in high.items():
        os.dup2(each, number)
    for each in map(int, os.listdir("/proc/self/fd")):
        if each not in high:
            with suppress(OSError):  # that of the list itself
                os.close(each)


def _be_called(arguments: Sequence[str]) -> None:
    """What the system tells of the process: first the program, then the last argument, as the others take room."""
    fields = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    name = b"\0".join(os.fsencode(each) for each in (arguments[0], arguments[-1]))[: end - begin - 1]
    ctypes.memmove(begin, name.ljust(end - begin, b"\0"), end - begin)
    _libc.prctl(_PR_SET_NAME, os.fsencode(arguments[-1])[:15])
