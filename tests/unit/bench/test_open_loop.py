from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from bench.gpu_processes import RandomLoad
from bench.load import METHOD
from bench.open_loop import Plan, drive, schedule_s
from bench.steps import BenchError


@pytest.fixture
async def target() -> AsyncIterator[str]:
    """A server that answers with the request, but never answers b"never"."""

    async def answer(request: bytes, context: Any) -> bytes:
        if request == b"never":
            await asyncio.Event().wait()
        return request

    service, method = METHOD.strip("/").split("/")
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(service, {method: grpc.unary_unary_rpc_method_handler(answer)})]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


def test_schedule_has_the_rate_and_depends_on_the_seed_alone() -> None:
    plan = Plan("", (), per_s=1_000, deadline_s=1, seconds=9, warmup_s=1, seed=1)
    times_s = schedule_s(plan)
    assert len(times_s) == pytest.approx(10_000, rel=0.1)
    assert times_s == sorted(times_s) == schedule_s(plan)
    assert times_s[-1] < 10


async def test_drive_counts_requests_sent_after_the_warm_up(target: str) -> None:
    plan = Plan(target, (b"a",), per_s=200, deadline_s=30, seconds=0.3, warmup_s=0.1)
    found = await drive(plan)
    assert found["ok"] == found["offered"] == sum(at_s >= 0.1 for at_s in schedule_s(plan)) > 0
    assert found["errors"] == {}


async def test_drive_counts_requests_not_answered_in_time_as_errors(target: str) -> None:
    found = await drive(Plan(target, (b"never",), per_s=100, deadline_s=0.05, seconds=0.2, warmup_s=0.0))
    assert found["errors"] == {"DEADLINE_EXCEEDED": found["offered"]}


def test_schedule_has_one_request_that_counts_even_if_it_is_due_after_the_end() -> None:
    plan = Plan("nowhere", (b"",), per_s=0.5, deadline_s=1.0, seconds=0.01, warmup_s=0.01)
    (only,) = schedule_s(plan)
    assert only > 0.02


async def test_drive_tells_each_latency(target: str) -> None:
    found = await drive(Plan(target, (b"a",), per_s=200, deadline_s=30, seconds=0.2, warmup_s=0.0))
    assert len(found["latencies_ms"]) == found["ok"]
    assert max(found["latencies_ms"]) >= found["p99_ms"] >= found["p50_ms"]


async def test_random_load_of_several_processes_has_the_rate_of_all(target: str, tmp_path: Path) -> None:
    (tmp_path / "request").write_bytes(b"a")
    send = RandomLoad(2).send
    found = await asyncio.to_thread(send, target, [tmp_path / "request"], 200, 0.5, 0.1, 0)
    assert found["requests_per_s"] == pytest.approx(200, rel=0.5)
    assert found["p99_ms"] >= found["p50_ms"] > 0


async def test_random_load_that_gets_no_answers_fails(target: str, tmp_path: Path) -> None:
    (tmp_path / "request").write_bytes(b"")
    with pytest.raises(BenchError, match="EMPTY"):
        await asyncio.to_thread(RandomLoad(1).send, target, [tmp_path / "request"], 100, 0.2, 0.0, 0)
