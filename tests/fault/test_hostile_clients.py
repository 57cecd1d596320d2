"""Clients that can reach a port can't fill the log, block the server or take its memory."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline.clients import InferenceClient
from paceline.protos import inference_pb2 as pb
from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceStub
from paceline.protos.wire import delimited
from tests.certificates import Authority
from tests.fault.traffic import connected, peak_bytes, quiet, request
from tests.harness import ServerProcess, write_identity
from tests.integration.http2 import begun_calls, call_by_hand, calls_unread, next_reset
from tests.polling import eventually

PREFACE = begun_calls(0)


def said_since(server: ServerProcess, lines: int) -> list[str]:
    """The first words of the log's lines after the first `lines`, all of which must be ours."""
    return [json.loads(line)["message"].split()[0] for line in server.stderr[lines:]]


def test_failed_handshakes_leave_no_lines(tmp_path: Path) -> None:
    pair = Authority(tmp_path).sign("server")
    write_identity(tmp_path / "models")
    args = ["--grpc-use-ssl=true", f"--grpc-server-cert={pair.certificate}", f"--grpc-server-key={pair.key}"]
    with ServerProcess(tmp_path / "models", args=args) as server:
        lines = len(server.stderr)
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", server.grpc_port), timeout=20) as connection:
                connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
                while connection.recv(4096):
                    pass
        assert server.terminate() == 0
    assert said_since(server, lines) == ["stopping:", "stopped"]


@pytest.mark.parametrize("header", [("grpc-timeout", "9x9"), ("grpc-encoding", "nonsense")], ids=lambda one: one[0])
def test_unreadable_headers_leave_no_lines(tmp_path: Path, header: tuple[str, str]) -> None:
    write_identity(tmp_path)
    with ServerProcess(tmp_path) as server:
        lines = len(server.stderr)
        for _ in range(3):
            assert b"grpc-status" in asyncio.run(call_by_hand(server.grpc_port, b"", dict([header])))
        assert server.terminate() == 0
    assert said_since(server, lines) == ["stopping:", "stopped"]


def threads(server: ServerProcess) -> int:
    return len(list(Path(f"/proc/{server.pid}/task").iterdir()))


def test_silent_connections_to_the_metrics_port_are_limited_and_keep_nobody_out(tmp_path: Path) -> None:
    write_identity(tmp_path)
    with ServerProcess(tmp_path) as server, ExitStack() as silent:
        before = threads(server)
        connections = [
            silent.enter_context(socket.create_connection(("127.0.0.1", server.metrics_port), timeout=20))
            for _ in range(100)
        ]
        for number, one in enumerate(connections):
            one.sendall(b"GET /met"[: number % 8])
        # The oldest connection is closed first, whatever it has sent.
        assert connections[0].recv(1) == b""
        eventually(lambda: threads(server) <= before + 64, "no thread for each of them")
        assert server.metrics()["paceline_ready"] == 1
        eventually(lambda: threads(server) <= before + 64, "no thread left of a closed one")
    assert not any("Traceback" in line for line in server.stderr)


def is_open(connection: socket.socket) -> bool:
    """Whether the server sends anything on it."""
    try:
        return bool(connection.recv(1))
    except ConnectionError:
        return False


def test_connections_beyond_the_limit_are_closed_and_earlier_ones_keep_working(tmp_path: Path) -> None:
    write_identity(tmp_path)
    with ServerProcess(tmp_path, args=["--grpc-max-connections=5"]) as server, ExitStack() as idle:
        with InferenceClient(server.target) as client:
            assert client.server_live()
            connections = [
                idle.enter_context(socket.create_connection(("127.0.0.1", server.grpc_port), timeout=20))
                for _ in range(20)
            ]
            for one in connections:
                with suppress(ConnectionError):
                    one.sendall(PREFACE)
            assert sum(map(is_open, connections)) == 4
            assert client.server_live()
            for one in connections:
                one.close()
        with InferenceClient(server.target) as client:
            client.wait_ready(20)


