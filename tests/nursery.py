"""Commands, servers, fronts of servers inside the test's process, and what the product itself starts, forked by a
process that has imported what they need.

Starting Python and importing takes one or two seconds of CPU time for each, and hundreds of tests have some. A forked
one calls the product's own main function, with descriptors, environment, folder and output as it would get them. That
servers start as users start them is left to tests that ask the harness for a `fresh` one, whose processes are started
by the product; that the product starts its processes also to tests that ask for `processes_as_usual`.

Lives here: that process, and what it forks. Must not: assertions about behaviour.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import os
import pickle
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path

from tests.children import Command, become, fork_children

__all__ = ["LIBRARIES", "Forked", "ForkedFront", "fork_what_is_started", "main", "start_front"]

_NUMBER = struct.Struct("i")
_MAX_BYTES, _MAX_DESCRIPTORS = 2**20, 16
_PR_SET_PDEATHSIG = 1
_TUNABLES, _VERBOSITY = "GLIBC_TUNABLES", "GRPC_VERBOSITY"
LIBRARIES = "LD_LIBRARY_PATH"
"""The variable that is read at a process's start, and of which each value has a forking process of its own."""


async def start_front(descriptors: tuple[int, int, int]) -> ForkedFront:
    """Do what `server.fronts.pool.start_front` does, faster."""
    started_as = ("", (), dict(os.environ), os.getcwd())
    return ForkedFront(*await asyncio.to_thread(_fork, started_as, (1, 2, *descriptors)))


class Forked:
    """What `subprocess.Popen` gives for `python -m MODULE ARGUMENTS` with a pipe for its stderr, started faster. The
    descriptor `out` becomes its stdout."""

    def __init__(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], folder: Path, out: int = 1
    ) -> None:
        reads, writes = os.pipe()
        try:
            started_as = (module, tuple(arguments), dict(environment), str(folder))
            self.pid, self._told = _fork(started_as, (out, writes))
        finally:
            os.close(writes)
        self.stderr = os.fdopen(reads)
        self._ends = threading.Lock()
        self._status: int | None = None

    def send_signal(self, number: int) -> None:
        with self._ends, contextlib.suppress(ProcessLookupError):  # it has ended, which is about to be reported
            if self._ended(0) is None:
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        with self._ends:
            return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        with self._ends:
            status = self._ended(timeout)
        if status is None:
            raise subprocess.TimeoutExpired("the forked process", timeout or 0)
        return status

    def _ended(self, timeout_s: float | None) -> int | None:
        if self._status is None and select.select([self._told], [], [], timeout_s)[0]:
            (self._status,) = _NUMBER.unpack(self._told.recv(_NUMBER.size))
            self._told.close()
        return self._status


class ForkedFront:
    """A `FrontProcess`, whose exit status arrives on `told`."""

    def __init__(self, pid: int, told: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._told = told
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(told, self._on_end)

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended, which is about to be reported
            if self.returncode is None:
                os.kill(self.pid, signal.SIGKILL)

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._told)
        (self.returncode,) = _NUMBER.unpack(self._told.recv(_NUMBER.size))
        self._told.close()
        self._ended.set()


def fork_what_is_started() -> None:
    """Have the processes forked that the product starts in this one."""
    born_with = dict(os.environ)
    fork_children(lambda *wanted: _fork_child(_nursery(born_with.get(LIBRARIES, "")), *wanted), born_with)


_StartedAs = tuple[str, tuple[str, ...], dict[str, str], str]
"""The module that a server runs, or "" for a front; arguments, environment and folder."""


def _fork(started_as: _StartedAs, descriptors: Sequence[int]) -> tuple[int, socket.socket]:
    """The process, and where its exit status arrives. `descriptors` become its stdout and stderr, and the others stay
    open under their numbers."""
    told, tells = socket.socketpair()
    with tells:
        nursery = _nursery(started_as[2].get(LIBRARIES, ""))
        socket.send_fds(nursery, [pickle.dumps(started_as)], [tells.fileno(), *descriptors])
    (pid,) = _NUMBER.unpack(told.recv(_NUMBER.size))
    return pid, told


def _fork_child(nursery: socket.socket, command: Command, descriptors: Sequence[int]) -> int:
    """The pid of the process, which is an orphan by now."""
    told, tells = socket.socketpair()
    with told:
        with tells:
            socket.send_fds(nursery, [pickle.dumps(command)], [tells.fileno(), *descriptors])
        (pid,) = _NUMBER.unpack(told.recv(_NUMBER.size))
    return int(pid)


