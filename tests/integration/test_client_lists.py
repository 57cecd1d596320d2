"""Python's lists as inputs, against a real server, over each way that requests can take."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.clients import AsyncInferenceClient, InferenceClient
from tests.integration.serving import echo_model, serving

ROW = [5.1, 3.5, 1.4, 0.2]


@pytest.mark.parametrize(
    "options", [{}, {"transport": "stream"}, {"coalesce": 8}, {"transport": "stream", "coalesce": 8}]
)
async def test_lists_take_the_models_datatype_over_calls_and_streams(tmp_path: Path, options: dict[str, Any]) -> None:
    async with (
        serving(tmp_path, {"m": echo_model("FP32")}, config="max_batch_size: 8") as served,
        AsyncInferenceClient(served.target, timeout_s=20, **options) as client,
    ):
        results = await asyncio.gather(*(client.infer("m", {"a": [ROW, ROW]}) for _ in range(4)))
        for result in results:
            np.testing.assert_array_equal(result["x"], np.array([ROW, ROW], np.float32))


async def test_lists_take_the_models_datatype_in_the_blocking_client(tmp_path: Path) -> None:
    async with serving(tmp_path, {"m": echo_model("INT8")}) as served:
        with InferenceClient(served.target, timeout_s=20) as client:
            result = await asyncio.to_thread(client.infer, "m", {"a": [[1, 2]]})
            np.testing.assert_array_equal(result["x"], np.array([[1, 2]], np.int8))
