"""What is measured, as processes: the product, the echo, and the rivals in environments of their own.

Lives here: starting them, checking that they answer, reading their processor time from the system, ending them. Must
not: load or time them. Every process ends with the context that started it.
"""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import grpc

from bench import http_load, models
from bench.scenario import OVER_HTTP, Side
from paceline.protos import inference_pb2 as pb
from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.harness import REPO, ServerProcess
from tests.ports import free_port

__all__ = [
    "EchoProcess",
    "NotInstalledError",
    "NotServingError",
    "RivalProcess",
    "Subject",
    "ask_once",
    "counted",
    "cpu_s",
    "has_config",
    "main_thread_cpu_s",
    "start",
    "stub",
]

RIVALS = REPO / ".bench" / "rivals"
_START_S = 120.0
_ASK_S = 60.0
_END_S = 15.0
_UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class NotServingError(Exception):
    """A server didn't start, or doesn't answer as it should; the reason is for the report."""


class NotInstalledError(NotServingError):
    """A rival isn't installed, or is left out."""


class Subject(Protocol):
    """A server under load."""

    @property
    def target(self) -> str: ...

    @property
    def pid(self) -> int: ...

    def __enter__(self) -> Subject: ...

    def __exit__(self, *exc: object) -> None: ...


def start(side: Side, files: Mapping[str, Path], folder: Path) -> Subject:
    """The server of `side`, not yet entered; `files` are the models it is to serve, `folder` is for what it writes.
    Raises NotInstalledError if it isn't installed. Entering raises NotServingError if it doesn't start."""
    if side.upstream:
        return _Proxy(start(replace(side, server=side.upstream, upstream="", args=()), files, folder), side)
    if side.server == "echo":
        return EchoProcess()
    if side.server == "naive":
        return EchoProcess("bench.naive", *(f"{name}={file}" for name, file in files.items()))
    if side.server == "paceline":
        repository = folder / "models"
        for name, file in files.items():
            models.add(name, file, repository)
        return _Paceline(repository, args=["--allow-client-shm=true", *side.args], fresh=True)
    return RivalProcess(side.server, side.model, files[side.model], folder)


class _Paceline(ServerProcess):
    def __enter__(self) -> _Paceline:
        try:
            super().__enter__()
        except AssertionError:
            lines = "".join(self.stderr).strip().splitlines()[-3:]
            raise NotServingError(f"paceline did not start: {' / '.join(lines)}") from None
        return self


class _Proxy:
    """paceline in front of another server. `pid` is paceline's own: the other server's cost is measured on its own."""

    def __init__(self, upstream: Subject, side: Side) -> None:
        self._upstream = upstream
        self._side = side
        self._stack = ExitStack()

    def __enter__(self) -> _Proxy:
        with ExitStack() as undo:
            upstream = undo.enter_context(self._upstream)
            args = ["--upstream", upstream.target, "--upstream-model", self._side.model, *self._side.args]
            proxy = undo.enter_context(_Paceline(args=args, fresh=True))
            self.target, self.pid = proxy.target, proxy.pid
            self._stack = undo.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()


class EchoProcess:
    """`bench.echo`, or another module that serves like it, in a process of its own for as long as the context lasts."""

    def __init__(self, module: str = "bench.echo", *args: str) -> None:
        self._command = [sys.executable, "-m", module, *args]

    def __enter__(self) -> EchoProcess:
        self._process = subprocess.Popen(
            self._command,
            cwd=REPO,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,  # Ctrl-C goes to the process that started it, which then ends it
        )
        assert self._process.stdout is not None
        port = self._process.stdout.readline().strip()
        if not port:
            self.__exit__()
            raise NotServingError(f"{self._command[2]} did not start")
        self.target = f"127.0.0.1:{port}"
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()

    @property
    def pid(self) -> int:
        return self._process.pid


