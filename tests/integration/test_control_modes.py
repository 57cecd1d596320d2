"""Real servers whose ONNX models are added, changed and removed: on disk in mode poll, by RPC in mode explicit."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from paceline.protos import inference_pb2 as pb
from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests import models
from tests.harness import ServerProcess
from tests.polling import eventually
from tests.wire import infer

ONES = np.ones((1, 4), np.float32)


def write(folder: Path, step: float, version: int = 1) -> None:
    """Write a version that returns INPUT0 + step, in one atomic step, as users should."""
    made = folder.parent.parent / f"made-{folder.name}-{version}.onnx"
    models.write(models.ragged(step), made)
    (folder / str(version)).mkdir(parents=True, exist_ok=True)
    os.replace(made, folder / str(version) / "model.onnx")


class Client:
    """The RPCs that these tests need."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.stub: Any = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]

    def ask(self, name: str = "m", version: str = "") -> float | grpc.StatusCode:
        """What the model adds, or the status of its refusal."""
        request = infer(name, {"INPUT0": ONES.reshape(4, 1)}, version=version)
        try:
            answer = self.stub.ModelInfer(request, timeout=20)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()  # type: ignore[attr-defined]
            return code
        return float(np.frombuffer(answer.raw_output_contents[0], np.float32)[0] - 1)

    def index(self) -> list[tuple[str, str, str]]:
        answer = self.stub.RepositoryIndex(pb.RepositoryIndexRequest(), timeout=20)
        return [(line.name, line.version, line.state) for line in answer.models]

    def ready(self) -> bool:
        return bool(self.stub.ServerReady(pb.ServerReadyRequest(), timeout=20).ready)

    def load(self, name: str) -> None:
        self.stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name=name), timeout=60)


@contextmanager
def client_of(server: ServerProcess) -> Iterator[Client]:
    with grpc.insecure_channel(server.target) as channel:
        yield Client(channel)


@contextmanager
def traffic(client: Client) -> Iterator[list[float | grpc.StatusCode]]:
    """The outcomes of all requests to `m` that two clients send in a loop while the block runs."""
    heard: list[float | grpc.StatusCode] = []
    end = threading.Event()

    def loop() -> None:
        while not end.is_set():
            heard.append(client.ask())

    threads = [threading.Thread(target=loop) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield heard
    finally:
        end.set()
        for thread in threads:
            thread.join()


POLL = ("--model-control-mode", "poll", "--repository-poll-secs", "0.05")


def test_poll_follows_added_changed_broken_and_removed_models(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    with ServerProcess(repository, args=POLL) as server, client_of(server) as client:
        assert client.ready()
        assert client.ask() is grpc.StatusCode.NOT_FOUND
        write(repository / "m", 1)
        eventually(lambda: client.ask() == 1, "the new model")
        with traffic(client) as heard:
            eventually(lambda: 1 in heard, "requests answered")
            write(repository / "m", 2)
            eventually(lambda: 2 in heard, "the changed model")
            write(repository / "m", 3, version=2)
            eventually(lambda: 3 in heard, "the new version")
            (repository / "m" / "3").mkdir()
            (repository / "m" / "3" / "model.onnx").write_bytes(b"no model")
            eventually(
                lambda: any("load failed for model 'm'" in line["message"] for line in server.log), "the refusal"
            )
            eventually(lambda: ("m", "3", "UNAVAILABLE") in client.index(), "the refusal in the index")
            assert client.ready()
            shutil.rmtree(repository / "m" / "3")
            eventually(lambda: client.index() == [("m", "2", "READY")], "all well again")
        assert set(heard) == {1, 2, 3}, "nobody was refused meanwhile"
        shutil.rmtree(repository / "m" / "2")
        eventually(lambda: client.ask() == 2, "the older version again")
        shutil.rmtree(repository / "m")
        eventually(lambda: client.ask() is grpc.StatusCode.NOT_FOUND, "the model gone")
        eventually(lambda: client.index() == [], "the model forgotten")
        assert client.ready()
    assert server.returncode == 0
    assert not [line for line in server.log if "exception" in line]


def test_explicit_reloads_of_real_models_under_load_fail_no_request(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    write(repository / "m", 0)
    args = ("--model-control-mode", "explicit", "--load-model", "m")
    with ServerProcess(repository, args=args) as server, client_of(server) as client:
        with traffic(client) as heard:
            for step in range(1, 6):
                eventually(lambda n=step - 1: n in heard, "requests answered")  # type: ignore[misc]
                write(repository / "m", step)
                client.load("m")
                assert client.ask() == step
            eventually(lambda: 5 in heard, "requests answered")
        assert set(heard) == set(range(6)), "each load was served, and nobody was refused"
    assert server.returncode == 0


def test_explicit_file_override_with_external_weights_outlives_its_scratch_folder(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    repository, scratch = tmp_path / "repository", tmp_path / "scratch"
    repository.mkdir()
    scratch.mkdir()
    source = tmp_path / "model.onnx"
    onnx.save_model(
        models.mlp((4, 64, 4)), source, save_as_external_data=True, location="weights.bin", size_threshold=0
    )
    request = pb.RepositoryModelLoadRequest(model_name="m")
    request.parameters["config"].string_param = "{}"
    request.parameters["file:1/model.onnx"].bytes_param = source.read_bytes()
    request.parameters["file:1/weights.bin"].bytes_param = (tmp_path / "weights.bin").read_bytes()
    args = ("--model-control-mode", "explicit")
    with ServerProcess(repository, args=args, env={"TMPDIR": str(scratch)}) as server, client_of(server) as client:
        client.stub.RepositoryModelLoad(request, timeout=60)
        assert list(scratch.glob("paceline-*")) == []
        answer = client.stub.ModelInfer(infer("m", {"INPUT0": ONES}), timeout=20)
        assert len(answer.raw_output_contents[0]) == 16
        assert client.index() == [("m", "1", "READY")]
