"""Metrics of a running server: queues as they are at a scrape, tags as labels, and GPUs where there are some."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import grpc
import numpy as np
import pytest

from paceline.backends.cuda.driver import count_gpus
from paceline.backends.errors import LoadError
from paceline.server.config import Settings
from tests.integration.scripted import Script, busy, queued, request
from tests.integration.serving import echo_model, failure_of, serving, write_model
from tests.wire import infer, rows_of_floats

pytestmark = pytest.mark.usefixtures("frontends")

Code = grpc.StatusCode


async def test_metrics_of_pending_requests_by_priority_level(tmp_path: Path) -> None:
    script = Script()
    text = "max_batch_size: 4 dynamic_batching { priority_levels: 3 default_priority_level: 2 }"
    async with serving(tmp_path, {"m": script.model}, config=text) as served:
        async with busy(served, script):
            calls = await queued(served, [request(1), request(2, priority=3), request(3, priority=3)])
            seen = await served.metrics()
        await asyncio.gather(*calls)
        after = await served.metrics()
    names = [f'paceline_pending_requests{{model="m",priority="{level}",version="1"}}' for level in (1, 2, 3)]
    assert [seen[name] for name in names] == [0, 1, 2]
    assert [after[name] for name in names] == [0, 0, 0]


async def test_metrics_of_a_queue_rise_and_fall_by_batch(tmp_path: Path) -> None:
    """L0_metrics/metrics_queue_size_test: the waiting requests exclude executing ones and never exceed the bound."""
    script = Script()
    gates = [script.hold(mark) for mark in (0.0, 4.0)]
    text = "max_batch_size: 4 dynamic_batching { default_queue_policy { max_queue_size: 8 } }"
    async with serving(tmp_path, {"m": script.model}, config=text) as served:
        async with busy(served, script):
            calls = await queued(served, (request(mark) for mark in range(8)))
            assert (await failure_of(served.infer(request(9))))[0] is Code.RESOURCE_EXHAUSTED
            assert await served.metric("nv_inference_pending_request_count") == 8
        for gate, left in zip(gates, (4, 0), strict=True):
            await asyncio.to_thread(gate.wait_entered, 1)
            assert await served.metric("nv_inference_pending_request_count") == left
            gate.open()
        await asyncio.gather(*calls)


async def test_metrics_have_the_configured_tags_as_labels(tmp_path: Path) -> None:
    tags = 'metric_tags { key: "team" value: "blue" } metric_tags { key: "cost_center" value: "7" }'
    async with serving(tmp_path, {"m": echo_model()}, config=tags) as served:
        await served.infer(infer("m", {"a": rows_of_floats(2)}))
        labels = '_cost_center="7",_team="blue",model="m"'
        assert await served.metric("nv_inference_count", f'{labels},version="1"') == 2
        assert await served.metric("nv_model_load_duration_secs", f'{labels},version="1"') > 0


async def test_invalid_metric_tag_fails_the_load(tmp_path: Path) -> None:
    write_model(tmp_path, "m", 'metric_tags { key: "my-team" value: "blue" }')
    async with serving(tmp_path, {"m": echo_model(), "n": echo_model()}) as served:
        code, text = await failure_of(served.infer(infer("m", {"a": np.zeros((1, 2), np.float32)})))
        assert code is Code.UNAVAILABLE
        assert "metric_tags: expected names of ASCII letters, digits and _" in text
        assert "got 'my-team'" in text


async def test_gpu_metrics_without_driver_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    try:
        pytest.skip(f"there are {count_gpus()} GPUs")
    except LoadError as error:
        reason = str(error)
    with caplog.at_level(logging.DEBUG, "paceline.server"):
        async with serving(tmp_path, {"m": echo_model()}) as served:
            assert not any(name.startswith("nv_gpu") for name in await served.metrics())
    told = [record.getMessage() for record in caplog.records if "GPU" in record.getMessage()]
    assert told == [f"no GPU metrics: {reason}"]


async def test_gpus_are_not_looked_for_when_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = Settings(paths=(tmp_path,), allow_gpu_metrics=False)
    with caplog.at_level(logging.INFO, "paceline.server"):
        async with serving(tmp_path, {"m": echo_model()}, settings=settings) as served:
            assert not any(name.startswith("nv_gpu") for name in await served.metrics())
    assert "GPU" not in caplog.text
