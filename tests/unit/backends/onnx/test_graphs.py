"""Captured graphs, with a session that treats them as ONNX Runtime's CUDA provider does (`cuda_graph.cc`): the first
run under an id records all addresses, for the thread that makes it, and later runs under that id use only these,
whatever is bound."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
import pytest

from paceline.backends.base import Device, Execution, Slot
from paceline.backends.cuda.accelerator import open_streams
from paceline.backends.cuda.long_calls import captures
from paceline.backends.device_blocks import BlockPool
from paceline.backends.errors import DeviceLost, ExecutionError, LoadError
from paceline.backends.onnx.options import OnnxOptions
from paceline.backends.onnx.sessions import NO_GRAPH, OpenSession, open_session
from paceline.backends.onnx.shared import Shared
from paceline.backends.onnx.staged import StagedInstance
from paceline.backends.spec import Array, ModelSpec, TensorSpec
from tests import models
from tests.cuda import stand_in
from tests.host_accelerator import HostAccelerator

T = TypeVar("T")

CPU = Device()
FIXED = ModelSpec((TensorSpec("INPUT0", "FP32", (2,)),), (TensorSpec("OUTPUT0", "FP32", (2,)),), batched=True)
FREE = ModelSpec((TensorSpec("INPUT0", "FP32", (-1,)),), (TensorSpec("OUTPUT0", "FP32", (-1,)),), batched=True)
HALF = ModelSpec((TensorSpec("INPUT0", "FP32", (-1,)),), (TensorSpec("OUTPUT0", "FP32", (1,)),), batched=True)


class Capturing:
    """A session that captures. `runs` are the ids under which it ran, in order; `broken`: it fails to capture.
    `stale`: replays do nothing. `on_capture` is called during a capture."""

    def __init__(self, session: Any, broken: bool = False, stale: bool = False) -> None:
        self._session = session
        self._graphs = threading.local()
        self.broken = broken
        self.stale = stale
        self.runs: list[int] = []
        self.on_capture: Callable[[], None] = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run_with_iobinding(self, binding: Any, options: Any) -> None:
        graph = int(options.get_run_config_entry("gpu_graph_id"))
        assert options.get_run_config_entry("disable_synchronize_execution_providers") == "1"
        self.runs.append(graph)
        if graph == NO_GRAPH:
            self._session.run_with_iobinding(binding, options)
            return
        if self.broken:
            raise RuntimeError(
                "[ONNXRuntimeError] : 1 : FAIL : CUDA failure 900: operation not permitted while capturing"
            )
        if graph not in self._graphs.__dict__:
            self.on_capture()
        elif self.stale:
            return
        captured = self._graphs.__dict__.setdefault(graph, binding)
        self._session.run_with_iobinding(captured, options)


@dataclass
class Bench:
    """An instance whose sessions capture; `sessions` are those that were opened."""

    folder: Path
    model: Any
    spec: ModelSpec
    broken: bool = False
    stale: bool = False
    reopens: bool = True
    sessions: list[Capturing] = field(default_factory=list)
    accelerator: Any = field(default_factory=HostAccelerator)

    def instance(self) -> StagedInstance:
        self.path = models.write(self.model, self.folder / "model.onnx")
        opened, blocks = self.open(self.broken, True), BlockPool(self.accelerator)
        return StagedInstance(Shared("m", opened, self.spec, CPU, OnnxOptions(), self.reopen, blocks))

    def open(self, broken: bool, graphs: bool) -> OpenSession:
        plain = open_session("m", self.path, OnnxOptions(), CPU)
        self.sessions.append(Capturing(plain.session, broken, self.stale))
        session: Any = self.sessions[-1] if graphs else plain.session
        return OpenSession(session, open_streams(self.accelerator), graphs)

    def reopen(self) -> OpenSession:
        if not self.reopens:
            raise LoadError("no memory for another session")
        return self.open(False, False)

    @property
    def runs(self) -> list[int]:
        """The ids of the runs since this was last read."""
        runs, self.sessions[0].runs = self.sessions[0].runs, []
        return runs


def rows(count: int, value: float, dims: int = 2) -> tuple[Array]:
    return (np.full((count, dims), value, np.float32),)


def on_thread_of(slot: Slot, function: Callable[[], T]) -> T:
    """What `function` returns on the slot's own thread."""
    answers: SimpleQueue[T] = SimpleQueue()
    slot.start("slot", lambda: answers.put(function()))
    return answers.get(timeout=30)


