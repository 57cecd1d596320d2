"""Sequences of our clients and of the command, against the server: states, order, and what becomes of lost ones."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from paceline.clients import (
    AsyncInferenceClient,
    AsyncInferenceSequence,
    InferenceClient,
    InvalidArgument,
    SequenceLost,
)
from paceline.clients.cli import infer
from tests import models, state_models
from tests.harness import ServerProcess

CONFIG = """
max_batch_size: 8
sequence_batching {
  max_sequence_idle_microseconds: %d
  oldest { }
  state { input_name: "STATE" output_name: "STATE_OUT" }
}
"""
PATIENT, BRIEF = 60_000_000, 1
WAYS: list[dict[str, Any]] = [{}, {"transport": "stream"}, {"coalesce": 8}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Model `sums` adds up each sequence; `brief` does too, and forgets it at once."""
    folder = tmp_path_factory.mktemp("models")
    for name, idle_us in (("sums", PATIENT), ("brief", BRIEF)):
        models.write(state_models.accumulator(dims=("batch", 1)), folder / name / "1" / "model.onnx")
        (folder / name / "config.pbtxt").write_text(CONFIG % idle_us)
    with ServerProcess(folder) as started:
        yield started


@pytest.fixture(params=WAYS, ids=str)
async def client(request: pytest.FixtureRequest, server: ServerProcess) -> AsyncIterator[AsyncInferenceClient]:
    async with AsyncInferenceClient(server.target, timeout_s=30, **request.param) as made:
        yield made


async def until_lost(sequence: AsyncInferenceSequence) -> None:
    """The limit of a microsecond is looked at when the server's event loop comes to it."""
    while True:
        await sequence.infer(given([1])[0])


def given(values: range | list[int]) -> list[dict[str, Any]]:
    return [{"INPUT0": np.full((1, 1), value, np.float32)} for value in values]


async def test_async_sequences_at_once_keep_their_states_apart(client: AsyncInferenceClient) -> None:
    async def use(number: int) -> list[float]:
        async with client.sequence("sums") as sequence:
            return [
                float(each["OUTPUT0"][0, 0]) async for each in sequence.infer_all(given(range(number, number + 10)))
            ]

    found = await asyncio.gather(*(use(number) for number in range(40)))
    assert found == [list(np.cumsum(range(number, number + 10))) for number in range(40)]


async def test_async_steps_sent_together_are_executed_in_order(client: AsyncInferenceClient) -> None:
    async with client.sequence("sums", "together") as sequence:
        steps = [sequence.infer(step, last=number == 49) for number, step in enumerate(given(range(50)))]
        found = [float(each["OUTPUT0"][0, 0]) for each in await asyncio.gather(*steps)]
    assert found == list(np.cumsum(range(50)))


async def test_async_lost_sequence_says_why_and_starts_afresh(client: AsyncInferenceClient) -> None:
    async with client.sequence("brief") as sequence:
        await sequence.infer(given([1])[0])
        with pytest.raises(SequenceLost, match="max_sequence_idle_microseconds"):
            await until_lost(sequence)
        assert (await sequence.infer(given([5])[0], last=True))["OUTPUT0"].tolist() == [[5]]


def test_sequence_goes_on_after_a_refused_step(server: ServerProcess) -> None:
    with InferenceClient(server.target) as client, client.sequence("sums", 7) as sequence:
        first, second = given([1, 2])
        for wrong in ({"INPUT0": np.zeros((1, 2), np.float32)}, {"INPUT0": np.zeros((2, 1), np.float32)}):
            with pytest.raises(InvalidArgument):
                sequence.infer(wrong)
        assert sequence.infer(first)["OUTPUT0"].tolist() == [[1]]
        with pytest.raises(InvalidArgument):
            sequence.infer({"INPUT0": np.zeros((1, 1), np.int32)}, last=True)
        assert sequence.infer(second, last=True)["OUTPUT0"].tolist() == [[3]]


def test_infer_all_ends_its_sequence_at_the_server(server: ServerProcess) -> None:
    ended = 'paceline_ended_sequences{model="sums",reason="end",version="1"}'
    before = server.metrics()[ended]
    with InferenceClient(server.target) as client:
        answers = [each["OUTPUT0"][0, 0] for each in client.sequence("sums").infer_all(given([1, 2, 3]))]
    assert answers == [1, 3, 6]
    assert server.metrics()[ended] == before + 1


def test_infer_command_sends_a_sequence_from_a_file(server: ServerProcess, tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    file.write_text("".join(f'{{"INPUT0": [[{value}]]}}\n' for value in (1, 2, 4)))
    given = ["sums", "--server", server.target, "--sequence", str(file), "--sequence-id", "file", "--format", "json"]
    result = CliRunner().invoke(infer, given)
    assert (result.exit_code, result.stderr) == (0, "")
    assert [json.loads(line)["outputs"][0]["data"] for line in result.stdout.splitlines()] == [[1], [3], [7]]
