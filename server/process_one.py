"""The duties of a system's first process, which containers give to whatever they run.

Lives here: a parent for the server, if it would be process 1. Must not: import what takes time: until it has run,
signals are lost.

The kernel discards signals for process 1 that it has no handler for, so SIGTERM wouldn't end a server that is still
importing. And whatever loses its parent becomes a child of process 1, and stays as a zombie if that doesn't ask for its
status.
"""

from __future__ import annotations

# The part of `signal` in C: that module would take half as long again as all of Python's start until here.
import _signal as signal  # type: ignore[import-not-found]
import os

__all__ = ["leave_process_one"]

_SI_KERNEL = 0x80
"""Where a signal comes from: the terminal, in our case, which sends it to all processes in it by itself."""


def leave_process_one() -> None:
    """Return in a new process if this one is process 1, which then waits for it, hands signals on to it, reaps orphans
    and ends with its status. Otherwise do nothing."""
    if os.getpid() != 1:
        return
    # Blocked signals aren't discarded, whichever process they are for: they wait.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    server = os.fork()
    if server == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    while True:
        arrived = signal.sigwaitinfo(signal.valid_signals())
        if arrived.si_signo == signal.SIGCHLD:
            _reap(server)
        elif arrived.si_code != _SI_KERNEL:
            os.kill(server, arrived.si_signo)


def _reap(server: int) -> None:
    """Release all children that have ended; end like `server` if it is among them. One signal may stand for several."""
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == 0:
            return
        if ended == server:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
