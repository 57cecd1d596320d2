"""The measurement of sequences runs to its end: every step is answered as the model alone answers it, and compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import sequence_costs, sequence_models, sequences
from paceline.protos import inference_pb2 as pb
from tests.lengths import whole_measurement


@whole_measurement
def test_all_streams_are_answered_and_compared(tmp_path: Path) -> None:
    files = {"fixed": sequence_models.write_fixed(tmp_path, products=1)}
    found: list[dict[str, Any]] = []
    sequences.measure(files, 1, 0.2, 5, found.append)
    assert [one["model"] for one in found] == ["fixed"]
    assert all(one["difference"] == 0 for one in found)
    assert all(one[key] > 0 for one in found for key in ("inside_of_joined", "of_joined", "of_plain", "of_one"))


@whole_measurement
def test_sequences_of_all_ages_are_answered_and_compared(tmp_path: Path) -> None:
    found: list[dict[str, Any]] = []
    sequences.measure_ages(sequence_models.write_growing(tmp_path, products=1), 1, 0.2, 5, found.append)
    assert all(one["difference"] == 0 and one["of_exact"] > 0 for one in found)


def test_costs_of_steps_and_memory_are_measured() -> None:
    found = sequence_costs.costs(0.01, live=(64, 128))
    assert [one["live"] for one in found["steps"]] == [64, 128]
    assert all(one["step_us"] > 0 and one["one_shot_us"] > 0 for one in found["steps"])
    assert 0 < found["sequence_bytes"] < 1024


@pytest.mark.parametrize(
    ("model", "write"),
    [
        (sequence_models.FIXED, sequence_models.write_fixed),
        (sequence_models.GROWING, sequence_models.write_growing),
    ],
)
def test_models_of_fixed_cost_sum_up_their_inputs(
    tmp_path: Path, model: sequence_models.Recurrent, write: Callable[[Path], Path]
) -> None:
    steps = model.inputs(3, 6)
    found = sequence_models.alone(model, write(tmp_path), steps)
    expected = np.cumsum([one["INPUT"] for one in steps])
    np.testing.assert_array_equal(np.ravel(found), expected)
    assert expected[-1] > 0


@pytest.mark.parametrize("model", [sequence_models.VAD, sequence_models.FIXED], ids=lambda model: model.name)
def test_messages_are_a_whole_sequence_with_flags(model: sequence_models.Recurrent) -> None:
    requests = [pb.ModelInferRequest.FromString(message) for message in sequence_models.messages(model, 4, 3)]
    flags = [
        tuple(request.parameters[name].bool_param for name in ("sequence_start", "sequence_end"))
        for request in requests
    ]
    assert flags == [(True, False), (False, False), (False, True)]
    assert {request.parameters["sequence_id"].int64_param for request in requests} == {5}
    sent = [request.raw_input_contents[0] for request in requests]
    assert sent == [next(iter(one.values())).tobytes() for one in model.inputs(4, 3)]


def test_chunks_of_speech_overlap_by_their_context() -> None:
    first, second, _ = sequence_models.VAD.inputs(0, 3)
    np.testing.assert_array_equal(first["input"][:, 512:], second["input"][:, :64])
    assert np.ptp(np.concatenate([one["input"] for one in sequence_models.VAD.inputs(0, 50)])) > 0.1
