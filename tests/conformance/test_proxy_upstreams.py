"""The batcher in front of other servers of the protocol, each in its own process: MLServer, the KServe SDK's model
server, and another paceline. Where one isn't installed (`make bench-rivals`), its tests are skipped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnxruntime
import pytest

from bench import models
from bench.scenario import Side
from bench.subjects import RIVALS, NotInstalledError, start
from paceline.protos import inference_pb2 as pb
from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.harness import ServerProcess
from tests.polling import eventually
from tests.ports import free_port
from tests.wire import infer

Code = grpc.StatusCode
COUNT = 48


class Proxied:
    """A proxy, what is behind it, and a stub of the proxy."""

    def __init__(self, name: str, upstream: Any, proxy: ServerProcess, stub: Any, file: Path) -> None:
        self.name = name
        self.upstream = upstream
        self.proxy = proxy
        self.stub = stub
        session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        self.expected = lambda rows: session.run(None, {models.INPUT: rows})[0]

    def executions(self) -> int:
        """Batches that were sent upstream."""
        request = pb.ModelStatisticsRequest(name="tiny")
        return sum(one.execution_count for one in self.stub.ModelStatistics(request).model_stats)


NAMES = ["paceline", "mlserver", "kserve"]


@contextmanager
def proxy_to(name: str, folder: Path) -> Iterator[Proxied]:
    """A new upstream of that kind and a proxy to it, both ready."""
    file = models.write("tiny", folder)
    try:
        upstream: Any = start(Side(name, "tiny", ((16,),)), {"tiny": file}, folder)
    except NotInstalledError as error:
        pytest.skip(f"{name} is {error}")
    # The SDK has no RepositoryIndex, and MLServer's lists only what is in its folder.
    named = [] if name == "paceline" else ["--upstream-model", "tiny"]
    flags = ["--upstream-health-secs", "0.1", "--max-queue-delay-microseconds", "20000", *named]
    with (
        upstream,
        ServerProcess(args=["--upstream", upstream.target, *flags]) as proxy,
        grpc.insecure_channel(proxy.target) as channel,
    ):
        stub = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        eventually(lambda: stub.ServerReady(pb.ServerReadyRequest()).ready, "ready")
        yield Proxied(name, upstream, proxy, stub, file)


@pytest.fixture(scope="module", params=NAMES)
def proxied(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxied]:
    with proxy_to(request.param, tmp_path_factory.mktemp("upstream")) as both:
        yield both


def rows_of(seed: int, rows: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).random((rows, 16), np.float32)


def test_concurrent_requests_get_their_own_answers_from_fewer_batches(proxied: Proxied) -> None:
    before = proxied.executions()
    inputs = [rows_of(seed, 1 + seed % 3) for seed in range(COUNT)]
    calls = [proxied.stub.ModelInfer.future(infer("tiny", {models.INPUT: rows}), timeout=60) for rows in inputs]
    for rows, call in zip(inputs, calls, strict=True):
        (output,), (data,) = call.result().outputs, call.result().raw_output_contents
        assert (output.name, output.datatype, list(output.shape)) == (models.OUTPUT, "FP32", list(rows.shape))
        np.testing.assert_array_equal(np.frombuffer(data, "<f4").reshape(rows.shape), proxied.expected(rows))
    assert 0 < proxied.executions() - before < COUNT / 2


def test_request_of_the_wrong_shape_fails_alone(proxied: Proxied) -> None:
    good = [infer("tiny", {models.INPUT: rows_of(seed, 1)}) for seed in range(8)]
    bad = infer("tiny", {models.INPUT: rows_of(0, 1)[:, :15]})
    calls = [proxied.stub.ModelInfer.future(one, timeout=60) for one in (*good, bad)]
    for call in calls[:-1]:
        assert len(call.result().raw_output_contents[0]) == 64
    error = calls[-1].exception()
    assert error is not None
    assert error.code() in (Code.INVALID_ARGUMENT, Code.INTERNAL)
    assert "model 'tiny': " in error.details()


@pytest.mark.parametrize("name", NAMES)
def test_proxy_is_not_ready_after_its_upstream_has_ended(name: str, tmp_path: Path) -> None:
    with proxy_to(name, tmp_path) as proxied:
        pid: int = proxied.upstream.pid
        # Other servers lead their own process group, with workers that wouldn't end with them.
        (os.killpg if os.getpgid(pid) == pid else os.kill)(pid, signal.SIGKILL)
        eventually(lambda: not proxied.stub.ServerReady(pb.ServerReadyRequest()).ready, "not ready", 60)
        with pytest.raises(grpc.RpcError) as caught:
            proxied.stub.ModelInfer(infer("tiny", {models.INPUT: rows_of(1, 1)}), timeout=20)
        failure: Any = caught.value
        assert failure.code() is Code.UNAVAILABLE
        assert proxied.proxy.returncode is None


_DOUBLE = """
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse


class Double(MLModel):
    async def predict(self, payload):
        rows = NumpyCodec.decode_input(payload.inputs[0])
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("x", 2 * rows)])
"""


@contextmanager
def mlserver_of(folder: Path) -> Iterator[str]:
    """`mlserver start` on a folder with one model whose version isn't a number; yields its target."""
    python = RIVALS / "mlserver" / "bin" / "python"
    if not (RIVALS / "mlserver" / "installed").exists():
        pytest.skip("mlserver is not installed: make bench-rivals")
    ports = [free_port() for _ in range(3)]
    names = ("http_port", "grpc_port", "metrics_port")
    given = {"debug": False, "host": "127.0.0.1", "parallel_workers": 0, **dict(zip(names, ports, strict=True))}
    (folder / "settings.json").write_text(json.dumps(given))
    tensors = {name: [{"name": tensor, "datatype": "FP32", "shape": [-1, 2]}] for name, tensor in
               (("inputs", "a"), ("outputs", "x"))}  # fmt: skip
    model = {"name": "double", "implementation": "double.Double", "parameters": {"version": "v1.2"}, **tensors}
    (folder / "model-settings.json").write_text(json.dumps(model))
    (folder / "double.py").write_text(_DOUBLE)
    code = "import sys; sys.argv = ['mlserver', 'start', '.']; from mlserver.cli import main; main()"
    with (folder / "log").open("wb") as log:
        # It has its own workers, which wouldn't end with it.
        process = subprocess.Popen(
            [python, "-c", code],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder)},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield f"127.0.0.1:{ports[1]}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_models_of_an_mlserver_are_found_with_their_metadata_and_versions(tmp_path: Path) -> None:
    with (
        mlserver_of(tmp_path) as target,
        ServerProcess(args=["--upstream", target, "--upstream-health-secs", "0.1"]) as proxy,
        grpc.insecure_channel(proxy.target) as channel,
    ):
        stub: Any = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        eventually(lambda: stub.ServerReady(pb.ServerReadyRequest()).ready, "ready", 60)
        told = stub.ModelMetadata(pb.ModelMetadataRequest(name="double"))
        assert (list(told.versions), list(told.inputs[0].shape)) == (["v1.2"], [-1, 2])
        rows = np.ones((3, 2), np.float32)
        answer = stub.ModelInfer(infer("double", {"a": rows}), timeout=20)
        assert answer.model_version == "v1.2"
        np.testing.assert_array_equal(np.frombuffer(answer.raw_output_contents[0], "<f4").reshape(3, 2), 2 * rows)
