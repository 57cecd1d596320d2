"""Trial runs that find out whether rows can be stacked: models that only look like it are told apart from those for
which it is true."""

from __future__ import annotations

import gc
import logging
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort  # type: ignore[import-untyped,unused-ignore]
import pytest

from paceline.backends.base import Device, ModelSource
from paceline.backends.errors import ExecutionError, LoadError, OutOfMemory, ProcessError
from paceline.backends.made_up import MAX_BYTES
from paceline.backends.onnx.backend import OnnxBackend
from paceline.backends.own_process.session import OwnProcessSession
from paceline.backends.row_trial import try_rows
from paceline.backends.spec import Array, ModelSpec, Tensors, TensorSpec
from paceline.backends.trials import Trial
from tests import models, odd_models
from tests.host_accelerator import HostAccelerator

SPEC = ModelSpec((TensorSpec("a", "FP32", (-1, 2)),), (TensorSpec("x", "FP32", (-1, 2)),))


def trial(folder: Path, model: onnx.ModelProto) -> Trial:
    source = ModelSource("m", models.write(model, folder / "model.onnx"))
    opened = OnnxBackend().open(source, Device())
    try:
        return opened.try_rows()
    finally:
        opened.close()


@pytest.mark.parametrize(
    "model",
    [
        models.mlp(),
        models.gather(),
        models.matrix_product(),
        models.transpose(),
        models.dice(),
        *(models.identity(datatype) for datatype in models.ELEMENT_TYPES),
        models.cast("FP32", "BF16"),
        models.identity(dims=("batch",)),
        models.identity(dims=("batch", 0)),
        models.identity(dims=("batch", *(1,) * 63)),
    ],
    ids=lambda model: "",
)
def test_try_rows_accepts_models_with_independent_rows(tmp_path: Path, model: onnx.ModelProto) -> None:
    assert trial(tmp_path, model).why_not == ""


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (models.over_rows("softmax"), "output 'OUTPUT0' of a row depends on the row beside it"),
        (models.over_rows("cumulate"), "output 'OUTPUT0' of a row depends on the row beside it"),
        (models.over_rows("compare"), "output 'OUTPUT0' has shape [1, 1] for one row and [2, 2] for two"),
        (models.over_rows("reshape"), "it runs with one row and fails with two: onnx runtime error 1: "),
    ],
    ids=["softmax", "cumulate", "compare", "reshape"],
)
def test_try_rows_reports_rows_that_depend_on_each_other(tmp_path: Path, model: onnx.ModelProto, text: str) -> None:
    assert trial(tmp_path, model).why_not.startswith(text)


def test_try_rows_runs_in_the_servers_process_if_no_other_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: object) -> OwnProcessSession:
        raise LoadError("no more processes")

    monkeypatch.setattr(OwnProcessSession, "__enter__", refuse)
    with caplog.at_level(logging.INFO, "paceline.backends"):
        assert trial(tmp_path, models.over_rows("cumulate")).why_not
    assert "model 'm' is tried in the server's own process, as no other can be had: no more processes" in caplog.text


