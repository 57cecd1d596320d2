"""NVIDIA's client with sequences: blocking, with callbacks, over streams, asyncio; its arguments reach models that
remember."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
from tritonclient.utils import InferenceServerException

from tests import models, state_models
from tests.conformance.triton import Callbacks, Triton, tensors
from tests.harness import ServerProcess

SEQUENCES, STEPS = 12, 10
CONFIG = """
max_batch_size: 8
sequence_batching { max_sequence_idle_microseconds: 60000000 oldest { } %s }
"""
STATE = 'state { input_name: "STATE" output_name: "STATE_OUT" }'
Inputs = dict[str, np.ndarray[Any, Any]]


@pytest.fixture(scope="module", params=[1, 2], ids=["alone", "fronts"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("models")
    models.write(state_models.accumulator(dims=("batch", 1)), folder / "sums" / "1" / "model.onnx")
    (folder / "sums" / "config.pbtxt").write_text(CONFIG % STATE)
    with ServerProcess(folder, args=("--frontends", str(request.param))) as started:
        yield started


def steps(number: int) -> list[tuple[Inputs, dict[str, Any]]]:
    """Inputs and arguments of each step of a sequence; every other sequence has text for its id."""
    own_id = f"s{number}" if number % 2 else number + 1
    return [
        (
            {"INPUT0": np.full((1, 1), number + step, np.float32)},
            {"sequence_id": own_id, "sequence_start": step == 0, "sequence_end": step == STEPS - 1},
        )
        for step in range(STEPS)
    ]


def sums(number: int) -> list[float]:
    return list(np.cumsum(np.arange(number, number + STEPS)))


def value(result: Any) -> float:
    return float(result.as_numpy("OUTPUT0")[0, 0])


async def test_sequences_of_both_clients_keep_their_states_apart(either: Triton) -> None:
    async def use(number: int) -> list[float]:
        return [value(await either.infer("sums", tensors(inputs), **flags)) for inputs, flags in steps(number)]

    found = await asyncio.gather(*(use(number) for number in range(SEQUENCES)))
    assert found == [sums(number) for number in range(SEQUENCES)]


async def test_step_of_an_unknown_sequence_has_tritons_phrase(either: Triton) -> None:
    inputs, _ = steps(0)[0]
    with pytest.raises(InferenceServerException, match="must specify the START flag") as raised:
        await either.infer("sums", tensors(inputs), sequence_id=99)
    assert raised.value.status() == "StatusCode.INVALID_ARGUMENT"
    with pytest.raises(InferenceServerException, match="must specify a non-zero or non-empty correlation ID"):
        await either.infer("sums", tensors(inputs))


def test_callbacks_get_the_answers_of_whole_sequences(server: ServerProcess) -> None:
    with tritonclient.grpc.InferenceServerClient(server.target) as client:
        for number in range(SEQUENCES):
            for (inputs, flags), expected in zip(steps(number), sums(number), strict=True):
                called = Callbacks()
                client.async_infer("sums", tensors(inputs), called, **flags)
                result, error = called.next()
                assert error is None
                assert value(result) == expected


@pytest.mark.parametrize("turn", [sorted, lambda all_steps: sorted(all_steps, key=lambda one: one[1])])
def test_stream_keeps_the_order_of_steps_sent_at_once(server: ServerProcess, turn: Callable[[Any], Any]) -> None:
    """Sequence by sequence, and step by step of all sequences."""
    order = turn([(number, step) for number in range(SEQUENCES) for step in range(STEPS)])
    called = Callbacks()
    with tritonclient.grpc.InferenceServerClient(server.target) as client:
        client.start_stream(called)
        for number, step in order:
            inputs, flags = steps(number)[step]
            client.async_stream_infer("sums", tensors(inputs), request_id=f"{number} {step}", **flags)
        found = {}
        for _ in order:
            result, error = called.next()
            assert error is None
            found[result.get_response().id] = value(result)
        client.stop_stream()
    assert found == {f"{number} {step}": sums(number)[step] for number, step in order}


async def test_asyncio_stream_carries_sequences(server: ServerProcess) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for number in range(SEQUENCES):
            for inputs, flags in steps(number):
                yield {"model_name": "sums", "inputs": tensors(inputs), **flags}

    async with tritonclient.grpc.aio.InferenceServerClient(server.target) as client:
        found = []
        async for result, error in client.stream_infer(requests()):
            assert error is None
            found.append(value(result))
    assert found == [each for number in range(SEQUENCES) for each in sums(number)]
