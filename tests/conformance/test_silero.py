"""Silero's voice detector: 64 streams of sound at once get what each gets from the package's model run alone.

Its file comes from the wheel silero-vad: `make witness` puts it there. Its state has the batch on the second axis, and
its sample rate is a scalar: nothing about either is configured.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import sequence_models
from bench.sequence_models import VAD
from paceline.clients import AsyncInferenceClient, AsyncInferenceSequence
from tests.harness import REPO, ServerProcess

FILE = Path(os.environ.get("PACELINE_SILERO", REPO / ".witness" / "silero_vad.onnx"))
STREAMS, CHUNKS = 64, 40
pytestmark = pytest.mark.skipif(not FILE.is_file(), reason=f"no {FILE}: make witness, or PACELINE_SILERO")

Chunks = Sequence[dict[str, Any]]


@pytest.mark.parametrize("frontends", [1, 2])
async def test_streams_at_once_get_what_each_gets_alone(tmp_path: Path, frontends: int) -> None:
    async def heard(sequence: AsyncInferenceSequence, chunks: Chunks) -> list[float]:
        return [float(answer["output"][0, 0]) async for answer in sequence.infer_all(chunks)]

    sequence_models.add(VAD, FILE, tmp_path)
    sounds = [VAD.inputs(number, CHUNKS) for number in range(STREAMS)]
    for number in range(0, STREAMS, 4):  # half the sample rate, and so half of the samples
        sounds[number] = [
            {"input": chunk["input"][:, ::2].copy(), "sr": np.array(8_000, np.int64)} for chunk in sounds[number]
        ]
    expected = np.array([np.ravel(sequence_models.alone(VAD, FILE, chunks)) for chunks in sounds])
    with ServerProcess(tmp_path, args=("--frontends", str(frontends))) as server:
        async with AsyncInferenceClient(server.target, transport="stream") as client:
            found = await asyncio.gather(*(heard(client.sequence("vad"), chunks) for chunks in sounds))
        metrics = server.metrics()
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert np.ptp(expected) > 0.3  # it hears voices in some of the sound
    labels = '{model="vad",version="1"}'
    assert metrics[f"nv_inference_count{labels}"] == STREAMS * CHUNKS
    assert metrics[f"nv_inference_exec_count{labels}"] < STREAMS * CHUNKS / 2
