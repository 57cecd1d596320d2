"""The same questions put to the server, over gRPC: mixed shapes, overload, sizes.

Lives here: the models, and the runs. Must not: format. Server and load generator are processes of their own. The
identity models sleep for what an execution costs, so that the cores are left to gRPC, whose cost can't be avoided.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from onnx import helper, numpy_helper

from bench.batching.preparing import PreparingProcess
from bench.load import open_loop
from bench.scenario import Closed
from bench.stats import Sample, Spread, ratio, spread
from bench.steps import Load
from paceline.clients.messages import infer_request
from tests import models
from tests.harness import ServerProcess

__all__ = ["OverloadPoint", "ShapesPoint", "Sizes", "measure_overload", "measure_shapes", "measure_sizes"]

SHAPES = (1, 2, 4, 8, 64)
_CLIENTS = 64
_FEATURES = 64
_MIDDLE = 64
_ROWS = 64

OVERLOAD_ROWS = 8
_BASE_MS, _ROW_US = 30, 1_250
BATCH_S = (_BASE_MS + OVERLOAD_ROWS * _ROW_US / 1_000) / 1_000
CAPACITY_PER_S = OVERLOAD_ROWS / BATCH_S
DEADLINE = 3.0

_IDENTITY = """
backend: "identity"
max_batch_size: {rows}
input {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }}
output {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }}
dynamic_batching {{ }}
parameters {{ key: "execute_delay_ms" value {{ string_value: "{base_ms}" }} }}
parameters {{ key: "paceline.execute_delay_per_row_us" value {{ string_value: "{row_us}" }} }}
{more}
"""
_PERCEPTRON = """
backend: "onnxruntime"
max_batch_size: {rows}
dynamic_batching {{ }}
instance_group {{ kind: KIND_CPU count: 1 }}
parameters {{ key: "intra_op_thread_count" value {{ string_value: "1" }} }}
"""


@dataclass(frozen=True, slots=True)
class ShapesPoint:
    """`shapes` shapes in turn, over one shape; medians of the rounds, the ratio taken within each."""

    model: str
    shapes: int
    throughput: Spread
    rows_per_batch: float
    answers_per_s: float


@dataclass(frozen=True, slots=True)
class OverloadPoint:
    """Goodput over the nominal capacity, at a `load` that is relative to it; median of the rounds, errors of the last
    one."""

    aware: bool
    load: float
    goodput: float
    errors: dict[str, int]
    generator_cores: float


@dataclass(frozen=True, slots=True)
class Sizes:
    """From a cold start: medians of the rounds."""

    sizes: str
    mean_rows: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    answered: float


def measure_shapes(rounds: int, seconds: float) -> list[ShapesPoint]:
    """64 clients, each sending the shapes in turn."""
    with _folder() as folder:
        _identity(folder / "models" / "identity", rows=_ROWS, base_ms=5, row_us=50)
        _perceptron(folder / "models" / "perceptron")
        with ServerProcess(folder / "models", fresh=True) as server:
            samples: list[dict[tuple[str, int], Sample]] = []
            cases = [(model, shapes) for model in ("identity", "perceptron") for shapes in SHAPES]
            for number in range(rounds):
                order = list(reversed(cases)) if number % 2 else cases
                samples.append({case: _shapes(server, folder, *case, seconds) for case in order})
    return [_shapes_point(model, shapes, samples) for model, shapes in cases]


def measure_overload(rounds: int, seconds: float, loads: Sequence[float]) -> list[OverloadPoint]:
    """Requests at random, with deadlines, to a deadline-aware model and to one that isn't."""
    with _folder() as folder:
        for aware in (True, False):
            text = "true" if aware else "false"
            _identity(
                folder / "models" / f"aware_{text}",
                rows=OVERLOAD_ROWS,
                base_ms=_BASE_MS,
                row_us=_ROW_US,
                more=f'parameters {{ key: "paceline.deadline_aware" value {{ string_value: "{text}" }} }}',
            )
        with ServerProcess(folder / "models", fresh=True) as server:
            return [
                _overload_point(server, folder, aware, load, rounds, seconds)
                for load in loads
                for aware in (True, False)
            ]


