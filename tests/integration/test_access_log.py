"""The access log, a line per request for debugging; and the log lines about failing models."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paceline.backends.errors import ExecutionError
from paceline.clients import AsyncInferenceClient
from paceline.protos import inference_pb2 as pb
from paceline.server.telemetry import log
from paceline.server.telemetry.log import RepeatFilter
from paceline.server.telemetry.model_statistics import FailureReason
from tests.integration.serving import echo_model, failure_of, serving
from tests.integration.streams import Stream
from tests.polling import eventually_async
from tests.wire import infer, rows_of_floats


def request(rows: int = 1, id: str = "", **how: Any) -> pb.ModelInferRequest:
    return infer("m", {"a": rows_of_floats(rows)}, id=id, **how)


def records(capfd: pytest.CaptureFixture[str], logger: str = "paceline.access") -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    return [line for line in lines if line["logger"] == logger]


async def test_each_request_is_logged_as_one_line_at_debug(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log.configure("debug", "json")
    model = echo_model()
    async with serving(tmp_path, {"m": model}) as served:
        await served.infer(request(3, "good"))
        await failure_of(served.infer(infer("nosuch", {"a": rows_of_floats(1)}, id="unknown")))
        await failure_of(served.infer(request(id="bad", version="x")))
        model.faults.raise_next(ExecutionError("no good"))
        await failure_of(served.infer(request(id="failed")))
        stream = Stream(served)
        await stream.send(request(id="streamed"))
        assert (await stream.message()).infer_response.id == "streamed"
        model.gate.close()
        gone = served.stub.ModelInfer(request(id="gone"), timeout=20)
        await eventually_async(lambda: model.gate.entered == 4, "an execution")
        gone.cancel()
        statistics = served.server.repository.get("m", "").statistics
        await eventually_async(lambda: statistics.failures[FailureReason.CANCELED], "that the server knows")
        stopping = asyncio.create_task(served.server.stop(20))
        await asyncio.sleep(0)  # the stop begins
        await stream.send(request(id="late"))  # a new call might arrive when the port is closed already
        assert (await stream.message()).error_message == "the server is stopping"
        model.gate.open()
        await stopping
    lines = records(capfd)
    assert [(line["request_id"], line["status"]) for line in lines] == [
        ("good", "OK"),
        ("unknown", "NOT_FOUND"),
        ("bad", "INVALID_ARGUMENT"),
        ("failed", "INTERNAL"),
        ("streamed", "OK"),
        ("gone", "CANCELLED"),
        ("late", "UNAVAILABLE"),
    ]
    good = lines[0]
    assert (good["level"], good["model"], good["version"], good["rows"], good["batch_rows"]) == (
        "DEBUG",
        "m",
        "1",
        3,
        3,
    )
    assert good["duration_us"] >= good["queue_us"] + good["compute_us"] > 0
    assert "no good" in lines[3]["error"]
    assert lines[5]["error"] == "the caller gave up"
    assert good["message"].startswith("model='m' version='1' request_id='good' status='OK' duration_us=")


@pytest.mark.parametrize("columns", [2, 5_000], ids=["small", "large"])
async def test_request_is_logged_wherever_it_was_read(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], frontends: int, columns: int
) -> None:
    log.configure("debug", "json")
    model, tensors = echo_model(), {"a": rows_of_floats(1, columns)}
    async with serving(tmp_path, {"m": model}) as served:
        await served.infer(infer("m", tensors, id="good"))
        model.faults.raise_next(ExecutionError("no good"))
        await failure_of(served.infer(infer("m", tensors, id="failed")))
    lines = [(line["request_id"], line["status"], line["model"], line["rows"]) for line in records(capfd)]
    assert lines == [("good", "OK", "m", 1), ("failed", "INTERNAL", "m", 1)]


async def test_request_of_the_streaming_client_is_found_by_its_id(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log.configure("debug", "json")
    async with (
        serving(tmp_path, {"m": echo_model()}) as served,
        AsyncInferenceClient(served.target, transport="stream") as client,
    ):
        for request_id in ("strm", ""):
            result = await client.infer("m", {"a": rows_of_floats(1)}, request_id=request_id)
            assert result.id == request_id
    assert [line["request_id"] for line in records(capfd)] == ["1:strm", "2"]


async def test_requests_are_not_logged_above_debug(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log.configure("info", "json")
    async with serving(tmp_path, {"m": echo_model()}) as served:
        await served.infer(request())
    assert records(capfd) == []


async def test_texts_from_clients_are_truncated_in_the_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log.configure("debug", "json")
    async with serving(tmp_path, {"m": echo_model()}) as served:
        await served.infer(request(id="x" * 100_000))
    (line,) = records(capfd)
    assert line["request_id"] == "x" * 200
    assert len(line["message"]) < 500


async def test_constantly_failing_model_is_logged_as_one_line_and_a_count(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "RepeatFilter", partial(RepeatFilter, window_s=100.0))
    log.configure("info", "json")
    model = echo_model()
    async with serving(tmp_path, {"m": model}) as served:
        model.faults.raise_next(ExecutionError("out of memory"), times=20)
        await asyncio.gather(*(failure_of(served.infer(request())) for _ in range(20)), return_exceptions=True)
    log.configure("info", "text")  # logs what is still to be logged
    first, count = records(capfd, "paceline.server.inference")
    assert (first["level"], first["message"]) == ("ERROR", "model 'm' version 1 failed: out of memory")
    assert count["repeated"] > 0
    assert count["message"].startswith("model 'm' version 1 failed: out of memory (and ")


async def test_requests_at_fault_are_not_logged_above_debug(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log.configure("info", "json")
    async with serving(tmp_path, {"m": echo_model()}) as served:
        await failure_of(served.infer(infer("m", {"b": rows_of_floats(1)})))
        await failure_of(served.infer(infer("nosuch")))
    assert not [line for line in capfd.readouterr().err.splitlines() if '"ERROR"' in line or '"WARNING"' in line]
