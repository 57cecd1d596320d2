"""Triton's own server, from PyTriton's wheel: `make bench-rivals` installs it.

Lives here: starting and ending it, and the reason if it can't be started. Must not: requests. It is a separate process,
with the libraries of its wheel, on loopback; its Python backend runs models with the interpreter of that environment.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

from bench.subjects import RIVALS
from tests.ports import free_port

__all__ = ["VERSION", "TritonProcess", "command", "missing"]

VERSION = "2.51.0"
"""The version whose behaviour docs/protocol.md and the lists here describe."""

_HOME = Path(os.environ.get("PACELINE_PYTRITON", RIVALS / "pytriton"))
_PACKAGES = next((_HOME / "lib").glob("python3.*"), _HOME) / "site-packages"
_STARTED = re.compile(r"Started Metrics Service at ")
_LIBRARIES = "import sysconfig; print(sysconfig.get_config_var('LIBDIR'))"


def missing() -> str:
    """Why Triton can't be started; "" if it can."""
    program = _distribution() / "bin" / "tritonserver"
    return "" if program.is_file() else f"no {program}: make bench-rivals, or PACELINE_PYTRITON"


def command() -> tuple[list[str], dict[str, str]]:
    """Arguments and environment that run its program without any flags."""
    return [str(_distribution() / "bin" / "tritonserver")], _environment()


class TritonProcess:
    """`tritonserver` on `repository`, with ports of its own and its files in `folder`. Entering returns once it serves;
    leaving ends it and the processes that it has started. `log` holds its lines."""

    def __init__(self, repository: Path, folder: Path, args: Sequence[str] = ()) -> None:
        self._repository = repository
        self._folder = folder
        self._args = args
        self._process: subprocess.Popen[str]
        self._started = threading.Event()
        self._reader: threading.Thread
        self.log: list[str] = []
        self.grpc_port, self.metrics_port = free_port(), free_port()
        # What its models' processes share with it, which stays behind where one of them was killed.
        self._regions = f"paceline-tests-{os.getpid()}-{self.grpc_port}-"

    def __enter__(self) -> TritonProcess:
        self._process = subprocess.Popen(
            self._command(),
            env=_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._started.wait(100) or self._process.poll() is not None:
            self.__exit__()
            raise AssertionError("Triton did not start:\n" + "".join(self.log))
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        # The processes of its models end with it, unless it was killed.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for region in Path("/dev/shm").glob(f"{self._regions}*"):
            region.unlink()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def _command(self) -> list[str]:
        program, _ = command()
        return [
            *program,
            f"--model-repository={self._repository}",
            f"--backend-directory={_backends(self._folder)}",
            f"--cache-directory={_distribution() / 'caches'}",
            f"--backend-config=python,shm-region-prefix-name={self._regions}",
            "--grpc-address=127.0.0.1",
            f"--grpc-port={self.grpc_port}",
            "--allow-http=false",
            "--metrics-address=127.0.0.1",
            f"--metrics-port={self.metrics_port}",
            *self._args,
        ]

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.log.append(line)
            if _STARTED.search(line):
                self._started.set()
        # Its output ends a moment before it does.
        self._process.wait()
        self._started.set()


def _distribution() -> Path:
    return _PACKAGES / "pytriton" / "tritonserver"


def _backends(folder: Path) -> Path:
    """The backends of the wheel, with the stub of this version of Python beside the Python backend, which looks for it
    there."""
    backends = folder / "backends"
    (backends / "python").mkdir(parents=True)
    stub = _distribution() / "python_backend_stubs" / _PACKAGES.parent.name.removeprefix("python")
    for file in (*(_distribution() / "backends" / "python").glob("*[!_]"), stub / "triton_python_backend_stub"):
        if file.is_file():
            (backends / "python" / file.name).symlink_to(file)
    return backends


def _environment() -> dict[str, str]:
    python = _HOME / "bin" / "python"
    # The stub links to a libpython by name.
    libraries = subprocess.run([python, "-c", _LIBRARIES], capture_output=True, text=True, check=True).stdout.strip()
    paths = os.pathsep.join((str(_PACKAGES / "nvidia_pytriton.libs"), libraries))
    return {**os.environ, "LD_LIBRARY_PATH": paths, "PATH": os.pathsep.join((str(python.parent), os.environ["PATH"]))}
