"""A Ray cluster of several nodes in this machine, for tests: all of it on loopback, and gone with the test.

Lives here: starting it in a process of its own (`python -m tests.ray_cluster CPUS…`, a node for each), killing a node.
Must not: assertions about the product.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from tests.harness import REPO

__all__ = ["RayCluster"]

LOOPBACK = "127.0.0.1"
# Ray takes 127.0.0.1 for the machine's address, and listens on all of its interfaces, unless it believes to be on a
# system where it has no clusters.
ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # A node is lost once it has been silent for this long.
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "500",
    "RAY_health_check_failure_threshold": "3",
}


class RayCluster:
    """A node for each of `cpus`, with that many of them. The first is the head, where drivers connect. `address` and
    `environment` are for them. Nodes are numbered from 0."""

    def __init__(self, *cpus: int) -> None:
        self._cpus = cpus
        self._process: subprocess.Popen[str]
        self.environment = {**os.environ, **ENVIRONMENT}
        self.address = ""

    def __enter__(self) -> RayCluster:
        command = [sys.executable, "-m", "tests.ray_cluster", *map(str, self._cpus)]
        self._process = subprocess.Popen(
            command, cwd=REPO, env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            self.address = self._told()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()

    def processes(self, node: int) -> Mapping[int, str]:
        """Their pids and names."""
        return self._asked(node, "tell")

    def kill(self, node: int) -> None:
        """As a machine is lost: all of its processes at once."""
        self._asked(node, "kill")

    def kill_actors(self, node: int) -> None:
        """As these crash."""
        self._asked(node, "kill", "ray::Actor")

    def _asked(self, node: int, what: str, prefix: str = "") -> Mapping[int, str]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps([node, what, prefix])}\n")
        self._process.stdin.flush()
        return {int(pid): name for pid, name in json.loads(self._told()).items()}

    def _told(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the cluster has ended"
        return line.strip()


# ---- In that process -------------------------------------------------------------------------------------------------


def _read(pid: int, file: str) -> bytes:
    """Nothing of a process that has ended: jobs come and go."""
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def _descendants(pid: int) -> list[int]:
    children = [int(child) for child in _read(pid, f"task/{pid}/children").split()]
    return [*children, *(each for child in children for each in _descendants(child))]


def _named(raylet: int, prefix: str) -> dict[int, str]:
    """The processes of a node."""
    names = {pid: _read(pid, "cmdline").partition(b"\0")[0].decode() for pid in (raylet, *_descendants(raylet))}
    return {pid: name for pid, name in names.items() if name and name.startswith(prefix)}


def main(*cpus: str) -> None:
    from ray.cluster_utils import Cluster

    # Sockets are in it, whose paths have to be short.
    folder = tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp")
    common = {
        "node_ip_address": LOOPBACK,
        "include_dashboard": False,
        "include_log_monitor": False,
        "no_monitor": True,
        "object_store_memory": 80 * 2**20,
    }
    head, *others = map(int, cpus)
    answers, sys.stdout = sys.stdout, sys.stderr
    cluster = Cluster(True, head_node_args={**common, "num_cpus": head, "temp_dir": folder.name})
    try:
        nodes = [cluster.head_node, *(cluster.add_node(**common, num_cpus=number) for number in others)]
        raylets = [node.all_processes["raylet"][0].process.pid for node in nodes]
        print(cluster.address, file=answers, flush=True)
        for line in sys.stdin:
            number, what, prefix = json.loads(line)
            found = _named(raylets[number], prefix)
            for pid in found if what == "kill" else ():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            print(json.dumps(found), file=answers, flush=True)
    finally:
        cluster.shutdown()
        folder.cleanup()


if __name__ == "__main__":
    main(*sys.argv[1:])