def values(execution: Execution) -> list[Any]:
    return [result[0].tolist() for result in execution.results]  # type: ignore[union-attr]


def negated(count: int, value: float) -> list[list[float]]:
    return [[-value, -value]] * count


def neg(*shape: Any) -> Any:
    node = models.helper.make_node("Neg", ["INPUT0"], ["OUTPUT0"])
    return models.model([node], [models.tensor("INPUT0", "FP32", shape)], [models.tensor("OUTPUT0", "FP32", shape)])


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, neg("batch", 2), FIXED)


def prepare(instance: StagedInstance, sizes: Sequence[int]) -> None:
    for slot in instance.slots:
        for size in sizes:
            slot.prepare([rows(1, 0)], size)


def captured_by(bench: Bench) -> list[int]:
    """The graphs that preparing has captured, each of which is then compared with what the model computes."""
    runs = bench.runs
    graphs = runs[::4]
    assert len(set(graphs)) == len(graphs)
    assert runs == [one for graph in graphs for one in (graph, NO_GRAPH, NO_GRAPH, graph)]
    return graphs


def test_prepared_sizes_are_replayed_and_no_others(bench: Bench) -> None:
    instance = bench.instance()
    prepare(instance, [8, 4, 1])
    captured = captured_by(bench)
    assert len(captured) == 6
    for number, slot in enumerate(instance.slots):
        big, middle, small = captured[3 * number : 3 * number + 3]
        for value, (count, padded, graph) in enumerate(
            [(5, 8, big), (1, 1, small), (4, 4, middle), (3, 3, NO_GRAPH)] * 3
        ):
            requests = [rows(1, value)] * (count - 1) + [rows(1, 100 + value)]
            answers = values(on_thread_of(slot, lambda: slot.execute(requests, padded)))  # noqa: B023
            assert answers == [negated(1, value)] * (count - 1) + [negated(1, 100 + value)]
            assert bench.runs == [graph]


def test_device_is_not_synchronized_during_a_capture_but_may_be_during_a_replay(bench: Bench) -> None:
    slot = bench.instance().slots[0]
    entered, threads = threading.Event(), list[threading.Thread]()

    def synchronize() -> None:
        with captures.synchronizing():
            entered.set()

    def look() -> None:
        threads.append(threading.Thread(target=synchronize))
        threads[0].start()
        assert not entered.wait(0.05)

    bench.sessions[0].on_capture = look
    slot.prepare([rows(1, 0)], 4)
    threads[0].join(30)
    assert entered.is_set()
    with captures.synchronizing():
        assert values(on_thread_of(slot, lambda: slot.execute([rows(4, 3)]))) == [negated(4, 3)]
    (*prepared, replayed) = bench.runs
    assert prepared[0] == replayed != NO_GRAPH


def test_replays_allocate_nothing(bench: Bench) -> None:
    instance = bench.instance()
    prepare(instance, [8, 4, 1])
    allocations = bench.accelerator.allocations
    for value in range(20):
        for slot in instance.slots:
            on_thread_of(slot, lambda: slot.execute([rows(3, value)], 4))  # noqa: B023
    assert bench.accelerator.allocations == allocations


def test_thread_that_captured_nothing_replays_nothing(bench: Bench) -> None:
    instance = bench.instance()
    prepare(instance, [4])
    bench.runs  # noqa: B018
    assert values(instance.slots[0].execute([rows(4, 3)])) == [negated(4, 3)]
    assert bench.runs == [NO_GRAPH]
    slot = instance.slots[0]
    assert values(on_thread_of(slot, lambda: slot.execute([rows(4, 5)]))) == [negated(4, 5)]
    assert bench.runs != [NO_GRAPH]


