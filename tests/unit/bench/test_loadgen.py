"""The parts of the measurement with LoadGen that need no LoadGen."""

from __future__ import annotations

import numpy as np
import pytest

from bench.loadgen import highest
from bench.loadgen_client import difference, read_log
from paceline.protos.inference_pb2 import ModelInferResponse


@pytest.mark.parametrize(("limit", "found"), [(100.0, 96.875), (40.0, 37.5), (3.0, 0.0)])
def test_search_ends_within_a_step_of_the_limit(limit: float, found: float) -> None:
    tried: list[float] = []
    assert highest(lambda rate: tried.append(rate) or rate <= limit, 100.0, 5) == found
    assert len(tried) == 5


def test_difference_is_the_largest_and_never_small_for_other_outputs() -> None:
    def answer(*values: float) -> bytes:
        return ModelInferResponse(raw_output_contents=[np.array(values, np.float32).tobytes()]).SerializeToString()

    expected = np.array([1, 2], np.float32)
    assert difference(answer(1, 2.5), expected) == 0.5
    assert difference(answer(1), expected) == difference(answer(1, np.nan), expected) == float("inf")


def test_results_are_read_from_the_detailed_log() -> None:
    line = ':::MLLOG {"key": "%s", "value": %s, "time_ms": 1.5, "event_type": "POINT_IN_TIME"}'
    log = "\n".join([line % ("result_validity", '"VALID"'), line % ("effective_seed", "7"), "something else"])
    assert read_log(log) == {"result_validity": "VALID"}
