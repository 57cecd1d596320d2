"""Outputs that belong on a GPU and are produced elsewhere: the instance's thread writes all of a request's there, or
none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import monotonic_ns

import numpy as np
import pytest

from paceline.backends.base import DeviceTensor, Execution
from paceline.backends.spec import Array, Tensors
from paceline.server.memory.cuda_region import CudaRegion, CudaRegions
from paceline.server.memory.reading import writing_outputs
from paceline.server.memory.region_tensors import Inputs, Span, TargetedInputs
from tests.unit.backends.cuda.fake_driver import HANDLE, Driver
from tests.wire import rows_of_floats

TEXTS: Array = np.array([[b"text"]], object)


@pytest.fixture
def driver() -> Driver:
    return Driver(size=64)


@pytest.fixture
def region(driver: Driver) -> CudaRegion:
    return CudaRegions(driver.load).open("r", HANDLE, 0, 64)


def results_after_writing(targets: Mapping[int, Span], *results: Array) -> Tensors | Exception:
    """The results of a request, some of whose outputs belong in `targets`, after an execution."""

    def execute(requests: Sequence[Inputs], padded_rows: int) -> Execution:
        return Execution([results], 0, 0, 0)

    return writing_outputs(execute)([TargetedInputs.to(targets, ())], 0).results[0]


def test_outputs_are_written_to_their_targets_and_others_stay(region: CudaRegion, driver: Driver) -> None:
    results = rows_of_floats(1), rows_of_floats(1, first=5)
    done = results_after_writing({1: Span(region, 16, 8)}, *results)
    assert not isinstance(done, Exception)
    assert done[0] is results[0]
    assert isinstance(done[1], DeviceTensor)
    assert driver.memory.raw == bytes(16) + results[1].tobytes() + bytes(40)


@pytest.mark.parametrize("other", [rows_of_floats(1, 3), TEXTS], ids=["too large", "texts"])
def test_outputs_of_a_request_all_stay_if_one_of_them_cannot_be_written(
    region: CudaRegion, driver: Driver, other: Array
) -> None:
    results = rows_of_floats(1), other
    done = results_after_writing({0: Span(region, 0, 8), 1: Span(region, 16, 8)}, *results)
    assert done is results or (not isinstance(done, Exception) and all(map(np.array_equal, done, results)))
    assert driver.memory.raw == bytes(64)


def test_time_spent_writing_counts_as_output_time(region: CudaRegion) -> None:
    def execute(requests: Sequence[Inputs], padded_rows: int) -> Execution:
        return Execution([(rows_of_floats(1),)], 1, 2, 3)

    began_ns = monotonic_ns()
    done = writing_outputs(execute)([TargetedInputs.to({0: Span(region, 0, 8)}, ())], 0)
    assert 3 < done.output_ns <= 3 + monotonic_ns() - began_ns
    assert (done.input_ns, done.infer_ns) == (1, 2)
