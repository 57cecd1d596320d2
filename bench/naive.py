"""The simplest batching server: `python -m bench.naive NAME=FILE ...`, on the echo's gRPC.

Lives here: what anybody would write in an afternoon. While ONNX Runtime runs a batch in a thread, requests gather in a
list; what is in the list when the batch is done is the next batch. Must not: check anything, know deadlines,
priorities, errors, metrics, or more than one tensor. What it costs beyond the echo is the least that batching costs in
Python; what the product costs beyond it is the price of what it does more.

Prints its port; ends when its standard input does, so it can't outlive the process that started it.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort  # type: ignore[import-untyped,unused-ignore]

from bench.echo import Echo, run
from bench.models import INPUT, MAX_ROWS, OUTPUT
from bench.sessions import open_session
from paceline.protos import inference_pb2 as pb

__all__ = ["Naive"]

Array = npt.NDArray[np.float32]
Waiting = list[tuple[Array, "asyncio.Future[Array]"]]


class _Lane:
    """Rows of one shape for one model."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self._session = session
        self._waiting: Waiting = []
        self._running: asyncio.Task[None] | None = None

    def submit(self, row: Array) -> asyncio.Future[Array]:
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Array] = loop.create_future()
        self._waiting.append((row, result))
        if self._running is None:
            self._running = loop.create_task(self._run())
        return result

    async def _run(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:MAX_ROWS], self._waiting[MAX_ROWS:]
            rows = await asyncio.to_thread(self._execute, [row for row, _ in batch])
            for number, (_, result) in enumerate(batch):
                result.set_result(rows[number : number + 1])
        self._running = None

    def _execute(self, rows: list[Array]) -> Array:
        results: Array = self._session.run(None, {INPUT: np.concatenate(rows)})[0]
        return results


class Naive(Echo):
    """Runs models with one FP32 tensor in and one out. `files` are ONNX files by model name."""

    def __init__(self, files: dict[str, Path]) -> None:
        super().__init__()
        self._sessions = {name: open_session(file) for name, file in files.items()}
        self._lanes: dict[tuple[str, tuple[int, ...]], _Lane] = {}

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Any) -> pb.ModelInferResponse:
        return _response(request, await self._submit(request))

    async def ModelStreamInfer(
        self, requests: AsyncIterator[pb.ModelInferRequest], context: Any
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        """Answers leave in the order of the requests."""
        under_way: deque[tuple[pb.ModelInferRequest, asyncio.Future[Array]]] = deque()
        more = asyncio.Event()

        async def read() -> None:
            async for request in requests:
                under_way.append((request, self._submit(request)))
                more.set()

        reading = asyncio.get_running_loop().create_task(read())
        reading.add_done_callback(lambda _: more.set())
        while under_way or not reading.done():
            while under_way:
                request, result = under_way.popleft()
                yield pb.ModelStreamInferResponse(infer_response=_response(request, await result))
            more.clear()
            if not reading.done():
                await more.wait()

    def _submit(self, request: pb.ModelInferRequest) -> asyncio.Future[Array]:
        shape = tuple(request.inputs[0].shape)
        lane = self._lanes.get((request.model_name, shape))
        if lane is None:
            lane = self._lanes[request.model_name, shape] = _Lane(self._sessions[request.model_name])
        return lane.submit(np.frombuffer(request.raw_input_contents[0], np.float32).reshape(shape))


def _response(request: pb.ModelInferRequest, result: Array) -> pb.ModelInferResponse:
    response = pb.ModelInferResponse(model_name=request.model_name, model_version="1", id=request.id)
    response.outputs.add(name=OUTPUT, datatype="FP32", shape=result.shape)
    response.raw_output_contents.append(result.tobytes())
    return response


if __name__ == "__main__":
    run(lambda: Naive({name: Path(file) for name, _, file in (arg.partition("=") for arg in sys.argv[1:])}))
