"""Inputs are read right before an execution: results are the same from anywhere, unreadable requests fail alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import monotonic_ns
from typing import Any

import numpy as np
import pytest

from paceline.backends.base import Device, Execution
from paceline.backends.errors import ExecutionError
from paceline.backends.spec import MISSING, Array, ModelSpec, Tensors, TensorSpec
from paceline.protos.datatypes import by_name
from paceline.server.errors import InvalidRequest
from paceline.server.memory import reading as reading_module
from paceline.server.memory.reading import reading
from paceline.server.memory.region_tensors import Input, RegionTensor, Span
from paceline.server.memory.system_region import SystemRegion, open_system_region
from tests.memory_models import MemoryModel
from tests.shared_objects import SharedObject, shared_object

FP32 = by_name("FP32")
STACKED = ModelSpec((TensorSpec("a", "FP32", (2,)),), (TensorSpec("x", "FP32", (2,)),), batched=True)
PAIR = ModelSpec(
    (TensorSpec("a", "FP32", (2,)), TensorSpec("b", "BYTES", (1,))),
    (TensorSpec("x", "FP32", (2,)), TensorSpec("y", "BYTES", (1,))),
    batched=True,
)
RAGGED = ModelSpec((TensorSpec("a", "FP32", (2,), optional=True),), (TensorSpec("x", "FP32", (2,)),), batched=True)
ALONE = ModelSpec((TensorSpec("a", "FP32", (-1, 2)),), (TensorSpec("x", "FP32", (-1, 2)),))


class Bench:
    """An identity model that records the arrays that its executions got."""

    def __init__(self, spec: ModelSpec) -> None:
        self.seen: list[list[Array]] = []
        self.instance = MemoryModel(spec, self._compute).instance(spec, Device())
        self.run = reading(self.instance.execute, spec)

    def _compute(self, inputs: Tensors) -> Tensors:
        self.seen.append(list(inputs))
        return inputs


@pytest.fixture
def memory() -> Iterator[SharedObject]:
    with shared_object(800) as made:
        made.put(np.arange(200, dtype=np.float32))
        yield made


@pytest.fixture
def region(memory: SharedObject) -> SystemRegion:
    return open_system_region("r", memory.key, 0, 800)


def in_region(region: SystemRegion, rows: int, first: int = 0) -> RegionTensor:
    return RegionTensor.of_span("input 'a'", Span(region, 8 * first, 8 * rows), FP32, (rows, 2))


def in_message(rows: int, first: int = 0) -> Array:
    return np.arange(2 * first, 2 * (first + rows), dtype=np.float32).reshape(rows, 2)


def values(results: Sequence[Any]) -> list[Any]:
    return [one if isinstance(one, Exception) else [output.tolist() for output in one] for one in results]


@pytest.mark.parametrize("spec", [STACKED, RAGGED], ids=["joined", "one by one"])
@pytest.mark.parametrize("padded", [0, 6, 9])
@pytest.mark.parametrize("inside", range(8))
@pytest.mark.parametrize("at_once", [False, True])
def test_results_are_the_same_wherever_inputs_were_stored(
    region: SystemRegion, spec: ModelSpec, padded: int, inside: int, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not at_once:  # as in a sandbox that forbids it
        monkeypatch.setattr(reading_module.SystemCall, "is_allowed", False)
    rows, firsts = [1, 3, 2], [5, 40, 7]
    requests: list[tuple[Input]] = [
        (in_region(region, count, first),) if inside >> number & 1 else (in_message(count, first),)
        for number, (count, first) in enumerate(zip(rows, firsts, strict=True))
    ]
    bench, plain = Bench(spec), Bench(spec)
    done = bench.run(requests, padded)
    expected = plain.instance.execute(
        [(in_message(count, first),) for count, first in zip(rows, firsts, strict=True)], padded
    )
    assert values(done.results) == values(expected.results)
    assert bench.seen[0][0].tolist() == plain.seen[0][0].tolist()


class OnlyMapped:
    """A region that can't be read tensor by tensor."""

    kind = "system"

    def __init__(self, region: SystemRegion) -> None:
        self.name, self.byte_size, self.mapped_at = region.name, region.byte_size, region.mapped_at
        self.check, self.write = region.check, region.write

    def read_into(self, target: Array, offset: int) -> None:
        raise AssertionError("it was read tensor by tensor")


