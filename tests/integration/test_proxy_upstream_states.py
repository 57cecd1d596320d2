"""What the batcher serves and says while the server behind it is not up yet, not ready, silent or gone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline.protos import inference_pb2 as pb
from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.harness import ServerProcess, write_identity
from tests.integration.probing import probe
from tests.integration.scripted import request, send
from tests.integration.serving import Served, failure_of
from tests.integration.streams import Stream
from tests.integration.upstreams import Upstream, behind, proxying, tensors_of, upstream
from tests.polling import eventually, eventually_async
from tests.ports import free_port
from tests.wire import infer, rows_of_floats

Code = grpc.StatusCode
NAMED = {"models": ("m",)}
READY_M = pb.RepositoryIndexResponse.ModelIndex(name="m", state="READY")


async def refusals_of(served: Served, name: str) -> list[tuple[grpc.StatusCode, str]]:
    """Status and message of each RPC about the model `name`."""
    return [
        await failure_of(served.infer(request(1, model=name))),
        await failure_of(served.stub.ModelMetadata(pb.ModelMetadataRequest(name=name), timeout=20)),
        await failure_of(served.stub.ModelConfig(pb.ModelConfigRequest(name=name), timeout=20)),
        await failure_of(served.stub.ModelStatistics(pb.ModelStatisticsRequest(name=name), timeout=20)),
    ]


@pytest.mark.usefixtures("frontends")
async def test_server_is_not_ready_while_its_upstream_is_not(tmp_path: Path) -> None:
    stub = Upstream()
    async with behind(tmp_path, stub) as served:
        repository = served.server.repository
        assert repository.ready
        stub.model_ready = False
        await eventually_async(lambda: not repository.ready, "not ready")
        code, text = await failure_of(served.infer(request(1)))
        assert code is Code.UNAVAILABLE
        assert "the model is not ready" in text
        assert not (await served.stub.ModelReady(pb.ModelReadyRequest(name="m"))).ready
        assert not (await served.stub.ServerReady(pb.ServerReadyRequest())).ready
        stub.model_ready = True
        await eventually_async(lambda: repository.ready, "ready again")
        assert tensors_of(await served.infer(request(1)))["x"][0, 0] == 2
        stub.ready = False  # the server itself: its models keep serving
        await eventually_async(lambda: not repository.ready, "not ready")
        assert (await served.stub.ModelReady(pb.ModelReadyRequest(name="m"))).ready
        assert tensors_of(await served.infer(request(1)))["x"][0, 0] == 2


async def test_upstream_that_starts_later_is_served(tmp_path: Path) -> None:
    stub = Upstream()
    port = free_port()
    target = f"127.0.0.1:{port}"
    async with proxying(tmp_path, target, **NAMED) as served:
        assert not (await served.stub.ServerReady(pb.ServerReadyRequest())).ready
        assert (await failure_of(served.infer(request(1))))[0] is Code.UNAVAILABLE
        async with upstream(stub, port):
            await eventually_async(lambda: served.server.repository.ready, "ready")
            assert tensors_of(await served.infer(request(1)))["x"][0, 0] == 2


@pytest.mark.usefixtures("frontends")
async def test_models_are_unavailable_until_upstream_lists_them(tmp_path: Path) -> None:
    stub = Upstream()
    stub.index = [READY_M]
    port = free_port()
    target = f"127.0.0.1:{port}"
    async with proxying(tmp_path, target) as served:
        for code, text in await refusals_of(served, "m"):
            assert code is Code.UNAVAILABLE
            assert text.startswith(f"Request for unknown model: 'm' is not ready: upstream {target}: ")
            assert "Connection refused" in text
        stream = Stream(served)
        await stream.send(request(1))
        refused = (await stream.message()).infer_response.parameters["paceline_status"]
        assert refused.string_param == "UNAVAILABLE"
        assert not (await served.stub.ModelReady(pb.ModelReadyRequest(name="m"))).ready
        settings = failure_of(served.stub.TraceSetting(pb.TraceSettingRequest(model_name="m")))
        assert (await settings)[0] is Code.UNAVAILABLE
        async with upstream(stub, port):
            await eventually_async(lambda: served.server.repository.ready, "ready")
            await stream.send(request(3))
            answer = (await stream.message()).infer_response
            assert tensors_of(answer)["x"][0, 0] == 6
            assert {code for code, _ in await refusals_of(served, "other")} == {Code.NOT_FOUND}
        await eventually_async(lambda: not served.server.repository.ready, "not ready")
        assert {code for code, _ in await refusals_of(served, "other")} == {Code.NOT_FOUND}


async def test_unlisted_model_is_unavailable_until_upstream_was_ready(tmp_path: Path) -> None:
    stub = Upstream()
    stub.index, stub.ready = [], False
    async with upstream(stub) as target, proxying(tmp_path, target) as served:
        refusal = (Code.UNAVAILABLE, f"Request for unknown model: 'm' is not ready: upstream {target} is not ready")
        assert await failure_of(served.infer(request(1))) == refusal
        stub.ready = True
        await eventually_async(lambda: served.server.repository.ready, "ready")
        assert (await failure_of(served.infer(request(1))))[0] is Code.NOT_FOUND
        stub.ready = False
        await eventually_async(lambda: not served.server.repository.ready, "not ready")
        assert (await failure_of(served.infer(request(1))))[0] is Code.NOT_FOUND


@pytest.mark.usefixtures("frontends")
@pytest.mark.parametrize("state", [None, "LOADING", "UNAVAILABLE"])
async def test_unlisted_model_of_unready_upstream_is_unavailable(tmp_path: Path, state: str | None) -> None:
    """Such an upstream was restarted, or is itself a proxy whose upstream is gone."""
    stub = Upstream()
    stub.index = [READY_M]
    async with upstream(stub) as target, proxying(tmp_path, target) as served:
        assert tensors_of(await served.infer(request(1)))["x"][0, 0] == 2
        stub.index = [] if state is None else [pb.RepositoryIndexResponse.ModelIndex(name="m", state=state)]
        stub.ready = False
        await eventually_async(lambda: not served.server.repository.ready, "not ready")
        assert await failure_of(served.infer(request(1))) == (
            Code.UNAVAILABLE,
            f"Request for unknown model: 'm' is not ready: upstream {target} is not ready",
        )
        stub.ready = True
        await eventually_async(lambda: served.server.repository.ready, "ready")
        assert (await failure_of(served.infer(request(1))))[0] is Code.NOT_FOUND
        stub.index = [READY_M]
        await eventually_async(lambda: served.server.repository.find("m", ""), "the model")
        assert tensors_of(await served.infer(request(1)))["x"][0, 0] == 2


@pytest.mark.parametrize("models", [(), ("m",)], ids=["of the index", "named"])
async def test_probe_and_log_say_why_upstream_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, models: tuple[str, ...]
) -> None:
    stub = Upstream()
    stub.index, stub.model_ready = [READY_M], False
    port = free_port()
    target = f"127.0.0.1:{port}"
    with caplog.at_level("INFO", "paceline.server"):
        async with proxying(tmp_path, target, models=models) as served:
            assert any(line.startswith(f"serving, not ready: upstream {target}: ") for line in caplog.messages)
            assert not any(line.startswith("ready: ") for line in caplog.messages)
            status, text = await probe(served, "/readyz")
            assert status == 503
            assert text.startswith(f"upstream {target}: ")
            assert "Connection refused" in text
            async with upstream(stub, port):
                why = f"model 'm': upstream {target}: the model is not ready"
                await eventually_async(lambda: f"not ready: {why}" in caplog.messages, "the model's reason")
                assert await probe(served, "/readyz") == (503, f"{why}\n")
                stub.model_ready = True
                await eventually_async(lambda: served.server.repository.ready, "ready")
                assert await probe(served, "/readyz") == (200, "ok\n")
                stub.model_ready = False  # it was served before
                await eventually_async(lambda: not served.server.repository.ready, "not ready")
                await eventually_async(lambda: served.server.repository.waits_for, "the reason")
                assert await probe(served, "/readyz") == (503, f"{why}\n")


async def test_unready_model_unanswered_checks_still_give_reason(tmp_path: Path) -> None:
    class Mute(Upstream):
        mute = False
        looks = 0

        async def ModelReady(self, call: Any, context: Any) -> pb.ModelReadyResponse:
            self.looks += 1
            if self.mute:
                await context.abort(Code.DEADLINE_EXCEEDED, "as if no answer had come")
            return await super().ModelReady(call, context)

    stub = Mute()
    async with behind(tmp_path, stub) as served:
        repository = served.server.repository
        stub.mute = True
        looks = stub.looks
        await eventually_async(lambda: stub.looks > looks + 2, "some looks")
        assert repository.ready  # it may be computing
        stub.mute, stub.model_ready = False, False
        await eventually_async(lambda: "the model is not ready" in repository.waits_for, "not ready")
        stub.mute = True
        await eventually_async(lambda: "as if no answer had come" in repository.waits_for, "the other reason")
        assert "as if no answer had come" in (await failure_of(served.infer(request(1))))[1]
        stub.mute, stub.model_ready = False, True
        await eventually_async(lambda: repository.ready, "ready again")
        assert tensors_of(await served.infer(request(2)))["x"][0, 0] == 4


class SilentWhileBusy(Upstream):
    """Fails readiness checks, `unanswered` so far, once it has received a request; `peers` are the connections over
    which they came."""

    def __init__(self) -> None:
        super().__init__()
        self.silent = True
        self.unanswered = 0
        self.peers: set[str] = set()

    async def ServerReady(self, call: Any, context: Any) -> pb.ServerReadyResponse:
        self.peers.add(context.peer())
        if self.calls and self.silent:
            self.unanswered += 1
            await context.abort(Code.DEADLINE_EXCEEDED, "as if no answer had come")
        return await super().ServerReady(call, context)


async def test_computing_upstream_is_not_taken_for_gone(tmp_path: Path) -> None:
    """Servers that compute on their event loop behave like this."""

    stub = SilentWhileBusy()
    async with behind(tmp_path, stub) as served:
        while stub.unanswered < 20:
            assert tensors_of(await served.infer(request(3)))["x"][0, 0] == 6
        assert served.server.repository.ready
        await eventually_async(lambda: not served.server.repository.ready, "silence without any answer is the end")


async def test_silent_upstream_is_checked_over_new_connections(tmp_path: Path) -> None:
    """A vanished machine closes no connection. If its address is another machine's by then, a new one leads there."""
    stub = SilentWhileBusy()
    stub.gates[1] = asyncio.Event()
    async with behind(tmp_path, stub, timeout_secs=20) as served:
        (call,) = send(served, request(1), timeout_s=None)
        await eventually_async(lambda: not served.server.repository.ready, "not ready")
        first = next(iter(stub.peers))
        await eventually_async(lambda: len(stub.peers) > 1, "another connection")
        stub.gates[1].set()
        assert tensors_of(await call)["x"][0, 0] == 2
        stub.silent = False
        await eventually_async(lambda: served.server.repository.ready, "ready again")
        stub.peers.clear()
        assert tensors_of(await served.infer(request(2)))["x"][0, 0] == 4
        await eventually_async(lambda: bool(stub.peers), "looked at again")
        assert first not in stub.peers


