"""gzip and deflate in both directions: each call chooses for its request, the server for all answers."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceStub
from paceline.server.config import Settings
from tests.integration.http2 import call_by_hand
from tests.integration.relay import Relay, relaying
from tests.integration.scripted import Script, mark_of, request
from tests.integration.serving import Served, serving
from tests.integration.streams import Stream
from tests.wire import infer

COLUMNS = 500_000  # 2 MB, which compress to almost nothing
SMALL = 20_000
BOTH = pytest.mark.parametrize("algorithm", [grpc.Compression.Gzip, grpc.Compression.Deflate], ids=lambda one: one.name)


@asynccontextmanager
async def relayed(repository: Path, level: str, *options: tuple[str, Any]) -> AsyncIterator[tuple[Served, Relay]]:
    """A server that compresses answers at `level`, behind a relay that counts bytes."""
    settings = Settings(paths=(repository,), grpc_infer_response_compression_level=level)
    async with (
        serving(repository, {"m": Script().model}, settings=settings) as served,
        relaying(served.server.grpc_port) as relay,
    ):
        unlimited = [("grpc.max_receive_message_length", -1), *options]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{relay.port}", options=unlimited) as channel:
            yield replace(served, channel=channel, stub=GRPCInferenceServiceStub(channel)), relay


@BOTH
async def test_compression_of_requests_is_chosen_by_each_call(tmp_path: Path, algorithm: grpc.Compression) -> None:
    async with relayed(tmp_path, "none") as (served, relay):
        one = request(7, columns=COLUMNS)
        assert mark_of(await served.stub.ModelInfer(one, compression=algorithm, timeout=20)) == 7
        assert relay.sent_bytes < SMALL
        assert relay.answered_bytes > 4 * COLUMNS
        sent = relay.sent_bytes
        assert mark_of(await served.infer(one)) == 7
        assert relay.sent_bytes - sent > 4 * COLUMNS


@pytest.mark.parametrize("level", ["low", "medium", "high"])
async def test_compression_of_answers_applies_to_calls_and_streams(tmp_path: Path, level: str) -> None:
    async with relayed(tmp_path, level) as (served, relay):
        assert mark_of(await served.infer(request(7, columns=COLUMNS))) == 7
        stream = Stream(served)
        await stream.send(request(8, columns=COLUMNS))
        assert await stream.next() == 8
        assert relay.answered_bytes < SMALL


async def test_compression_of_answers_is_omitted_for_clients_that_do_not_support_it(tmp_path: Path) -> None:
    async with relayed(tmp_path, "high", ("grpc.compression_enabled_algorithms_bitset", 1)) as (served, relay):
        assert mark_of(await served.infer(request(7, columns=COLUMNS))) == 7
        assert relay.answered_bytes > 4 * COLUMNS


@BOTH
async def test_compression_in_both_directions_keeps_every_bit(tmp_path: Path, algorithm: grpc.Compression) -> None:
    noise = np.random.default_rng(1).standard_normal((3, 300_000)).astype(np.float32)
    async with relayed(tmp_path, "high") as (served, _):
        answer = await served.stub.ModelInfer(infer("m", {"a": noise}), compression=algorithm, timeout=20)
        assert answer.raw_output_contents[0] == noise.tobytes()


@pytest.mark.parametrize("data", [b"\xff" * 100, zlib.compress(b"x" * 100)[:-7]], ids=["noise", "cut"])
@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_damaged_compressed_bytes_fail_only_their_own_call(tmp_path: Path, encoding: str, data: bytes) -> None:
    async with serving(tmp_path, {"m": Script().model}) as served:
        port = served.server.grpc_port
        received = await call_by_hand(port, data, {"grpc-encoding": encoding}, compressed=True)
        assert b"grpc-status\x0213" in received  # INTERNAL, by gRPC itself
        assert b"Decompression failed" in received
        assert mark_of(await served.infer(request(1))) == 1
