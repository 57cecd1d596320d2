"""Which inferences share a request, without a server."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from clients.coalescing import Coalescer
from clients.messages import InferResult, infer_request, infer_result
from protos import inference_pb2 as pb
from tests.unit.clients.peer import echo


async def test_requests_together_are_no_larger_than_a_message_may_be() -> None:
    sizes_bytes = []

    async def send(request: pb.ModelInferRequest, timeout_s: float | None) -> InferResult:
        sizes_bytes.append(sum(map(len, request.raw_input_contents)))
        context: Any = None
        return infer_result(echo(request, context))

    coalescer = Coalescer(send, 32, most_bytes=100)
    rows = [np.full((1, 10), number, np.float32) for number in range(7)]
    results = await asyncio.gather(*(coalescer.infer(infer_request("m", {"x": row}), 30.0) for row in rows))
    assert [result["x"].tolist() for result in results] == [row.tolist() for row in rows]
    assert sizes_bytes == [80, 80, 80, 40]
    larger = np.zeros((1, 40), np.float32)
    assert (await coalescer.infer(infer_request("m", {"x": larger}), 30.0))["x"].shape == larger.shape
