"""The two servers, with the same models in separate folders, and channels to them.

Lives here: starting both alike. Must not: calls, or expected answers.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from tests.differential.calls_settings import KEY_BYTES, KEYS
from tests.differential.repository import MODELS, write_repository
from tests.differential.triton_process import TritonProcess
from tests.harness import ServerProcess
from tests.shared_objects import FOLDER

__all__ = ["BY_NAME", "Both", "One", "serving_both", "serving_here", "shared_objects"]

BY_NAME = ("--model-control-mode=explicit", "--load-model=*")
"""Clients may load and unload models."""

_ALIKE = ("--exit-on-error=false", "--exit-timeout-secs=5")
# What Triton lets clients do by default, and this server only with these flags.
_OPEN = ("--allow-python-models", "true", "--allow-client-shm", "true", "--allow-remote-settings", "true")  # fmt: skip
_UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


@dataclass(frozen=True, slots=True)
class One:
    """A server, a channel to it, and the folder of its models."""

    process: TritonProcess | ServerProcess
    channel: grpc.Channel
    repository: Path

    def exposition(self) -> str:
        """The text on its metrics port."""
        url = f"http://127.0.0.1:{self.process.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as response:
            text: str = response.read().decode()
        return text


@dataclass(frozen=True, slots=True)
class Both:
    triton: One
    here: One

    def ended(self) -> list[str]:
        """The servers that have ended, so that nobody answers for them, with their last log lines."""
        ones = {"Triton": self.triton.process, "this server": self.here.process}
        return [
            f"{who} has ended with {one.returncode}: {one.log[-5:]}"
            for who, one in ones.items()
            if one.returncode is not None
        ]


@contextmanager
def shared_objects() -> Iterator[None]:
    """The objects that calls name by their keys."""
    paths = [FOLDER / key[1:] for key in KEYS]
    for path in paths:
        path.write_bytes(bytes(KEY_BYTES))
    try:
        yield
    finally:
        for path in paths:
            path.unlink()


@contextmanager
def serving_here(folder: Path, models: Mapping[str, str] = MODELS, mode: Sequence[str] = BY_NAME) -> Iterator[One]:
    """This server on `models`, started with the flags `mode`."""
    repository = write_repository(folder / "here" / "models", models)
    with (
        ServerProcess(repository, args=(*_ALIKE, *mode, *_OPEN)) as here,
        grpc.insecure_channel(here.target, _UNLIMITED) as channel,
    ):
        yield One(here, channel, repository)


@contextmanager
def serving_both(folder: Path, models: Mapping[str, str] = MODELS, mode: Sequence[str] = BY_NAME) -> Iterator[Both]:
    """Both servers on `models`, started with the flags `mode`."""
    repository = write_repository(folder / "triton" / "models", models)
    with (
        TritonProcess(repository, folder / "triton", (*_ALIKE, *mode)) as triton,
        grpc.insecure_channel(triton.target, _UNLIMITED) as channel,
        serving_here(folder, models, mode) as here,
    ):
        yield Both(One(triton, channel, repository), here)
