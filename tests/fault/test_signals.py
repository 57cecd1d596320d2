"""SIGTERM and SIGINT: whatever the server is doing, it ends gracefully, in time, and leaves no request unanswered."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.protos import inference_pb2 as pb
from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.fault.faulty import HANGS_UNTIL_TOLD, pipe_for_hangs, write_faulty
from tests.fault.traffic import connected, pending, request, says, total
from tests.harness import ServerProcess, write_identity
from tests.integration.serving import RETRY_CANCELLED
from tests.polling import eventually, eventually_async

BOTH_WAYS = pytest.mark.usefixtures("frontends")
"""For what the processes that speak gRPC take part in."""

OK, UNAVAILABLE = grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE
HANGS = 'parameters { key: "execute_delay_ms" value { string_value: "100000" } }'
FREE = "[ -1 ]"
"""Unknown dims keep the server from warming up, which takes as long as an execution."""


def delay_ms(ms: int) -> str:
    return f'parameters {{ key: "execute_delay_ms" value {{ string_value: "{ms}" }} }}'


def ends(server: ServerProcess, within_s: float) -> int:
    """The exit status; the server must end within `within_s` seconds from now."""
    status = server.wait(within_s)
    assert not [line for line in server.stderr if not line.startswith("{")]
    return status


def one_waits_for_another(server: ServerProcess) -> bool:
    """Whether, of two requests, one executes and the other waits. Seen twice: the first passes through the queue, too,
    and the second, if it came after a signal, would be refused."""
    return pending(server) == pending(server) == 1


def test_signal_while_idle_ends_at_once_with_status_0(tmp_path: Path, frontends: int) -> None:
    write_identity(tmp_path)
    number = signal.SIGTERM if frontends == 1 else signal.SIGINT
    with ServerProcess(tmp_path) as server, connected(server) as client:
        assert client.code(request()) is OK
        server.signal(number)
        assert ends(server, 15) == 0
        (took_s,) = re.findall(r"stopped after (\S+) s", "".join(server.stderr))
        assert float(took_s) < 15


def test_sigterm_without_grace_while_idle_gives_up_on_nothing(tmp_path: Path) -> None:
    write_identity(tmp_path)
    with ServerProcess(tmp_path, args=("--exit-timeout-secs", "0")) as server:
        server.signal(signal.SIGTERM)
        assert ends(server, 15) == 0
        assert not says(server, "gave up")


@BOTH_WAYS
def test_sigterm_with_open_health_streams_notifies_them_and_ends_at_once(tmp_path: Path) -> None:
    write_identity(tmp_path)
    with ServerProcess(tmp_path) as server, connected(server) as client:
        health = health_pb2_grpc.HealthStub(client.channel)
        streams = [health.Watch(health_pb2.HealthCheckRequest(service=name)) for name in ("", "no.such")]
        first = [next(stream).status for stream in streams]
        server.signal(signal.SIGTERM)
        last = [[response.status for response in stream] for stream in streams]
        assert ends(server, 15) == 0
    status = health_pb2.HealthCheckResponse
    assert first == [status.SERVING, status.SERVICE_UNKNOWN]
    assert last == [[status.NOT_SERVING], []]


@BOTH_WAYS
def test_sigterm_with_a_drain_grace_keeps_serving_unready_until_the_second(tmp_path: Path) -> None:
    write_identity(tmp_path)
    with ServerProcess(tmp_path, args=["--drain-grace-secs", "600"]) as server, connected(server) as client:
        watch = health_pb2_grpc.HealthStub(client.channel).Watch(health_pb2.HealthCheckRequest())
        status = health_pb2.HealthCheckResponse
        assert next(watch).status == status.SERVING
        server.signal(signal.SIGTERM)
        assert next(watch).status == status.NOT_SERVING
        assert client.code(request()) is OK
        stub: Any = GRPCInferenceServiceStub(client.channel)  # type: ignore[no-untyped-call]
        assert not stub.ServerReady(pb.ServerReadyRequest(), timeout=20).ready
        assert not stub.ModelReady(pb.ModelReadyRequest(name="echo"), timeout=20).ready
        assert stub.ServerLive(pb.ServerLiveRequest(), timeout=20).live
        with pytest.raises(urllib.error.HTTPError, match="503") as refused:
            urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/readyz", timeout=20)
        refused.value.close()
        with connected(server) as newcomer:
            assert newcomer.code(request()) is OK
        # If it ended, clients that watch health would ask again at once, and again.
        assert watch.is_active()
        server.signal(signal.SIGTERM)
        assert ends(server, 15) == 128 + signal.SIGTERM


def test_sigterm_with_a_drain_grace_ends_gracefully_after_it(tmp_path: Path) -> None:
    write_identity(tmp_path, extra="dynamic_batching { max_queue_delay_microseconds: 100000000 }")
    with ServerProcess(tmp_path, args=["--drain-grace-secs", "0.6"]) as server, connected(server) as client:
        call = client.send(request())
        eventually(lambda: pending(server) == 1, "a request waiting for company")
        began_s = time.monotonic()
        server.signal(signal.SIGTERM)
        eventually(lambda: says(server, "reporting not ready"), "the grace")
        assert call.code() is OK  # it waits until no more requests are accepted
        assert time.monotonic() - began_s > 0.5
        assert ends(server, 15) == 0
        said = [record["message"].partition(":")[0] for record in server.log]
        assert said.index("shutting down") < said.index("stopping")


@BOTH_WAYS
def test_sigterm_under_load_answers_accepted_requests_and_refuses_the_rest(tmp_path: Path) -> None:
    write_faulty(tmp_path / "models")
    env = pipe_for_hangs(tmp_path)
    with (
        ServerProcess(tmp_path / "models", env=env, module="tests.fault.faulty") as server,
        connected(server, RETRY_CANCELLED) as client,
    ):
        accepted = {HANGS_UNTIL_TOLD: client.send(request(first=HANGS_UNTIL_TOLD))}
        with (tmp_path / "pipe").open("wb"):  # opens once that one executes, which it does until the end of the block
            accepted |= {number: client.send(request(first=number)) for number in range(15)}
            eventually(lambda: pending(server) == 15, "all requests accepted")
            server.signal(signal.SIGTERM)
            late: list[Any] = []

            def one_more_is_refused() -> bool:
                late.append(client.send(request()))
                return any(call.done() and call.code() is UNAVAILABLE for call in late)

            eventually(one_more_is_refused, "a new request refused")
            assert not any(call.done() for call in accepted.values())
        for number, call in accepted.items():
            assert call.result().raw_output_contents[0] == request(first=number).raw_input_contents[0]
        assert ends(server, 30) == 0
        assert {call.code() for call in late} <= {OK, UNAVAILABLE}


@BOTH_WAYS
async def test_sigterm_during_traffic_from_many_clients_refuses_only_with_unavailable(tmp_path: Path) -> None:
    write_identity(tmp_path)
    codes: Counter[grpc.StatusCode] = Counter()

    async def send_until_refused(target: str) -> None:
        options = [("grpc.use_local_subchannel_pool", 1), *RETRY_CANCELLED]
        async with grpc.aio.insecure_channel(target, options=options) as channel:
            stub: Any = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
            code = OK
            while code is OK:
                code = await stub.ModelInfer(request(), timeout=20).code()
                codes[code] += 1

    with ServerProcess(tmp_path) as server:
        clients = [asyncio.create_task(send_until_refused(server.target)) for _ in range(32)]
        await eventually_async(lambda: codes[OK] > 100, "traffic flowing")
        server.signal(signal.SIGTERM)
        await asyncio.gather(*clients)
        assert ends(server, 15) == 0
    assert codes == {OK: codes[OK], UNAVAILABLE: 32}


def test_sigterm_during_a_long_queue_delay_executes_at_once(tmp_path: Path) -> None:
    write_identity(tmp_path, extra="dynamic_batching { max_queue_delay_microseconds: 100000000 }")
    with ServerProcess(tmp_path) as server, connected(server) as client:
        calls = [client.send(request(first=number)) for number in range(3)]
        eventually(lambda: pending(server) == 3, "three requests waiting for company")
        server.signal(signal.SIGTERM)
        assert ends(server, 15) == 0
        assert [call.code() for call in calls] == [OK] * 3


@BOTH_WAYS
def test_sigterm_during_a_hanging_execution_ends_after_the_grace_period(tmp_path: Path) -> None:
    write_identity(tmp_path, dims=FREE, extra=HANGS)
    with ServerProcess(tmp_path, args=("--exit-timeout-secs", "1.5")) as server, connected(server) as client:
        running, waiting = client.send(request()), client.send(request())
        eventually(lambda: one_waits_for_another(server), "one request running, one waiting")
        began = time.monotonic()
        server.signal(signal.SIGTERM)
        assert ends(server, 15) == 0
        assert time.monotonic() - began > 1.4
        for call in (running, waiting):
            assert call.code() is UNAVAILABLE
            assert call.details() == "model 'echo': the model is being unloaded or the server is stopping"
        assert says(server, "gave up waiting after 1.5 s for models that still execute, load or are being closed")


def test_second_signal_ends_at_once_with_its_status(tmp_path: Path, frontends: int) -> None:
    write_identity(tmp_path, dims=FREE, extra=HANGS)
    second = signal.SIGINT if frontends == 1 else signal.SIGTERM
    with ServerProcess(tmp_path, args=("--exit-timeout-secs", "100")) as server, connected(server) as client:
        call, other = client.send(request()), client.send(request())
        eventually(lambda: one_waits_for_another(server), "one request running, one waiting")
        server.signal(signal.SIGTERM)
        eventually(lambda: says(server, "stopping"), "the first signal noticed")
        server.signal(second)
        assert ends(server, 15) == 128 + second
        assert call.code() is UNAVAILABLE
        assert other.code() is UNAVAILABLE


@pytest.mark.skipif(sys.platform != "linux", reason="which signals a process catches is told by Linux")
def test_signal_that_is_not_handled_ends_the_process_at_once(tmp_path: Path) -> None:
    write_identity(tmp_path)
    with ServerProcess(tmp_path) as server:
        status = Path(f"/proc/{server.pid}/status").read_text(encoding="ascii")
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)
        others = (signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
        assert not [one for one in others if caught >> (one - 1) & 1]
        assert caught >> (signal.SIGTERM - 1) & 1
        server.signal(signal.SIGUSR1)
        assert ends(server, 15) == -signal.SIGUSR1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_while_models_load_ends_at_once_with_status_0(tmp_path: Path, number: int) -> None:
    write_identity(tmp_path, extra=HANGS)  # its warm-up hangs
    server = ServerProcess(tmp_path)
    server.start()
    try:
        eventually(lambda: says(server, "loading"), "models being loaded")
        server.signal(number)
        assert ends(server, 15) == 0
        assert says(server, "stopped while loading")
    finally:
        server.kill()


def test_sigterm_after_the_client_is_gone_still_ends_at_once(tmp_path: Path) -> None:
    write_identity(tmp_path, extra="dynamic_batching { max_queue_delay_microseconds: 100000000 }")
    with ServerProcess(tmp_path) as server:
        with connected(server) as client:
            call = client.send(request())
            eventually(lambda: pending(server) == 1, "a request in the queue")
            call.cancel()
        eventually(lambda: pending(server) == 0, "the request gone from the queue")
        assert total(server, "nv_inference_count") == 0
        server.signal(signal.SIGTERM)
        assert ends(server, 15) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("line", ["loading 1 model", "model 'echo' version 1 loaded", "ready: gRPC"])
def test_signal_at_each_step_of_the_start_ends_with_status_0(tmp_path: Path, line: str, number: int) -> None:
    write_identity(tmp_path)
    server = ServerProcess(tmp_path)
    server.start()
    try:
        eventually(lambda: says(server, line), line)
        server.signal(number)
        assert ends(server, 20) == 0
    finally:
        server.kill()


def test_signal_before_the_first_log_line_ends_the_process(tmp_path: Path) -> None:
    write_identity(tmp_path)
    server = ServerProcess(tmp_path, fresh=True)
    server.start()
    try:
        server.signal(signal.SIGTERM)
        assert server.wait(20) in (0, -signal.SIGTERM, 128 + signal.SIGTERM)
    finally:
        server.kill()


def test_sigint_during_a_drain_gives_up_at_once(tmp_path: Path) -> None:
    write_identity(tmp_path, dims=FREE, rows=1, extra=delay_ms(300))
    with ServerProcess(tmp_path) as server, connected(server) as client:
        calls = [client.send(request(first=number)) for number in range(40)]
        # In this order: what is answered in between is missed, and not counted twice.
        eventually(lambda: total(server, "nv_inference_request_success") + pending(server) >= 39, "all accepted")
        server.signal(signal.SIGTERM)
        eventually(lambda: says(server, "stopping"), "the drain")
        eventually(lambda: sum(call.done() and call.code() is OK for call in calls) >= 2, "some answers")
        server.signal(signal.SIGINT)
        assert ends(server, 15) == 128 + signal.SIGINT
        codes = [call.code() for call in calls]
        assert set(codes) == {OK, UNAVAILABLE}
