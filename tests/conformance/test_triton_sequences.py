"""Sequences as NVIDIA's clients send them, alone and through several processes, and through a proxy in front."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
from tritonclient.utils import InferenceServerException

from tests import models, state_models
from tests.conformance.triton import Callbacks, Triton, tensors
from tests.harness import ServerProcess

CONFIG = """
    max_batch_size: 8
    sequence_batching {
      max_sequence_idle_microseconds: 60000000
      oldest { }
      state { input_name: "STATE" output_name: "STATE_OUT" }
    }
"""


@pytest.fixture(scope="module", params=["alone", "fronts", "proxy"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of a model that adds up what the steps of a sequence bring."""
    root = tmp_path_factory.mktemp("repository")
    path = models.write(state_models.accumulator(), root / "sums" / "1" / "model.onnx")
    (path.parents[1] / "config.pbtxt").write_text(CONFIG)
    with ExitStack() as stack:
        frontends = "2" if request.param == "fronts" else "1"
        serves = stack.enter_context(ServerProcess(root, args=("--frontends", frontends)))
        if request.param == "proxy":
            serves = stack.enter_context(ServerProcess(args=("--upstream", serves.target)))
        yield serves


@pytest.fixture(params=[tritonclient.grpc, tritonclient.grpc.aio], ids=["sync", "aio"])
async def triton(request: pytest.FixtureRequest, server: ServerProcess) -> AsyncIterator[Triton]:
    client = Triton(request.param.InferenceServerClient(server.target))
    yield client
    await client.close()


def value(number: float, rows: int = 1) -> Any:
    return tensors({"INPUT0": np.full((rows, 2), number, np.float32)})


def sum_of(result: Any) -> float:
    assert [output.name for output in result.get_response().outputs] == ["OUTPUT0"]
    (one,) = set(result.as_numpy("OUTPUT0").ravel().tolist())
    return float(one)


@pytest.mark.parametrize("kind", [int, str])
async def test_steps_add_up_within_their_sequence_alone(triton: Triton, kind: type[int] | type[str]) -> None:
    for number in range(1, 6):
        for sequence in range(1, 4):
            flags = {"sequence_start": number == 1, "sequence_end": number == 5}
            result = await triton.infer("sums", value(sequence), sequence_id=kind(sequence), **flags)
            assert sum_of(result) == number * sequence


async def test_start_again_begins_anew_and_end_ends(triton: Triton) -> None:
    sums = [
        sum_of(await triton.infer("sums", value(1), sequence_id=77, sequence_start=start, sequence_end=end))
        for start, end in ((True, False), (False, False), (True, False), (False, True))
    ]
    assert sums == [1, 2, 1, 2]
    with pytest.raises(InferenceServerException, match="must specify the START flag"):
        await triton.infer("sums", value(1), sequence_id=77)


@pytest.mark.parametrize(
    ("options", "rows", "status", "phrase"),
    [
        ({}, 1, "INVALID_ARGUMENT", "model 'sums' must specify a non-zero or non-empty correlation ID"),
        ({"sequence_id": 5}, 1, "INVALID_ARGUMENT", "request for sequence 5 to model 'sums' must specify the START"),
        ({"sequence_id": 5}, 2, "INVALID_ARGUMENT", "model 'sums' must specify batch-size 1 due to requirements of"),
        ({"sequence_id": "x" * 129}, 1, "UNIMPLEMENTED", "string correlation ID cannot be longer than 128 characters"),
    ],
    ids=["no id", "no start", "two rows", "a long id"],
)
async def test_step_that_fits_no_sequence_is_refused_as_by_triton(
    triton: Triton, options: dict[str, Any], rows: int, status: str, phrase: str
) -> None:
    with pytest.raises(InferenceServerException) as caught:
        await triton.infer("sums", value(1, rows), **options)
    assert caught.value.status() == f"StatusCode.{status}"
    assert phrase in caught.value.message()


def test_stream_carries_steps_of_many_sequences(server: ServerProcess) -> None:
    called = Callbacks()
    with tritonclient.grpc.InferenceServerClient(server.target) as client:
        client.start_stream(called)
        for number in range(1, 11):
            for sequence in (1001, 1002, "1001"):
                flags = {"sequence_start": number == 1, "sequence_end": number == 10}
                client.async_stream_infer(
                    "sums", value(number), sequence_id=sequence, request_id=f"{sequence!r}", **flags
                )
        sums: dict[str, list[float]] = {}
        for _ in range(30):
            result, error = called.next()
            assert error is None
            sums.setdefault(result.get_response().id, []).append(sum_of(result))
        client.stop_stream()
    assert sums == {key: [n * (n + 1) / 2 for n in range(1, 11)] for key in ("1001", "1002", "'1001'")}


async def test_aio_stream_carries_steps(server: ServerProcess) -> None:
    async def steps() -> AsyncIterator[dict[str, Any]]:
        for number in range(10):
            yield {
                "model_name": "sums",
                "inputs": value(1),
                "sequence_id": 2001,
                "sequence_start": number == 0,
                "sequence_end": number == 9,
            }

    async with tritonclient.grpc.aio.InferenceServerClient(server.target) as client:
        sums = []
        async for result, error in client.stream_infer(steps()):
            assert error is None
            sums.append(sum_of(result))
    assert sums == [*range(1, 11)]


async def test_metadata_and_configuration_tell_of_sequences(triton: Triton) -> None:
    assert {"sequence", "sequence(string_id)"} <= {*(await triton.get_server_metadata()).extensions}
    config = (await triton.get_model_config("sums")).config
    assert config.sequence_batching.max_sequence_idle_microseconds == 60_000_000
    assert config.sequence_batching.HasField("oldest")
    assert config.max_batch_size == 8
    metadata = await triton.get_model_metadata("sums")
    assert [(one.name, [*one.shape]) for one in metadata.inputs] == [("INPUT0", [-1, 2])]
    assert [one.name for one in metadata.outputs] == ["OUTPUT0"]
