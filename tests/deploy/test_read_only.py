"""The server as containers run it: user 1000, no home, no capability, nothing writable.

The environment that the image would have is looked for in PACELINE_IMAGE_ROOT, else where `make witness` makes it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from paceline.clients import InferenceClient
from tests.deploy.sandbox import read_only_as_nobody, why_not
from tests.harness import REPO, ServerProcess
from tests.polling import eventually

ROOT = Path(os.environ.get("PACELINE_IMAGE_ROOT", REPO / ".witness" / "container"))
INSTALLED = ROOT / "opt" / "paceline" / "bin"
SOURCE_TREE = (sys.executable, "-m", "paceline")


@pytest.fixture(scope="module", autouse=True)
def _sandbox() -> None:
    if reason := why_not():
        pytest.skip(reason)


def program(which: str) -> tuple[str, ...]:
    if which == "source tree":
        tried = [*read_only_as_nobody(), sys.executable, "-c", ""]
        done = subprocess.run(tried, capture_output=True, text=True, timeout=20, check=False)
        if done.returncode:
            pytest.skip(f"user 1000 can't run this Python: {done.stderr.strip()}")
        return SOURCE_TREE
    if not (INSTALLED / "paceline").exists():
        pytest.skip("the image's environment isn't there: `make witness` makes it")
    return (str(INSTALLED / "python"), str(INSTALLED / "paceline"))


@pytest.mark.parametrize("which", ["source tree", "image's environment"])
def test_server_serves_and_ends_gracefully_where_nothing_is_writable(storage: Path, which: str) -> None:
    nowhere = {"HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"}
    command = (*read_only_as_nobody(), *program(which))
    with ServerProcess(storage, env=nowhere, program=command) as server:
        assert "Uid:\t1000\t1000\t1000\t1000" in Path(f"/proc/{server.pid}/status").read_text()
        with InferenceClient(server.target) as client:
            ones = np.ones((1, 16), np.int32)
            assert (client.infer("m", {"INPUT0": ones, "INPUT1": ones})["OUTPUT0"] == 2).all()
            assert client.server_ready()
        assert server.metrics()['nv_inference_request_success{model="m",version="1"}'] == 1
        assert server.terminate() == 0
    assert not [line for line in server.log if line["level"] != "INFO"]


def open_to_all(path: Path) -> bool:
    """Whether user 1000 can run the program."""
    real = path.resolve()
    return real.is_file() and all(each.stat().st_mode & 0o001 for each in (real, *real.parents))


def python_for_all() -> tuple[str, dict[str, str]]:
    """A Python of this version that user 1000 can run, and the environment that lets it find everything installed
    here."""
    for path in (Path(sys.executable), Path(f"/usr/bin/python3.{sys.version_info.minor}")):
        if open_to_all(path):
            found = os.pathsep.join([str(REPO), *(each for each in sys.path if each.endswith("-packages"))])
            return str(path), {"PYTHONPATH": found}
    pytest.skip("user 1000 can run no Python of this version")


def test_processes_started_by_the_server_need_no_more_than_it_has(python_storage: Path) -> None:
    """Processes of Python models and those that speak gRPC; and a server in front of another."""
    python, path = python_for_all()
    env = {"HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1", **path}
    command = (*read_only_as_nobody(), python, "-m", "paceline")
    flags = ["--allow-python-models", "true", "--frontends", "2"]
    with (
        ServerProcess(python_storage, env=env, program=command, args=flags) as server,
        ServerProcess(env=env, program=command, args=["--upstream", server.target]) as proxy,
        InferenceClient(proxy.target) as client,
    ):
        eventually(client.server_ready, "ready")
        assert (client.infer("py", {"x": np.ones((1, 2), np.float32)})["y"] == 2).all()
        assert not [line for line in (*server.log, *proxy.log) if line["level"] != "INFO"]


def test_image_has_no_pip_and_keeps_its_packages_metadata() -> None:
    if not INSTALLED.exists():
        pytest.skip("the image's environment isn't there: `make witness` makes it")
    (packages,) = INSTALLED.parent.glob("lib/python3.*/site-packages")
    names = {path.name.partition("-")[0].lower() for path in packages.glob("*.dist-info")}
    assert {"paceline", "grpcio", "onnxruntime", "numpy", "protobuf"} <= names
    assert not {"pip", "setuptools", "onnxruntime_gpu"} & names
