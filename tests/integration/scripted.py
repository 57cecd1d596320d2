"""A model that records what it got and can be held up at chosen rows, for the tests of batching.

Lives here: requests that a mark distinguishes, the model that records marks, and sending in a known order. Must not:
assertions about behaviour.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from paceline.backends.spec import ModelSpec, Tensors, TensorSpec
from paceline.protos import inference_pb2 as pb
from tests.integration.serving import Served
from tests.memory_models import Gate, MemoryModel
from tests.polling import eventually_async
from tests.wire import Array, infer

__all__ = [
    "BUSY",
    "Script",
    "busy",
    "mark_of",
    "marked",
    "marks",
    "own",
    "queued",
    "request",
    "send",
    "sent",
    "totals",
]

BUSY = -1.0
"""The mark of requests that only keep an instance busy."""

Call = asyncio.Task[Any]


class Script:
    """Computes output = input, in `model`, from FP32 of any number of columns.

    `seen` lists the marks of all rows that the model got, execution by execution, including padding and executions
    that fail. An execution with a row whose mark is in `gates` waits there; `errors` are raised instead of an answer.
    """

    def __init__(self) -> None:
        self.seen: list[list[float]] = []
        self.gates: dict[float, Gate] = {}
        self.errors: dict[float, BaseException] = {}
        tensor = TensorSpec("a", "FP32", (-1, -1))
        self.model = MemoryModel(ModelSpec((tensor,), (TensorSpec("x", "FP32", (-1, -1)),)), self._compute)

    def hold(self, mark: float) -> Gate:
        """Close a gate, at which executions with this mark wait from now on, and return it."""
        gate = self.gates[mark] = Gate()
        gate.close()
        return gate

    def _compute(self, inputs: Tensors) -> Tensors:
        found = marks(inputs[0])
        self.seen.append(found)
        for mark, gate in list(self.gates.items()):
            if mark in found:
                gate.enter()
        for mark, error in list(self.errors.items()):
            if mark in found:
                raise error
        return inputs

    @property
    def served(self) -> list[list[float]]:
        """`seen` without the executions that only kept instances busy."""
        return [batch for batch in self.seen if BUSY not in batch]


def own(**settings: object) -> str:
    """Our own parameters of a `config.pbtxt`."""
    template = 'parameters {{ key: "paceline.{}" value {{ string_value: "{}" }} }}'
    return " ".join(template.format(key, str(value).lower()) for key, value in settings.items())


def marked(mark: float, rows: int = 1, columns: int = 2) -> Array:
    return np.full((rows, columns), mark, np.float32)


def marks(array: Array) -> list[float]:
    return [float(mark) for mark in array[:, 0].tolist()]


def mark_of(answer: pb.ModelInferResponse | bytes) -> float:
    """The mark, which all elements of the answer's only output must have."""
    if isinstance(answer, bytes):
        answer = pb.ModelInferResponse.FromString(answer)
    (data,) = answer.raw_output_contents
    found = set(np.frombuffer(data, "<f4").tolist())
    assert len(found) == 1, found
    return float(found.pop())


def request(
    mark: float, rows: int = 1, columns: int = 2, *, model: str = "m", **parameters: object
) -> pb.ModelInferRequest:
    return infer(model, {"a": marked(mark, rows, columns)}, parameters=parameters)


def send(served: Served, *requests: pb.ModelInferRequest, timeout_s: float | None = 20) -> list[Call]:
    """Calls in flight, all sent at once."""
    return [asyncio.create_task(served.infer(one, timeout_s)) for one in requests]


async def queued(served: Served, requests: Iterable[pb.ModelInferRequest], timeout_s: float | None = 20) -> list[Call]:
    """Calls in flight, each of which waits in the queue before the next is sent."""
    calls: list[Call] = []
    for one in requests:
        before = served.waiting(one.model_name)
        calls += send(served, one, timeout_s=timeout_s)
        expected, model = before + 1, one.model_name
        await eventually_async(lambda m=model, n=expected: served.waiting(m) == n, f"{expected} requests waiting")
    return calls


async def sent(served: Served, script: Script, *requests: pb.ModelInferRequest) -> list[Call]:
    """Calls in flight, each of which waits in the queue or executes before the next is sent."""
    calls: list[Call] = []
    for one in requests:
        before, model = _arrived(served, script, one.model_name), one.model_name
        calls += send(served, one)
        await eventually_async(lambda m=model, n=before: _arrived(served, script, m) == n + 1, "the request received")
    return calls


def _arrived(served: Served, script: Script, model: str) -> int:
    return served.waiting(model) + sum(len(batch) for batch in script.model.batches)


@asynccontextmanager
async def busy(
    served: Served, script: Script, instances: int = 1, *, model: str = "m", rows: int = 1
) -> AsyncIterator[Gate]:
    """Keep every instance busy until the block ends or the yielded gate is opened, each with a request of `rows` rows:
    pass as many as it takes to be executed at once."""
    gate = script.hold(BUSY)
    blockers: list[Call] = []
    for number in range(instances):
        blockers += send(served, request(BUSY, rows, model=model), timeout_s=None)
        await asyncio.to_thread(gate.wait_entered, number + 1)
    try:
        yield gate
    finally:
        gate.open()
        await asyncio.gather(*blockers)
        del script.gates[BUSY]


def totals(metrics: Mapping[str, float], model: str = "m") -> dict[str, float]:
    """How all requests of a model have ended: the numbers of `success`, and of failures by reason."""
    labels = f'model="{model}"'
    found = {"success": metrics[f'nv_inference_request_success{{{labels},version="1"}}']}
    for reason in ("REJECTED", "CANCELED", "BACKEND", "OTHER"):
        found[reason] = metrics[f'nv_inference_request_failure{{{labels},reason="{reason}",version="1"}}']
    return found
