"""A reader who types what the documents show.

Lives here: the clone that they do it in, and how it is run. Must not: which of it isn't run.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.server.rpc.credentials import line_of
from tests import decoder_models, models, state_models, text_models
from tests.certificates import Authority
from tests.harness import REPO, ServerProcess, run_command

__all__ = ["Reader", "make_clone", "start"]

_LONGEST_S = 100
_SERVE = re.compile(r"paceline serve\b")
_ASK = re.compile(r"\bpaceline (infer|health|describe|models)\b(?!.*--server)", re.DOTALL)
_LOCAL_PORT = re.compile(r"(?:(?<=localhost:)|(?<=127\.0\.0\.1:))\d{4}\b")
_WATCH = re.compile(r"\bpaceline top\b")
_PORT_FLAG = re.compile(r"--(grpc|metrics)-port[ =](\d+)")

_ALONE = re.compile(r"paceline (?:[^\\|<>&;$`*?~#(){}\[\]\n\"']|'[^']*'|\"[^\"$`\\]*\"|\\\n)*")
"""A command that a shell only divides into words."""
_MODELS = re.compile(r"(?<=[ =])/(mnt/)?models\b")


def make_clone(folder: Path) -> None:
    """Make `folder` a clone with an environment, and with the models and files that documents name."""
    for path in REPO.iterdir():
        if path.name in ("examples", "protos"):  # where commands write
            shutil.copytree(
                path,
                folder / path.name,
                ignore=shutil.ignore_patterns("node_modules", "classifier.npz", "pipeline.joblib"),
            )
        elif path.name not in (".venv", "models"):
            (folder / path.name).symlink_to(path)
    (folder / ".venv").symlink_to(sys.prefix)
    models.write(models.add_sub(), folder / "models" / "resnet" / "1" / "model.onnx")
    (folder / "models" / "resnet" / "config.pbtxt").write_text("max_batch_size: 8")  # loads without a trial
    models.write(state_models.accumulator(dims=("batch", 4)), folder / "models" / "sums" / "1" / "model.onnx")
    kept = 'max_sequence_idle_microseconds: 60000000 state { input_name: "STATE" output_name: "STATE_OUT" }'
    (folder / "models" / "sums" / "config.pbtxt").write_text(f"max_batch_size: 8 sequence_batching {{ {kept} }}")
    speaks = decoder_models.Decoder(vocabulary=10_000)
    text_models.write(text_models.byte_level(), decoder_models.write(speaks, folder / "models" / "tiny-llama" / "1"))
    Authority(folder, "ca").sign("me")
    (folder / "tokens").write_text(line_of("me", "secret"))


def start(folder: Path, command: str) -> ServerProcess:
    """The server that `paceline serve …` starts, on free ports."""
    _, _, *arguments = shlex.split(command.replace("\\\n", ""), comments=True)
    listen = () if "unix:" in command else ("--grpc-address", "127.0.0.1", "--grpc-port", "0")
    server = ServerProcess(*arguments, env=_variables(folder), cwd=folder, listen=listen)
    server.start()
    return server


def _variables(folder: Path) -> dict[str, str]:
    """The environment is active."""
    return {"PATH": f"{folder / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"}


def _environment(folder: Path) -> dict[str, str]:
    """`make` uses the active one, too. The demo has few files to classify. Whether `make` runs these tests makes no
    difference."""
    own = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    return {**own, **_variables(folder), "ENV": ".venv", "FOLDER": "protos", "TOKEN": "secret"}


class Reader:
    """Runs what a section shows, one after the other. `served` is the server that is there; a server that the section
    starts takes the ports that it names, or their defaults, for what follows. Leaving ends it."""

    def __init__(self, folder: Path, served: ServerProcess) -> None:
        self._folder = folder
        self._grpc = {"8001": served, "9000": served}
        self._metrics = {"8002": served}
        self._started: list[ServerProcess] = []

    def __enter__(self) -> Reader:
        models.write(models.add_sub(), self._folder / "model.onnx")  # a section before may have put another one there
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                for server in self._started:
                    server.wait_ready()
                assert {server.terminate() for server in self._started} <= {0}
        finally:
            for server in self._started:
                server.kill()

    def type(self, command: str) -> str:
        """Run a command; what it printed. A server goes on."""
        command = _MODELS.sub("models", command.replace("infer MODEL", "infer magika").replace("/run/paceline/", ""))
        if _SERVE.match(command):
            ports = {"grpc": "8001", "metrics": "8002", **dict(_PORT_FLAG.findall(command))}
            server = start(self._folder, self._on_real_ports(command))
            self._started.append(server)
            self._grpc[ports["grpc"]] = self._metrics[ports["metrics"]] = server
            return ""
        command = _ASK.sub(r"\g<0> --server 127.0.0.1:8001", command)
        command = _WATCH.sub(r"\g<0> --metrics 127.0.0.1:8002", command)
        if _ALONE.fullmatch(command):
            return self._run_forked(shlex.split(command))
        return self._run("bash", "-euo", "pipefail", "-c", command)

    def paste(self, code: str) -> str:
        """Run Python; what it printed."""
        return self._run("python", "-c", code)

    def _run_forked(self, words: Sequence[str]) -> str:
        """Run `paceline …`, which takes a second when it is started."""
        words = self._on_servers(words)
        done = run_command(*words[1:], env=_variables(self._folder), cwd=self._folder)
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}{done.stderr}"
        return done.stdout

    def _run(self, *words: str) -> str:
        words = self._on_servers(words)
        done = subprocess.run(
            words, cwd=self._folder, env=_environment(self._folder), capture_output=True, text=True, timeout=_LONGEST_S
        )
        assert done.returncode == 0, f"{words[-1]}\n{done.stdout}{done.stderr}"
        return done.stdout

    def _on_servers(self, words: Sequence[str]) -> tuple[str, ...]:
        """The same with the ports of servers that are ready."""
        for server in self._started:
            server.wait_ready()
        return tuple(map(self._on_real_ports, words))

    def _on_real_ports(self, text: str) -> str:
        ports = {port: server.grpc_port for port, server in self._grpc.items()}
        ports |= {port: server.metrics_port for port, server in self._metrics.items()}
        return _LOCAL_PORT.sub(lambda printed: str(ports.get(printed[0], printed[0])), text)
