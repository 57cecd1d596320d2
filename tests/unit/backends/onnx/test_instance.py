"""Execution of ONNX models with numeric tensors, compared with onnxruntime run directly."""

from __future__ import annotations

import gc
import os
import re
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from paceline.backends.base import Device, DeviceKind
from paceline.backends.errors import ExecutionError, LoadError, UnfitOutputs
from paceline.backends.onnx.instance import OnnxInstance
from paceline.backends.onnx.options import OnnxOptions
from paceline.backends.spec import Array, ModelSpec, TensorSpec
from paceline.protos.datatypes import DATATYPES
from tests import decoder_models, models
from tests.polling import eventually
from tests.unit.backends.onnx_models import (
    CPU,
    batched,
    floats,
    instance_of,
    open_model,
    run_directly,
    run_one,
)

NUMERIC = sorted(set(DATATYPES) - {"BYTES", "BF16"})


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        (
            [TensorSpec("INPUT0", "FP32", (1,))],
            [TensorSpec("nope", "FP32", (1,))],
            "expected one of the model's outputs ['OUTPUT0'], got 'nope'",
        ),
        (
            [TensorSpec("nope", "FP32", (1,))],
            [TensorSpec("OUTPUT0", "FP32", (1,))],
            "expected one of the model's inputs ['INPUT0'], got 'nope'",
        ),
        (
            [TensorSpec("INPUT0", "FP64", (1,))],
            [TensorSpec("OUTPUT0", "FP32", (1,))],
            "input 'INPUT0': expected the model's datatype FP32, got FP64",
        ),
        ([], [TensorSpec("OUTPUT0", "FP32", (1,))], "the model's input 'INPUT0' isn't among those served"),
    ],
)
def test_instance_spec_that_does_not_match_the_model_is_refused(
    inputs: list[TensorSpec], outputs: list[TensorSpec], message: str, tmp_path: Path
) -> None:
    model = open_model(models.identity("FP32"), tmp_path)

    with pytest.raises(LoadError, match=re.escape(f"model 'm': {message}")):
        model.instance(ModelSpec(tuple(inputs), tuple(outputs), batched=True), CPU)


def test_instance_batched_without_inputs_is_refused(tmp_path: Path) -> None:
    constant = helper.make_tensor("constant", TensorProto.FLOAT, [1, 2], [1.0, 2.0])
    node = helper.make_node("Identity", ["constant"], ["OUTPUT0"])
    model = models.model([node], [], [models.tensor("OUTPUT0", "FP32", [None, 2])], [constant])

    with pytest.raises(
        LoadError, match="expected an input, whose first dimension says how many rows a batch has, got none"
    ):
        instance_of(model, tmp_path)


def test_instance_order_and_subset_of_served_tensors_go_by_name(tmp_path: Path) -> None:
    model = open_model(models.add_sub("FP32", size=2), tmp_path)
    whole = batched(model.spec)
    served = ModelSpec(tuple(reversed(whole.inputs)), (whole.outputs[1],), batched=True)
    ones, threes = np.ones((1, 2), np.float32), np.full((1, 2), 3, np.float32)

    (difference,) = run_one(model.instance(served, CPU), ones, threes)

    assert difference.tolist() == [[2, 2]]


@pytest.mark.skipif(sys.platform != "linux", reason="counts the threads that Linux shows in /proc")
def test_instances_on_the_cpu_share_one_pool_with_the_configured_number_of_threads(tmp_path: Path) -> None:
    def threads() -> set[str]:
        return set(os.listdir("/proc/self/task"))

    gc.collect()
    before = threads()
    model = open_model(models.mlp(), tmp_path, {"intra_op_thread_count": "4"})
    # The calling thread is the fourth. What else may begin meanwhile, as timers of earlier tests do, ends soon.
    eventually(lambda: len(threads() - before) == 3, "three threads")
    pool = threads() - before
    instances = [model.instance(batched(model.spec), CPU) for _ in range(3)]

    eventually(lambda: threads() - before == pool, "the same three threads")
    assert len({id(instance) for instance in instances}) == 3


