"""The measurement of pipelines runs to its end: both ways of asking are loaded and compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import pipelines
from examples.embedding import build
from tests.lengths import whole_measurement


@whole_measurement
def test_chain_of_identity_models_is_compared_with_one() -> None:
    found: list[dict[str, Any]] = []
    pipelines.measure_identity(1, 0.2, found.append)
    assert all(one[key] > 0 for one in found for key in ("cpu_of_one", "wait_of_one"))
    assert len(found) == 1


@whole_measurement
def test_embeddings_are_compared_with_the_encoder_alone(tmp_path: Path) -> None:
    if wanted := build.missing():
        pytest.skip(f"make witness has not downloaded {', '.join(wanted)}")
    found: list[dict[str, Any]] = []
    pipelines.measure_text(build.build(tmp_path), 1, 1.0, found.append)
    assert all(one[key] > 0 for one in found for key in ("of_encoder", "rows_per_batch", "rows_per_batch_alone"))
    assert len(found) == 1
