"""Real servers for tests: a process whose ports are read from its log, ended with the test whatever happens.

Lives here: starting, waiting for it to serve by reading the log, ending. Must not: assertions about behaviour.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.request
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.children import READ_WHEN_USED
from tests.nursery import LIBRARIES, Forked

__all__ = ["REPO", "ServerProcess", "has_ipv6", "run_command", "touch", "write_identity"]

REPO = Path(__file__).resolve().parents[1]
_PR_SET_PDEATHSIG = 1
_SERVES = re.compile(
    r"(?:ready|serving, not ready: .*): gRPC on (?:unix:.*?|.*:(\d+))(?:, metrics on port (\d+))?$", re.DOTALL
)


class ServerProcess:
    """`paceline serve PATHS` on free loopback ports. Entering returns once it serves, ready or not; leaving ends it.

    `module` is run with these arguments, or `program`, which has to become that process, as signals are sent to it.
    Unless it has to be `fresh`, that is forked from a process that has imported what servers need (`tests.nursery`).
    `listen` says where else to speak gRPC. `log` holds its log records so far, each a dict of time, level, logger and
    message.
    """

    def __init__(
        self,
        *paths: Path | str,
        args: Sequence[str] = (),
        env: dict[str, str] | None = None,
        module: str = "paceline",
        program: Sequence[str] = (),
        listen: Sequence[str] = ("--grpc-address", "127.0.0.1", "--grpc-port", "0"),
        cwd: Path = REPO,
        fresh: bool = False,
    ) -> None:
        self._module = module
        self._arguments = ["serve", *map(str, paths), *listen, "--metrics-port", "0", "--log-format", "json", *args]
        self._command = [*(program or (sys.executable, "-m", module)), *self._arguments]
        self._env = {**os.environ, **(env or {})}
        self._cwd = cwd
        self._fresh = (
            fresh or bool(program) or not all(READ_WHEN_USED.match(name) for name in {*(env or ())} - {LIBRARIES})
        )
        self._ready = threading.Event()
        self._process: subprocess.Popen[str] | Forked
        self._reader: threading.Thread
        self.log: list[dict[str, Any]] = []
        self.stderr: list[str] = []
        self.grpc_port = self.metrics_port = 0
        self._serves = False

    def __enter__(self) -> ServerProcess:
        self.start()
        self.wait_ready()
        return self

    def __exit__(self, *exc: object) -> None:
        self.terminate()
        self.kill()

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def start(self) -> None:
        """Start the process, and don't wait."""
        self._process = self._newly() if self._fresh else self._forked()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _forked(self) -> Forked:
        return Forked(self._module, self._arguments, self._env, self._cwd)

    def _newly(self) -> subprocess.Popen[str]:
        with warnings.catch_warnings():
            # Python 3.12 warns of preexec_fn in a process with threads; ours makes one system call and no allocation.
            warnings.simplefilter("ignore", DeprecationWarning)
            return subprocess.Popen(
                self._command,
                cwd=self._cwd,
                env=self._env,
                stderr=subprocess.PIPE,
                text=True,
                preexec_fn=_die_with_parent,
            )

    def wait_ready(self, timeout_s: float = 60) -> None:
        if not self._ready.wait(timeout_s) or not self._serves:
            how = "but ended" if self._ready.is_set() else f"in {timeout_s:g} s"
            self.kill()
            said = self.log[-1]["message"] if self.log else "nothing"
            raise AssertionError(
                f"the server did not come to serve {how}, saying at last: {said}\n{''.join(self.stderr)}"
            )

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self, timeout_s: float = 60) -> int:
        """The exit status, once it has ended and all its output is in `stderr`."""
        status = self._process.wait(timeout_s)
        self._reader.join(timeout_s)
        return status

    def terminate(self, timeout_s: float = 60) -> int:
        """End it gracefully; its exit status."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        return self.wait(timeout_s)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        if self._process.stderr:
            self._process.stderr.close()

    def metrics(self) -> dict[str, float]:
        """All samples by `name{labels}`."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=60) as response:
            lines = response.read().decode().splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[:1] != "#")}

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.stderr.append(line)
            if line.startswith("{"):
                self.log.append(json.loads(line))
                if found := _SERVES.match(self.log[-1]["message"]):
                    self.grpc_port, self.metrics_port = int(found[1] or 0), int(found[2] or 0)
                    self._serves = True
                    self._ready.set()
        self._ready.set()


def run_command(
    *arguments: str, env: dict[str, str] | None = None, cwd: Path = REPO
) -> subprocess.CompletedProcess[str]:
    """`paceline ARGUMENTS` in a forked process, from start to end, which has to come within two minutes."""
    with tempfile.TemporaryFile("w+") as out:
        process = Forked("paceline", arguments, {**os.environ, **(env or {})}, cwd, out.fileno())
        with process.stderr as stderr:
            said = stderr.read()
        status = process.wait(120)
        out.seek(0)
        return subprocess.CompletedProcess(["paceline", *arguments], status, out.read(), said)


def touch(model: Path) -> None:
    """Let a model count as changed: a load of one that has not would do nothing."""
    file = next(path for path in model.rglob("*") if path.is_file())
    about = file.stat()
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns + 1))


def write_identity(
    repository: Path, name: str = "echo", *, extra: str = "", dims: str = "[ 16 ]", rows: int = 8
) -> Path:
    """Write a model that returns its FP32 input INPUT0 as OUTPUT0; `extra` is more configuration, by default dynamic
    batching."""
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(f"""
        backend: "identity"
        max_batch_size: {rows}
        input {{ name: "INPUT0" data_type: TYPE_FP32 dims: {dims} }}
        output {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: {dims} }}
        {extra or "dynamic_batching { }"}
    """)
    return folder


_LIBC = ctypes.CDLL(None)


def _die_with_parent() -> None:
    """The parent is the thread that starts the process: start servers on one that lives as long as they should."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def has_ipv6() -> bool:
    """Whether this machine has an IPv6 address to listen on."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True
