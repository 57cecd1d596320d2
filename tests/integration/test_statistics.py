"""ModelStatistics over gRPC after traffic whose batches are all known, and the metrics that must agree with it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path

import grpc
import pytest

from paceline.backends.errors import ExecutionError
from paceline.protos import inference_pb2 as pb
from tests.integration.scripted import Script, busy, own, queued, request, send, totals
from tests.integration.serving import Served, echo_model, failure_of, serving, write_model
from tests.integration.streams import Stream
from tests.polling import eventually_async
from tests.wire import infer, rows_of_floats

pytestmark = pytest.mark.usefixtures("frontends")

Code = grpc.StatusCode
MERGE = "max_batch_size: 4 dynamic_batching { }"
REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")


async def asked(served: Served, name: str = "m", version: str = "") -> list[pb.ModelStatistics]:
    response = await served.stub.ModelStatistics(pb.ModelStatisticsRequest(name=name, version=version), timeout=20)
    return list(response.model_stats)


def sizes(statistics: pb.ModelStatistics) -> dict[int, int]:
    """Executions by rows, in the order reported."""
    for batch in statistics.batch_stats:
        assert batch.compute_input.count == batch.compute_infer.count == batch.compute_output.count
    return {batch.batch_size: batch.compute_infer.count for batch in statistics.batch_stats}


def counts(statistics: pb.ModelStatistics) -> dict[str, int]:
    return {field.name: one.count for field, one in statistics.inference_stats.ListFields() if one.count}


async def assert_metrics_agree(served: Served, statistics: pb.ModelStatistics) -> Mapping[str, float]:
    seen, labels = await served.metrics(), f'{{model="{statistics.name}",version="{statistics.version}"}}'
    stats = statistics.inference_stats
    assert seen[f"nv_inference_request_success{labels}"] == stats.success.count
    assert sum(totals(seen, statistics.name)[reason] for reason in REASONS) == stats.fail.count
    assert seen[f"nv_inference_count{labels}"] == statistics.inference_count
    assert seen[f"nv_inference_exec_count{labels}"] == statistics.execution_count
    assert seen[f"nv_inference_request_duration_us{labels}"] == stats.success.ns // 1_000
    for name in ("queue", "compute_input", "compute_infer", "compute_output"):
        assert seen[f"nv_inference_{name}_duration_us{labels}"] == getattr(stats, name).ns // 1_000
    return seen


# ---- Which models ----------------------------------------------------------------------------------------------------


async def test_statistics_without_traffic_are_zero(tmp_path: Path) -> None:
    async with serving(tmp_path, {"m": echo_model()}) as served:
        (one,) = await asked(served)
    assert (one.name, one.version, one.last_inference, one.inference_count, one.execution_count) == ("m", "1", 0, 0, 0)
    assert counts(one) == sizes(one) == {}
    assert not one.memory_usage
    assert not one.response_stats


async def test_statistics_without_name_are_all_sorted(tmp_path: Path) -> None:
    (write_model(tmp_path, "b", "version_policy { all { } }") / "10").mkdir()
    (tmp_path / "b" / "9").mkdir()
    async with serving(tmp_path, {"b": echo_model(), "a": echo_model()}) as served:
        found = [(one.name, one.version) for one in await asked(served, "")]
        assert found == [("a", "1"), ("b", "1"), ("b", "9"), ("b", "10")]
        assert [one.version for one in await asked(served, "b")] == ["1", "9", "10"]
        assert [one.version for one in await asked(served, "b", "9")] == ["9"]


async def test_statistics_of_versions_are_counted_separately(tmp_path: Path) -> None:
    (write_model(tmp_path, "m", "version_policy { all { } }") / "2").mkdir()
    async with serving(tmp_path, {"m": echo_model()}) as served:
        await served.infer(infer("m", {"a": rows_of_floats(3)}, version="1"))
        await served.infer(infer("m", {"a": rows_of_floats(2)}))
        assert [(one.version, one.inference_count) for one in await asked(served)] == [("1", 3), ("2", 2)]


@pytest.mark.parametrize(
    ("name", "version", "code", "text"),
    [
        ("n", "", Code.NOT_FOUND, "Request for unknown model: 'n' is not found; this server has ['broken', 'm']"),
        ("n", "1", Code.NOT_FOUND, "Request for unknown model: 'n' is not found; this server has ['broken', 'm']"),
        ("m", "7", Code.NOT_FOUND, "Request for unknown model: 'm' version 7 is not found; versions served: ['1']"),
        ("m", "x", Code.INVALID_ARGUMENT, "model 'm': expected a version number, got 'x'"),
        (
            "broken",
            "",
            Code.UNAVAILABLE,
            "Request for unknown model: 'broken' is not ready: max_batch_size: expected >= 0, got -1",
        ),
    ],
)
async def test_statistics_of_models_or_versions_not_served_are_refused(
    tmp_path: Path, name: str, version: str, code: grpc.StatusCode, text: str
) -> None:
    write_model(tmp_path, "broken", "max_batch_size: -1")
    async with serving(tmp_path, {"broken": echo_model(), "m": echo_model()}) as served:
        assert await failure_of(asked(served, name, version)) == (code, text)
        assert [one.name for one in await asked(served, "")] == ["m"]


async def test_statistics_extension_is_advertised(tmp_path: Path) -> None:
    async with serving(tmp_path, {"m": echo_model()}) as served:
        assert "statistics" in (await served.stub.ServerMetadata(pb.ServerMetadataRequest())).extensions


# ---- Their contents --------------------------------------------------------------------------------------------------


async def test_statistics_after_known_batches_are_exact(tmp_path: Path) -> None:
    script = Script()
    async with serving(tmp_path, {"m": script.model}, config=MERGE) as served:
        before_ms = time.time_ns() // 1_000_000
        async with busy(served, script):
            calls = await queued(served, (request(mark) for mark in range(5)))
        await asyncio.gather(*calls)
        (one,) = await asked(served)
        assert sizes(one) == {1: 2, 4: 1}  # the one that kept the model busy, four together, the fifth
        assert (one.inference_count, one.execution_count) == (6, 3)
        names = ("success", "queue", "compute_input", "compute_infer", "compute_output")
        assert counts(one) == dict.fromkeys(names, 6)
        assert before_ms <= one.last_inference <= time.time_ns() // 1_000_000
        await assert_metrics_agree(served, one)


async def test_statistics_of_padded_batches_count_the_rows_of_requests(tmp_path: Path) -> None:
    script = Script()
    text = f"max_batch_size: 8 dynamic_batching {{ }} {own(batch_sizes='4,8')}"
    async with serving(tmp_path, {"m": script.model}, config=text) as served:
        for rows in (3, 5, 3):
            await served.infer(request(1, rows))
        (one,) = await asked(served)
        assert list(map(len, script.seen)) == [4, 8, 4]
        assert sizes(one) == {3: 2, 5: 1}
        seen = await assert_metrics_agree(served, one)
        assert seen['paceline_padding_rows{model="m",version="1"}'] == 5
        assert seen['paceline_padding_share{model="m",version="1"}'] == 5 / 16
        assert seen['paceline_execution_us_count{model="m",up_to_rows="4",version="1"}'] == 2
        assert seen['paceline_execution_us_count{model="m",up_to_rows="8",version="1"}'] == 1


async def test_statistics_of_times_are_what_the_model_took(tmp_path: Path) -> None:
    script = Script()
    script.model.latency = lambda rows: 0.03
    async with serving(tmp_path, {"m": script.model}, config=MERGE) as served:
        async with busy(served, script):
            calls = await queued(served, (request(mark) for mark in range(4)))
            until_ns = time.monotonic_ns() + 20_000_000
            await eventually_async(lambda: time.monotonic_ns() > until_ns, "20 ms to pass")
            began_ns = time.monotonic_ns()
        await asyncio.gather(*calls)
        took_ns = time.monotonic_ns() - began_ns
        (one,) = await asked(served)
    stats, (alone, together) = one.inference_stats, one.batch_stats
    assert 30_000_000 <= together.compute_infer.ns < took_ns
    assert stats.compute_infer.ns == alone.compute_infer.ns + 4 * together.compute_infer.ns
    assert stats.compute_input.ns == alone.compute_input.ns + 4 * together.compute_input.ns
    assert stats.compute_output.ns == alone.compute_output.ns + 4 * together.compute_output.ns
    assert stats.queue.ns >= 4 * 20_000_000  # four waited for the one that kept the model busy
    parts = (stats.queue, stats.compute_input, stats.compute_infer, stats.compute_output)
    assert stats.success.ns >= sum(part.ns for part in parts)


async def test_statistics_of_cancelled_queued_requests_lack_executions(tmp_path: Path) -> None:
    script = Script()
    async with serving(tmp_path, {"m": script.model}, config=MERGE) as served:
        async with busy(served, script):
            calls = await queued(served, (request(mark) for mark in range(3)))
            calls[1].cancel()
            await eventually_async(lambda: served.failed() == 1, "one cancelled")
        await asyncio.gather(*calls, return_exceptions=True)
        (one,) = await asked(served)
        assert sizes(one) == {1: 1, 2: 1}
        assert (one.inference_stats.success.count, one.inference_stats.fail.count) == (3, 1)
        seen = await assert_metrics_agree(served, one)
        assert totals(seen)["CANCELED"] == 1
        assert seen['paceline_dropped_requests{model="m",reason="cancelled",version="1"}'] == 1


async def test_statistics_of_cancelled_executing_requests_keep_rows(
    tmp_path: Path,
) -> None:
    script = Script()
    gate = script.hold(0)
    async with serving(tmp_path, {"m": script.model}, config=MERGE) as served:
        async with busy(served, script):
            calls = await queued(served, (request(mark) for mark in range(4)))
        await asyncio.to_thread(gate.wait_entered, 1)
        for victim in (0, 2):
            calls[victim].cancel()
        await eventually_async(lambda: served.failed() == 2, "two cancelled")
        gate.open()
        await asyncio.gather(*calls, return_exceptions=True)
        (one,) = await asked(served)
        assert sizes(one) == {1: 1, 4: 1}
        assert one.inference_count == 5
        assert counts(one) == {
            "success": 3, "fail": 2, "queue": 3, "compute_input": 3, "compute_infer": 3, "compute_output": 3,
        }  # fmt: skip
        seen = await assert_metrics_agree(served, one)
        assert totals(seen) == {"success": 3, "REJECTED": 0, "CANCELED": 2, "BACKEND": 0, "OTHER": 0}
        assert seen['paceline_dropped_requests{model="m",reason="cancelled",version="1"}'] == 0


async def test_statistics_count_passed_deadlines_as_cancelled(tmp_path: Path) -> None:
    for timeout_s in (0.2, 2, 20):
        script = Script()
        gate = script.hold(0)
        async with serving(tmp_path, {"m": script.model}, config=MERGE) as served:
            assert (await failure_of(served.infer(request(0), timeout_s)))[0] is Code.DEADLINE_EXCEEDED
            if not gate.entered:
                continue  # on so busy a machine, it has passed before the execution
            await eventually_async(lambda: served.failed() == 1, "its caller's leaving noticed")
            gate.open()
            await served.infer(request(1))
            (one,) = await asked(served)
            assert (one.inference_stats.success.count, one.inference_count) == (1, 2)
            assert totals(await assert_metrics_agree(served, one))["CANCELED"] == 1
            return
    pytest.fail("no request was executing in time")


async def test_statistics_of_failed_executions_have_no_batches(tmp_path: Path) -> None:
    script = Script()
    script.errors[13.0] = ExecutionError("unlucky")
    script.model.latency = lambda rows: 0.01
    async with serving(tmp_path, {"m": script.model}, config=MERGE + own(isolate_failures=False)) as served:
        async with busy(served, script):
            calls = await queued(served, (request(mark) for mark in (1, 13, 2)))
        assert [(await failure_of(call))[0] for call in calls] == [Code.INTERNAL] * 3
        (one,) = await asked(served)
        assert sizes(one) == {1: 1}
        assert (one.inference_count, one.inference_stats.success.count, one.inference_stats.fail.count) == (1, 1, 3)
        assert one.inference_stats.fail.ns > 0
        assert totals(await assert_metrics_agree(served, one))["BACKEND"] == 3


async def test_statistics_of_rerun_halves_count_requests_once(tmp_path: Path) -> None:
    script = Script()
    script.errors[13.0] = ExecutionError("unlucky")
    async with serving(tmp_path, {"m": script.model}, config=MERGE) as served:
        async with busy(served, script):
            calls = await queued(served, (request(mark) for mark in (1, 2, 13, 3)))
        await asyncio.gather(*calls, return_exceptions=True)
        (one,) = await asked(served)
        assert sizes(one) == {1: 2, 2: 1}
        assert (one.inference_stats.success.count, one.inference_stats.fail.count) == (4, 1)
        await assert_metrics_agree(served, one)


async def test_statistics_of_split_request_count_it_once(tmp_path: Path) -> None:
    script = Script()
    text = f"max_batch_size: 8 dynamic_batching {{ }} {own(split_oversized=True)}"
    async with serving(tmp_path, {"m": script.model}, config=text) as served:
        await served.infer(request(1, rows=20))
        (one,) = await asked(served)
        assert sizes(one) == {4: 1, 8: 2}
        assert (one.inference_stats.success.count, one.inference_stats.queue.count) == (1, 3)
        async with busy(served, script):
            (call,) = send(served, request(2, rows=100))
            await eventually_async(lambda: served.waiting("m") == 13, "all parts waiting")
            call.cancel()
            await eventually_async(lambda: served.failed() == 1, "it cancelled")
            seen = await served.metrics()
        assert totals(seen)["CANCELED"] == 1
        assert seen['paceline_dropped_requests{model="m",reason="cancelled",version="1"}'] == 13


async def test_statistics_count_every_outcome_once(tmp_path: Path) -> None:
    script = Script()
    script.errors[13.0] = ExecutionError("unlucky")
    policy = "default_queue_policy { max_queue_size: 4 allow_timeout_override: true }"
    text = f"max_batch_size: 8 dynamic_batching {{ {policy} }} {own(deadline_aware=False)}"
    faulty = request(1)
    faulty.inputs[0].datatype = "INT32"
    in_vain = request(1)
    in_vain.inputs[0].parameters["shared_memory_region"].string_param = "r"
    async with serving(tmp_path, {"m": script.model}, config=text) as served:
        async with busy(served, script):
            assert (await failure_of(served.infer(request(5, timeout=1_000))))[0] is Code.DEADLINE_EXCEEDED
            calls = await queued(served, (request(mark) for mark in (1, 13, 2)))
            (gone,) = await queued(served, [request(4)])
            assert (await failure_of(served.infer(request(6))))[0] is Code.RESOURCE_EXHAUSTED
            for bad in (faulty, in_vain, request(1, rows=9)):
                await failure_of(served.infer(bad))
            gone.cancel()
            await eventually_async(lambda: served.failed() == 6, "the cancelled one counted")
        await asyncio.gather(*calls, return_exceptions=True)
        (one,) = await asked(served)
        seen = await assert_metrics_agree(served, one)
    assert totals(seen) == {"success": 3, "REJECTED": 2, "CANCELED": 1, "BACKEND": 1, "OTHER": 3}
    assert (one.inference_stats.success.count, one.inference_stats.fail.count) == (3, 7)
    dropped = ("queue_full_requests", "queue_full_rows", "queue_full_bytes", "closed", "expired", "cancelled")
    assert [seen[f'paceline_dropped_requests{{model="m",reason="{one}",version="1"}}'] for one in dropped] == [
        1, 0, 0, 0, 1, 1,
    ]  # fmt: skip


async def test_statistics_count_requests_while_stopping_as_rejected(tmp_path: Path) -> None:
    script = Script()
    gate = script.hold(0)
    async with serving(tmp_path, {"m": script.model}, config=MERGE) as served:
        # New calls might arrive when the port is already closed.
        stream = Stream(served)
        await stream.send(request(0))
        await asyncio.to_thread(gate.wait_entered, 1)
        statistics = served.server.repository.get("m", "").statistics
        stopping = asyncio.create_task(served.server.stop(20))
        await asyncio.sleep(0)  # the stop begins
        for model in ("m", "nosuch"):
            await stream.send(request(1, model=model, paceline_unordered=True))
            assert await stream.next() == ("UNAVAILABLE", "the server is stopping")
        seen = await served.metrics()
        assert totals(seen)["REJECTED"] == 1
        assert seen['paceline_dropped_requests{model="m",reason="closed",version="1"}'] == 1
        gate.open()
        assert await stream.next() == 0
        assert await stopping
    assert (statistics.requests.count, statistics.failed) == (1, 1)
