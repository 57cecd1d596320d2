"""LoadGen's runs end with an error unless every sample got the right answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench import gpu_models
from bench.loadgen import run, samples
from bench.loadgen_client import HOME
from bench.steps import BenchError
from tests.harness import ServerProcess
from tests.lengths import whole_measurement


@whole_measurement
@pytest.mark.skipif(not (HOME / "installed").exists(), reason="no LoadGen: make bench-loadgen")
def test_only_right_answers_to_all_samples_are_a_run(tmp_path: Path) -> None:
    model = next(one for one in gpu_models.chosen("cpu", gpu_models.QUICK) if one.name == "bert_base_fp32")
    file = gpu_models.write(model, tmp_path)
    gpu_models.add(model, file, tmp_path / "models", "cpu")
    samples(model, file, tmp_path / "right")
    samples(replace(model, name="nobody"), file, tmp_path / "unknown")
    samples(model, file, tmp_path / "wrong")
    expected = np.load(tmp_path / "wrong" / "expected.npy")
    expected[7] += 1
    np.save(tmp_path / "wrong" / "expected.npy", expected)
    with ServerProcess(tmp_path / "models") as server:
        found = run(server.target, tmp_path / "right", "server", 400.0, 0.5)
        assert found["answered"] == found["result_query_count"] > 0
        with pytest.raises(BenchError, match="'wrong answer': "):
            run(server.target, tmp_path / "wrong", "offline", 200.0, 0.5)
        with pytest.raises(BenchError, match="NOT_FOUND: "):
            run(server.target, tmp_path / "unknown", "offline", 50.0, 0.5)