@pytest.mark.parametrize("padded", [0, 9])
def test_tensors_of_a_batch_are_read_in_one_call(region: SystemRegion, padded: int) -> None:
    whole = OnlyMapped(region)
    requests: list[tuple[Input]] = [
        (RegionTensor("input 'a'", whole, 8 * first, np.dtype(np.float32), (rows, 2)),)
        for rows, first in ((1, 5), (3, 40))
    ]
    bench = Bench(STACKED)
    done = bench.run([requests[0], (in_message(2, 7),), requests[1]], padded)
    assert values(done.results) == [[in_message(rows, first).tolist()] for rows, first in ((1, 5), (2, 7), (3, 40))]
    assert len(bench.seen[0][0]) == max(6, padded)


@pytest.mark.parametrize(
    ("offset", "size", "inside"),
    [(0, 800, True), (792, 8, True), (800, 0, True), (0, 801, False), (793, 8, False), (801, 0, False), (-1, 8, False)],
)
def test_tensor_has_an_address_only_within_its_region(
    region: SystemRegion, offset: int, size: int, inside: bool
) -> None:
    tensor = RegionTensor("input 'a'", region, offset, np.dtype(np.uint8), (size,))
    assert region.mapped_at is not None
    assert tensor.mapped_at(size) == (region.mapped_at + offset if inside else None)


class Slot:
    """An instance with its own buffers, which records whether its inputs were in them."""

    def __init__(self, spec: ModelSpec, *, pads: bool = False) -> None:
        self.pads = pads
        self.buffers: list[Array] = []
        self.forgotten = 0
        self.there: list[bool] = []
        self._instance = MemoryModel(spec).instance(spec, Device())

    def release_buffers(self) -> None:
        self.forgotten += 1

    def buffer(self, index: int, shape: tuple[int, ...]) -> Array:
        self.buffers.append(np.full(shape, np.nan, np.float32))
        return self.buffers[-1]

    def execute(self, requests: Sequence[Tensors], padded_rows: int = 0) -> Execution:
        array = requests[0][0]
        self.there.append(len(requests) == 1 and (array is self.buffers[-1] or array.base is self.buffers[-1]))
        return self._instance.execute(requests, padded_rows)


@pytest.mark.parametrize("padded", [0, 6])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("pads", [False, True])
def test_inputs_are_read_into_the_instances_buffers(region: SystemRegion, pads: bool, count: int, padded: int) -> None:
    slot = Slot(STACKED, pads=pads)
    run = reading(slot.execute, STACKED, slot)
    results = run([(in_region(region, 2, 10 * number),) for number in range(count)], padded).results
    assert values(results) == [[in_message(2, 10 * number).tolist()] for number in range(count)]
    assert slot.there == [True]
    (buffer,) = slot.buffers
    assert buffer.shape == (max(padded, 2 * count), 2)
    assert [bool(np.isnan(row).all()) for row in buffer[2 * count :]] == [pads] * (len(buffer) - 2 * count)


def test_buffers_are_released_if_no_request_of_the_batch_can_be_read(
    memory: SharedObject, region: SystemRegion
) -> None:
    requests = [(in_region(region, 2, 90),), (in_region(region, 2, 90),)]
    memory.resize(90 * 8 + 3)
    for some in (requests, requests[:1]):
        slot = Slot(STACKED)
        results = reading(slot.execute, STACKED, slot)(some, 0).results
        assert all(isinstance(one, InvalidRequest) for one in results)
        assert (slot.there, slot.forgotten) == ([], 1)


def test_inputs_from_messages_need_no_buffers() -> None:
    slot = Slot(STACKED)
    slot.buffer(0, (0, 2))
    reading(slot.execute, STACKED, slot)([(in_message(2),)], 0)
    assert (slot.there, len(slot.buffers)) == ([False], 1)


def test_inputs_of_a_model_without_batch_axis_need_no_buffers(region: SystemRegion) -> None:
    slot = Slot(ALONE)
    slot.buffer(0, (0, 2))
    results = reading(slot.execute, ALONE, slot)([(in_region(region, 2, 3),)], 0).results
    assert values(results) == [[[[6, 7], [8, 9]]]]
    assert (slot.there, len(slot.buffers)) == ([False], 1)


