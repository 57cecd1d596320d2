"""The image itself, run by a container engine as the README shows. PACELINE_IMAGE names a built image, and
PACELINE_ENGINE the engine's command line, by default `docker`."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton

from paceline.clients import InferenceClient
from tests.shared_objects import shared_object

IMAGE = os.environ.get("PACELINE_IMAGE", "")
ENGINE = shlex.split(os.environ.get("PACELINE_ENGINE", "docker"))

# Engines that copy an image's file system for each container are slow.
pytestmark = [
    pytest.mark.skipif(not IMAGE, reason="no image: PACELINE_IMAGE names one that is built"),
    pytest.mark.timeout(600),
]


def engine(*arguments: str) -> str:
    done = subprocess.run([*ENGINE, *arguments], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{shlex.join([*ENGINE, *arguments])}: {done.stderr}"
    return done.stdout.strip()


class Container:
    """A running container."""

    def __init__(self, id: str) -> None:
        self.id = id

    @property
    def target(self) -> str:
        return engine("port", self.id, "8001/tcp").splitlines()[0]

    @property
    def log(self) -> str:
        done = subprocess.run([*ENGINE, "logs", self.id], capture_output=True, text=True, timeout=60, check=True)
        return done.stdout + done.stderr

    @contextlib.contextmanager
    def client(self) -> Iterator[InferenceClient]:
        """A client of the server, once the server is ready."""
        with InferenceClient(self.target) as client:
            client.wait_ready(timeout_s=120)
            yield client

    def stop(self) -> int:
        engine("stop", "-t", "30", self.id)
        return int(engine("inspect", "--format", "{{.State.ExitCode}}", self.id))


@contextlib.contextmanager
def running(folder: Path, *options: str, serve: tuple[str, ...] = ()) -> Iterator[Container]:
    """Run the image, its root file system read-only, with `folder` as its models."""
    volume = ("--read-only", "-v", f"{folder}:/models:ro")
    ports = ("-p", "127.0.0.1::8001", "-p", "127.0.0.1::8002")
    command = ("serve", "/models", *serve) if serve else ()
    container = Container(engine("run", "-d", *volume, *ports, *options, IMAGE, *command).splitlines()[-1])
    try:
        yield container
    finally:
        engine("rm", "-f", container.id)


def test_image_serves_and_shuts_down_gracefully(storage: Path) -> None:
    with running(storage) as container:
        with container.client() as client:
            ones = np.ones((1, 16), np.int32)
            assert (client.infer("m", {"INPUT0": ones, "INPUT1": ones})["OUTPUT0"] == 2).all()
        assert engine("exec", container.id, "paceline", "health") == "SERVING"
        assert engine("exec", container.id, "id", "-u") == "1000"
        assert container.stop() == 0
        assert "stopped after" in container.log.splitlines()[-1]


def test_image_has_all_that_fronts_model_processes_and_shared_memory_need(python_storage: Path) -> None:
    """Anything that the engine's own seccomp filter forbids would show here."""
    switches = ("--allow-python-models", "true", "--allow-client-shm", "true")
    processes = ("--frontends", "2", "--backend-config", "onnxruntime,own-process=1")
    x = np.arange(32 * 60_000, dtype=np.float32).reshape(32, 60_000)
    with (
        shared_object(x.nbytes) as memory,
        running(python_storage, "--ipc", "host", serve=(*switches, *processes)) as container,
        container.client() as client,
    ):
        ones = np.ones((1, 16), np.int32)
        assert (client.infer("m", {"INPUT0": ones, "INPUT1": ones})["OUTPUT0"] == 2).all()
        assert (client.infer("py", {"x": x})["y"] == 2 * x).all()
        os.fchmod(memory.descriptor, 0o666)
        memory.put(x)
        assert (doubled_in(memory.key, x, container.target) == 2 * x).all()
        assert container.stop() == 0
        assert " WARNING " not in container.log


def doubled_in(key: str, x: np.ndarray, target: str) -> np.ndarray:
    with triton.InferenceServerClient(target) as client:
        client.register_system_shared_memory("x", key, x.nbytes)
        tensor = triton.InferInput("x", x.shape, "FP32")
        tensor.set_shared_memory("x", x.nbytes)
        return client.infer("py", [tensor]).as_numpy("y")


def test_image_without_models_reports_it_and_ends(storage: Path) -> None:
    shutil.rmtree(storage / "m")
    with running(storage) as container:
        assert engine("wait", container.id) == "1"
        assert "/models: no models here" in container.log
