"""The batcher in front of NVIDIA's Triton itself, which PyTriton contains (`make bench-rivals`; else skipped)."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from bench.subjects import RIVALS
from paceline.clients import AsyncInferenceClient, ClientError
from paceline.protos import inference_pb2 as pb
from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.harness import REPO, ServerProcess
from tests.polling import eventually
from tests.ports import free_port
from tests.wire import infer

Code = grpc.StatusCode
HERE = REPO / "tests" / "conformance"
MODELS = ("double", "shout", "half", "total")
COUNT = 40


def named(*models: str) -> list[str]:
    """Flags that name the models: PyTriton restricts the index."""
    return [word for model in models for word in ("--upstream-model", model)]


@contextmanager
def triton_on(port: int, log: Path) -> Iterator[int]:
    """Triton with the models of `pytriton_models.py`, ready; yields the id of its process group."""
    python = RIVALS / "pytriton" / "bin" / "python"
    if not (RIVALS / "pytriton" / "installed").exists():
        pytest.skip("PyTriton is not installed: make bench-rivals")
    with log.open("ab") as file:
        command = [str(python), str(HERE / "pytriton_models.py"), str(port)]
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
            eventually(lambda: process.poll() is not None or has_all(stub), "Triton is ready", 100)
        assert process.poll() is None, log.read_text(errors="replace")[-2000:]
        yield process.pid
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def has_all(stub: Any) -> bool:
    try:
        return all(stub.ModelReady(pb.ModelReadyRequest(name=name), timeout=5).ready for name in (*MODELS, "several"))
    except grpc.RpcError:
        return False


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port(count=2)
    with triton_on(port, tmp_path_factory.mktemp("triton") / "log"):
        yield f"127.0.0.1:{port}"


@pytest.fixture(scope="module")
def proxy(triton: str) -> Iterator[ServerProcess]:
    """One call at a time: Triton would join two concurrent calls, and fail them together."""
    flags = ["--upstream-health-secs", "0.1", "--upstream-batches", "1", *named(*MODELS)]
    with ServerProcess(args=["--upstream", triton, *flags]) as server:
        yield server


@pytest.fixture(scope="module")
def stub(proxy: ServerProcess) -> Iterator[Any]:
    with grpc.insecure_channel(proxy.target) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        eventually(lambda: stub.ServerReady(pb.ServerReadyRequest()).ready, "ready")
        yield stub


def rows_of(*marks: float, columns: int = 2) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.array([[mark] * columns for mark in marks], np.float32)


def doubled(answer: pb.ModelInferResponse) -> list[float]:
    """The first column of `x`."""
    return [
        float(row[0]) for row in np.frombuffer(answer.raw_output_contents[0], "<f4").reshape(answer.outputs[0].shape)
    ]


def failure(call: Any) -> tuple[grpc.StatusCode, str]:
    error = call.exception()
    assert error is not None
    return error.code(), error.details()


def executions(stub: Any, model: str = "double") -> int:
    told = stub.ModelStatistics(pb.ModelStatisticsRequest(name=model)).model_stats
    return sum(one.execution_count for one in told)


def test_models_are_described_as_triton_describes_them(stub: Any, triton: str) -> None:
    with grpc.insecure_channel(triton) as channel:
        behind: Any = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        for name in MODELS:
            request = pb.ModelMetadataRequest(name=name)
            assert stub.ModelMetadata(request) == behind.ModelMetadata(request)
            ours = stub.ModelConfig(pb.ModelConfigRequest(name=name)).config
            theirs = behind.ModelConfig(pb.ModelConfigRequest(name=name)).config
            assert (ours.max_batch_size, ours.backend) == (theirs.max_batch_size, theirs.backend)


def test_concurrent_requests_get_their_own_answers_from_fewer_calls(stub: Any) -> None:
    before = executions(stub)
    calls = [stub.ModelInfer.future(infer("double", {"a": rows_of(mark)}), timeout=60) for mark in range(COUNT)]
    assert [doubled(call.result()) for call in calls] == [[2.0 * mark] for mark in range(COUNT)]
    assert executions(stub) - before < COUNT


def test_row_that_fails_its_batch_fails_alone_with_tritons_error_text(stub: Any) -> None:
    """The text is a traceback, longer than gRPC's default limit for headers."""
    marks = [*range(6), -2000, *range(6)]
    calls = [stub.ModelInfer.future(infer("double", {"a": rows_of(mark)}), timeout=60) for mark in marks]
    bad = calls.pop(6)
    assert [doubled(call.result()) for call in calls] == [[2.0 * mark] for mark in (*range(6), *range(6))]
    code, text = failure(bad)
    assert code is Code.INTERNAL
    assert text.startswith("model 'double': upstream 127.0.0.1:")
    assert "Failed to process the request(s) for model 'double" in text


def test_texts_of_any_length_and_fp16_values_pass(stub: Any) -> None:
    texts = [b"a", b"", "gr\u00fc\u00dfe".encode(), b"z" * 3000]
    calls = [stub.ModelInfer.future(infer("shout", {"text": np.array([[text]], object)}), timeout=60) for text in texts]
    said = [call.result().raw_output_contents[0][4:] for call in calls]
    assert said == [text.upper() for text in texts]
    floats = np.array([[1.5, -2]], np.float16)
    answer = stub.ModelInfer(infer("half", {"h": floats}), timeout=60)
    np.testing.assert_array_equal(np.frombuffer(answer.raw_output_contents[0], "<f2"), [3, -4])