def few_descriptors(number: int, most: int | None = None) -> Sequence[str]:
    limits = f"ulimit -Sn {number}; ulimit -Hn {most or number}"
    return "/bin/sh", "-c", f'{limits}; exec "{sys.executable}" -m paceline "$@"', "sh"


def connections_to(server: ServerProcess, number: int, until: ExitStack) -> list[socket.socket]:
    """Idle connections, of which the server may have closed some."""
    connections = [
        until.enter_context(socket.create_connection(("127.0.0.1", server.grpc_port), timeout=20))
        for _ in range(number)
    ]
    for one in connections:
        with suppress(ConnectionError):
            one.sendall(PREFACE)
    return connections


def stays_open(connection: socket.socket) -> bool:
    """Whether the server hasn't closed it so far."""
    connection.setblocking(False)
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return True
    except ConnectionError:
        pass
    return False


LIMIT = 'paceline_limit{limit="connections"}'
"""Of 256 descriptors, 32 are kept for probes."""


def says_full(server: ServerProcess) -> int:
    return sum("connections are open, as many as there may be" in record["message"] for record in server.log)


def test_connections_leave_descriptors_to_models_that_load_later(tmp_path: Path) -> None:
    models = [f"m{number}" for number in range(60)]
    for name in ("echo", *models):
        write_identity(tmp_path, name)
    args = ["--model-control-mode=explicit", "--load-model=echo"]
    with ServerProcess(tmp_path, args=args, program=few_descriptors(256)) as server, ExitStack() as idle:
        before = server.metrics()[LIMIT]
        assert before < 224
        with grpc.insecure_channel(server.target) as channel:
            stub: Any = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
            stub.ServerLive(pb.ServerLiveRequest(), timeout=60)
            connections = connections_to(server, 150, idle)
            assert all(map(is_open, connections))
            for name in models:
                stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name=name), timeout=60)
            eventually(lambda: says_full(server) > 0, "a line in the log")
            connections += connections_to(server, 100, idle)

            def settled() -> bool:
                return server.metrics()[LIMIT] == sum(map(stays_open, connections)) + 1

            eventually(settled, "as many connections as the limit says, one of them the channel's")
            assert server.metrics()[LIMIT] <= before - len(models)
            assert stays_open(connections[0])
            assert stub.ServerLive(pb.ServerLiveRequest(), timeout=60).live
    assert not any("Traceback" in line for line in server.stderr)


def test_loads_leave_descriptors_to_connections_and_probes(tmp_path: Path) -> None:
    for number in range(100):
        write_identity(tmp_path, f"m{number}")
    with ServerProcess(tmp_path, program=few_descriptors(128)) as server:
        metrics = server.metrics()
        assert metrics["paceline_failed_models"] > 0
        assert metrics[LIMIT] >= 8
        with grpc.insecure_channel(server.target) as channel:
            stub: Any = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
            reasons = {one.reason for one in stub.RepositoryIndex(pb.RepositoryIndexRequest(), timeout=60).models}
        assert all("files that the process may open (ulimit -Hn)" in reason for reason in reasons - {""})


@pytest.mark.parametrize(
    ("flags", "bounds"),
    [
        ((), range(80, 112)),
        (("--frontends=2",), range(160, 224)),
        (("--grpc-max-connections=51",), [51]),
    ],
)
def test_metrics_show_the_connection_limit_that_descriptors_or_the_flag_allow(
    tmp_path: Path, flags: Sequence[str], bounds: Sequence[int]
) -> None:
    """Of 128 descriptors, 16 are kept for probes, and some are in use."""
    write_identity(tmp_path)
    with ServerProcess(tmp_path, program=few_descriptors(128), args=flags) as server:
        eventually(lambda: int(server.metrics()[LIMIT]) in bounds, "frontends to tell theirs")


def test_soft_limit_of_descriptors_is_raised_to_the_hard_limit(tmp_path: Path) -> None:
    write_identity(tmp_path)
    with ServerProcess(tmp_path, program=few_descriptors(128, most=400)) as server:
        assert resource.prlimit(server.pid, resource.RLIMIT_NOFILE) == (400, 400)
        assert server.metrics()[LIMIT] > 300


