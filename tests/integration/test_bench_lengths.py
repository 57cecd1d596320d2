"""The measurement of texts of different lengths runs to its end: its model's lengths are found, and everything is
answered."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped,unused-ignore]
import pytest

from bench import lengths, text_model
from tests.lengths import whole_measurement


@whole_measurement
def test_every_load_is_answered_and_compared() -> None:
    found = lengths.measure(0.5, text_model.QUICK)
    assert min(found[key] for key in ("of_best", "of_exact", "short_of_long")) > 0
    assert {name.partition("{")[0] for name in found["padding"]} >= {"paceline_elements", "paceline_padding_elements"}


def test_encoder_ignores_what_texts_are_filled_up_with(tmp_path_factory: pytest.TempPathFactory) -> None:
    file = text_model.write(tmp_path_factory.mktemp("encoder"), text_model.QUICK)
    session = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    both = text_model.feeds([3, 9])
    (together,) = session.run(None, both)
    (alone,) = session.run(None, {name: array[:1, :3] for name, array in both.items()})
    np.testing.assert_allclose(together[:1], alone, atol=1e-5)
