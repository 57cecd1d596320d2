"""What instances with slots run before a model is ready: each slot runs batches of all sizes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format

from paceline.backends.base import Device, Execution, ModelInstance
from paceline.backends.errors import InstanceError, LoadError, OutOfMemory
from paceline.backends.spec import Tensors
from paceline.protos import model_config_pb2 as pb
from paceline.server.errors import ConfigError
from paceline.server.models.model_config import plan
from paceline.server.models.warmup import WarmUp
from tests.unit.server.models.warmup_bench import Bench, sample


class Slot:
    """Records the sizes that it is prepared for; more than `most` rows fail with `kind`."""

    def __init__(self, instance: ModelInstance, most: int, kind: type[InstanceError]) -> None:
        self.device = instance.device
        self.execute, self.close = instance.execute, instance.close
        self.sizes: list[int] = []
        self._most, self._kind = most, kind

    def prepare(self, requests: Sequence[Tensors], padded_rows: int = 0) -> None:
        size = max(padded_rows, sum(len(request[0]) for request in requests))
        if size > self._most:
            raise self._kind("too large")
        self.sizes.append(size)
        self.execute(requests, padded_rows)


class Slotted:
    """An instance with two slots, which is to be warmed up only through these."""

    def __init__(self, instance: ModelInstance, most: int, kind: type[InstanceError]) -> None:
        self.device, self.close = instance.device, instance.close
        self.slots = [Slot(instance, most, kind) for _ in range(2)]

    def execute(self, requests: Sequence[Tensors], padded_rows: int = 0) -> Execution:
        raise AssertionError("its slots are to be warmed up, each on its own thread")


def prepared(
    text: str = "",
    *,
    rows: int = 6,
    most: int = 100,
    kind: type[InstanceError] = OutOfMemory,
    dims: tuple[int, ...] = (2,),
    execution_s: int = 0,
) -> list[list[int]]:
    """The sizes that each of two slots was prepared for, in order."""
    bench = Bench(dims=dims, rows=rows)
    bench.execution_ns = execution_s * 10**9
    config = text_format.Parse(f'name: "m" max_batch_size: {rows} {text}', pb.ModelConfig())
    served = plan(config, bench.own)
    instance: Any = Slotted(bench.model.instance(served.spec, Device()), most, kind)
    WarmUp(config, served, Path(), bench.now_ns).run([instance])
    return [slot.sizes for slot in instance.slots]


SIZES = 'parameters { key: "paceline.batch_sizes" value { string_value: "1,3,6" } }'


def test_slots_are_prepared_for_all_sizes_the_largest_first() -> None:
    assert prepared() == [[6, 4, 2, 1]] * 2
    assert prepared(rows=8) == [[8, 4, 2, 1]] * 2
    assert prepared(SIZES) == [[6, 3, 1]] * 2
    assert prepared(rows=0) == [[2]] * 2  # as its dims are [2]


def test_slots_are_prepared_by_samples_padded_to_each_size_that_holds_them() -> None:
    assert prepared(SIZES + sample(more="batch_size: 2")) == [[6, 3]] * 2
    assert prepared(SIZES + sample(more="batch_size: 2 count: 2")) == [[6, 3, 2]] * 2
    assert prepared(SIZES + sample(more="batch_size: 0")) == [[]] * 2


@pytest.mark.parametrize("text", ["", sample()])
def test_slots_are_prepared_for_no_more_sizes_after_ten_minutes(text: str) -> None:
    sizes = 'parameters { key: "paceline.batch_sizes" value { string_value: "1,2,3,4,5,6" } }'
    assert prepared(sizes + text, execution_s=200) == [[6, 5, 4, 3], []]


@pytest.mark.parametrize(
    ("kind", "what"), [(OutOfMemory, "doesn't fit into the device's memory"), (InstanceError, "fails")]
)
def test_size_that_does_not_fit_or_fails_is_left_out(
    kind: type[InstanceError], what: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "paceline.server.warmup"):
        assert prepared(SIZES, most=3, kind=kind) == [[3, 1]] * 2
    assert caplog.messages == [f"model 'm': warm-up: a batch of 6 rows {what}: too large"] * 2


def test_without_a_size_that_its_session_executes_the_load_fails() -> None:
    with pytest.raises(LoadError, match="its warm-up failed: too large"):
        prepared(most=0, kind=InstanceError)


def test_no_warm_up_without_memory_for_any_size(caplog: pytest.LogCaptureFixture) -> None:
    assert prepared(most=0) == [[], []]
    assert "is served without warm-up" in caplog.messages[-1]
    with pytest.raises(ConfigError, match="failed to run warmup sample 's': too large"):
        prepared(sample(), most=0)


def test_slots_of_open_dims_stay_unprepared_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "paceline.server.warmup"):
        assert prepared(dims=(-1,)) == [[], []]
    assert caplog.messages == ["model 'm' is served without warm-up, as not all its dims are known; set model_warmup"]
