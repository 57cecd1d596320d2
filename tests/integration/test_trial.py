"""Models without a configuration whose metadata can't be trusted: the server finds out by trial runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort  # type: ignore[import-untyped,unused-ignore]
import pytest

from paceline.protos import inference_pb2 as pb
from paceline.server.config import Settings
from tests import models, odd_models
from tests.integration.serving import Served, serving
from tests.operators import build_library, twice
from tests.wire import Array, infer, rows_of_floats


async def _answers(served: Served, inputs: list[Array]) -> list[Array]:
    responses = await asyncio.gather(*(served.infer(infer("m", {"INPUT0": one})) for one in inputs))
    return [np.frombuffer(one.raw_output_contents[0], np.float32).reshape(one.outputs[0].shape) for one in responses]


def _alone(model: onnx.ModelProto, inputs: list[Array]) -> list[Array]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return [session.run(None, {"INPUT0": one})[0] for one in inputs]


async def _limit(served: Served, name: str = "m") -> int:
    asked = await served.stub.ModelConfig(pb.ModelConfigRequest(name=name))
    return int(asked.config.max_batch_size)


@pytest.mark.parametrize("kind", ["softmax", "cumulate", "compare"])
async def test_model_whose_rows_depend_on_each_other_is_not_batched(tmp_path: Path, kind: str) -> None:
    model = models.over_rows(kind)
    models.write(model, tmp_path / "m" / "1" / "model.onnx")
    inputs = [rows_of_floats(1 + i % 3, 3, first=i) / 10 for i in range(32)]
    async with serving(tmp_path) as served:
        for answer, expected in zip(await _answers(served, inputs), _alone(model, inputs), strict=True):
            np.testing.assert_allclose(answer, expected, rtol=1e-6)
        assert await _limit(served) == 0


@pytest.mark.parametrize("config", ["max_batch_size: 8", "dynamic_batching { }"])
async def test_model_configured_to_batch_does_so_without_a_trial(tmp_path: Path, config: str) -> None:
    path = models.write(models.over_rows("cumulate"), tmp_path / "m" / "1" / "model.onnx")
    (path.parents[1] / "config.pbtxt").write_text(config)
    async with serving(tmp_path) as served:
        assert await _limit(served) > 0


async def test_model_that_crashes_its_trial_process_is_served_one_by_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = models.write(twice(), tmp_path / "m" / "1" / "model.onnx")
    build_library(path.with_name("twice.so"), least=4)
    (path.parents[1] / "config.pbtxt").write_text('model_operations { op_library_filename: "twice.so" }')
    inputs = [rows_of_floats(2, 2 + i % 3, first=i) for i in range(8)]
    async with serving(tmp_path, settings=Settings(paths=(tmp_path,), allow_op_libraries=True)) as served:
        for answer, given in zip(await _answers(served, inputs), inputs, strict=True):
            np.testing.assert_array_equal(answer, 2 * given)
        assert await _limit(served) == 0
    assert "the process that ran it was killed by SIGFPE" in caplog.text


@pytest.mark.parametrize("own", ["", 'parameters { key: "paceline.own_process" value { string_value: "true" } }'])
async def test_dynamically_quantized_model_is_batched_and_the_log_says_what_that_does(
    own: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = "max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 100000000 preferred_batch_size: 2 }"
    path = models.write(models.dynamically_quantized(), tmp_path / "m" / "1" / "model.onnx")
    (path.parents[1] / "config.pbtxt").write_text(f"{config} {own}")
    alone = _alone_by_index(models.dynamically_quantized())
    async with serving(tmp_path) as served:
        requests = [infer("m", {"INPUT0": np.array([[number]], np.int64)}) for number in (1, 2)]
        answers = await asyncio.gather(*map(served.infer, requests))
        assert not np.allclose(np.frombuffer(answers[0].raw_output_contents[0], np.float32), alone(1))
    assert "model 'm': DynamicQuantizeLinear scales by the largest number in a batch" in caplog.text


async def test_dynamically_quantized_model_is_batched_unless_a_trial_shows_much_difference(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows of a table that a trial looks up differ little in size; numbers that callers send, by any factor."""
    models.write(models.dynamically_quantized(), tmp_path / "little" / "1" / "model.onnx")
    models.write(models.over_rows("quantize"), tmp_path / "much" / "1" / "model.onnx")
    async with serving(tmp_path) as served:
        assert [await _limit(served, name) for name in ("little", "much")] == [32, 0]
    lines = sorted(line for line in caplog.messages if "DynamicQuantizeLinear scales by the largest number" in line)
    little, much = lines
    assert little.startswith("model 'little': ")
    assert much.startswith("model 'much' isn't batched: output 'OUTPUT0' of a row depends on the row beside it (")


