"""Servers that are killed, restarted and reloaded while clients use them."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline.protos import inference_pb2 as pb
from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.fault.traffic import connected, pending, quiet, request, total
from tests.harness import ServerProcess, touch, write_identity
from tests.polling import eventually, eventually_async
from tests.ports import free_port

OK, UNAVAILABLE = grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE
CLIENTS = 4
RETRIES = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "methodConfig": [
        {
            "name": [{"service": "inference.GRPCInferenceService"}],
            "waitForReady": True,
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "0.05s",
                "maxBackoff": "0.5s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
            },
        }
    ],
}
"""A client's service config that retries what may be retried, on another server as well."""
HEALTH = {"healthCheckConfig": {"serviceName": "inference.GRPCInferenceService"}}
"""Makes it send nothing to a server that reports that it is stopping."""
QUICK = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.min_reconnect_backoff_ms", 50)]
QUICK += [("grpc.max_reconnect_backoff_ms", 200)]
LARGE = ("grpc.per_rpc_retry_buffer_size", 1 << 20)
"""Makes it retry requests of more than 256 KiB as well."""


def server_on(port: int, repository: Path, *args: str) -> ServerProcess:
    return ServerProcess(repository, args=("--grpc-port", str(port), *args))


@pytest.fixture
def ports() -> list[int]:
    return [free_port(), free_port()]


def test_sigkill_fails_requests_in_progress_and_the_next_server_serves_the_same_channel(
    tmp_path: Path, ports: list[int]
) -> None:
    write_identity(tmp_path, extra="dynamic_batching { max_queue_delay_microseconds: 100000000 }")
    with server_on(ports[0], tmp_path) as server, grpc.insecure_channel(server.target, QUICK) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        calls = [stub.ModelInfer.future(request(), timeout=60) for _ in range(3)]
        eventually(lambda: pending(server) == 3, "three requests waiting")
        server.kill()
        assert {call.code() for call in calls} == {UNAVAILABLE}
        with server_on(ports[0], tmp_path) as again:
            answer = stub.ModelInfer(request(rows=8), timeout=60, wait_for_ready=True)
            assert answer.raw_output_contents[0] == request(rows=8).raw_input_contents[0]
            assert quiet(again)
            assert total(again, "nv_inference_request_success") == 1


@pytest.mark.parametrize(
    ("config", "args", "columns"),
    [(RETRIES | HEALTH, ["--drain-grace-secs=1"], 16), (RETRIES, ["--frontends=2"], 100_000)],
    ids=["looking-at-health", "trying-again-with-much"],
)
async def test_rolling_restart_under_load_loses_no_request_of_clients_that_retry(
    tmp_path: Path, ports: list[int], config: dict[str, Any], args: list[str], columns: int
) -> None:
    """Two servers are stopped and restarted on their ports, one after the other, while clients use both."""
    delay = 'parameters { key: "execute_delay_ms" value { string_value: "5" } }'
    write_identity(tmp_path, extra=f"dynamic_batching {{ }} {delay}", dims="[ -1 ]")
    options: list[tuple[str, Any]] = [*QUICK, LARGE, ("grpc.service_config", json.dumps(config))]
    target = "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in ports)
    codes: Counter[grpc.StatusCode] = Counter()
    ended = False

    async def client(stub: Any, number: int) -> None:
        mine = request(columns=columns, first=number * 100)
        while not ended:
            try:
                answer = await stub.ModelInfer(mine, timeout=30)
                assert answer.raw_output_contents[0] == mine.raw_input_contents[0]
                codes[OK] += 1
            except grpc.aio.AioRpcError as error:
                codes[error.code()] += 1

    async def both_answer(servers: list[ServerProcess]) -> None:
        before = [total(server, "nv_inference_request_success") for server in servers]
        await eventually_async(
            lambda: all(
                total(server, "nv_inference_request_success") > count
                for server, count in zip(servers, before, strict=True)
            ),
            "both servers answering",
        )

    with ExitStack() as stack:
        servers = [stack.enter_context(server_on(port, tmp_path, *args)) for port in ports]
        async with grpc.aio.insecure_channel(target, options=options) as channel:
            stub: Any = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
            clients = [asyncio.create_task(client(stub, number)) for number in range(CLIENTS)]
            for number, port in enumerate(ports):
                await both_answer(servers)
                assert await asyncio.to_thread(servers[number].terminate) == 0
                servers[number] = server_on(port, tmp_path, *args)
                stack.callback(servers[number].kill)
                servers[number].start()  # on this thread: it would end with the thread that starts it
                await asyncio.to_thread(servers[number].wait_ready)
            await both_answer(servers)
            ended = True
            await asyncio.gather(*clients)
        assert set(codes) == {OK}, codes
        assert codes[OK] > CLIENTS
        for server in servers:
            assert quiet(server)