def test_unprepared_shapes_are_computed_correctly_and_keep_the_graphs_unless_buffers_move(tmp_path: Path) -> None:
    # The output's size is known, whatever the input's is: INPUT0 is summed up.
    node = models.helper.make_node("ReduceSum", ["INPUT0", "AXES"], ["OUTPUT0"], keepdims=1)
    axes = models.numpy_helper.from_array(np.array([1], np.int64), "AXES")
    given, taken = models.tensor("INPUT0", "FP32", ["batch", "n"]), models.tensor("OUTPUT0", "FP32", ["batch", 1])
    bench = Bench(tmp_path, models.model([node], [given], [taken], [axes]), HALF)
    instance = bench.instance()
    slot = instance.slots[0]
    slot.prepare([rows(1, 0, 5)], 4)
    (graph,) = captured_by(bench)
    run = lambda count, value, dims: values(on_thread_of(slot, lambda: slot.execute([rows(count, value, dims)])))  # noqa: E731
    assert run(4, 1, 5) == [[[5]] * 4]
    assert run(4, 1, 3) == [[[3]] * 4]
    assert run(4, 2, 5) == [[[10]] * 4]
    assert bench.runs == [graph, NO_GRAPH, graph]
    # Larger than all buffers: they move, and the captured graph would read memory that has been freed.
    assert run(4, 1, 5000) == [[[5000]] * 4]
    assert run(4, 3, 5) == [[[15]] * 4]
    assert bench.runs == [NO_GRAPH, NO_GRAPH]


def test_outputs_of_unknown_size_are_never_captured(tmp_path: Path) -> None:
    bench = Bench(tmp_path, neg("batch", "n"), FREE)
    slot = bench.instance().slots[0]
    slot.prepare([rows(1, 0)], 4)
    assert values(on_thread_of(slot, lambda: slot.execute([rows(4, 3)]))) == [negated(4, 3)]
    assert bench.runs == [NO_GRAPH, NO_GRAPH]


def test_bad_batch_keeps_the_graphs(bench: Bench) -> None:
    slot = bench.instance().slots[0]
    slot.prepare([rows(1, 0)], 4)
    (graph,) = captured_by(bench)
    with pytest.raises(ExecutionError):
        slot.execute([rows(1, 0), rows(1, 0, 3)])
    assert values(on_thread_of(slot, lambda: slot.execute([rows(4, 3)]))) == [negated(4, 3)]
    assert bench.runs == [graph]


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("broken", "onnx runtime error 1: CUDA failure 900: "),
        # As those that draw random numbers, or copy from host memory that is used for something else by then.
        ("stale", "output 'OUTPUT0' of a replayed graph is not what the model computes"),
    ],
)
def test_model_that_cannot_be_captured_or_replayed_runs_without_graphs_and_logs_it_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str, why: str
) -> None:
    bench = Bench(tmp_path, neg("batch", 2), FIXED, broken=fault == "broken", stale=fault == "stale")
    instance = bench.instance()
    with caplog.at_level(logging.WARNING, "paceline.backends.onnx"):
        prepare(instance, [8, 4])
    (record,) = caplog.records
    assert record.getMessage().startswith(f"model 'm' runs without CUDA graphs: {why}")
    assert len(bench.sessions) == 2
    for slot in instance.slots:
        assert values(on_thread_of(slot, lambda: slot.execute([rows(3, 7)], 8))) == [negated(3, 7)]  # noqa: B023


def test_streams_live_as_long_as_their_sessions_bindings(tmp_path: Path) -> None:
    driver = stand_in.build(tmp_path)
    bench = Bench(tmp_path, neg("batch", 2), FIXED, broken=True, accelerator=stand_in.accelerator(tmp_path, driver))
    instance = bench.instance()
    instance.slots[1].execute([rows(1, 0)])
    instance.slots[0].prepare([rows(1, 0)], 8)
    assert driver.stand_in_streams() == 6
    assert values(instance.slots[1].execute([rows(1, 7)])) == [negated(1, 7)]
    assert driver.stand_in_streams() == 3


def test_loss_of_the_device_during_a_capture_is_not_blamed_on_graphs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    driver = stand_in.build(tmp_path)
    bench = Bench(tmp_path, neg("batch", 2), FIXED, broken=True, accelerator=stand_in.accelerator(tmp_path, driver))
    slot = bench.instance().slots[0]
    driver.stand_in_fail(b"cuStreamSynchronize", 719)
    with pytest.raises(DeviceLost, match="cuStreamSynchronize returned 719"):
        slot.prepare([rows(1, 0)], 8)
    assert len(bench.sessions) == 1
    assert not caplog.records


def test_model_that_can_be_neither_captured_nor_opened_again_is_an_error(tmp_path: Path) -> None:
    bench = Bench(tmp_path, neg("batch", 2), FIXED, broken=True, reopens=False)
    with pytest.raises(ExecutionError, match="no memory for another session"):
        bench.instance().slots[0].prepare([rows(1, 0)], 8)