class RivalProcess:
    """bench/rivals/on_NAME.py, run by the Python of its own environment, serving one model, for as long as the context
    lasts. Its output goes to NAME.log in `folder`."""

    def __init__(self, name: str, model: str, file: Path, folder: Path) -> None:
        self._python = RIVALS / name / "bin" / "python"
        if not (RIVALS / name / "installed").exists():
            raise NotInstalledError("not installed: make bench-rivals")
        self._name, self._model, self._folder = name, model, folder
        self._log = folder / f"{name}.log"
        self._dims = [
            ",".join(map(str, dims)) for dims in (models.MODELS[model].dims, models.MODELS[model].output_dims)
        ]
        self._file = file
        self.target = f"127.0.0.1:{free_port()}"

    def __enter__(self) -> RivalProcess:
        script = REPO / "bench" / "rivals" / f"on_{self._name}.py"
        command = [str(self._python), str(script), self.target.partition(":")[2], self._model, str(self._file)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, *self._dims],
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        try:
            self._wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        processes = _descendants(self._process.pid)
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pid in processes:  # what it left behind
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    @property
    def pid(self) -> int:
        return self._process.pid

    def _is_ready(self) -> bool:
        if self._name not in OVER_HTTP:
            return _is_ready(self.target, self._model)
        row = models.row(models.MODELS[self._model].shape)
        try:
            ask_once(self.target, "http", row, models.MODELS[self._model].output_bytes(len(row)))
        except NotServingError:
            return False
        return True

    def _wait_ready(self) -> None:
        until_s = time.monotonic() + _START_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > until_s:
                last = self._log.read_text(errors="replace").strip().splitlines()[-3:]
                raise NotServingError(f"{self._name} did not start: {' / '.join(last)}")
            time.sleep(0.2)


def stub(target: str) -> tuple[grpc.Channel, Any]:
    """A channel, for the caller to close, and the service's stub on it."""
    channel = grpc.insecure_channel(target, options=_UNLIMITED)
    return channel, GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]


def ask_once(target: str, transport: str, request: bytes, output_bytes: int) -> None:
    """Send one request and check that as many bytes come back as expected; NotServingError says what came instead."""
    if transport == "http":
        try:
            status, body = http_load.ask(target, request)
        except (OSError, http.client.HTTPException) as error:
            raise NotServingError(f"no answer: {error!r}") from None
        if status != http.client.OK or len(body) != output_bytes:
            raise NotServingError(f"answers with status {status} and {len(body)} bytes instead of {output_bytes}")
        return
    channel, service = stub(target)
    message = pb.ModelInferRequest.FromString(request)
    with channel:
        try:
            if transport == "stream":
                answer = next(iter(service.ModelStreamInfer(iter([message]), timeout=_ASK_S)))
                if answer.error_message:
                    raise NotServingError(f"not supported: {answer.error_message}")
                response = answer.infer_response
            else:
                response = service.ModelInfer(message, timeout=_ASK_S)
        except grpc.RpcError as error:
            text = f"{error.code().name}: {error.details()}"
            raise NotServingError(f"not supported: {text}") from None
    raw = sum(map(len, response.raw_output_contents))
    if raw != (0 if transport == "shm" else output_bytes):
        raise NotServingError(f"answers with {raw} bytes instead of {output_bytes}")


def has_config(target: str, model: str) -> bool:
    """Whether the server answers ModelConfig, tensors included, which perf_analyzer asks for."""
    channel, service = stub(target)
    with channel:
        try:
            config = service.ModelConfig(pb.ModelConfigRequest(name=model), timeout=_ASK_S)
        except grpc.RpcError:
            return False
    return bool(config.config.input)


def cpu_s(pid: int) -> float | None:
    """The processor time, in seconds, of a process and its descendants, ended ones included; None if the system doesn't
    tell. Source: proc_pid_stat(5)."""
    ticks = 0
    for one in [pid, *_descendants(pid)]:
        fields = _stat(one)
        if fields is not None:
            ticks += sum(int(value) for value in fields[11:15])  # utime, stime, and those of children waited for
        elif one == pid:
            return None
    return ticks / os.sysconf("SC_CLK_TCK")


def main_thread_cpu_s(pid: int) -> float | None:
    """The processor time, in seconds, of a process's first thread, which in a server has the event loop."""
    fields = _stat(pid, f"task/{pid}/")
    return None if fields is None else sum(int(value) for value in fields[11:13]) / os.sysconf("SC_CLK_TCK")


def counted(server: ServerProcess, model: str) -> tuple[float, float]:
    """Rows and executions of a model so far, by its metrics."""
    metrics, labels = server.metrics(), f'{{model="{model}",version="1"}}'
    return metrics[f"nv_inference_count{labels}"], metrics[f"nv_inference_exec_count{labels}"]


def _descendants(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        fields = _stat(int(path.name))
        if fields is not None:
            parents.setdefault(int(fields[1]), []).append(int(path.name))
    found = [pid]
    for one in found:
        found += parents.get(one, [])
    return found[1:]


def _stat(pid: int, thread: str = "") -> list[str] | None:
    """The fields from the third on: state, parent, …"""
    try:
        return Path(f"/proc/{pid}/{thread}stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _is_ready(target: str, model: str) -> bool:
    channel, service = stub(target)
    with channel:
        try:
            return bool(service.ModelReady(pb.ModelReadyRequest(name=model), timeout=5).ready)
        except grpc.RpcError:
            return False