def test_try_rows_leaves_no_session_of_a_closed_model_to_the_garbage_collector(tmp_path: Path) -> None:
    """A session holds the weights, in memory or on a device."""

    def sessions() -> int:
        return sum(isinstance(one, ort.InferenceSession) for one in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = sessions()
        trial(tmp_path, models.mlp())
        assert sessions() == before
    finally:
        gc.enable()


def test_try_rows_with_staged_batches_leaves_the_session_usable(tmp_path: Path) -> None:
    source = ModelSource("m", models.write(models.over_rows("cumulate"), tmp_path / "model.onnx"), cuda_graphs=True)
    opened = OnnxBackend(accelerators=lambda device: HostAccelerator()).open(source, Device())
    tried = opened.try_rows()
    assert tried.why_not == "output 'OUTPUT0' of a row depends on the row beside it"
    instance = opened.instance(tried.spec, Device())
    (result,) = instance.execute([(np.ones((2, 3), np.float32),)]).results
    assert not isinstance(result, Exception)
    assert result[0].tolist() == [[1] * 3, [2] * 3]
    instance.close()
    opened.close()


def test_try_rows_reports_models_that_fail_for_many_rows() -> None:
    def few(inputs: Tensors) -> Tensors:
        if len(inputs[0]) > 4:
            raise ExecutionError("too many")
        return inputs

    assert try_rows(SPEC, few).why_not == "it runs with one row and fails with 8 rows: too many"


def test_try_rows_tries_large_rows_at_most_two_at_a_time() -> None:
    sizes: list[int] = []

    def run(inputs: Tensors) -> Tensors:
        sizes.append(len(inputs[0]))
        return inputs

    wide = ModelSpec((TensorSpec("a", "FP32", (-1, 1 << 22)),), (TensorSpec("x", "FP32", (-1, 1 << 22)),))
    assert try_rows(wide, run).why_not == ""
    assert max(sizes) == 2


UNKNOWN = "it isn't known whether its rows depend on each other, as "
UNTRIED = UNKNOWN + "it accepts no made-up inputs (%s)"
GIVEN_UP = UNKNOWN + "its trial was given up: %s"


def test_try_rows_reports_models_that_accept_no_made_up_inputs() -> None:
    def run(inputs: Tensors) -> Tensors:
        if len(inputs[0]) in (1, 8):
            raise ExecutionError("no such word")
        return [inputs[0][:, :1]]

    assert try_rows(SPEC, run) == Trial(SPEC, UNTRIED % "no such word")


@pytest.mark.parametrize("count", [1, 2])
def test_try_rows_gives_up_models_that_lack_memory_for_two_rows(count: int) -> None:
    def run(inputs: Tensors) -> Tensors:
        if len(inputs[0]) == count:
            raise OutOfMemory("full")
        return [inputs[0][:, :1]]

    assert try_rows(SPEC, run) == Trial(SPEC, GIVEN_UP % "full")


@pytest.mark.parametrize("mixes", [False, True])
def test_try_rows_judges_by_pairs_if_there_is_no_memory_for_more(mixes: bool) -> None:
    def run(inputs: Tensors) -> Tensors:
        if len(inputs[0]) > 2:
            raise OutOfMemory("full")
        return [np.flipud(inputs[0]) if mixes else inputs[0]]

    assert try_rows(SPEC, run).why_not == ("output 'x' of a row depends on the row beside it" if mixes else "")


@pytest.mark.parametrize(("side", "mebibytes"), [(2900, 64), (30_000, 6866)])
def test_try_rows_gives_up_rows_with_large_results_after_one(side: int, mebibytes: int) -> None:
    sizes: list[int] = []

    def run(inputs: Tensors) -> Tensors:
        sizes.append(len(inputs[0]))
        return [np.broadcast_to(inputs[0][:, :1, None], (len(inputs[0]), side, side))]

    large = replace(SPEC, outputs=(TensorSpec("x", "FP32", (-1, -1, -1)),))
    why = GIVEN_UP % f"2 rows with their results take {mebibytes} MiB, and may take 64 MiB"
    assert try_rows(large, run) == Trial(large, why)
    assert sizes == [1]


def test_try_rows_takes_little_more_memory_than_rows_and_results() -> None:
    columns = (1 << 20) - 1
    spec = ModelSpec((TensorSpec("a", "FP32", (-1, columns)),), (TensorSpec("x", "FP32", (-1, columns)),))

    def mix(inputs: Tensors) -> Tensors:
        return [inputs[0] * np.float32(1 + 0.03 * (len(inputs[0]) > 1))]

    tracemalloc.start()
    try:
        assert try_rows(spec, mix).why_not == ""
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 * MAX_BYTES


class SlowModel:
    """Moves a clock on by `row_ns` for each row that it executes."""

    def __init__(self, row_ns: int) -> None:
        self.row_ns = row_ns
        self.time_ns = 10**15

    def run(self, inputs: Tensors) -> Tensors:
        self.time_ns += self.row_ns * len(inputs[0])
        return inputs

    def now_ns(self) -> int:
        return self.time_ns


@pytest.mark.parametrize(
    ("row_s", "why_not", "least_s", "most_s"),
    [(0.001, "", 0, 1), (1, "", 30, 50), (60, GIVEN_UP % "it took longer than 30 s", 60, 150)],
)
def test_try_rows_begins_no_execution_after_half_a_minute(
    row_s: float, why_not: str, least_s: float, most_s: float
) -> None:
    """Unless it has seen pairs of rows by then, nothing is known."""
    model = SlowModel(int(row_s * 1e9))
    assert try_rows(SPEC, model.run, model.now_ns).why_not == why_not
    assert least_s <= model.time_ns / 1e9 - 10**6 <= most_s


def test_try_rows_does_not_try_rows_that_would_be_too_large(tmp_path: Path) -> None:
    assert trial(tmp_path, models.identity(dims=("batch", 1 << 40))).why_not == UNTRIED % "they would be too large"


@pytest.mark.parametrize("fatal", [1, 2, 8])
def test_try_rows_reports_models_that_end_the_process(fatal: int) -> None:
    def run(inputs: Tensors) -> Tensors:
        if len(inputs[0]) == fatal:
            raise ProcessError("it was killed")
        return inputs

    assert try_rows(SPEC, run) == Trial(SPEC, "it was killed", deadly=True)


def test_try_rows_keeps_its_finding_if_memory_runs_out_for_longer_rows() -> None:
    def run(inputs: Tensors) -> Tensors:
        if inputs[0].shape[1] > 1 or inputs[0].max() > 100:
            raise OutOfMemory("full")
        return inputs

    spec = ModelSpec((TensorSpec("a", "FP32", (-1, -1)),), (TensorSpec("x", "FP32", (-1, -1)),))
    assert try_rows(spec, run) == Trial(spec)


def test_try_rows_stacks_large_results_at_most_two_at_a_time() -> None:
    sizes: list[int] = []

    def run(inputs: Tensors) -> Tensors:
        sizes.append(len(inputs[0]))
        return [np.broadcast_to(inputs[0][:, :1], (len(inputs[0]), 1 << 22))]

    assert try_rows(replace(SPEC, outputs=(TensorSpec("x", "FP32", (-1, 1 << 22)),)), run).why_not == ""
    assert max(sizes) == 2


def test_try_rows_reports_too_little_memory_to_compare() -> None:
    def run(inputs: Tensors) -> Tensors:
        raise MemoryError("Unable to allocate 9 GiB")

    assert try_rows(SPEC, run) == Trial(SPEC, GIVEN_UP % "Unable to allocate 9 GiB")


def test_try_rows_stacks_two_rows_if_no_more_are_accepted() -> None:
    seen: list[Array] = []

    def run(inputs: Tensors) -> Tensors:
        if len(inputs[0]) == 1 and len(seen) == 2:
            raise ExecutionError("not that one")
        seen.append(inputs[0])
        return inputs

    assert try_rows(SPEC, run).why_not == ""
    assert [len(np.unique(rows, axis=0)) for rows in seen if len(rows) == 8] == [2, 2, 1]


def test_try_rows_tries_without_negative_numbers_if_they_give_nan() -> None:
    with np.errstate(invalid="ignore"):
        tried = try_rows(SPEC, lambda inputs: [np.cumsum(np.sqrt(inputs[0]), axis=0)])
    assert tried.why_not == "output 'x' of a row depends on the row beside it"


def test_try_rows_accepts_models_that_require_a_minimum_length() -> None:
    def run(inputs: Tensors) -> Tensors:
        if inputs[0].shape[1] < 16:
            raise ExecutionError("too short")
        return [inputs[0].mean(axis=1, keepdims=True)]

    spec = ModelSpec((TensorSpec("a", "FP32", (-1, -1)),), (TensorSpec("x", "FP32", (-1, 1)),))
    assert try_rows(spec, run) == Trial(spec)


@pytest.mark.parametrize("error", [ExecutionError("no second time"), OutOfMemory("full")], ids=["refused", "memory"])
@pytest.mark.parametrize("loud", [False, True])
def test_try_rows_reports_dependent_rows_that_fail_when_run_again(error: ExecutionError, loud: bool) -> None:
    """`loud`: the dependence shows only in extremely different rows."""
    mixed = False

    def run(inputs: Tensors) -> Tensors:
        nonlocal mixed
        if mixed and len(inputs[0]) == 1:
            raise error
        if len(inputs[0]) == 1 or (loud and inputs[0].max() < 100):
            return inputs
        mixed = True
        return [inputs[0] - inputs[0].mean(axis=0)]

    assert try_rows(SPEC, run).why_not == "output 'x' of a row depends on the row beside it"


def test_try_rows_reports_dependent_rows_that_end_the_process_when_run_again() -> None:
    alone = 0

    def run(inputs: Tensors) -> Tensors:
        nonlocal alone
        alone += len(inputs[0]) == 1
        if alone > 2:
            raise ProcessError("it was killed")
        return [inputs[0] - inputs[0].mean(axis=0)]

    assert try_rows(SPEC, run) == Trial(SPEC, "it was killed", deadly=True)


@pytest.mark.parametrize("datatype", ["FP32", "BF16", "INT64", "BYTES"])
def test_try_rows_passes_a_scalar_as_an_array_without_axes(datatype: str) -> None:
    seen: list[Array] = []

    def run(inputs: Tensors) -> Tensors:
        seen.extend(inputs)
        return [np.zeros((), np.float32)]

    try_rows(ModelSpec((TensorSpec("a", datatype, ()),), (TensorSpec("x", "FP32", ()),)), run)
    assert [(type(array), array.shape) for array in seen] == [(np.ndarray, ())]


def test_try_rows_leaves_optional_inputs_optional(tmp_path: Path) -> None:
    tried = trial(tmp_path, models.with_default(batched=True))
    assert [tensor.optional for tensor in tried.spec.inputs] == [False, True]


@pytest.mark.parametrize(
    ("said", "seen"),
    [((1, 3), (-1, 3)), ((2, 3), (-1, 3)), (("batch", 4), (-1, -1)), (("batch", 3), (-1, 3))],
)
def test_try_rows_reports_the_dims_of_outputs_as_observed(
    tmp_path: Path, said: models.Dims, seen: tuple[int, ...]
) -> None:
    tried = trial(tmp_path, odd_models.declared_dims(said))
    assert [(tensor.dims, tensor.assumed) for tensor in tried.spec.outputs] == [(seen, False)]
    assert tried.why_not == ""


def test_try_rows_of_fixed_vectors_finds_only_the_dims(tmp_path: Path) -> None:
    unbatched = trial(tmp_path, models.add_sub("FP32", batched=False))
    assert [tensor.dims for tensor in unbatched.spec.outputs] == [(16,), (16,)]
    assert (unbatched.fixed_rows, unbatched.why_not) == (
        0,
        "its inputs have no other dimension, so a row would be one number",
    )
