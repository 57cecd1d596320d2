"""The requests that `bench.gpu` sends."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bench import gpu_models
from bench.gpu_steps import requests_of, source
from paceline.protos.inference_pb2 import ModelInferRequest

IMAGES, TEXTS = (one for one in gpu_models.chosen("cpu", gpu_models.QUICK) if one.datatype == "FP32")


def test_requests_in_shared_memory_lie_one_after_the_other_in_it(tmp_path: Path) -> None:
    batch = source(IMAGES)
    requests = [
        ModelInferRequest.FromString(path.read_bytes()) for path in requests_of(IMAGES, batch, 2, "r", tmp_path)
    ]
    parameters = [one.inputs[0].parameters for one in requests]
    ends = [one["shared_memory_offset"].int64_param + one["shared_memory_byte_size"].int64_param for one in parameters]
    assert [one["shared_memory_offset"].int64_param for one in parameters] == [0, *ends[:-1]]
    assert ends[-1] == batch.nbytes
    assert {one.inputs[0].shape[0] for one in requests} == {2}


def test_requests_without_shared_memory_have_all_rows_in_messages(tmp_path: Path) -> None:
    batch = source(TEXTS)
    paths = requests_of(TEXTS, batch, TEXTS.rows, "", tmp_path)
    sent = [ModelInferRequest.FromString(path.read_bytes()).raw_input_contents[0] for path in paths]
    assert len(set(sent)) == len(paths) == 16
    np.testing.assert_array_equal(np.frombuffer(b"".join(sent), np.int64).reshape(batch.shape), batch)
