"""The command `paceline`, and what its process does before anything else.

Lives here: a parent for the server, if it would be process 1; descriptors 0, 1 and 2; settings of libraries that read
them when they are imported. Must not: import what takes time at the top. Until `leave_process_one` has run, signals are
lost.
"""

# The part of `signal` in C: that module would take half as long again as all of Python's start until here.
import _signal as signal  # type: ignore[import-not-found]
import os
import sys

_SI_KERNEL = 0x80
"""Where a signal comes from: the terminal, in our case, which sends it to all processes in it by itself."""


def leave_process_one() -> None:
    """Return in a new process if this one is process 1, which then waits for it, hands signals on to it, reaps orphans
    and ends with its status. Otherwise do nothing.

    Containers make whatever they run process 1. The kernel discards signals for it that it has no handler for, so
    SIGTERM wouldn't end a server that is still importing. And whatever loses its parent becomes a child of process 1,
    and stays as a zombie if that doesn't ask for its status.
    """
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
        if arrived.si_signo != signal.SIGCHLD:
            if arrived.si_code != _SI_KERNEL:
                os.kill(server, arrived.si_signo)
            continue
        # One signal may stand for several children that have ended.
        ended, status = os.waitpid(-1, os.WNOHANG)
        while ended:
            if ended == server:
                code = os.waitstatus_to_exitcode(status)
                os._exit(code if code >= 0 else 128 - code)
            ended, status = os.waitpid(-1, os.WNOHANG)


def main() -> None:
    """Run the command."""
    leave_process_one()
    # Until the command has begun, Ctrl-C ends the process as it does others, without a traceback of what is imported.
    if is_interruptible := signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Supervisors and shells may leave descriptors 0, 1 and 2 closed (`<&-`). What is opened next would get the number,
    # and what native code writes to stderr would go to a client; libuv aborts when it closes such a socket. Before
    # anything else, as even importing ctypes may open a file for good: libffi 3.8 keeps its own library open.
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # Opening takes the lowest free number, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdin is None:  # commands that are asked to read it find it empty
        sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    if sys.argv[1:2] == ["serve"]:
        from paceline.server.cpus import usable_cpus
        from paceline.server.memory import huge_pages

        huge_pages.ask()

        # For the libraries of Python models, and numpy's here, which read it when they are imported.
        if (cpus := usable_cpus()).limited_by:
            os.environ.setdefault("OMP_NUM_THREADS", str(cpus.count))
    # gRPC writes to stderr directly, past the log's format and bounds, and blocks if nobody reads it. At its default
    # verbosity it logs every failed handshake, and even at ERROR malformed headers: anybody could make it write a lot.
    # It reads the variable when it is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from google.protobuf.runtime_version import VersionError

    try:
        _run(is_interruptible=is_interruptible)
    except VersionError as error:
        # pip installs what a package needs in place of what another does, and only says so.
        advice = "name paceline and what was installed after it in one `pip install`, or give each its own environment"
        sys.exit(f"Error: installed packages need different versions of protobuf: {advice}: {error}")


def _run(*, is_interruptible: bool) -> None:
    from paceline.server.tuning import excluded_from_gc

    with excluded_from_gc():
        from paceline.server.cli import main as command
        from paceline.server.telemetry.log_output import StdoutError, exit_now, take_stdout

    take_stdout()
    if is_interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # So that commands leave nothing behind. Those whose work goes on for a while after a signal handle it themselves.
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        command(prog_name="paceline")
    except StdoutError as error:
        print(f"Error: {error}", file=sys.stderr)
        exit_now(1)
