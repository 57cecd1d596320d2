"""Ten times the load that a server can bear: the surplus is refused while the rest is answered, once each, within the
memory limits; afterwards, nothing is left of it."""

from __future__ import annotations

import asyncio
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import grpc

from paceline.protos import inference_pb2 as pb
from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.fault.traffic import peak_bytes, pending, request
from tests.harness import ServerProcess, write_identity
from tests.polling import eventually, eventually_async

Code = grpc.StatusCode
MIB = 2**20
COLUMNS = 65_536  # 256 KiB
QUEUED, RPCS = 16, 64
BEARABLE = 20
"""Concurrent calls: those in the queue, those that execute, and some on their way."""


def samples(server: ServerProcess, name: str) -> dict[str, float]:
    return {key: value for key, value in server.metrics().items() if re.match(rf"{name}(\{{|$)", key)}


def nothing_left(server: ServerProcess) -> bool:
    """Whether no gauge shows anything in progress."""
    gauges = samples(server, "paceline_limit_used") | samples(server, "nv_inference_pending_request_count")
    return not any(value for name, value in gauges.items() if 'limit="models"' not in name)


async def outcome(stub: Any, number: int, columns: int = COLUMNS) -> Code:
    """How a call ends; OK only if the answer is its own."""
    message = request(1, columns, first=float(number))
    try:
        answer: pb.ModelInferResponse = await stub.ModelInfer(message, timeout=60)
    except grpc.aio.AioRpcError as error:
        return error.code()
    assert answer.raw_output_contents[0] == message.raw_input_contents[0]
    return Code.OK


async def test_surplus_is_refused_while_admitted_requests_still_wait(tmp_path: Path) -> None:
    """The admitted requests wait for others that don't come, so all that are answered are answered before them."""
    delayed = "dynamic_batching { max_queue_delay_microseconds: 1000000000 }"
    write_identity(tmp_path, rows=32, extra=delayed)
    with ServerProcess(tmp_path, args=[f"--max-queued-requests={QUEUED}"]) as server:
        async with grpc.aio.insecure_channel(server.target) as channel:
            stub: Any = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
            calls = [asyncio.create_task(outcome(stub, number, 16)) for number in range(10 * QUEUED)]
            await eventually_async(
                lambda: sum(call.done() for call in calls) == 9 * QUEUED, "nine of ten to be answered"
            )
            assert {call.result() for call in calls if call.done()} == {Code.RESOURCE_EXHAUSTED}
            waiting = [call for call in calls if not call.done()]
            assert samples(server, "nv_inference_pending_request_count") == {
                'nv_inference_pending_request_count{model="echo",version="1"}': QUEUED
            }
            for call in waiting[: QUEUED // 2]:
                call.cancel()
            await eventually_async(lambda: pending(server) == QUEUED // 2, "the cancelled ones gone")
            rest = 32 - QUEUED // 2
            await stub.ModelInfer(request(rest), timeout=60)  # fills the batch
            assert [await call for call in waiting[QUEUED // 2 :]] == [Code.OK] * (QUEUED // 2)
            await asyncio.to_thread(_until_nothing_left, server)


async def test_ten_times_the_load_is_answered_once_each_and_leaves_nothing_behind(
    tmp_path: Path, frontends: int
) -> None:
    write_identity(
        tmp_path,
        rows=2,
        dims=f"[ {COLUMNS} ]",
        extra='dynamic_batching { } parameters { key: "execute_delay_ms" value { string_value: "20" } }',
    )
    args = [f"--max-queued-requests={QUEUED}", f"--grpc-max-concurrent-rpcs={RPCS}", f"--max-queued-bytes={4 * MIB}"]
    sent = 1_000
    with ServerProcess(tmp_path, args=args) as server:
        async with grpc.aio.insecure_channel(server.target) as channel:
            stub: Any = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
            assert await outcome(stub, -1) is Code.OK
            before = peak_bytes(server.pid)
            numbers = iter(range(sent))
            outcomes: Counter[Code] = Counter()

            async def caller() -> None:
                for number in numbers:
                    outcomes[await outcome(stub, number)] += 1

            callers = asyncio.gather(*(caller() for _ in range(10 * BEARABLE)))
            seen: list[dict[str, float]] = []
            while not callers.done():
                seen.append(await asyncio.to_thread(server.metrics))
            await callers
            assert set(outcomes) == {Code.OK, Code.RESOURCE_EXHAUSTED}
            assert sum(outcomes.values()) == sent
            # The requests are 250 MiB in all; at a time, calls may take 16 MiB and the queue 4 MiB.
            assert peak_bytes(server.pid) - before < 200 * MIB
            assert await outcome(stub, sent) is Code.OK
            await asyncio.to_thread(_until_nothing_left, server)
            metrics = server.metrics()
            label = '{model="echo",version="1"}'
            answered = outcomes[Code.OK] + 2
            assert metrics[f"nv_inference_request_success{label}"] == answered
            assert metrics[f"nv_inference_count{label}"] == answered
            await asyncio.to_thread(_until_refusals_are, server, outcomes[Code.RESOURCE_EXHAUSTED])
            # As much is executed as without the surplus: all batches but some at the beginning and the end are full.
            assert metrics[f"nv_inference_exec_count{label}"] < 0.6 * answered
    bounds = [name for name in seen[0] if name.startswith("paceline_limit{")]
    assert len(bounds) > 5
    for scrape in seen:
        for name in bounds:
            assert scrape.get(name.replace("limit", "limit_used", 1), 0) <= scrape[name], name


def _until_nothing_left(server: ServerProcess) -> None:
    eventually(lambda: nothing_left(server), "all counters at zero")


async def test_burst_of_calls_is_answered_without_cancelling_any(tmp_path: Path) -> None:
    """More calls at once than gRPC by itself would keep pending until somebody accepts them, which is 3,000."""
    write_identity(tmp_path, rows=32)
    with ServerProcess(tmp_path) as server:
        async with grpc.aio.insecure_channel(server.target) as channel:
            stub: Any = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
            server.signal(signal.SIGSTOP)
            calls = [asyncio.create_task(outcome(stub, number, 16)) for number in range(3_500)]
            await asyncio.wait(calls, timeout=0.5)  # so that they are on their way
            server.signal(signal.SIGCONT)
            assert Counter(await asyncio.gather(*calls)) == {Code.OK: 3_500}
        eventually(lambda: nothing_left(server), "nothing to be left")


def _until_refusals_are(server: ServerProcess, count: int) -> None:
    """Fronts report theirs only from time to time."""
    names = (
        'nv_inference_request_failure{model="echo",reason="REJECTED",version="1"}',
        'paceline_refused_rpcs{reason="rpcs"}',
    )
    eventually(lambda: sum(map(server.metrics().__getitem__, names)) == count, f"{count} refusals counted")
