from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import pytest

from bench.gpu_processes import LoadGenerators, RandomLoad
from bench.load import BenchError, closed, open_loop
from paceline.clients.load.sending import METHOD


@pytest.fixture
async def target() -> AsyncIterator[str]:
    """A server that answers with the request, but refuses b"no", breaks with b"bad", and never answers b"never"."""

    async def answer(request: bytes, context: Any) -> bytes:
        if request in (b"no", b"bad"):
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED if request == b"no" else grpc.StatusCode.INTERNAL)
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


async def test_closed_loop_tells_rates_percentiles_and_what_was_seen(target: str) -> None:
    seen, began = count(), []
    found = await asyncio.to_thread(
        closed, target, [b"one", b"two"], 4, 0.4, 0.2, look=lambda: next(seen), meanwhile=lambda: began.append(True)
    )
    assert found["ok"] > 0
    # More than once 0.4 s if hardly anything was answered, as on a machine that stands still.
    times = found["answers"] / found["requests_per_s"] / 0.4
    assert times == pytest.approx(round(times))
    assert found["p50_ms"] <= found["p90_ms"] <= found["p99_ms"]
    assert (found["before"], found["after"], began) == (1, 1 + round(times), [True])


async def test_closed_loop_with_an_error_has_no_result(target: str) -> None:
    with pytest.raises(BenchError, match="RESOURCE_EXHAUSTED"):
        await asyncio.to_thread(closed, target, [b"one", b"no"], 2, 0.2, 0.0)


async def test_open_loop_counts_refused_and_late_requests(target: str, tmp_path: Path) -> None:
    (tmp_path / "never").write_bytes(b"never")
    found = await asyncio.to_thread(open_loop, target, [b"no", tmp_path / "never", b"one"], 150, 0.5, 0.5, 0.0)
    # The generator itself may be late.
    assert found["errors"].keys() - {"NOT_SENT"} == {"RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"}
    assert found["ok"] + sum(found["errors"].values()) == found["offered"] > 0
    assert found["refused_p99_ms"] >= found["refused_p50_ms"] > 0


async def test_open_loop_with_any_other_error_has_no_result(target: str) -> None:
    with pytest.raises(BenchError, match="INTERNAL"):
        await asyncio.to_thread(open_loop, target, [b"bad"], 100, 5.0, 0.3, 0.0)


async def test_loads_of_several_processes_are_one(target: str, tmp_path: Path) -> None:
    (tmp_path / "request").write_bytes(b"a")
    random = await asyncio.to_thread(RandomLoad(2).send, target, [tmp_path / "request"], 200, 0.5, 0.1, 0)
    assert random["requests_per_s"] == pytest.approx(200, rel=0.5)
    assert random["p99_ms"] >= random["p50_ms"] > 0
    crowd = await asyncio.to_thread(LoadGenerators(2, 3, 2, False).send, target, [tmp_path / "request"], 0.2, 0.1)
    assert crowd["requests_per_s"] > 0


async def test_random_load_that_gets_no_answers_fails(target: str, tmp_path: Path) -> None:
    (tmp_path / "request").write_bytes(b"")
    with pytest.raises(BenchError, match="EMPTY"):
        await asyncio.to_thread(RandomLoad(1).send, target, [tmp_path / "request"], 100, 0.2, 0.0, 0)
