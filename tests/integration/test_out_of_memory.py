"""Batches that don't fit into memory, of the in-memory test model and of one in ONNX Runtime, over gRPC."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import numpy as np
import pytest

from paceline.backends.errors import OutOfMemory
from tests import models, odd_models
from tests.integration.scripted import own
from tests.integration.serving import echo_model, failure_of, serving
from tests.memory_models import MemoryModel
from tests.wire import infer, rows_of_floats

pytestmark = pytest.mark.usefixtures("frontends")

DELAY = "dynamic_batching { max_queue_delay_microseconds: 60000000 }"
MERGE = f"max_batch_size: 16 {DELAY} "
SHORT = OutOfMemory("onnx runtime error 1: Failed to allocate memory for requested buffer of size 9")
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


def hungry(fits: int) -> MemoryModel:
    """A model with memory for `fits` rows."""
    model = echo_model()
    model.faults.raise_when(lambda inputs: len(inputs[0]) > fits, SHORT)
    return model


@pytest.mark.parametrize("error", [SHORT, MemoryError("no room")], ids=["device", "host"])
async def test_batch_that_does_not_fit_is_rerun_in_smaller_ones_and_all_are_answered(
    tmp_path: Path, error: Exception
) -> None:
    model = echo_model()
    model.faults.raise_when(lambda inputs: len(inputs[0]) > 5, error)
    async with serving(tmp_path, {"m": model}, config=MERGE) as served:
        requests = [infer("m", {"a": rows_of_floats(1, first=number)}) for number in range(16)]
        answers = await asyncio.gather(*map(served.infer, requests))
        for request, answer in zip(requests, answers, strict=True):
            assert answer.raw_output_contents[0] == request.raw_input_contents[0]
        assert [len(batch) for batch in model.batches] == [16, 8, 4, 4, 4, 4]
        assert await served.metric("paceline_out_of_memory") == 2
        assert await served.metric("paceline_allowed_batch_rows") == 4
        assert await served.metric("nv_inference_request_success") == 16


async def test_batch_fails_and_the_next_ones_are_smaller_when_failures_are_not_isolated(tmp_path: Path) -> None:
    model = hungry(8)
    async with serving(tmp_path, {"m": model}, config=MERGE + own(isolate_failures=False)) as served:
        full = [infer("m", {"a": rows_of_floats(1)}) for _ in range(16)]
        failures = await asyncio.gather(*(failure_of(served.infer(request)) for request in full))
        assert failures == [(EXHAUSTED, f"model 'm': {SHORT}")] * 16
        await asyncio.gather(*map(served.infer, full))
        assert [len(batch) for batch in model.batches] == [16, 8, 8]
        assert await served.metric("nv_inference_request_failure", 'model="m",reason="BACKEND",version="1"') == 16


async def test_request_that_does_not_fit_alone_fails_and_those_in_its_batch_are_answered(tmp_path: Path) -> None:
    model = hungry(4)
    async with serving(tmp_path, {"m": model}, config=MERGE) as served:
        large = asyncio.create_task(failure_of(served.infer(infer("m", {"a": rows_of_floats(8)}))))
        requests = [infer("m", {"a": rows_of_floats(2, first=10 * number)}) for number in range(4)]
        small = [asyncio.create_task(served.infer(request)) for request in requests]
        assert await large == (EXHAUSTED, f"model 'm': {SHORT}")
        for request, answer in zip(requests, await asyncio.gather(*small), strict=True):
            assert answer.raw_output_contents[0] == request.raw_input_contents[0]
        assert sorted(model.batches[0]) == [2, 2, 2, 2, 8]


async def test_onnx_model_runs_smaller_batches_when_full_ones_do_not_fit(tmp_path: Path) -> None:
    models.write(odd_models.memory_hungry(3), tmp_path / "m" / "1" / "model.onnx")
    config = (
        'max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 60000000 } model_warmup { name: "none" }'
    )
    (tmp_path / "m" / "config.pbtxt").write_text(config)
    async with serving(tmp_path) as served:
        requests = [infer("m", {"INPUT0": np.full((1, 1), number, np.float32)}) for number in range(8)]
        answers = await asyncio.gather(*map(served.infer, requests))
        assert [answer.raw_output_contents[0] for answer in answers] == [
            request.raw_input_contents[0] for request in requests
        ]
        assert await served.metric("paceline_allowed_batch_rows") == 2
        alone = infer("m", {"INPUT0": np.ones((4, 1), np.float32)})
        pair = infer("m", {"INPUT0": np.ones((2, 1), np.float32)})
        code, text = (await asyncio.gather(failure_of(served.infer(alone)), served.infer(pair)))[0]
        assert code is EXHAUSTED
        assert text.startswith("model 'm': onnx runtime error 1: ")
        assert "Failed to allocate memory for requested buffer of size" in text