def test_inputs_left_out_by_all_stay_missing_beside_those_in_shared_memory(region: SystemRegion) -> None:
    left_out, given = TensorSpec("o", "FP32", (2,), optional=True), TensorSpec("a", "FP32", (2,))
    spec = ModelSpec((left_out, given), (given,), batched=True)
    instance = MemoryModel(spec, lambda inputs: [inputs[1] if inputs[0] is MISSING else -inputs[1]])
    run = reading(instance.instance(spec, Device()).execute, spec)
    done = run([(MISSING, in_region(region, 1)), (MISSING, in_message(2, 30))], 0)
    assert values(done.results) == [[in_message(1).tolist()], [in_message(2, 30).tolist()]]


def test_inputs_beside_those_in_shared_memory_are_joined_too(region: SystemRegion) -> None:
    texts = [np.array([[b"p"]], object), np.array([[b"q"], [b"r"]], object)]
    bench = Bench(PAIR)
    done = bench.run([(in_region(region, 1), texts[0]), (in_message(2, 30), texts[1])], 4)
    assert values(done.results) == [
        [[[0, 1]], [[b"p"]]],
        [[[60, 61], [62, 63]], [[b"q"], [b"r"]]],
    ]
    assert bench.seen[0][1].ravel().tolist() == [b"p", b"q", b"r", b"r"]


def test_joined_batch_reaches_the_model_in_the_array_that_was_read_into(region: SystemRegion) -> None:
    bench = Bench(STACKED)
    bench.run([(in_region(region, 1),), (in_region(region, 2, 1),)], 4)
    (array,) = bench.seen[0]
    assert array.base is None
    assert array.shape == (4, 2)


@pytest.mark.parametrize("spec", [STACKED, RAGGED, ALONE], ids=["joined", "one by one", "no batch axis"])
def test_one_request_alone_is_read_and_executed(region: SystemRegion, spec: ModelSpec) -> None:
    bench = Bench(spec)
    assert values(bench.run([(in_region(region, 2, 3),)], 0).results) == [[[[6, 7], [8, 9]]]]


@pytest.mark.parametrize("spec", [STACKED, RAGGED], ids=["joined", "one by one"])
@pytest.mark.parametrize("was_read", [False, True])
@pytest.mark.parametrize("gone", [{0}, {1}, {2}, {0, 1}, {1, 2}, {0, 1, 2}])
def test_requests_with_truncated_memory_fail_alone(
    memory: SharedObject, region: SystemRegion, spec: ModelSpec, was_read: bool, gone: set[int]
) -> None:
    requests = [(in_region(region, 2, 90 if number in gone else 2 * number),) for number in range(3)]
    if was_read:
        Bench(spec).run(requests, 6)
    memory.resize(90 * 8 + 3)
    bench = Bench(spec)
    began_ns = monotonic_ns()
    done = bench.run(requests, 6)
    took_ns = monotonic_ns() - began_ns
    for number, result in enumerate(done.results):
        if number in gone:
            assert isinstance(result, InvalidRequest)
            assert str(result).startswith("input 'a': shared memory region 'r': expected ")
            assert (result.__traceback__, result.__context__) == (None, None)
        else:
            assert values([result]) == [[in_message(2, 2 * number).tolist()]]
    assert len(bench.seen) == done.ran == (len(gone) < 3)
    assert 0 < done.input_ns <= took_ns


def test_model_error_is_passed_on(region: SystemRegion) -> None:
    def fail(inputs: Tensors) -> Tensors:
        raise ExecutionError("no")

    instance = MemoryModel(STACKED, fail).instance(STACKED, Device())
    with pytest.raises(ExecutionError, match="no"):
        reading(instance.execute, STACKED)([(in_region(region, 1),), (in_message(1),)], 0)


def test_requests_from_messages_are_passed_on_unchanged() -> None:
    given: list[object] = []

    def execute(requests: Sequence[Tensors], padded_rows: int) -> Execution:
        given.append(requests)
        return Execution([], 1, 2, 3)

    requests = [(in_message(1),)]
    assert reading(execute, STACKED)(requests, 5) == Execution([], 1, 2, 3)
    assert given == [requests]
