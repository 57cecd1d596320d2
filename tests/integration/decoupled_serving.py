"""Servers of a decoupled model that runs what requests ask for.

Lives here: serving it, asking it, and reading what it answers. Must not: assertions about behaviour.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from paceline.protos import inference_pb2 as pb
from paceline.server.config import Settings
from tests import open_puppet
from tests.integration.serving import Served, serving
from tests.integration.streams import Stream
from tests.polling import eventually_async
from tests.wire import infer

__all__ = [
    "BATCHED",
    "COUNT",
    "EMPTY_FINAL",
    "ENDLESS",
    "FINAL",
    "KEEP",
    "ONE_BY_ONE",
    "Told",
    "answers_with_one",
    "asking",
    "counts",
    "one",
    "rest",
    "served",
    "settled",
    "told",
]


FINAL = "triton_final_response"


EMPTY_FINAL = "triton_enable_empty_final_response"


COUNT = "for n in range(3): send(n)\n"


ENDLESS = "while not request.cancelled: send(1)\n"


KEEP = "model.kept.append(request)\n"


BATCHED = "max_batch_size: 8 dynamic_batching { }"


ONE_BY_ONE = "max_batch_size: 1"


Told = tuple[str, int | str | None, bool]
"""Id, the output, the error or nothing, and whether it is the last answer."""


@asynccontextmanager
async def served(root: Path, config: str = BATCHED, settings: Settings | None = None) -> AsyncIterator[Served]:
    open_puppet.write(root, config)
    allowing = settings or Settings(paths=(root,), allow_python_models=True)
    async with serving(root, settings=allowing) as started:
        yield started


def asking(code: str, request_id: str = "", **parameters: bool | int) -> pb.ModelInferRequest:
    """A request by which the model runs `code`."""
    request = infer("m", {"x": np.array([[1]], np.int64)})
    request.id = request_id
    request.parameters["run"].string_param = code
    for key, value in parameters.items():
        kind = "bool_param" if isinstance(value, bool) else "int64_param"
        setattr(request.parameters[key], kind, value)
    return request


def told(message: pb.ModelStreamInferResponse) -> Told:
    response = message.infer_response
    last = response.parameters[FINAL].bool_param
    if message.error_message:
        assert response.parameters["paceline_status"].string_param
        return response.id, message.error_message, last
    output = int(np.frombuffer(response.raw_output_contents[0], np.int64)[0]) if response.outputs else None
    return response.id, output, last


async def rest(stream: Stream) -> list[Told]:
    """All answers until the stream ends; no more is sent."""
    await stream.end()
    answers: list[Told] = []
    while isinstance(message := await asyncio.wait_for(stream.call.read(), 20), pb.ModelStreamInferResponse):
        answers.append(told(message))
    return answers


async def one(served: Served, code: str) -> int | str | None:
    """The one answer to a request on a stream of its own."""
    stream = Stream(served)
    await stream.send(asking(code))
    (answer,) = await rest(stream)
    return answer[1]


async def answers_with_one(served: Served) -> bool:
    return await one(served, "send(1, True)") == 1


async def settled(served: Served) -> pb.ModelStatistics:
    """The statistics, once no request is open any more."""
    model = served.server.repository.get("m", "")
    assert model.open_requests is not None
    await eventually_async(lambda: not len(model.open_requests), "no request is open")
    reply = await served.stub.ModelStatistics(pb.ModelStatisticsRequest(name="m"), timeout=20)
    return reply.model_stats[0]


def counts(statistics: pb.ModelStatistics) -> tuple[int, int]:
    return statistics.inference_stats.success.count, statistics.inference_stats.fail.count