@contextmanager
def traffic(server: ServerProcess, clients: int = 4) -> Iterator[Counter[grpc.StatusCode]]:
    """Clients that send one request after the other, and a count of the statuses."""
    codes: Counter[grpc.StatusCode] = Counter()
    ended = threading.Event()

    def ask() -> None:
        with connected(server) as client:
            while not ended.is_set():
                codes[client.code(request())] += 1

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield codes
    finally:
        ended.set()
        for thread in threads:
            thread.join()


@pytest.mark.usefixtures("frontends")
def test_reloads_under_load_lose_and_refuse_no_request(tmp_path: Path) -> None:
    write_identity(tmp_path)
    with (
        ServerProcess(tmp_path, args=("--model-control-mode", "explicit", "--load-model", "echo")) as server,
        traffic(server) as codes,
        grpc.insecure_channel(server.target) as channel,
    ):
        stub: Any = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        for _ in range(10):
            before = codes[OK]
            touch(tmp_path / "echo")
            stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="echo"), timeout=60)
            eventually(lambda before=before: codes[OK] >= before + 20, "requests answered")  # type: ignore[misc]
        assert set(codes) == {OK}, codes
    assert server.returncode == 0


def gone(repository: Path) -> Callable[[], None]:
    """Move the repository away; the returned function puts it back."""
    elsewhere = repository.with_name("elsewhere")
    repository.rename(elsewhere)
    return lambda: elsewhere.rename(repository) and None


@pytest.mark.parametrize("mode", ["none", "poll", "explicit"])
def test_models_keep_serving_while_their_repository_is_gone_and_after_it_is_back(tmp_path: Path, mode: str) -> None:
    repository = tmp_path / "repository"
    write_identity(repository)
    args = ["--model-control-mode", mode, "--repository-poll-secs", "0.05"]
    args += ["--load-model", "echo"] if mode == "explicit" else []
    with ServerProcess(repository, args=args) as server, connected(server) as client:
        stub: Any = GRPCInferenceServiceStub(client.channel)  # type: ignore[no-untyped-call]
        put_back = gone(repository)
        assert client.code(request()) is OK
        load = stub.RepositoryModelLoad.future(pb.RepositoryModelLoadRequest(model_name="echo"), timeout=60)
        assert load.code() is (UNAVAILABLE if mode == "explicit" else grpc.StatusCode.UNIMPLEMENTED)
        if mode == "poll":
            said = "can't be read"
            eventually(lambda: any(said in line["message"] for line in server.log), "a line in the log")
        (line,) = stub.RepositoryIndex(pb.RepositoryIndexRequest(), timeout=60).models
        assert (line.name, line.state) == ("echo", "READY")
        assert client.code(request()) is OK
        put_back()
        if mode == "explicit":
            touch(repository / "echo")
            stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="echo"), timeout=60)
        assert client.code(request()) is OK
        assert quiet(server)
        server.signal(signal.SIGTERM)
        assert server.wait(20) == 0
