"""CUDA graphs on a GPU, compared with the answers of the CPU."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from paceline.backends.cuda.accelerator import CudaAccelerator
from paceline.backends.onnx.sessions import NO_GRAPH
from paceline.backends.spec import ModelSpec, TensorSpec
from tests import models
from tests.unit.backends.onnx.gpu_pair import (
    GRAPHS,
    MLP,
    Pair,
    beside,
    floats,
    on_thread_of,
)

pytestmark = pytest.mark.gpu


def test_graphs_are_captured_and_replayed_with_other_data_and_sizes(
    tmp_path: Path, accelerator: CudaAccelerator, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "paceline.backends.onnx"):
        pair = Pair(tmp_path, models.mlp((64, 256, 16)), MLP, accelerator, GRAPHS)
        rng = np.random.default_rng(1)
        for slot in pair.gpu.slots:
            for size in (32, 8, 1):
                slot.prepare([floats(rng, 1, 64)], size)
    assert not caplog.records
    assert pair.gpu._shared.graphs
    graphs = [bound.graph for slot in pair.gpu.slots for bound in slot._bindings.values()]
    assert len(set(graphs)) == 6
    assert NO_GRAPH not in graphs
    for _ in range(50):
        for slot in pair.gpu.slots:
            rows, padded = ((5, 8), (1, 1), (32, 32), (20, 32), (3, 3), (13, 0))[int(rng.integers(6))]
            on_thread_of(slot, lambda: pair.check(slot, [floats(rng, 1, 64)] * rows, padded))  # noqa: B023
            # A thread that has captured nothing computes as if there were no graphs.
            pair.check(slot, [floats(rng, rows, 64)], padded)


def test_graphs_of_convolutions_are_replayed_in_any_order_of_sizes(
    tmp_path: Path, accelerator: CudaAccelerator
) -> None:
    """cuDNN's plans belong to a node and not to a graph: each size that is captured makes new ones."""
    rng = np.random.default_rng(1)
    weights = [
        onnx.numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32) / 9, name)
        for name, shape in (("A", (8, 3, 3, 3)), ("B", (4, 8, 3, 3)))
    ]
    nodes = [
        helper.make_node("Conv", ["INPUT0", "A"], ["X"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["X"], ["Y"]),
        helper.make_node("Conv", ["Y", "B"], ["OUTPUT0"], strides=[2, 2]),
    ]
    model = models.model(
        nodes,
        [models.tensor("INPUT0", "FP32", ["batch", 3, 17, 17])],
        [models.tensor("OUTPUT0", "FP32", ["batch", 4, 8, 8])],
        weights,
    )
    spec = ModelSpec(
        (TensorSpec("INPUT0", "FP32", (3, 17, 17)),), (TensorSpec("OUTPUT0", "FP32", (4, 8, 8)),), batched=True
    )
    pair = Pair(tmp_path, model, spec, accelerator, GRAPHS)
    for slot in pair.gpu.slots:
        for size in (32, 8, 1):
            slot.prepare([floats(rng, 1, 3, 17, 17)], size)
    plans = getattr(ctypes.CDLL("libcudnn.so.9"), "stand_in_plans", lambda: 0)
    for _ in range(30):
        for slot in pair.gpu.slots:
            rows, padded = ((5, 8), (1, 1), (32, 32), (20, 32), (3, 3))[int(rng.integers(5))]
            before = plans()
            on_thread_of(slot, lambda: pair.check(slot, [floats(rng, rows, 3, 17, 17)], padded))  # noqa: B023
            assert padded == 3 or plans() == before


def test_graph_replays_at_the_same_time_keep_batches_separate(tmp_path: Path, accelerator: CudaAccelerator) -> None:
    pair = Pair(tmp_path, models.mlp((64, 256, 16)), MLP, accelerator, GRAPHS)
    for slot in pair.gpu.slots:
        slot.prepare([floats(np.random.default_rng(0), 1, 64)], 8)

    def run(number: int) -> None:
        rng, slot = np.random.default_rng(number), pair.gpu.slots[number]
        for _ in range(100):
            on_thread_of(slot, lambda: pair.check(slot, [floats(rng, 8, 64)]))

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(run, [0, 1]))