def test_closed_instance_is_an_error_and_its_sibling_keeps_running(tmp_path: Path) -> None:
    model = open_model(models.add_sub("FP32", size=2), tmp_path)
    first, second = (model.instance(batched(model.spec), CPU) for _ in range(2))
    x = np.ones((1, 2), np.float32)

    first.close()

    with pytest.raises(ExecutionError, match="the instance is closed"):
        run_one(first, x, x)
    assert run_one(second, x, x)[0].tolist() == [[2, 2]]


def _numbers(datatype: str, shape: tuple[int, ...], seed: int = 0) -> Array:
    random = np.random.default_rng(seed)
    if datatype == "BOOL":
        return random.integers(0, 2, shape).astype(bool)
    dtype = DATATYPES[datatype].dtype
    return np.frombuffer(random.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)


@pytest.mark.parametrize("datatype", NUMERIC)
def test_execute_identity_of_each_datatype_is_exact_to_the_bit(datatype: str, tmp_path: Path) -> None:
    instance = instance_of(models.identity(datatype), tmp_path)
    requests = [(_numbers(datatype, (rows, 3), seed=rows),) for rows in (1, 2, 5)]

    results = instance.execute(requests).results

    for (sent,), (got,) in zip(requests, results, strict=True):
        assert got.dtype == sent.dtype
        assert got.tobytes() == sent.tobytes()


@pytest.mark.parametrize("datatype", ["INT32", "FP32"])
def test_execute_add_sub_equals_numpy(datatype: str, tmp_path: Path) -> None:
    instance = instance_of(models.add_sub(datatype), tmp_path)
    dtype = DATATYPES[datatype].dtype
    requests = [tuple(np.full((1, 16), value + i, dtype) for value in (10, 3)) for i in range(4)]

    for (a, b), (total, difference) in zip(requests, instance.execute(requests).results, strict=True):
        np.testing.assert_array_equal(total, a + b)
        np.testing.assert_array_equal(difference, a - b)


def test_execute_mlp_batch_equals_onnxruntime_run_directly(tmp_path: Path) -> None:
    model = models.mlp((16, 64, 4))
    x = floats(9, 16)

    results = instance_of(model, tmp_path).execute([(x[:1],), (x[1:4],), (x[4:],)]).results

    (expected,) = run_directly(model, {"INPUT0": x})
    np.testing.assert_allclose(np.concatenate([y for (y,) in results]), expected, rtol=1e-5)


def test_execute_two_free_dimensions_accept_any_size(tmp_path: Path) -> None:
    a, b = floats(2, 3, 5), floats(2, 5, 4)

    (product,) = run_one(instance_of(models.matrix_product(), tmp_path), a, b)

    np.testing.assert_allclose(product, a @ b, rtol=1e-5)


def test_execute_rank_0_without_batch_axis_keeps_its_rank(tmp_path: Path) -> None:
    model = open_model(models.scalar(), tmp_path)

    (doubled,) = run_one(model.instance(model.spec, CPU), np.array(2.5, np.float32))

    assert (doubled.shape, float(doubled)) == ((), 5.0)


def test_execute_fixed_batch_model_runs_whole_requests(tmp_path: Path) -> None:
    model = open_model(models.fixed_batch(4, 3), tmp_path)
    x = floats(4, 3)

    (negated,) = run_one(model.instance(model.spec, CPU), x)

    np.testing.assert_array_equal(negated, -x)
    with pytest.raises(ExecutionError, match=r"onnx runtime error 2: .*INPUT0"):
        run_one(model.instance(model.spec, CPU), floats(2, 3))


def test_execute_failing_row_gives_onnx_runtimes_message_in_one_line_and_prints_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    instance = instance_of(models.gather(), tmp_path)
    good, bad = (np.array([[2]], np.int64),), (np.array([[77]], np.int64),)

    with pytest.raises(ExecutionError, match=r"^onnx runtime error 2: .*Gather node.*idx=77 must be within") as caught:
        instance.execute([good, bad])

    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")
    assert instance.execute([good]).results[0][0].tolist() == [[20.0]]


def test_execute_output_that_drops_rows_is_an_error_naming_it(tmp_path: Path) -> None:
    instance = instance_of(models.positive_rows(2), tmp_path)
    kept, dropped = np.ones((1, 2), np.float32), -np.ones((1, 2), np.float32)

    with pytest.raises(ExecutionError, match=re.escape("output 'OUTPUT0': expected shape [2, 2], got [1, 2]")):
        instance.execute([(kept,), (dropped,)])
    assert len(instance.execute([(kept,), (kept,)]).results) == 2