def test_model_without_batch_axis_gets_requests_unchanged(stub: Any) -> None:
    sizes = range(1, 9)
    calls = [stub.ModelInfer.future(infer("total", {"n": np.ones(size, np.float32)}), timeout=60) for size in sizes]
    sums = [float(np.frombuffer(call.result().raw_output_contents[0], "<f4")[0]) for call in calls]
    assert sums == [float(size) for size in sizes]


def test_typed_contents_and_wanted_outputs_reach_triton(stub: Any) -> None:
    request = pb.ModelInferRequest(model_name="double", id="mine", outputs=[{"name": "y"}])
    request.inputs.add(name="a", datatype="FP32", shape=[1, 2]).contents.fp32_contents.extend([1, 2])
    answer = stub.ModelInfer(request, timeout=60)
    assert ([one.name for one in answer.outputs], answer.id) == (["y"], "mine")
    np.testing.assert_array_equal(np.frombuffer(answer.raw_output_contents[0], "<f4"), [-1, -2])


def test_large_message_passes_both_ways(proxy: ServerProcess) -> None:
    unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(proxy.target, options=unlimited) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        rows = np.ones((4, 500_000), np.float32)
        answer = stub.ModelInfer(infer("double", {"a": rows}), timeout=100)
        assert (np.frombuffer(answer.raw_output_contents[0], "<f4") == 2).all()


def test_deadline_is_kept_and_others_are_served_afterwards(stub: Any) -> None:
    late = stub.ModelInfer.future(infer("double", {"a": rows_of(1500)}), timeout=0.5)
    assert failure(late)[0] is Code.DEADLINE_EXCEEDED
    assert doubled(stub.ModelInfer(infer("double", {"a": rows_of(3)}), timeout=60)) == [6.0]


async def test_stream_and_coalescing_client_are_served(proxy: ServerProcess, stub: Any) -> None:
    async with AsyncInferenceClient(proxy.target, transport="stream") as client:
        answers = [await client.infer("double", {"a": rows_of(mark)}) for mark in range(3)]
        assert [float(one["x"][0, 0]) for one in answers] == [0, 2, 4]
        with pytest.raises(ClientError):
            await client.infer("double", {"a": rows_of(-2000)})
    async with AsyncInferenceClient(proxy.target, coalesce=4) as client:
        assert (await client.infer("double", {"a": rows_of(5)}))["x"][0, 0] == 10


def test_second_batcher_in_front_of_the_first_describes_and_answers_the_same(proxy: ServerProcess, stub: Any) -> None:
    flags = ["--upstream", proxy.target, "--upstream-batches", "1", "--upstream-health-secs", "0.1"]
    with ServerProcess(args=flags) as second, grpc.insecure_channel(second.target) as channel:
        chained: Any = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        eventually(lambda: chained.ServerReady(pb.ServerReadyRequest()).ready, "ready")
        request = pb.ModelMetadataRequest(name="double")
        assert chained.ModelMetadata(request) == stub.ModelMetadata(request)
        marks = [1, 2, -2000, 3]
        calls = [chained.ModelInfer.future(infer("double", {"a": rows_of(mark)}), timeout=60) for mark in marks]
        assert failure(calls.pop(2))[0] is Code.INTERNAL
        assert [doubled(call.result()) for call in calls] == [[2.0], [4.0], [6.0]]


def test_restricted_index_is_logged_and_decoupled_model_is_refused(triton: str) -> None:
    with ServerProcess(args=["--upstream", triton, "--upstream-health-secs", "0.1"]) as server:
        eventually(lambda: any("--upstream-model" in line["message"] for line in server.log), "the way out is logged")
    flags = ["--upstream", triton, "--upstream-health-secs", "0.1", *named("double", "several")]
    with ServerProcess(args=flags) as server, grpc.insecure_channel(server.target) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        eventually(lambda: stub.ModelReady(pb.ModelReadyRequest(name="double")).ready, "the other is served")
        call = stub.ModelInfer.future(infer("several", {"a": rows_of(1)}), timeout=20)
        code, text = failure(call)
        assert code is Code.UNAVAILABLE
        assert "decoupled" in text


def test_triton_killed_during_a_batch_is_unavailable_until_it_is_back(tmp_path: Path) -> None:
    port = free_port(count=2)
    flags = ["--upstream", f"127.0.0.1:{port}", "--upstream-health-secs", "0.1", *named("double")]
    with ServerProcess(args=flags) as proxy, grpc.insecure_channel(proxy.target) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        assert not stub.ServerReady(pb.ServerReadyRequest()).ready
        with triton_on(port, tmp_path / "log") as group:
            eventually(lambda: stub.ServerReady(pb.ServerReadyRequest()).ready, "ready", 30)
            slow = stub.ModelInfer.future(infer("double", {"a": rows_of(60_000)}), timeout=60)
            eventually(lambda: proxy.metrics()['nv_inference_pending_request_count{model="double",version="1"}'] == 0,
                       "under way")  # fmt: skip
            os.killpg(group, signal.SIGKILL)
            assert failure(slow)[0] is Code.UNAVAILABLE
            eventually(lambda: not stub.ServerReady(pb.ServerReadyRequest()).ready, "not ready", 30)
        with triton_on(port, tmp_path / "log"):
            eventually(lambda: stub.ServerReady(pb.ServerReadyRequest()).ready, "ready again", 30)
            assert doubled(stub.ModelInfer(infer("double", {"a": rows_of(4)}), timeout=60)) == [8.0]