def check_captured(folder: Path, accelerator: CudaAccelerator, sizes: Iterable[int]) -> None:
    """Whether a model that is slow to capture keeps its graphs."""
    pair = Pair(folder, models.mlp((64, *[16] * 100, 16)), MLP, accelerator, GRAPHS)
    for slot in pair.gpu.slots:
        for size in sizes:
            slot.prepare([floats(np.random.default_rng(1), 1, 64)], size)
    assert pair.gpu._shared.graphs


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A folder for another model."""
    folder = tmp_path / "other"
    folder.mkdir()
    return folder


def test_graphs_are_captured_while_other_sessions_open_and_close(
    tmp_path: Path, other: Path, accelerator: CudaAccelerator, caplog: pytest.LogCaptureFixture
) -> None:
    def open_and_close() -> None:
        pair = Pair(other, models.mlp((64, 256, 16)), MLP, accelerator)
        pair.check(pair.gpu.slots[0], [floats(np.random.default_rng(2), 8, 64)])
        pair.gpu.close()
        pair.opened.close()

    with caplog.at_level(logging.WARNING, "paceline.backends.onnx"), beside(open_and_close):
        for number in range(5):
            folder = tmp_path / str(number)
            folder.mkdir()
            pair = Pair(folder, models.mlp((64, 256, 16)), MLP, accelerator, GRAPHS)
            for slot in pair.gpu.slots:
                for size in (32, 8, 1):
                    slot.prepare([floats(np.random.default_rng(1), 1, 64)], size)
            assert pair.gpu._shared.graphs
            pair.gpu.close()
            pair.opened.close()
    assert not caplog.records


def test_graphs_are_captured_while_threads_execute_another_model_for_the_first_time(
    tmp_path: Path, other: Path, accelerator: CudaAccelerator, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(other, models.mlp((64, 256, 16)), MLP, accelerator, GRAPHS)

    def execute() -> None:
        with ThreadPoolExecutor(1) as thread:  # ONNX Runtime makes handles for each thread
            thread.submit(pair.check, pair.gpu.slots[0], [floats(np.random.default_rng(2), 8, 64)]).result(60)

    with caplog.at_level(logging.WARNING, "paceline.backends.onnx"), beside(execute):
        check_captured(tmp_path, accelerator, range(20, 0, -1))
    assert not caplog.records


def test_graphs_are_captured_while_buffers_of_other_models_grow(
    tmp_path: Path, other: Path, accelerator: CudaAccelerator, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(other, models.mlp((64, 8, 16)), MLP, accelerator)
    more = count(1, 10)

    def grow() -> None:
        rows = next(more)
        pair.check(pair.gpu.slots[rows % 2], [floats(np.random.default_rng(2), rows, 64)])

    with caplog.at_level(logging.WARNING, "paceline.backends.onnx"), beside(grow):
        check_captured(tmp_path, accelerator, range(100, 0, -1))
    assert not caplog.records


def test_model_with_control_flow_runs_without_graphs_and_logs_it(
    tmp_path: Path, accelerator: CudaAccelerator, caplog: pytest.LogCaptureFixture
) -> None:
    result = models.tensor("RESULT", "FP32", ["batch", 64])
    branches = [
        helper.make_graph([helper.make_node(kind, ["INPUT0"], ["RESULT"])], kind, [], [result])
        for kind in ("Neg", "Abs")
    ]
    nodes = [
        helper.make_node("ReduceSum", ["INPUT0"], ["SUM"], keepdims=0),
        helper.make_node("Greater", ["SUM", "ZERO"], ["POSITIVE"]),
        helper.make_node("If", ["POSITIVE"], ["OUTPUT0"], then_branch=branches[0], else_branch=branches[1]),
    ]
    model = models.model(
        nodes,
        [models.tensor("INPUT0", "FP32", ["batch", 64])],
        [models.tensor("OUTPUT0", "FP32", ["batch", 64])],
        [onnx.numpy_helper.from_array(np.array(0, np.float32), "ZERO")],
    )
    spec = ModelSpec((TensorSpec("INPUT0", "FP32", (64,)),), (TensorSpec("OUTPUT0", "FP32", (64,)),), batched=True)
    with caplog.at_level(logging.WARNING, "paceline.backends.onnx"):
        pair = Pair(tmp_path, model, spec, accelerator, GRAPHS)
    assert [record.getMessage()[:38] for record in caplog.records] == ["model 'm' runs without CUDA graphs: on"]
    rng = np.random.default_rng(1)
    for slot in pair.gpu.slots:
        slot.prepare([floats(rng, 1, 64)], 8)
        pair.check(slot, [floats(rng, 3, 64)], 8)
