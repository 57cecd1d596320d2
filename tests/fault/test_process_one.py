"""The server as process 1 of a PID namespace, as in a container. Needs root and unshare."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fault.traffic import says
from tests.harness import REPO, ServerProcess, write_identity
from tests.polling import eventually

AS_PROCESS_ONE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


def why_not() -> str:
    if os.geteuid() != 0 or not (shutil.which("unshare") and shutil.which("nsenter")):
        return "needs root, unshare and nsenter"
    tried = subprocess.run([*AS_PROCESS_ONE, "true"], capture_output=True, text=True)
    return f"no PID namespace here: {tried.stderr}" if tried.returncode else ""


pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


def process_one(unshare: int) -> int:
    """The process that `unshare` has started, by its number here."""
    (child,) = Path(f"/proc/{unshare}/task/{unshare}/children").read_text().split()
    return int(child)


def test_signal_ends_what_is_still_starting() -> None:
    code = "from paceline.server.__main__ import leave_process_one as f; f(); print('imports', flush=True); input()"
    command = [*AS_PROCESS_ONE, sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout
        assert started.stdout.readline() == "imports\n"
        os.kill(process_one(started.pid), signal.SIGTERM)
        assert started.wait(60) == 128 + signal.SIGTERM


def test_server_ends_in_order_with_its_own_status(tmp_path: Path) -> None:
    write_identity(tmp_path)
    with ServerProcess(tmp_path, program=(*AS_PROCESS_ONE, sys.executable, "-m", "paceline")) as server:
        os.kill(process_one(server.pid), signal.SIGTERM)
        assert server.wait() == 0
        assert says(server, "stopped after")
    failing = [*AS_PROCESS_ONE, sys.executable, "-m", "paceline", "serve", "--no-such-flag"]
    assert subprocess.run(failing, cwd=REPO, capture_output=True, timeout=60).returncode == 2


def test_orphans_do_not_stay_as_zombies(tmp_path: Path) -> None:
    write_identity(tmp_path)
    with ServerProcess(tmp_path, program=(*AS_PROCESS_ONE, sys.executable, "-m", "paceline")) as server:
        one = process_one(server.pid)
        for _ in range(3):  # a shell that leaves a process behind, which becomes a child of process 1
            enter = ["nsenter", "--target", str(one), "--pid", "--mount", "sh", "-c", "true & exit"]
            subprocess.run(enter, check=True, timeout=60)
        eventually(lambda: len(found := states(one)) == 2 and "Z" not in found, "only process 1 and the server")
        os.kill(one, signal.SIGTERM)
        assert server.wait() == 0


def states(one: int) -> list[str]:
    """A letter for each process that is in the namespace of `one`."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            inside = os.readlink(status.parent / "ns" / "pid") == os.readlink(f"/proc/{one}/ns/pid")
            letter = re.search(r"^State:\s+(\w)", status.read_text(), re.MULTILINE)
        except OSError:  # it has ended meanwhile
            continue
        if inside and letter:
            found.append(letter[1])
    return found