def test_execute_output_without_batch_axis_in_a_batched_model_is_an_error(tmp_path: Path) -> None:
    instance = instance_of(models.batch_sum(2), tmp_path)

    with pytest.raises(ExecutionError, match="the first dimension of every output must be the 3 rows of the batch"):
        instance.execute([(floats(1, 2),), (floats(2, 2),)])


def test_execute_shrinks_only_arenas_that_the_session_has(tmp_path: Path) -> None:
    parameters = {"memory.enable_memory_arena_shrinkage": "gpu:5;cpu:0"}
    x = np.ones((1, 2), np.float32)

    (y,) = run_one(instance_of(models.identity("FP32"), tmp_path, parameters), x)

    np.testing.assert_array_equal(y, x)


@pytest.mark.parametrize("model", [models.identity("FP32"), models.identity("BF16"), models.cast("BF16", "FP32")])
def test_execute_results_outlive_later_runs_the_instance_and_the_model(model: onnx.ModelProto, tmp_path: Path) -> None:
    opened = open_model(model, tmp_path)
    instance = opened.instance(batched(opened.spec), CPU)
    dtype = DATATYPES[opened.spec.inputs[0].datatype].dtype
    (first,) = run_one(instance, np.full((64, 64), 1, dtype))
    before = first.copy()

    for value in range(2, 6):
        run_one(instance, np.full((64, 64), value, dtype))
    instance.close()
    opened.close()
    del instance, opened
    gc.collect()

    np.testing.assert_array_equal(first, before)


def test_execute_writing_to_a_result_leaves_the_models_constants_unchanged(tmp_path: Path) -> None:
    constant = helper.make_tensor("OUTPUT1", TensorProto.FLOAT, [2], [1.0, 2.0])
    dims: models.Dims = [2]
    model = models.model(
        [helper.make_node("Identity", ["INPUT0"], ["OUTPUT0"])],
        [models.tensor("INPUT0", "FP32", dims)],
        [models.tensor("OUTPUT0", "FP32", dims), models.tensor("OUTPUT1", "FP32", dims)],
        [constant],
    )
    opened = open_model(model, tmp_path)
    instance = opened.instance(opened.spec, CPU)
    x = np.zeros(2, np.float32)

    run_one(instance, x)[1][...] = 99

    assert run_one(instance, x)[1].tolist() == [1.0, 2.0]


@pytest.fixture(params=[CPU, Device(DeviceKind.GPU)], ids=["shared", "copied"])
def keeping(request: pytest.FixtureRequest, tmp_path: Path) -> OnnxInstance:
    """A decoder that adds to what it is given in place, where it has the same memory."""
    model = open_model(decoder_models.build(decoder_models.TINY_GROUPED), tmp_path)
    return OnnxInstance(model._session(CPU), model.spec, request.param, OnnxOptions())


def test_kept_arrays_are_what_comes_in_and_goes_out(keeping: OnnxInstance) -> None:
    tokens, mask = np.array([[5, 6, 7]]), np.ones((1, 3), np.int64)
    pasts = [np.zeros((1, 2, 0, 16), np.float32)] * 4
    kept = [np.full((1, 2, 8, 16), np.nan, np.float32) for _ in pasts]
    run = keeping.keeping(kept)
    first, *pasts = keeping.run([tokens, mask, *pasts])
    (same,) = run([tokens, mask])
    assert (same == first).all()
    second, *pasts = keeping.run([tokens[:, :1], np.ones((1, 4), np.int64), *pasts])
    assert (run([tokens[:, :1], np.ones((1, 4), np.int64)])[0] == second).all()
    assert (same == first).all()
    assert all((one[:, :, :4] == past).all() for one, past in zip(kept, pasts, strict=True))


def test_kept_arrays_that_are_too_small_are_refused(keeping: OnnxInstance) -> None:
    run = keeping.keeping([np.zeros((1, 2, 2, 16), np.float32) for _ in range(4)])
    with pytest.raises((ExecutionError, UnfitOutputs)):
        run([np.array([[5, 6, 7]]), np.ones((1, 3), np.int64)])