@pytest.mark.parametrize(
    "config",
    [
        'max_batch_size: 8 input { name: "INPUT0" data_type: TYPE_INT64 dims: 1 } '
        'output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 1, 2 ] }',
        'input { name: "INPUT0" } output { name: "OUTPUT0" }',
    ],
    ids=["one-by-one", "no-batch-axis"],
)
async def test_dynamically_quantized_model_may_be_configured_not_to_be_batched(
    config: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = models.write(models.dynamically_quantized(), tmp_path / "m" / "1" / "model.onnx")
    (path.parents[1] / "config.pbtxt").write_text(config)
    alone = _alone_by_index(models.dynamically_quantized())
    async with serving(tmp_path) as served:
        requests = [infer("m", {"INPUT0": np.array([[number]], np.int64)}) for number in (0, 1, 2, 3) * 8]
        answers = await asyncio.gather(*map(served.infer, requests))
        for number, answer in zip((0, 1, 2, 3) * 8, answers, strict=True):
            np.testing.assert_array_equal(np.frombuffer(answer.raw_output_contents[0], np.float32), alone(number))
    assert "scales by" not in caplog.text


def _alone_by_index(model: onnx.ModelProto) -> Callable[[int], Array]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return lambda number: session.run(None, {"INPUT0": np.array([[number]], np.int64)})[0].ravel()


async def test_unconfigured_model_with_wrongly_declared_output_dims_is_served_and_batched(tmp_path: Path) -> None:
    model = odd_models.declared_dims((1, 3))
    models.write(model, tmp_path / "m" / "1" / "model.onnx")
    inputs = [rows_of_floats(1 + i % 3, 3, first=i) for i in range(8)]
    async with serving(tmp_path) as served:
        for answer, expected in zip(await _answers(served, inputs), _alone(model, inputs), strict=True):
            np.testing.assert_array_equal(answer, expected)
        metadata = await served.stub.ModelMetadata(pb.ModelMetadataRequest(name="m"))
        assert list(metadata.outputs[0].shape) == [-1, 3]
        told = (await served.stub.ModelConfig(pb.ModelConfigRequest(name="m"))).config
    assert told.max_batch_size == 32
    (tmp_path / "m" / "config.pbtxt").write_text(str(told))
    async with serving(tmp_path) as served:
        assert len(await _answers(served, inputs)) == 8


async def test_wrongly_declared_output_dims_do_no_harm_unconfigured(tmp_path: Path) -> None:
    model = odd_models.declared_dims((2, 3))
    path = models.write(model, tmp_path / "m" / "1" / "model.onnx")
    (path.parents[1] / "config.pbtxt").write_text('input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1, 3 ] }')
    inputs = [rows_of_floats(1 + i % 3, 3, first=i) for i in range(8)]
    async with serving(tmp_path) as served:
        for answer, expected in zip(await _answers(served, inputs), _alone(model, inputs), strict=True):
            np.testing.assert_array_equal(answer, expected)


@pytest.mark.parametrize("dims", [("batch", 4), (2, 3), (1, 3)])
async def test_wrongly_declared_output_dims_may_be_free_in_a_configuration(tmp_path: Path, dims: models.Dims) -> None:
    path = models.write(odd_models.declared_dims(dims), tmp_path / "m" / "1" / "model.onnx")
    (path.parents[1] / "config.pbtxt").write_text("""
        input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1, 3 ] }
        output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1, -1 ] }
    """)
    async with serving(tmp_path) as served:
        assert [one.shape for one in await _answers(served, [rows_of_floats(5, 3)])] == [(5, 3)]


async def test_output_that_no_message_can_carry_may_be_left_out_of_the_configuration(tmp_path: Path) -> None:
    model = odd_models.map_output()
    model.graph.node.append(onnx.helper.make_node("ArgMax", ["INPUT0"], ["OUTPUT1"], axis=1, keepdims=0))
    model.graph.output.append(models.tensor("OUTPUT1", "INT64", ["batch"]))
    path = models.write(model, tmp_path / "m" / "1" / "model.onnx")
    (path.parents[1] / "config.pbtxt").write_text("""
        max_batch_size: 4
        input { name: "INPUT0" data_type: TYPE_FP32 dims: 2 }
        output { name: "OUTPUT1" data_type: TYPE_INT64 dims: 1 reshape { } }
    """)
    async with serving(tmp_path) as served:
        answer = await served.infer(infer("m", {"INPUT0": rows_of_floats(2, 2)}))
        assert [output.name for output in answer.outputs] == ["OUTPUT1"]
        assert answer.raw_output_contents[0] == np.array([[1], [1]], np.int64).tobytes()
