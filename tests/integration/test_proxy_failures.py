"""The batcher in front of a server that refuses, fails, hangs and answers nonsense."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from time import monotonic_ns
from typing import Any

import grpc
import pytest
from google.protobuf import text_format

from paceline.backends.errors import ExecutionError, UpstreamRefused
from paceline.backends.remote import RemoteServer
from paceline.protos import inference_pb2 as pb
from paceline.protos import model_config_pb2 as config_pb
from paceline.server.config import Settings
from tests.integration.scripted import Script, request, send
from tests.integration.serving import failure_of, serving
from tests.integration.upstreams import (
    Upstream,
    batch_of_patient_and_hasty,
    behind,
    calls_behind_a_busy_upstream,
    double,
    proxying,
    tensors_of,
    upstream,
)
from tests.polling import eventually_async

Code = grpc.StatusCode
NAMED = {"models": ("m",)}


def poison(mark: float, code: grpc.StatusCode, text: str) -> Callable[[Any], tuple[grpc.StatusCode, str] | None]:
    return lambda call: (code, text) if any(row == mark for row in rows(call)) else None


def rows(call: pb.ModelInferRequest) -> list[float]:
    stub = Upstream()
    stub.calls.append(call)
    return stub.marks[0]


class EmptyAnswers(grpc.GenericRpcHandler):
    """Ends each call with OK but without a message: to a unary caller, an empty stream looks like that."""

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler[Any, Any]:
        async def say_nothing(request: bytes, context: Any) -> AsyncIterator[bytes]:
            return
            yield b""

        return grpc.unary_stream_rpc_method_handler(say_nothing)


async def test_answer_without_a_message_is_an_error_and_does_not_prevent_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((EmptyAnswers(),))
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    remote = RemoteServer(target)
    remote.open()
    try:
        async with proxying(tmp_path, target, **NAMED) as served:
            said = f"upstream {target}: it answered OK without a message"
            code, text = await failure_of(served.infer(request(1)))
            assert (code, text) == (Code.UNAVAILABLE, f"Request for unknown model: 'm' is not ready: {said}")
            with pytest.raises(UpstreamRefused) as caught:
                await remote.infer(b"", (), monotonic_ns() + 20_000_000_000)
            assert (caught.value.status, str(caught.value)) == ("INTERNAL", said)
        assert not [record for record in caplog.records if record.exc_info]
    finally:
        await remote.close()
        await server.stop(0)


@pytest.mark.usefixtures("frontends")
@pytest.mark.parametrize("code", [Code.INVALID_ARGUMENT, Code.INTERNAL, Code.UNKNOWN, Code.FAILED_PRECONDITION])
async def test_request_refused_by_the_upstream_fails_alone_with_the_upstreams_status(
    tmp_path: Path, code: grpc.StatusCode, caplog: pytest.LogCaptureFixture
) -> None:
    stub = Upstream()
    stub.abort = poison(5, code, "not this one")
    async with behind(tmp_path, stub) as served:
        calls = await calls_behind_a_busy_upstream(served, stub, *(request(mark) for mark in range(8)))
        stub.gate.set()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [mark for mark, one in enumerate(outcomes[1:]) if isinstance(one, Exception)] == [5]
        got, text = await failure_of(calls[6])
        assert got is code
        assert text.startswith("model 'm': upstream 127.0.0.1:")
        assert text.endswith(": not this one")
        assert len(stub.calls) == 1 + 1 + 2 * 3
    errors = [record for record in caplog.records if record.name == "paceline.server.inference"]
    assert bool(errors) == (code is not Code.INVALID_ARGUMENT), "a request at fault is no error of the model"


@pytest.mark.usefixtures("frontends")
async def test_upstream_error_messages_of_any_length_keep_their_status(tmp_path: Path) -> None:
    """Triton's are tracebacks. Headers beyond gRPC's default limit would be dropped, and the status with them."""
    stub = Upstream()
    stub.abort = poison(2, Code.INTERNAL, "begin " + "Zeile ü\n" * 5_000 + "end")
    async with behind(tmp_path, stub) as served:
        calls = await calls_behind_a_busy_upstream(served, stub, *(request(mark) for mark in range(4)))
        stub.gate.set()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [mark for mark, one in enumerate(outcomes[1:]) if isinstance(one, Exception)] == [2]
        code, text = await failure_of(calls[3])
        assert code is Code.INTERNAL
        assert text.endswith("end")
        assert "begin" in text


@pytest.mark.parametrize(
    "code",
    [Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED, Code.DEADLINE_EXCEEDED, Code.UNAUTHENTICATED, Code.PERMISSION_DENIED,
     Code.NOT_FOUND, Code.UNIMPLEMENTED, Code.ABORTED],
    ids=lambda code: code.name,
)  # fmt: skip
async def test_refusal_not_due_to_a_request_fails_the_whole_batch_without_a_rerun(
    tmp_path: Path, code: grpc.StatusCode
) -> None:
    stub = Upstream()
    stub.abort = lambda call: (code, "not now") if len(rows(call)) > 1 else None
    async with behind(tmp_path, stub) as served:
        calls = await calls_behind_a_busy_upstream(served, stub, *(request(mark) for mark in range(4)))
        stub.gate.set()
        for call in calls[1:]:
            got, text = await failure_of(call)
            assert (got, text.endswith(": not now")) == (code, True)
        assert len(stub.calls) == 2
        stub.abort = lambda call: None
        await eventually_async(lambda: served.server.repository.ready, "ready")
        assert tensors_of(await served.infer(request(1)))["x"][0, 0] == 2


async def test_batch_beyond_the_upstreams_message_limit_is_sent_in_halves(tmp_path: Path) -> None:
    stub = Upstream()
    async with (
        upstream(stub, options=[("grpc.max_receive_message_length", 250)]) as target,
        proxying(tmp_path, target, **NAMED) as served,
    ):
        calls = await calls_behind_a_busy_upstream(served, stub, *(request(mark, rows=8) for mark in range(1, 5)))
        stub.gate.set()
        answers = await asyncio.gather(*calls)
        assert [float(tensors_of(one)["x"][0, 0]) for one in answers] == [-2, 2, 4, 6, 8]
        assert sorted(sorted(set(marks)) for marks in stub.marks) == [[-1], [1, 2], [3, 4]]


def short(call: pb.ModelInferRequest) -> pb.ModelInferResponse:
    answer = double(call)
    for output in answer.outputs:
        output.shape[0] -= 1
    answer.raw_output_contents[:] = [data[:-8] for data in answer.raw_output_contents]
    return answer


def without(name: str) -> Callable[[pb.ModelInferRequest], pb.ModelInferResponse]:
    def answer(call: pb.ModelInferRequest) -> pb.ModelInferResponse:
        whole = double(call)
        places = [place for place, output in enumerate(whole.outputs) if output.name != name]
        return pb.ModelInferResponse(
            outputs=[whole.outputs[place] for place in places],
            raw_output_contents=[whole.raw_output_contents[place] for place in places],
        )

    return answer


def cut(call: pb.ModelInferRequest) -> pb.ModelInferResponse:
    answer = double(call)
    answer.raw_output_contents[0] = answer.raw_output_contents[0][:-1]
    return answer


def renamed_type(call: pb.ModelInferRequest) -> pb.ModelInferResponse:
    answer = double(call)
    answer.outputs[0].datatype = "INT32"
    return answer


def one_raw(call: pb.ModelInferRequest) -> pb.ModelInferResponse:
    answer = double(call)
    del answer.raw_output_contents[1]
    return answer


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (short, "output 'x': expected shape [1, -1], got [0, 2]"),
        (without("y"), "output 'y' is not in the upstream's answer, only ['x']"),
        (cut, "output 'x' of the upstream's answer: expected 8 bytes for FP32 of shape [1, 2], got 7"),
        (renamed_type, "output 'x': expected FP32, got INT32"),
        (one_raw, "the upstream answered with 2 outputs and 1 raw contents"),
    ],
    ids=["rows", "missing", "bytes", "datatype", "raw"],
)
async def test_malformed_answer_is_an_error_and_does_not_affect_the_next_one(
    tmp_path: Path, answer: Any, said: str
) -> None:
    stub = Upstream()
    stub.answer = answer
    async with behind(tmp_path, stub) as served:
        calls = await calls_behind_a_busy_upstream(served, stub, request(1), request(2))
        stub.gate.set()
        for call in calls:
            code, text = await failure_of(call)
            assert code is Code.INTERNAL
            assert said in text
        stub.answer = double
        assert tensors_of(await served.infer(request(3)))["x"][0, 0] == 6


async def test_answer_in_typed_contents_is_understood(tmp_path: Path) -> None:
    def typed(call: pb.ModelInferRequest) -> pb.ModelInferResponse:
        answer = double(call)
        for output, tensor in zip(answer.outputs, tensors_of(answer).values(), strict=True):
            output.contents.fp32_contents.extend(tensor.ravel().tolist())
        del answer.raw_output_contents[:]
        return answer

    stub = Upstream()
    stub.answer = typed
    async with behind(tmp_path, stub) as served:
        calls = await calls_behind_a_busy_upstream(served, stub, request(1), request(2))
        stub.gate.set()
        assert [float(tensors_of(await call)["y"][0, 1]) for call in calls] == [1, -1, -2]


async def test_hanging_upstream_costs_no_more_than_the_configured_timeout(tmp_path: Path) -> None:
    stub = Upstream()
    stub.gates[1] = asyncio.Event()
    async with behind(tmp_path, stub, timeout_secs=0.3) as served:
        (call,) = send(served, request(1), timeout_s=None)
        code, text = await failure_of(call)
        assert code is Code.DEADLINE_EXCEEDED
        assert text.startswith("model 'm': upstream ")
        # The hanging call's place is free again. A busy machine may take longer than the timeout for any call.
        while code is Code.DEADLINE_EXCEEDED:
            again: Any = served.stub.ModelInfer(request(2), timeout=20)
            code = await again.code()
        assert tensors_of(await again)["x"][0, 0] == 4


@pytest.mark.usefixtures("frontends")
async def test_upstream_call_is_cancelled_once_its_last_caller_is_gone(tmp_path: Path) -> None:
    stub = Upstream()
    stub.gates[1] = asyncio.Event()
    async with behind(tmp_path, stub) as served:
        _, *waiting = await calls_behind_a_busy_upstream(served, stub, request(1), request(2))
        stub.gate.set()
        await eventually_async(lambda: stub.marks[1:] == [[1, 2]], "the batch of both")
        waiting[0].cancel()
        (behind_them,) = send(served, request(3))
        await eventually_async(lambda: served.waiting("m") == 1, "waiting")
        assert stub.under_way == 1
        waiting[1].cancel()
        assert tensors_of(await behind_them)["x"][0, 0] == 6  # theirs was the only call allowed at a time
        await eventually_async(lambda: stub.under_way == 0, "the call cancelled")
        statistics = await served.stub.ModelStatistics(pb.ModelStatisticsRequest(name="m"))
        assert statistics.model_stats[0].inference_stats.fail.count == 2


async def test_upstream_call_is_cancelled_once_its_last_caller_has_timed_out(tmp_path: Path) -> None:
    """Before its own deadline, which is that of the caller who has left."""
    stub = Upstream()
    async with behind(tmp_path, stub) as served:
        patient, hasty = await batch_of_patient_and_hasty(served, stub)
        patient.cancel()
        assert (await failure_of(hasty))[0] is Code.DEADLINE_EXCEEDED
        await eventually_async(lambda: stub.under_way == 0, "the call cancelled")


async def test_poisoned_request_behind_a_paceline_upstream_fails_alone(tmp_path: Path) -> None:
    script = Script()
    script.errors[3] = ExecutionError("that row")
    async with (
        serving(tmp_path, {"m": script.model}, config="max_batch_size: 32 dynamic_batching { }") as behind_it,
        proxying(tmp_path, behind_it.target) as served,
    ):
        gate = script.hold(-1)
        calls = send(served, request(-1), timeout_s=None)
        await asyncio.to_thread(gate.wait_entered, 1)
        calls += send(served, *(request(mark) for mark in range(6)))
        await eventually_async(lambda: served.waiting("m") == 6, "six waiting")
        gate.open()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        failed = [call for call, one in zip(calls, outcomes, strict=True) if isinstance(one, Exception)]
        assert [await failure_of(call) for call in failed] == [
            (Code.INTERNAL, f"model 'm': upstream {behind_it.target}: model 'm': that row")
        ]


async def test_stop_answers_requests_that_the_upstream_still_computes(tmp_path: Path) -> None:
    stub = Upstream()
    stub.gates[1] = asyncio.Event()
    async with behind(tmp_path, stub) as served:
        (call,) = send(served, request(1))
        await eventually_async(lambda: stub.under_way == 1, "under way")
        stopping = asyncio.create_task(served.server.stop(20))
        await eventually_async(lambda: not served.server.inference.serving, "stopping")
        stub.gates[1].set()
        assert tensors_of(await call)["x"][0, 0] == 2
        assert await stopping


async def test_queue_timeout_applies_in_front_of_an_upstream(tmp_path: Path) -> None:
    stub = Upstream()
    # Requests of the default level wait without a limit.
    levels = "priority_levels: 2 default_priority_level: 1 priority_queue_policy { key: 1 value { } }"
    stub.config = text_format.Parse(
        f"max_batch_size: 8 dynamic_batching {{ {levels} }}", config_pb.ModelConfig(name="m")
    )
    settings = Settings(paths=())
    short_wait = replace(settings, batching=replace(settings.batching, queue_timeout_ns=50_000_000))
    async with behind(tmp_path, stub, settings=short_wait) as served:
        calls = await calls_behind_a_busy_upstream(served, stub)
        code, text = await failure_of(served.infer(request(1, priority=2)))
        assert (code, "timeout expired" in text) == (Code.DEADLINE_EXCEEDED, True)
        stub.gate.set()
        await calls[0]