def test_upstream_killed_during_batch_is_served_again(tmp_path: Path) -> None:
    """With real processes: a connection breaks, and the server that comes back is another one."""
    slow = 'dynamic_batching { } parameters { key: "execute_delay_ms" value { string_value: "60000" } }'
    write_identity(tmp_path / "slow", extra=slow, dims="[ -1 ]")  # a free dimension, so that it isn't warmed up
    write_identity(tmp_path / "fast")
    one = infer("echo", {"INPUT0": rows_of_floats(1, 16)})
    pending = 'nv_inference_pending_request_count{model="echo",version="1"}'
    port = ("--grpc-port", str(free_port()))
    with ServerProcess(tmp_path / "slow", args=port) as first:
        args = ["--upstream", first.target, "--upstream-health-secs", "0.05", "--upstream-batches", "1"]
        with ServerProcess(args=args) as proxy, grpc.insecure_channel(proxy.target) as channel:
            stub: Any = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
            calls: list[Any] = []

            def some_wait_behind_others() -> bool:
                calls.append(stub.ModelInfer.future(one, timeout=60))
                return proxy.metrics()[pending] > 0

            eventually(some_wait_behind_others, "a batch under way")
            first.kill()
            for call in calls:
                assert call.exception().code() is Code.UNAVAILABLE
            eventually(lambda: not stub.ServerReady(pb.ServerReadyRequest()).ready, "not ready")
            with ServerProcess(tmp_path / "fast", args=port):
                eventually(lambda: stub.ServerReady(pb.ServerReadyRequest()).ready, "ready again", 30)
                answer = stub.ModelInfer(one, timeout=20)
                assert answer.raw_output_contents[0] == one.raw_input_contents[0]
