"""The ceiling's bound tensors, on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bench import gpu_direct
from bench.sessions import open_session
from tests import models


def test_bound_tensors_are_read_and_written_where_they_are(tmp_path: Path) -> None:
    file = models.write(models.identity("FP32", ("batch", 4)), tmp_path / "model.onnx")
    session, batch = open_session(file), np.zeros((8, 4), np.float32)
    whole = gpu_direct.Bound(session, batch, "cpu")
    batch += 1
    np.testing.assert_array_equal(whole.run_with_copies(), batch)
    assert gpu_direct.measure(whole.run, 8, 0.0).keys() == {"rows_per_s", "batch_ms"}
    assert gpu_direct.after_smaller_ms(whole, gpu_direct.Bound(session, batch[:4], "cpu"), 0.0) > 0
