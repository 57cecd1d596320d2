"""ONNX models opened and run, against onnxruntime run directly. Which device gets them: `test_onnx_devices.py`."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort  # type: ignore[import-untyped,unused-ignore]
import pytest
from onnx import TensorProto, helper

from backends.base import Array, Device, ModelInstance, ModelSource, ModelSpec, Tensors, TensorSpec
from backends.errors import ExecutionError, LoadError
from backends.onnx import OnnxBackend, OnnxModel
from backends.onnx_options import GraphLevel, OnnxOptions
from backends.onnx_sessions import session_options
from protos.datatypes import DATATYPES
from tests import models

CPU = Device()
NUMERIC = sorted(set(DATATYPES) - {"BYTES", "BF16"})


def _open(model: onnx.ModelProto, folder: Path, parameters: Mapping[str, str] | None = None) -> OnnxModel:
    path = models.write(model, folder / "model.onnx")
    return OnnxBackend().open(ModelSource("m", path, parameters=parameters or {}), CPU)


def _batched(spec: ModelSpec) -> ModelSpec:
    def without_axis(tensors: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(tensor.name, tensor.datatype, tensor.dims[1:], tensor.utf8) for tensor in tensors)

    return ModelSpec(without_axis(spec.inputs), without_axis(spec.outputs), batched=True)


def _instance(model: onnx.ModelProto, folder: Path, parameters: Mapping[str, str] | None = None) -> ModelInstance:
    opened = _open(model, folder, parameters)
    return opened.instance(_batched(opened.spec), CPU)


def _run_directly(model: onnx.ModelProto, inputs: Mapping[str, Array]) -> list[Any]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return list(session.run(None, inputs))


def _single(instance: ModelInstance, *inputs: Array) -> Tensors:
    return instance.execute([inputs]).results[0]


def _numbers(datatype: str, shape: tuple[int, ...], seed: int = 0) -> Array:
    random = np.random.default_rng(seed)
    if datatype == "BOOL":
        return random.integers(0, 2, shape).astype(bool)
    dtype = DATATYPES[datatype].dtype
    return np.frombuffer(random.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)


def _objects(*rows: Sequence[bytes]) -> Array:
    return np.array([list(row) for row in rows], object)


# --- opening ---------------------------------------------------------------------------------------------------------


def test_open_simple_model_tells_names_datatypes_and_whole_dims(tmp_path: Path) -> None:
    model = _open(models.add_sub(), tmp_path)

    assert model.platform == "onnxruntime_onnx"
    assert model.spec == ModelSpec(
        inputs=(TensorSpec("INPUT0", "INT32", (-1, 16)), TensorSpec("INPUT1", "INT32", (-1, 16))),
        outputs=(TensorSpec("OUTPUT0", "INT32", (-1, 16)), TensorSpec("OUTPUT1", "INT32", (-1, 16))),
        batched=False,
    )


@pytest.mark.parametrize("datatype", sorted(DATATYPES))
def test_open_identity_of_each_datatype_tells_it(datatype: str, tmp_path: Path) -> None:
    spec = _open(models.identity(datatype), tmp_path).spec

    assert spec.inputs == (TensorSpec("INPUT0", datatype, (-1, -1), utf8=datatype == "BYTES"),)


@pytest.mark.parametrize(
    ("dims", "expected"),
    [((), ()), (("batch", None, "n"), (-1, -1, -1)), ((4, 3), (4, 3)), ((None, 8, None), (-1, 8, -1)), ((0,), (0,))],
)
def test_open_free_dimensions_are_minus_one_and_others_as_they_are(
    dims: models.Dims, expected: tuple[int, ...], tmp_path: Path
) -> None:
    assert _open(models.identity("FP32", dims), tmp_path).spec.inputs[0].dims == expected


def test_open_folder_takes_the_model_with_its_external_weights(tmp_path: Path) -> None:
    model, folder = models.mlp((64, 64, 4)), tmp_path / "model.onnx"
    x = _floats(2, 64)
    expected = _run_directly(model, {"INPUT0": x})
    folder.mkdir()
    onnx.save_model(model, folder / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    assert (folder / "weights.bin").stat().st_size > 64 * 64 * 4

    opened = OnnxBackend().open(ModelSource("m", folder), CPU)

    (y,) = _single(opened.instance(_batched(opened.spec), CPU), x)
    np.testing.assert_allclose(y, expected[0], rtol=1e-5)


def _floats(*shape: int) -> Array:
    return np.random.default_rng(7).standard_normal(shape).astype(np.float32)


def test_open_missing_file_names_model_and_path(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"

    with pytest.raises(LoadError, match=re.escape(f"model 'm': no such file: '{path}'")):
        OnnxBackend().open(ModelSource("m", path), CPU)


def test_open_folder_without_a_model_names_the_file_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=re.escape(f"no such file: '{tmp_path / 'model.onnx'}'")):
        OnnxBackend().open(ModelSource("m", tmp_path), CPU)


def test_open_empty_file_says_empty(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.touch()

    with pytest.raises(LoadError, match=re.escape(f"model 'm': the file is empty: '{path}'")):
        OnnxBackend().open(ModelSource("m", path), CPU)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"not a model at all", "onnx runtime error 7: "),
        (models.mlp().SerializeToString()[:-20], "onnx runtime error 7: "),
        (
            models.model(
                [helper.make_node("NoSuchOp", ["INPUT0"], ["OUTPUT0"])],
                [models.tensor("INPUT0", "FP32", [1])],
                [models.tensor("OUTPUT0", "FP32", [1])],
            ).SerializeToString(),
            "No Op registered for NoSuchOp",
        ),
    ],
    ids=["garbage", "truncated", "unknown-operator"],
)
def test_open_broken_file_gives_path_and_onnx_runtimes_reason_in_one_line(
    content: bytes, reason: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)

    with pytest.raises(LoadError) as caught:
        OnnxBackend().open(ModelSource("m", path), CPU)

    assert str(caught.value).startswith(f"model 'm': can't open '{path}': ")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (models.sequence_output(), "output 'OUTPUT0': seq(tensor(float)) has no datatype in the v2 protocol"),
        (models.map_output(), "output 'OUTPUT0': seq(map(int64,tensor(float))) has no datatype in the v2 protocol"),
        (models.float8_output(), "output 'OUTPUT0': tensor(float8e4m3fn) has no datatype in the v2 protocol"),
    ],
)
def test_open_type_the_protocol_lacks_is_refused_by_name(model: onnx.ModelProto, reason: str, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=re.escape(f"model 'm': {reason}")):
        _open(model, tmp_path)


def test_open_unsupported_option_is_refused(tmp_path: Path) -> None:
    path = models.write(models.add_sub(), tmp_path / "model.onnx")

    with pytest.raises(LoadError, match="expected one of cuda, tensorrt, got 'amp'"):
        OnnxBackend().open(ModelSource("m", path, accelerators=(("amp", {}),)), CPU)


# --- instances -------------------------------------------------------------------------------------------------------


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
def test_instance_spec_that_is_not_the_models_is_refused(
    inputs: list[TensorSpec], outputs: list[TensorSpec], message: str, tmp_path: Path
) -> None:
    model = _open(models.identity("FP32"), tmp_path)

    with pytest.raises(LoadError, match=re.escape(f"model 'm': {message}")):
        model.instance(ModelSpec(tuple(inputs), tuple(outputs), batched=True), CPU)


def test_instance_batched_without_inputs_is_refused(tmp_path: Path) -> None:
    constant = helper.make_tensor("constant", TensorProto.FLOAT, [1, 2], [1.0, 2.0])
    node = helper.make_node("Identity", ["constant"], ["OUTPUT0"])
    model = models.model([node], [], [models.tensor("OUTPUT0", "FP32", [None, 2])], [constant])

    with pytest.raises(LoadError, match="expected an input, whose first dimension tells the rows of a batch, got none"):
        _instance(model, tmp_path)


def test_instance_served_order_and_subset_go_by_name(tmp_path: Path) -> None:
    model = _open(models.add_sub("FP32", size=2), tmp_path)
    whole = _batched(model.spec)
    served = ModelSpec(tuple(reversed(whole.inputs)), (whole.outputs[1],), batched=True)
    ones, threes = np.ones((1, 2), np.float32), np.full((1, 2), 3, np.float32)

    (difference,) = _single(model.instance(served, CPU), ones, threes)

    assert difference.tolist() == [[2, 2]]


@pytest.mark.skipif(sys.platform != "linux", reason="counts the threads that Linux shows in /proc")
def test_instances_on_the_cpu_share_one_pool_of_the_threads_asked_for(tmp_path: Path) -> None:
    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    gc.collect()
    before = threads()
    model = _open(models.mlp(), tmp_path, {"intra_op_thread_count": "4"})
    with_one = threads()
    instances = [model.instance(_batched(model.spec), CPU) for _ in range(3)]

    assert with_one - before == 3  # the calling thread is the fourth
    assert threads() == with_one
    assert len({id(instance) for instance in instances}) == 3


def test_instance_after_close_says_so_and_leaves_its_sibling_running(tmp_path: Path) -> None:
    model = _open(models.add_sub("FP32", size=2), tmp_path)
    first, second = (model.instance(_batched(model.spec), CPU) for _ in range(2))
    x = np.ones((1, 2), np.float32)

    first.close()

    with pytest.raises(ExecutionError, match="the instance is closed"):
        _single(first, x, x)
    assert _single(second, x, x)[0].tolist() == [[2, 2]]


def test_session_options_carry_what_was_asked_for() -> None:
    made = session_options(
        OnnxOptions(
            graph_level=GraphLevel.EXTENDED,
            intra_op_threads=3,
            inter_op_threads=2,
            parallel=True,
            cpu_mem_arena=False,
            mem_pattern=False,
            session_entries={"session.use_device_allocator_for_initializers": "1"},
        )
    )

    assert made.graph_optimization_level == ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    assert (made.intra_op_num_threads, made.inter_op_num_threads) == (3, 2)
    assert made.execution_mode == ort.ExecutionMode.ORT_PARALLEL
    assert (made.enable_cpu_mem_arena, made.enable_mem_pattern) == (False, False)
    assert made.get_session_config_entry("session.use_device_allocator_for_initializers") == "1"


@pytest.mark.parametrize("level", list(GraphLevel))
def test_session_options_know_each_graph_level(level: GraphLevel) -> None:
    made = session_options(OnnxOptions(graph_level=level))

    assert made.graph_optimization_level == getattr(ort.GraphOptimizationLevel, level.value)


# --- executing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("datatype", NUMERIC)
def test_execute_identity_of_each_datatype_is_exact_to_the_bit(datatype: str, tmp_path: Path) -> None:
    instance = _instance(models.identity(datatype), tmp_path)
    requests = [(_numbers(datatype, (rows, 3), seed=rows),) for rows in (1, 2, 5)]

    results = instance.execute(requests).results

    for (sent,), (got,) in zip(requests, results, strict=True):
        assert got.dtype == sent.dtype
        assert got.tobytes() == sent.tobytes()


@pytest.mark.parametrize("datatype", ["INT32", "FP32"])
def test_execute_add_sub_equals_numpy(datatype: str, tmp_path: Path) -> None:
    instance = _instance(models.add_sub(datatype), tmp_path)
    dtype = DATATYPES[datatype].dtype
    requests = [tuple(np.full((1, 16), value + i, dtype) for value in (10, 3)) for i in range(4)]

    for (a, b), (total, difference) in zip(requests, instance.execute(requests).results, strict=True):
        np.testing.assert_array_equal(total, a + b)
        np.testing.assert_array_equal(difference, a - b)


def test_execute_mlp_batch_equals_onnxruntime_run_directly(tmp_path: Path) -> None:
    model = models.mlp((16, 64, 4))
    x = _floats(9, 16)

    results = _instance(model, tmp_path).execute([(x[:1],), (x[1:4],), (x[4:],)]).results

    (expected,) = _run_directly(model, {"INPUT0": x})
    np.testing.assert_allclose(np.concatenate([y for (y,) in results]), expected, rtol=1e-5)


def test_execute_two_free_dimensions_take_any_size(tmp_path: Path) -> None:
    a, b = _floats(2, 3, 5), _floats(2, 5, 4)

    (product,) = _single(_instance(models.matrix_product(), tmp_path), a, b)

    np.testing.assert_allclose(product, a @ b, rtol=1e-5)


def test_execute_rank_0_without_batch_axis_keeps_its_rank(tmp_path: Path) -> None:
    model = _open(models.scalar(), tmp_path)

    (doubled,) = _single(model.instance(model.spec, CPU), np.array(2.5, np.float32))

    assert (doubled.shape, float(doubled)) == ((), 5.0)


def test_execute_fixed_batch_model_runs_whole_requests(tmp_path: Path) -> None:
    model = _open(models.fixed_batch(4, 3), tmp_path)
    x = _floats(4, 3)

    (negated,) = _single(model.instance(model.spec, CPU), x)

    np.testing.assert_array_equal(negated, -x)
    with pytest.raises(ExecutionError, match=r"onnx runtime error 2: .*INPUT0"):
        _single(model.instance(model.spec, CPU), _floats(2, 3))


def test_execute_failing_row_gives_the_models_own_words_in_one_quiet_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    instance = _instance(models.gather(), tmp_path)
    good, bad = (np.array([[2]], np.int64),), (np.array([[77]], np.int64),)

    with pytest.raises(ExecutionError, match=r"^onnx runtime error 2: .*Gather node.*idx=77 must be within") as caught:
        instance.execute([good, bad])

    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")
    assert instance.execute([good]).results[0][0].tolist() == [[20.0]]


def test_execute_output_that_drops_rows_is_an_error_naming_it(tmp_path: Path) -> None:
    instance = _instance(models.positive_rows(2), tmp_path)
    kept, dropped = np.ones((1, 2), np.float32), -np.ones((1, 2), np.float32)

    with pytest.raises(ExecutionError, match=re.escape("output 'OUTPUT0': expected shape [2, 2], got [1, 2]")):
        instance.execute([(kept,), (dropped,)])
    assert len(instance.execute([(kept,), (kept,)]).results) == 2


def test_execute_output_without_batch_axis_served_as_if_it_had_one_is_an_error(tmp_path: Path) -> None:
    instance = _instance(models.batch_sum(2), tmp_path)

    with pytest.raises(ExecutionError, match="the first dimension of every output must be the 3 rows of the batch"):
        instance.execute([(_floats(1, 2),), (_floats(2, 2),)])


def test_execute_arenas_to_shrink_are_those_the_session_has(tmp_path: Path) -> None:
    parameters = {"memory.enable_memory_arena_shrinkage": "gpu:5;cpu:0"}
    x = np.ones((1, 2), np.float32)

    (y,) = _single(_instance(models.identity("FP32"), tmp_path, parameters), x)

    np.testing.assert_array_equal(y, x)


@pytest.mark.parametrize("model", [models.identity("FP32"), models.identity("BF16"), models.cast("BF16", "FP32")])
def test_execute_results_outlive_later_runs_the_instance_and_the_model(model: onnx.ModelProto, tmp_path: Path) -> None:
    opened = _open(model, tmp_path)
    instance = opened.instance(_batched(opened.spec), CPU)
    dtype = DATATYPES[opened.spec.inputs[0].datatype].dtype
    (first,) = _single(instance, np.full((64, 64), 1, dtype))
    before = first.copy()

    for value in range(2, 6):
        _single(instance, np.full((64, 64), value, dtype))
    instance.close()
    opened.close()
    del instance, opened
    gc.collect()

    np.testing.assert_array_equal(first, before)


def test_execute_result_written_to_leaves_the_models_constants_alone(tmp_path: Path) -> None:
    constant = helper.make_tensor("OUTPUT1", TensorProto.FLOAT, [2], [1.0, 2.0])
    dims: models.Dims = [2]
    model = models.model(
        [helper.make_node("Identity", ["INPUT0"], ["OUTPUT0"])],
        [models.tensor("INPUT0", "FP32", dims)],
        [models.tensor("OUTPUT0", "FP32", dims), models.tensor("OUTPUT1", "FP32", dims)],
        [constant],
    )
    opened = _open(model, tmp_path)
    instance = opened.instance(opened.spec, CPU)
    x = np.zeros(2, np.float32)

    _single(instance, x)[1][...] = 99

    assert _single(instance, x)[1].tolist() == [1.0, 2.0]


# --- strings ---------------------------------------------------------------------------------------------------------

AWKWARD = [b"", b"\0", b"a\0", "naïve".encode(), "日本語\0\U0001f600".encode(), b"b'quoted'", b"x" * 5000]


def test_execute_strings_come_back_exact(tmp_path: Path) -> None:
    instance = _instance(models.identity("BYTES"), tmp_path)

    results = instance.execute([(_objects([text]),) for text in AWKWARD]).results

    assert [result[0].tolist() for result in results] == [[[text]] for text in AWKWARD]
    assert {type(result[0].item()) for result in results} == {bytes}


def test_execute_strings_equal_onnxruntime_run_directly(tmp_path: Path) -> None:
    words: dict[str, Any] = {
        "keys_strings": ["one", "größer"],
        "values_strings": ["eins", "bigger"],
        "default_string": "?",
    }
    model = models.model(
        [helper.make_node("LabelEncoder", ["INPUT0"], ["OUTPUT0"], domain="ai.onnx.ml", **words)],
        [models.tensor("INPUT0", "BYTES", ["batch", 1])],
        [models.tensor("OUTPUT0", "BYTES", ["batch", 1])],
    )
    texts = ["größer", "one", "two", ""]

    results = _instance(model, tmp_path).execute([(_objects([text.encode()]),) for text in texts]).results

    (expected,) = _run_directly(model, {"INPUT0": np.array([[text] for text in texts], object)})
    assert [result[0].item().decode() for result in results] == expected.ravel().tolist()
    assert [result[0].item() for result in results] == [b"bigger", b"eins", b"?", b"?"]


def test_execute_strings_to_numbers_and_none_at_all(tmp_path: Path) -> None:
    instance = _instance(models.cast("BYTES", "FP32"), tmp_path)

    results = instance.execute([(_objects([b"1.5", b"2"]),), (_objects([b"-3", b"4e2"]),)]).results

    assert [result[0].tolist() for result in results] == [[[1.5, 2.0]], [[-3.0, 400.0]]]
    assert _single(instance, np.empty((1, 0), object))[0].shape == (1, 0)


def test_execute_string_that_is_not_utf8_names_the_input(tmp_path: Path) -> None:
    instance = _instance(models.identity("BYTES"), tmp_path)

    with pytest.raises(ExecutionError, match="input 'INPUT0': expected UTF-8"):
        _single(instance, _objects([b"\xff"]))
    assert _single(instance, _objects([b"fine"]))[0].tolist() == [[b"fine"]]


def test_execute_model_that_makes_bad_utf8_is_an_execution_error(tmp_path: Path) -> None:
    model = models.model(
        [helper.make_node("Identity", ["constant"], ["OUTPUT0"])],
        [models.tensor("INPUT0", "FP32", [1])],
        [models.tensor("OUTPUT0", "BYTES", [1])],
        [TensorProto(name="constant", data_type=TensorProto.STRING, dims=[1], string_data=[b"\xff\xfe"])],
    )
    opened = _open(model, tmp_path)

    with pytest.raises(ExecutionError, match=r"onnx runtime error: .*can't decode byte 0xff"):
        _single(opened.instance(opened.spec, CPU), np.zeros(1, np.float32))


# --- bfloat16 --------------------------------------------------------------------------------------------------------


def test_execute_bf16_bit_patterns_come_back_exact(tmp_path: Path) -> None:
    instance = _instance(models.identity("BF16"), tmp_path)
    every = np.arange(2**16, dtype=np.uint16).reshape(-1, 64)

    results = instance.execute([(every[:1],), (every[1:],)]).results

    assert np.concatenate([bits for (bits,) in results]).tobytes() == every.tobytes()
    assert results[0][0].dtype == np.uint16


def test_execute_bf16_casts_mean_what_the_bits_mean(tmp_path: Path) -> None:
    x = np.array([[1.0, -2.5, 0.15625, 3e38]], np.float32)
    bits = (x.view(np.uint32) >> 16).astype(np.uint16)  # BF16 is the upper half of FP32; these need no rounding but one

    (widened,) = _single(_instance(models.cast("BF16", "FP32"), tmp_path / "widen"), bits)
    (narrowed,) = _single(_instance(models.cast("FP32", "BF16"), tmp_path / "narrow"), widened)

    assert widened.tobytes() == (bits.astype(np.uint32) << 16).tobytes()
    assert narrowed.tobytes() == bits.tobytes()


def test_execute_bf16_without_elements_keeps_its_shape(tmp_path: Path) -> None:
    (y,) = _single(_instance(models.identity("BF16"), tmp_path), np.empty((2, 0), np.uint16))

    assert (y.shape, str(y.dtype)) == ((2, 0), "uint16")


def test_execute_bf16_beside_floats_and_strings_made_of_it_converts_each_its_way(tmp_path: Path) -> None:
    dims: models.Dims = ["batch", 2]
    model = models.model(
        [
            helper.make_node("Cast", ["INPUT0"], ["wide"], to=TensorProto.FLOAT),
            helper.make_node("Add", ["wide", "INPUT1"], ["OUTPUT0"]),
            helper.make_node("Cast", ["wide"], ["OUTPUT1"], to=TensorProto.STRING),
            helper.make_node("Identity", ["INPUT0"], ["OUTPUT2"]),
        ],
        [models.tensor("INPUT0", "BF16", dims), models.tensor("INPUT1", "FP32", dims)],
        [models.tensor(f"OUTPUT{i}", datatype, dims) for i, datatype in enumerate(["FP32", "BYTES", "BF16"])],
    )
    bits = np.array([[0x3F80, 0xC000]], np.uint16)  # 1 and -2

    total, texts, same = _single(_instance(model, tmp_path), bits, np.array([[10, 20]], np.float32))

    assert total.tolist() == [[11, 18]]
    assert texts.tolist() == [[b"1", b"-2"]]
    assert same.tolist() == bits.tolist()


def test_instance_bf16_beside_string_inputs_is_refused(tmp_path: Path) -> None:
    dims: models.Dims = ["batch", 2]
    model = models.model(
        [helper.make_node("Identity", [f"INPUT{i}"], [f"OUTPUT{i}"]) for i in range(2)],
        [models.tensor("INPUT0", "BF16", dims), models.tensor("INPUT1", "BYTES", dims)],
        [models.tensor("OUTPUT0", "BF16", dims), models.tensor("OUTPUT1", "BYTES", dims)],
    )

    with pytest.raises(LoadError, match="model 'm': BYTES inputs in a model with BF16 are not supported by this build"):
        _instance(model, tmp_path)


def test_execute_bf16_failure_is_an_execution_error_and_leaves_the_instance_usable(tmp_path: Path) -> None:
    opened = _open(models.identity("BF16", (2, 2)), tmp_path)
    instance = opened.instance(opened.spec, CPU)

    with pytest.raises(ExecutionError, match=r"onnx runtime error: .*INPUT0"):
        _single(instance, np.zeros((3, 2), np.uint16))
    assert _single(instance, np.ones((2, 2), np.uint16))[0].tolist() == [[1, 1], [1, 1]]
