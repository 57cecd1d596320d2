"""Steps of the end that hang or can't be done any more: the process ends in its time all the same."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fault.hanging_end import KEEPS_INTERPRETER
from tests.fault.traffic import says
from tests.harness import ServerProcess, write_identity


def why_no_network_of_its_own() -> str:
    if os.geteuid() != 0 or not (shutil.which("unshare") and shutil.which("ip") and shutil.which("nsenter")):
        return "needs root, unshare, nsenter and ip"
    tried = subprocess.run(["unshare", "--net", "ip", "link", "set", "lo", "up"], capture_output=True, text=True)
    return f"no network namespace here: {tried.stderr}" if tried.returncode else ""


@pytest.mark.parametrize(
    ("before", "address", "after"),
    [
        ("echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6 || true", "::", "true"),
        ("ip addr add 192.0.2.7/32 dev lo", "192.0.2.7", "ip addr del 192.0.2.7/32 dev lo"),
    ],
    ids=["without IPv6", "address gone"],
)
def test_end_does_not_need_the_metrics_address(tmp_path: Path, before: str, address: str, after: str) -> None:
    if why_not := why_no_network_of_its_own():
        pytest.skip(why_not)
    write_identity(tmp_path)
    command = f'ip link set lo up; {before}; exec "{sys.executable}" -m paceline "$@"'
    program = ("unshare", "--net", "sh", "-euc", command, "sh")
    with ServerProcess(tmp_path, program=program, args=("--metrics-address", address)) as server:
        subprocess.run(["nsenter", "--net", "--target", str(server.pid), *after.split()], check=True)
        assert server.terminate() == 0


def test_step_that_hangs_is_told_and_killed(tmp_path: Path) -> None:
    write_identity(tmp_path)
    with ServerProcess(tmp_path, args=("--exit-timeout-secs", "0"), module="tests.fault.hanging_end") as server:
        assert server.terminate() == -signal.SIGALRM
        assert says(server, "the end hangs after 4 s")
        assert "in flush" in server.log[-1]["message"] or "wait" in server.log[-1]["message"]


def test_step_that_keeps_the_interpreter_is_killed(tmp_path: Path) -> None:
    write_identity(tmp_path)
    env = {KEEPS_INTERPRETER: "1"}
    args = ("--exit-timeout-secs", "0")
    with ServerProcess(tmp_path, args=args, env=env, module="tests.fault.hanging_end") as server:
        assert server.terminate() == -signal.SIGALRM