@cache
def _nursery(libraries: str) -> socket.socket:
    """The connection to the forking process, which ends with this process, as the connection does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = (
        f"import sys; path = sys.path[:]; sys.path[:] = {sys.path!r}; "
        # Starts this program again, as it would each server.
        "from paceline.server.memory import huge_pages; huge_pages.ask(); "
        f"from tests.nursery import main; main({theirs.fileno()}, path)"
    )
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", code, "paceline-nursery"],
            stdin=subprocess.DEVNULL,
            # The first is read by gRPC when it is imported, the last by the system when the process starts.
            env={_VERBOSITY: "NONE", **os.environ, **({LIBRARIES: libraries} if libraries else {})},
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    atexit.register(process.wait)
    atexit.register(ours.close)
    return ours


# ---- In that process -------------------------------------------------------------------------------------------------


def main(descriptor: int, path: list[str]) -> None:
    """Fork a process for each message, and report a front's or a server's end, until the connection ends. In a process
    of a server or of a command, return when it has ended: Python ends after it, as usual. `path` is where Python itself
    looks for modules."""
    import gc

    import paceline.backends.onnx.backend
    import paceline.backends.own_process.model
    import paceline.backends.python.worker
    import paceline.server.app
    import paceline.server.cli
    import paceline.server.fronts.process  # noqa: F401

    gc.freeze()
    _fork_each(socket.socket(fileno=descriptor), path)


def _fork_each(asked: socket.socket, path: list[str]) -> None:
    children: dict[int, int] = {}
    ended, noticed = os.pipe()
    os.set_blocking(noticed, False)
    signal.set_wakeup_fd(noticed)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([asked, ended], [], [])
        if ended in ready:
            os.read(ended, _MAX_BYTES)
            _tell_ends(children)
        if asked in ready:
            message, given, _, _ = socket.recv_fds(asked, _MAX_BYTES, _MAX_DESCRIPTORS)
            if not message:
                return
            wanted: _StartedAs | Command = pickle.loads(message)
            if isinstance(wanted, Command):
                if not (pid := _orphan()):
                    break
                os.write(given[0], _NUMBER.pack(pid))
                for each in given:
                    os.close(each)
            elif pid := os.fork():
                _note_child(pid, given, children)
            else:
                break
    asked.detach()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if isinstance(wanted, Command):
        sys.path[:] = path
        become(wanted, given[1:])
    elif wanted[0]:
        _be_server(wanted, given[1:], path)
    else:
        _be_front(wanted, given[1:])


def _orphan() -> int:
    """In this process, the pid of a new one, which is the child of the nearest ancestor that adopts; in that, 0."""
    reads, writes = os.pipe()
    if not (between := os.fork()):
        if os.fork():
            os._exit(0)
        # Before anybody knows it: whoever starts it may kill its group at once.
        os.setsid()
        os.write(writes, _NUMBER.pack(os.getpid()))
        return 0
    os.waitpid(between, 0)
    (pid,) = _NUMBER.unpack(os.read(reads, _NUMBER.size))
    os.close(reads)
    os.close(writes)
    return pid


def _note_child(pid: int, given: list[int], children: dict[int, int]) -> None:
    children[pid], *others = given
    os.write(children[pid], _NUMBER.pack(pid))
    for each in others:
        os.close(each)


def _tell_ends(children: dict[int, int]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        tell = children.pop(pid)
        with contextlib.suppress(BrokenPipeError):  # the test has ended before
            os.write(tell, _NUMBER.pack(os.waitstatus_to_exitcode(status)))
        os.close(tell)


def _be_server(started_as: _StartedAs, given: list[int], path: list[str]) -> None:
    """Set up what a newly started process has, and run the module as a program, which also ends as one. What it starts
    is forked by a process of its own, as that has to be its child."""
    module, arguments, environment, folder = started_as
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        os.setsid()
        _close_all_but(theirs.fileno())
        _fork_each(theirs, path)
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tunables = {_TUNABLES: os.environ[_TUNABLES]} if _TUNABLES in os.environ else {}
    # Which the server sets for itself, as it was set for this process before it imported gRPC.
    verbosity = {_VERBOSITY: os.environ[_VERBOSITY]}
    _be_new(environment | tunables, folder, [*given, ours.fileno()])
    fork_children(partial(_fork_child, ours), verbosity | os.environ)
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _be_front(started_as: _StartedAs, given: list[int]) -> None:
    """The same for a front. Doesn't return."""
    from paceline.server.fronts.process import main as front

    _, _, environment, folder = started_as
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        _be_new(environment, folder, given)
        front(*given[2:])
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        os._exit(1)


def _be_new(environment: dict[str, str], folder: str, given: list[int]) -> None:
    out, err, *others = given
    os.dup2(out, 1)
    os.dup2(err, 2)
    _close_all_but(*others)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)


def _close_all_but(*kept: int) -> None:
    for each in map(int, os.listdir("/proc/self/fd")):
        if each > 2 and each not in kept:
            with contextlib.suppress(OSError):  # that of the list itself
                os.close(each)