async def test_calls_beyond_the_limit_of_a_connection_are_reset(tmp_path: Path) -> None:
    write_identity(tmp_path)
    with (
        ServerProcess(tmp_path, args=["--grpc-max-connection-calls=5"]) as server,
        InferenceClient(server.target) as client,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.grpc_port)
        writer.write(begun_calls(20))
        # Streams have odd numbers, and the first five are those allowed.
        assert [await next_reset(reader) for _ in range(15)] == list(range(11, 40, 2))
        assert client.server_live()
        writer.close()


@pytest.mark.parametrize("algorithm", [grpc.Compression.Gzip, grpc.Compression.Deflate], ids=lambda one: one.name)
def test_message_beyond_the_limit_once_decompressed_is_refused_before_it_takes_the_memory(
    tmp_path: Path, algorithm: grpc.Compression
) -> None:
    """Some 130 KB, 128 MiB uncompressed."""
    write_identity(tmp_path)
    with ServerProcess(tmp_path, args=["--grpc-max-message-bytes=1000000"]) as server, connected(server) as client:
        assert client.code(request()) is grpc.StatusCode.OK
        before = peak_bytes(server.pid)
        infer = client.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        bomb = infer.future(bytes(128 * 2**20), compression=algorithm, timeout=60)
        assert bomb.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "larger than max" in bomb.details()
        assert peak_bytes(server.pid) - before < 32 * 2**20
        assert client.code(request()) is grpc.StatusCode.OK


EMPTY_TEXTS = delimited(b"\x2a", delimited(b"\x2a", b"\x42\x00" * 2**23))
EMPTY_TEXTS_RAW = pb.ModelInferRequest(
    model_name="echo",
    inputs=[pb.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="BYTES", shape=[1, 2**22])],
    raw_input_contents=[bytes(2**24)],
).SerializeToString()


@pytest.mark.parametrize(
    "data",
    [EMPTY_TEXTS, EMPTY_TEXTS_RAW, b"\x2a\x00" * 2**23, b"\x22\x00" * 2**23],
    ids=["typed", "raw", "inputs", "map"],
)
def test_millions_of_empty_things_take_little_more_than_their_message(tmp_path: Path, data: bytes) -> None:
    """Some 16 KB, 16 MiB uncompressed, of which Python would make a hundred times as much."""
    write_identity(tmp_path)
    with ServerProcess(tmp_path) as server, connected(server) as client:
        assert client.code(request()) is grpc.StatusCode.OK
        before = peak_bytes(server.pid)
        infer = client.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        bomb = infer.future(data, compression=grpc.Compression.Gzip, timeout=60)
        assert bomb.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert peak_bytes(server.pid) - before < 5 * len(data)
        assert client.code(request()) is grpc.StatusCode.OK


UNREAD, UNSENT = calls_unread(20, request().SerializeToString()), begun_calls(20)


@pytest.mark.parametrize(
    ("frontends", "calls"), [(1, UNREAD), (1, UNSENT), (2, UNREAD)], ids=["unread", "unsent", "unread-fronts"]
)
def test_calls_without_a_request_or_with_an_unread_answer_count_until_the_client_leaves(
    tmp_path: Path, frontends: int, calls: bytes
) -> None:
    """A connection reaches one process, which has its share of the limit."""
    write_identity(tmp_path)
    args, allowed = ["--grpc-max-concurrent-rpcs=8", f"--frontends={frontends}"], 8 // frontends
    used, refused = 'paceline_limit_used{limit="rpcs"}', 'paceline_refused_rpcs{reason="rpcs"}'
    with ServerProcess(tmp_path, args=args) as server:
        with socket.create_connection(("127.0.0.1", server.grpc_port), timeout=20) as connection:
            connection.sendall(calls)
            eventually(lambda: server.metrics()[refused] == 20 - allowed, "the surplus refused")
            assert server.metrics()[used] == allowed
            with InferenceClient(server.target) as prober:
                assert prober.server_live()
        eventually(lambda: server.metrics()[used] == 0, "nothing left of it")
        with connected(server) as client:
            assert client.code(request()) is grpc.StatusCode.OK
        assert quiet(server)
