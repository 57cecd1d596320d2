"""A server on the stand-in for a GPU, with a model whose answers are compared with the CPU's."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped,unused-ignore]
import pytest

from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests import models
from tests.cuda import stand_in
from tests.harness import ServerProcess
from tests.wire import infer

__all__ = ["GPUS", "Served", "libraries", "write"]

GPUS = "max_batch_size: 16 dynamic_batching { } instance_group { kind: KIND_GPU %s }"


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        pytest.skip("this onnxruntime is built without CUDA")
    if importlib.util.find_spec("nvidia") is not None:
        pytest.skip("NVIDIA's own libraries are installed, and would be found first")
    return stand_in.libraries(tmp_path_factory.mktemp("gpu"))


def write(folder: Path, name: str, config: str, sizes: tuple[int, ...] = (64, 256, 16)) -> Path:
    path = models.write(models.mlp(sizes), folder / name / "1" / "model.onnx")
    (folder / name / "config.pbtxt").write_text(config)
    return path


class Served:
    """A server on the stand-in with a perceptron `m` of `sizes` and other models in `folder`; `cpu` runs `m` too."""

    FLAGS = ("--model-control-mode", "explicit", "--load-model", "*", "--exit-timeout-secs", "2")

    def __init__(self, folder: Path, libraries: Path, config: str, sizes: tuple[int, ...] = (64, 256, 16), **env: Any):
        path = write(folder, "m", config, sizes)
        self.cpu = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        self.shape: tuple[int, ...] = sizes[:1]
        given = {"LD_LIBRARY_PATH": str(libraries), **{name: str(value) for name, value in env.items()}}
        self.server = ServerProcess(folder, args=self.FLAGS, env=given)

    def __enter__(self) -> Served:
        self.server.__enter__()
        self.channel = grpc.insecure_channel(self.server.target)
        self.stub: Any = GRPCInferenceServiceStub(self.channel)  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: object) -> None:
        self.channel.close()
        self.server.__exit__(*exc)

    def check(self, rows: int, seed: int = 0, name: str = "m") -> None:
        given = np.random.default_rng(seed).standard_normal((rows, *self.shape)).astype(np.float32)
        answer = self.stub.ModelInfer(infer(name, {"INPUT0": given}), timeout=60)
        got = np.frombuffer(answer.raw_output_contents[0], np.float32)
        expected = self.cpu.run(None, {"INPUT0": given})[0]
        np.testing.assert_allclose(got.reshape(expected.shape), expected, rtol=1e-4, atol=1e-4)

    def refused(self, rows: int) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.RpcError) as refusal:
            self.check(rows)
        return refusal.value.code(), refusal.value.details()

    def check_concurrently(self, clients: int, requests: int) -> None:
        def client(number: int) -> None:
            for turn in range(requests):
                self.check(1 + (number + turn) % 3, 1000 * number + turn)

        with ThreadPoolExecutor(clients) as threads:
            list(threads.map(client, range(clients)))

    def metric(self, name: str, **labels: str) -> float:
        inner = ",".join(f'{key}="{value}"' for key, value in labels.items())
        return self.server.metrics()[f"{name}{{{inner}}}" if inner else name]

    @property
    def said(self) -> list[str]:
        return [one["message"] for one in self.server.log]
