"""The product's processes are forked in tests, whatever other tests have imported: there are hundreds of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.harness import ServerProcess, write_identity


def test_process_of_a_model_is_forked() -> None:
    command = [sys.executable, "-P", "-c", "", "paceline:m"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=())
    assert child.stdin is not None
    assert child.stdout is not None
    with child.stdin, child.stdout:
        assert child.wait() == 0
    assert not isinstance(child, subprocess.Popen)


def test_fronts_of_a_server_are_forked(tmp_path: Path) -> None:
    write_identity(tmp_path)
    with ServerProcess(tmp_path, args=["--frontends", "2"]) as server:
        tasks = Path(f"/proc/{server.pid}/task").iterdir()
        children = [pid for task in tasks for pid in (task / "children").read_text().split()]
        commands = [Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0") for pid in children]
    fronts = [command for command in commands if command[-1] == b"paceline-front"]
    assert fronts == [[sys.executable.encode(), b"paceline-front"]] * 2
