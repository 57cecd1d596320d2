"""Fronts for servers inside the test's process, forked by a process that has imported what they need.

Starting Python and importing takes half a second of CPU time for each front, and hundreds of tests have some. A forked
front calls the product's own main function, with descriptors, environment, folder and output as it would get them. That
fronts are started as the product starts them is left to tests whose servers are separate processes.

Lives here: that process, and the fronts that it forks. Must not: assertions about behaviour.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import traceback
from functools import cache

from paceline.server.fronts.pool import FrontProcess

__all__ = ["main", "start_front"]

_NUMBER = struct.Struct("i")
_MAX_BYTES, _MAX_DESCRIPTORS = 2**20, 16


async def start_front(descriptors: tuple[int, int, int]) -> FrontProcess:
    """Do what `server.fronts.pool.start_front` does, faster."""
    return _Forked(*await asyncio.to_thread(_fork, _nursery(), descriptors))


class _Forked:
    """A process whose exit status arrives on `told`."""

    def __init__(self, pid: int, told: socket.socket) -> None:
        self.returncode: int | None = None
        self._pid = pid
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
                os.kill(self._pid, signal.SIGKILL)

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._told)
        (self.returncode,) = _NUMBER.unpack(self._told.recv(_NUMBER.size))
        self._told.close()
        self._ended.set()


def _fork(nursery: socket.socket, descriptors: tuple[int, int, int]) -> tuple[int, socket.socket]:
    told, tells = socket.socketpair()
    with tells:
        started_as = pickle.dumps((dict(os.environ), os.getcwd()))
        socket.send_fds(nursery, [started_as], [1, 2, tells.fileno(), *descriptors])
    (pid,) = _NUMBER.unpack(told.recv(_NUMBER.size))
    return pid, told


@cache
def _nursery() -> socket.socket:
    """The connection to the forking process, which ends with this process, as the connection does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = f"import sys; sys.path[:] = {sys.path!r}; from tests.nursery import main; main({theirs.fileno()})"
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", code, "paceline-nursery"],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    atexit.register(process.wait)
    atexit.register(ours.close)
    return ours


# ---- In that process -------------------------------------------------------------------------------------------------


def main(descriptor: int) -> None:
    """Fork a front for each message, and report its end, until the connection ends."""
    import gc

    import paceline.server.fronts.process  # noqa: F401

    gc.freeze()
    children: dict[int, int] = {}
    ended, noticed = os.pipe()
    os.set_blocking(noticed, False)
    signal.set_wakeup_fd(noticed)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with socket.socket(fileno=descriptor) as asked:
        while True:
            ready, _, _ = select.select([asked, ended], [], [])
            if ended in ready:
                os.read(ended, _MAX_BYTES)
                _tell_ends(children)
            if asked in ready:
                started_as, given, _, _ = socket.recv_fds(asked, _MAX_BYTES, _MAX_DESCRIPTORS)
                if not started_as:
                    return
                _fork_front(started_as, given, children)


def _fork_front(started_as: bytes, given: list[int], children: dict[int, int]) -> None:
    out, err, tell, *descriptors = given
    pid = os.fork()
    if not pid:
        _be_front(*pickle.loads(started_as), out, err, descriptors)
    children[pid] = tell
    os.write(tell, _NUMBER.pack(pid))
    for each in (out, err, *descriptors):
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


def _be_front(environment: dict[str, str], folder: str, out: int, err: int, descriptors: list[int]) -> None:
    """Set up what a newly started process has, and run the front. Doesn't return."""
    from paceline.server.fronts.process import main as front

    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        os.dup2(out, 1)
        os.dup2(err, 2)
        for each in map(int, os.listdir("/proc/self/fd")):
            if each > 2 and each not in descriptors:
                with contextlib.suppress(OSError):  # that of the list itself
                    os.close(each)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        front(*descriptors)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        os._exit(1)
