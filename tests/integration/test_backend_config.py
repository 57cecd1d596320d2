"""`--backend-config` in separate server processes, since threads that sessions share stay in a process for good."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest

from paceline.protos import inference_pb2 as pb
from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests import models
from tests.harness import ServerProcess
from tests.wire import infer


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for number in range(4):
        models.write(models.mlp(), folder / f"m{number}" / "1" / "model.onnx")
    (folder / "m1" / "config.pbtxt").write_text("dynamic_batching { }")
    own = 'parameters { key: "intra_op_thread_count" value { string_value: "1" } }'
    (folder / "m2" / "config.pbtxt").write_text(f"max_batch_size: 8 {own}")
    (folder / "m3" / "config.pbtxt").write_text("max_batch_size: 8")  # which isn't tried, as no other but m0 is
    return folder


@contextmanager
def started(repository: Path, *settings: str) -> Iterator[tuple[ServerProcess, GRPCInferenceServiceStub]]:
    flags = [f"--backend-config=onnxruntime,{one}" for one in settings]
    with ServerProcess(repository, args=flags) as server, grpc.insecure_channel(server.target) as channel:
        yield server, GRPCInferenceServiceStub(channel)


def threads(server: ServerProcess) -> int:
    return len(os.listdir(f"/proc/{server.pid}/task"))


@pytest.fixture(scope="module")
def few(repository: Path) -> int:
    """The threads of a server whose sessions have none of their own."""
    with started(repository, "intra_op_thread_count=1") as (server, _):
        return threads(server)


def test_default_max_batch_size_applies_to_models_that_set_none(repository: Path) -> None:
    with started(repository, "default-max-batch-size=5") as (_, stub):
        config = stub.ModelConfig(pb.ModelConfigRequest(name="m1"), timeout=20).config
        assert config.max_batch_size == 5
        config = stub.ModelConfig(pb.ModelConfigRequest(name="m0"), timeout=20).config
        assert list(config.dynamic_batching.preferred_batch_size) == [5]


def test_thread_count_applies_to_each_session_that_sets_none(repository: Path, few: int) -> None:
    with started(repository, "intra_op_thread_count=5") as (server, _):
        # Four more each for three models: the caller's thread counts too. gRPC's threads come and go.
        assert threads(server) > few + 9


def test_threads_follow_the_cpus_unless_told(repository: Path) -> None:
    if (os.cpu_count() or 1) < 2 or not shutil.which("taskset"):
        pytest.skip("needs two CPUs and taskset")
    program = ("taskset", "--cpu-list", str(min(os.sched_getaffinity(0))), sys.executable, "-m", "paceline")
    counts = []
    for told, count in ((), 1), (("--backend-config=onnxruntime,intra_op_thread_count=5",), 5):
        with ServerProcess(repository, args=told, program=program) as server:
            line = f"CPUs: 1 (affinity, of {os.cpu_count()}); intra_op_thread_count is {count} by default"
            assert line in [record["message"] for record in server.log]
            counts.append(threads(server))
    assert counts[1] > counts[0] + 9


def test_shared_threads_are_one_pool_for_all_models(repository: Path, few: int) -> None:
    shared = ("enable-global-threadpool=1", "intra_op_thread_count=5")
    with started(repository, *shared) as (server, stub):
        assert threads(server) <= few + 8
        for number in range(4):
            request = infer(f"m{number}", {"INPUT0": np.ones((2, 16), np.float32)})
            assert list(stub.ModelInfer(request, timeout=20).outputs[0].shape) == [2, 4]
