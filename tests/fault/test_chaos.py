"""Thousands of requests, at random good, bad, malformed, hasty, cancelled or broken off, over many connections."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import grpc

from paceline.protos import inference_pb2 as pb
from tests.fault.traffic import connected, quiet, request
from tests.fuzz.mutation import mutated
from tests.fuzz.targets import inputs
from tests.harness import ServerProcess, write_identity
from tests.integration.http2 import call_frames
from tests.lengths import LONG
from tests.polling import eventually

REQUESTS = 10_000 if LONG else 1_500
CONNECTIONS, AT_ONCE = 16, 128
CONFIG = """dynamic_batching { max_queue_delay_microseconds: 200 default_queue_policy { max_queue_size: 64 } }
    instance_group { count: 2 } parameters { key: "execute_delay_ms" value { string_value: "1" } }"""
INFER = "/inference.GRPCInferenceService/ModelInfer"
Code = grpc.StatusCode
GOOD = {Code.OK, Code.RESOURCE_EXHAUSTED}
POSSIBLE = {
    "good": GOOD,
    "bad": {Code.INVALID_ARGUMENT, Code.NOT_FOUND},
    # Changed at random, a request may still be good, and may ask for a deadline.
    "malformed": {*GOOD, Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.UNIMPLEMENTED, Code.DEADLINE_EXCEEDED},
    "hasty": {*GOOD, Code.DEADLINE_EXCEEDED},
    "cancelled": {*GOOD, Code.CANCELLED},
    "broken off": {None},
}
KINDS = ["good"] * 8 + ["bad"] * 3 + ["malformed"] * 4 + ["hasty"] * 2 + ["cancelled"] * 2 + ["broken off"]


class Chaos:
    """A misbehaving client. What it does is the same in each run; when it does it isn't."""

    def __init__(self, server: ServerProcess, channels: list[grpc.aio.Channel]) -> None:
        self._port = server.grpc_port
        self._calls: list[Any] = [channel.unary_unary(INFER) for channel in channels]
        self._good = request().SerializeToString()
        self._corpus = [self._good, *(path.read_bytes() for path in inputs("infer"))]
        self.ends: dict[str, Counter[Code | None]] = {kind: Counter() for kind in POSSIBLE}

    async def run(self, count: int) -> None:
        numbers = iter(range(count))

        async def work() -> None:
            for number in numbers:
                chance = random.Random(number)
                kind = chance.choice(KINDS)
                code = await (self._break_off(chance) if kind == "broken off" else self._call(kind, number, chance))
                self.ends[kind][code] += 1

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))

    async def _call(self, kind: str, number: int, chance: random.Random) -> Code:
        data, timeout_s = self._data(kind, number, chance), 60.0
        if kind == "hasty":
            timeout_s = chance.choice((0.0005, 0.003, 0.01))
        call = self._calls[number % len(self._calls)](data, timeout=timeout_s)
        if kind == "cancelled":
            await asyncio.sleep(chance.choice((0, 0.001, 0.004)))
            call.cancel()
        code: Code = await call.code()
        if kind == "good" and code is Code.OK:
            answer = pb.ModelInferResponse.FromString(await call)
            assert answer.raw_output_contents[0] == pb.ModelInferRequest.FromString(data).raw_input_contents[0]
        return code

    def _data(self, kind: str, number: int, chance: random.Random) -> bytes:
        if kind == "bad":
            bad = request(columns=chance.choice((0, 15, 17)))
            return bad.SerializeToString()
        if kind == "malformed":
            return mutated("infer", chance, self._corpus)
        return request(first=number).SerializeToString()

    async def _break_off(self, chance: random.Random) -> None:
        """Open a separate connection, and end it in the middle of a request, properly or with a reset."""
        frames = call_frames(self._good)
        _, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(frames[: chance.randrange(len(frames))])
        if chance.random() < 0.5:
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()


def resident_bytes(server: ServerProcess) -> int:
    return int(Path(f"/proc/{server.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors(server: ServerProcess) -> int:
    return len(list(Path(f"/proc/{server.pid}/fd").iterdir()))


async def test_chaos_gets_expected_statuses_and_each_its_own_answer_and_leaves_nothing_behind(tmp_path: Path) -> None:
    write_identity(tmp_path, extra=CONFIG)
    with ServerProcess(tmp_path) as server:
        with connected(server) as client:
            assert client.code(request()) is Code.OK
        before, open_before = resident_bytes(server), descriptors(server)
        options = [("grpc.use_local_subchannel_pool", 1)]
        channels = [grpc.aio.insecure_channel(server.target, options=options) for _ in range(CONNECTIONS)]
        chaos = Chaos(server, channels)
        await chaos.run(REQUESTS)
        for channel in channels:
            await channel.close()
        for kind, possible in POSSIBLE.items():
            assert set(chaos.ends[kind]) <= possible, (kind, chaos.ends[kind])
        assert chaos.ends["good"][Code.OK] > REQUESTS // 20
        eventually(lambda: quiet(server), "nothing waiting")
        eventually(lambda: descriptors(server) <= open_before + 2, "the connections closed")
        assert resident_bytes(server) - before < 150_000_000
        with connected(server) as client:
            assert client.code(request()) is Code.OK
        assert not [line for line in server.stderr if not line.startswith("{")]
