from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from bench.load import METHOD, STREAM_METHOD, Plan, Tally, drive, read_messages, summary, write_messages
from paceline.protos import inference_pb2 as pb
from tests.harness import REPO


@pytest.fixture
async def target() -> AsyncIterator[str]:
    """A server that answers with the request, but refuses b"no"."""

    async def answer(request: bytes, context: Any) -> bytes:
        if request == b"no":
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED)
        return request

    async def answer_each(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    service, method = METHOD.strip("/").split("/")
    handlers = {
        method: grpc.unary_unary_rpc_method_handler(answer),
        STREAM_METHOD.rpartition("/")[2]: grpc.stream_stream_rpc_method_handler(answer_each),
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def test_drive_counts_answers_and_ends(target: str) -> None:
    found = await drive(Plan(target, (b"one", b"two"), clients=4, channels=2, seconds=0.2, warmup_s=0.05))
    assert found["ok"] > 0
    assert found["errors"] == {}
    assert found["answers_in_all"] > found["ok"]
    assert found["p50_ms"] <= found["p90_ms"] <= found["p99_ms"]


async def test_clients_with_own_payloads_send_them_in_turn(target: str, tmp_path: Path) -> None:
    ours = [(b"", b"no", b"x" * 300), (b"a",)]
    read = [read_messages(write_messages(tmp_path / f"{at}", each)) for at, each in enumerate(ours)]
    assert read == ours
    found = await drive(Plan(target, (), clients=2, seconds=0.2, warmup_s=0.05, own=tuple(read)))
    assert found["ok"] > 0
    # One of three is refused, and one is empty, as is its answer.
    assert set(found["errors"]) == {"EMPTY", "RESOURCE_EXHAUSTED"}


async def test_waiting_load_reports_ready_and_begins_when_told_to(target: str, tmp_path: Path) -> None:
    process = await waiting(target, tmp_path)
    said, _ = await process.communicate(b"begin\n")
    found = json.loads(said)
    assert found["ok"] > 0
    assert found["errors"] == {}


async def test_waiting_load_ends_when_its_input_is_closed(target: str, tmp_path: Path) -> None:
    process = await waiting(target, tmp_path)
    assert await process.communicate(b"") == (b"", None)
    assert process.returncode == 0


async def waiting(target: str, folder: Path) -> asyncio.subprocess.Process:
    """A load process that has reported that it is ready, and waits."""
    (folder / "request").write_bytes(b"one")
    command = [sys.executable, "-m", "bench.load", "--wait", target, str(folder / "request"), "--seconds", "0.1"]
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    process = await asyncio.create_subprocess_exec(*command, cwd=REPO, **pipes)  # type: ignore[arg-type]
    assert process.stdout is not None
    assert json.loads(await process.stdout.readline()) == {}
    return process


async def test_drive_counts_errors_by_status_and_empty_answers(target: str) -> None:
    for request, status in ((b"no", "RESOURCE_EXHAUSTED"), (b"", "EMPTY")):
        found = await drive(Plan(target, (request,), clients=2, seconds=0.1, warmup_s=0.0))
        assert found["ok"] == 0
        assert set(found["errors"]) == {status}
        assert found["p50_ms"] is None


def test_summary_of_answers_is_rate_and_percentiles() -> None:
    tally = Tally([3_000_000, 1_000_000, 2_000_000], Counter(UNAVAILABLE=2))
    found = summary(tally, elapsed_s=2.0)
    assert (found["ok"], found["errors"], found["requests_per_s"]) == (3, {"UNAVAILABLE": 2}, 1.5)
    assert (found["p50_ms"], found["p99_ms"]) == (2.0, 3.0)


async def test_drive_over_streams_counts_answers_and_errors_in_answers(target: str) -> None:
    good = pb.ModelStreamInferResponse(infer_response=pb.ModelInferResponse(id="1")).SerializeToString()
    found = await drive(Plan(target, (good,), clients=3, seconds=0.2, warmup_s=0.05, stream=True))
    assert found["ok"] > 0
    assert found["errors"] == {}
    bad = pb.ModelStreamInferResponse(error_message="no").SerializeToString()
    found = await drive(Plan(target, (bad,), clients=1, seconds=0.1, warmup_s=0.0, stream=True))
    assert (found["ok"], set(found["errors"])) == (0, {"STREAM"})


async def test_drive_measures_until_the_first_answer_if_that_is_late(target: str) -> None:
    found = await drive(Plan(target, (b"one",), clients=1, seconds=0.0, warmup_s=0.0))
    assert found["ok"] >= 1
    assert found["requests_per_s"] == pytest.approx(found["ok"] / found["elapsed_s"])
