"""Python models that answer after `execute` has returned: what becomes of their calls of other models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from paceline.server.config import Settings
from tests.calling_puppet import write_caller
from tests.integration.calling import BATCHED, asking, numbers
from tests.integration.serving import Served, echo_model, serving
from tests.integration.streams import Stream
from tests.memory_models import MemoryModel
from tests.polling import eventually_async
from tests.wire import infer

_MODEL = """
import asyncio
import numpy as np

class Model:
    inputs = {"run": ("BYTES", [-1, 1]), "x": ("FP32", [-1, 16])}
    outputs = {"y": ("FP32", [-1, 4])}
"""


@asynccontextmanager
async def _answering(root: Path, methods: str, echo: MemoryModel) -> AsyncIterator[Served]:
    """Model `m` with these methods, which answers when it likes and calls `echo`."""
    decoupled = "model_transaction_policy { decoupled: true }"
    write_caller(root, decoupled, calls="echo", source=_MODEL + methods)
    settings = Settings(paths=(root,), allow_python_models=True)
    async with serving(root, {"echo": echo}, config=BATCHED, settings=settings) as started:
        yield started


async def test_calls_of_requests_that_are_answered_later_end_with_them(tmp_path: Path) -> None:
    source = """
    async def load(self, context):
        self.refused = asyncio.Queue()

    async def execute(self, requests):
        self.tasks = [asyncio.create_task(self.answer(request)) for request in requests]

    async def answer(self, request):
        run = request.inputs["run"][0, 0]
        if run == b"call":
            try:
                await self.models["echo"].async_infer({"a": request.inputs["x"]})
            except self.models.CallFailed as error:
                await self.refused.put(error.status)
        elif run == b"wait for it":
            status = await self.refused.get()
            request.send({"y": np.full((1, 4), status == "CANCELLED", np.float32)})
        request.end()
"""
    echo = echo_model()
    async with _answering(tmp_path, source, echo) as started:
        echo.gate.close()
        warm, entered = echo.batches, echo.gate.entered
        busy = asyncio.ensure_future(started.infer(infer("echo", {"a": np.zeros((1, 16), np.float32)})))
        await asyncio.to_thread(echo.gate.wait_entered, entered + 1)
        stream, other = Stream(started), Stream(started)
        await stream.send(asking("call"))
        await eventually_async(lambda: started.waiting("echo") == 1, "the call has arrived")
        stream.call.cancel()
        await other.send(asking("wait for it"))
        assert numbers((await other.message()).infer_response) == [1.0] * 4
        assert started.waiting("echo") == 0
        echo.gate.open()
        await busy
        assert echo.batches == [*warm, (1,)]
        await other.end()


async def test_task_that_outlives_its_first_request_may_call(tmp_path: Path) -> None:
    source = """
    task = None

    async def execute(self, requests):
        if self.task is None:
            self.queue = asyncio.Queue()
            self.task = asyncio.create_task(self.work())
        for request in requests:
            self.queue.put_nowait(request)

    async def work(self):
        while True:
            request = await self.queue.get()
            try:
                called = await self.models["echo"].async_infer({"a": request.inputs["x"]})
                request.send({"y": called["x"][:, :4]})
            except Exception as error:
                request.fail(repr(error))
            else:
                request.end()
"""
    echo = echo_model()
    async with _answering(tmp_path, source, echo) as started:
        stream = Stream(started)
        for _ in range(3):
            await stream.send(asking("", 2))
            message = await stream.message()
            assert not message.error_message
            assert numbers(message.infer_response) == [2.0] * 4
        await stream.end()