def measure_sizes(rounds: int, seconds: float) -> list[Sizes]:
    """Requests at random from a cold start, on a model that prepares for each new number of rows."""
    found: dict[str, list[dict[str, float]]] = {"free": [], "padded": []}
    for _ in range(rounds):
        for name, runs in found.items():
            with _folder() as folder:
                sizes = 'parameters { key: "paceline.batch_sizes" value { string_value: "1,2,4,8,16,32" } }'
                more = sizes if name == "padded" else ""
                _identity(folder / "models" / "identity", rows=32, base_ms=20, row_us=200, more=more)
                with PreparingProcess(folder / "models") as server:
                    requests = _requests(folder, "identity", 1)
                    runs.append(open_loop(server.target, requests, 500.0, 30.0, seconds, 0.0))
                    metrics, labels = server.metrics(), '{model="identity",version="1"}'
                    executions = metrics["nv_inference_exec_count" + labels]
                    runs[-1]["rows"] = metrics["nv_inference_count" + labels] / executions
    return [_sizes(name, runs) for name, runs in found.items()]


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        yield Path(name)


def _identity(folder: Path, *, rows: int, base_ms: int, row_us: int, more: str = "") -> None:
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(_IDENTITY.format(rows=rows, base_ms=base_ms, row_us=row_us, more=more))


def _perceptron(folder: Path) -> None:
    """Two matrix products over the last axis; batch and length are free."""
    random, wide = np.random.default_rng(0), 16 * _FEATURES
    weights = [random.standard_normal(shape).astype(np.float32) for shape in ((_FEATURES, wide), (wide, _FEATURES))]
    nodes = [
        helper.make_node("MatMul", ["INPUT0", "w0"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "w1"], ["OUTPUT0"]),
    ]
    dims: models.Dims = ["batch", "length", _FEATURES]
    made = models.model(
        nodes,
        [models.tensor("INPUT0", "FP32", dims)],
        [models.tensor("OUTPUT0", "FP32", dims)],
        [numpy_helper.from_array(one, f"w{place}") for place, one in enumerate(weights)],
    )
    models.write(made, folder / "1" / "model.onnx")
    (folder / "config.pbtxt").write_text(_PERCEPTRON.format(rows=_ROWS))


def _requests(folder: Path, model: str, shapes: int) -> tuple[Path, ...]:
    """One request per shape; their lengths lie around the same middle, so that they cost the same on average."""
    paths = []
    for length in range(_MIDDLE - shapes // 2, _MIDDLE - shapes // 2 + shapes):
        shape = (1, length, _FEATURES) if model == "perceptron" else (1, length)
        path = folder / f"{model}.{length}.request"
        path.write_bytes(infer_request(model, {"INPUT0": np.ones(shape, np.float32)}).SerializeToString())
        paths.append(path)
    return tuple(paths)


def _shapes(server: ServerProcess, folder: Path, model: str, shapes: int, seconds: float) -> Sample:
    return Load(server, _requests(folder, model, shapes), Closed(_CLIENTS), model).measure(seconds, 0.5)


def _shapes_point(model: str, shapes: int, samples: Sequence[dict[tuple[str, int], Sample]]) -> ShapesPoint:
    mine, one = ([found[model, count] for found in samples] for count in (shapes, 1))
    return ShapesPoint(
        model=model,
        shapes=shapes,
        throughput=ratio([found["requests_per_s"] for found in mine], [found["requests_per_s"] for found in one]),
        rows_per_batch=spread([found["rows_per_batch"] for found in mine]).median,
        answers_per_s=spread([found["requests_per_s"] for found in mine]).median,
    )


def _overload_point(
    server: ServerProcess, folder: Path, aware: bool, load: float, rounds: int, seconds: float
) -> OverloadPoint:
    requests = _requests(folder, f"aware_{str(aware).lower()}", 1)
    runs = [
        open_loop(server.target, requests, load * CAPACITY_PER_S, DEADLINE * BATCH_S, seconds, 1.0)
        for _ in range(rounds)
    ]
    return OverloadPoint(
        aware=aware,
        load=load,
        goodput=spread([run["requests_per_s"] / CAPACITY_PER_S for run in runs]).median,
        errors=runs[-1]["errors"],
        generator_cores=spread([run["cores"] for run in runs]).median,
    )


def _sizes(name: str, runs: Sequence[dict[str, float]]) -> Sizes:
    return Sizes(
        sizes=name,
        mean_rows=spread([run["rows"] for run in runs]).median,
        p50_ms=spread([run["p50_ms"] for run in runs]).median,
        p90_ms=spread([run["p90_ms"] for run in runs]).median,
        p99_ms=spread([run["p99_ms"] for run in runs]).median,
        answered=spread([run["ok"] / run["offered"] for run in runs]).median,
    )
