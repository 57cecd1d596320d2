"""ONNX models with tensors that no message can carry: what is served of them, and what the log and errors say."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from paceline.protos import inference_pb2 as pb
from tests import models, odd_models
from tests.integration.serving import failure_of, serving
from tests.wire import infer, rows_of_floats

_FLOATS = helper.make_tensor_type_proto(TensorProto.FLOAT, ["batch", 2])


def _beside(kind: str, type_proto: onnx.TypeProto, **attributes: int) -> onnx.ModelProto:
    """A model with OUTPUT0 = -INPUT0, and OUTPUT1, which the operator `kind` makes of INPUT0."""
    model = odd_models.shapeless("Neg", ["batch", 2])
    model.graph.node.append(helper.make_node(kind, ["INPUT0"], ["OUTPUT1"], **attributes))
    model.graph.output.append(helper.make_value_info("OUTPUT1", type_proto))
    return model


LEFT_OUT: dict[str, tuple[Callable[[], onnx.ModelProto], str]] = {
    "maps": (
        odd_models.classifier,
        "seq(map(int64,tensor(float))) has no datatype in the v2 protocol; convert scikit-learn's classifiers with "
        "skl2onnx's options={'zipmap': False}",
    ),
    "sequence": (
        lambda: _beside("SequenceConstruct", helper.make_sequence_type_proto(_FLOATS)),
        "seq(tensor(float)) has no datatype in the v2 protocol; export the model with a tensor in its place",
    ),
    "optional": (
        lambda: _beside("Optional", helper.make_optional_type_proto(_FLOATS)),
        "optional(tensor(float)) has no datatype in the v2 protocol; export the model with a tensor in its place",
    ),
    "float8": (
        lambda: _beside(
            "Cast", helper.make_tensor_type_proto(TensorProto.FLOAT8E4M3FN, ["batch", 2]), to=TensorProto.FLOAT8E4M3FN
        ),
        "tensor(float8e4m3fn) has no datatype in the v2 protocol; export the model with a Cast to another element type",
    ),
}


@pytest.mark.parametrize("kind", LEFT_OUT)
async def test_output_that_no_message_can_carry_is_left_out_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    maker, words = LEFT_OUT[kind]
    model = maker()
    model.opset_import[0].version = 19
    models.write(model, tmp_path / "m" / "1" / "model.onnx")
    with caplog.at_level(logging.WARNING, "paceline"):
        async with serving(tmp_path) as served:
            answer = await served.infer(infer("m", {"INPUT0": rows_of_floats(3, 2)}))
            assert [output.name for output in answer.outputs] == ["OUTPUT0"]
            metadata = await served.stub.ModelMetadata(pb.ModelMetadataRequest(name="m"))
            assert [output.name for output in metadata.outputs] == ["OUTPUT0"]
            request = infer("m", {"INPUT0": rows_of_floats(1, 2)}, outputs=["OUTPUT1"])
            code, text = await failure_of(served.infer(request))
            assert (code, "unexpected inference output 'OUTPUT1'" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"model 'm' is served without its output 'OUTPUT1': {words}"]


async def test_scikit_learn_classifier_is_batched_and_answers_with_its_labels(tmp_path: Path) -> None:
    models.write(odd_models.classifier(), tmp_path / "m" / "1" / "model.onnx")
    async with serving(tmp_path) as served:
        answer = await served.infer(infer("m", {"INPUT0": np.float32([[1, 2], [2, 1], [0, 9]])}))
        assert answer.raw_output_contents[0] == np.array([1, 0, 1], np.int64).tobytes()
        told = (await served.stub.ModelConfig(pb.ModelConfigRequest(name="m"))).config
        assert told.max_batch_size == 32


@pytest.mark.parametrize(
    ("maker", "config", "words"),
    [
        (odd_models.map_output, "", "output 'OUTPUT0': seq(map(int64,tensor(float))) has no datatype"),
        (odd_models.sequence_output, "", "output 'OUTPUT0': seq(tensor(float)) has no datatype"),
        (
            odd_models.sequence_input,
            "",
            "input 'INPUT0': seq(tensor(float)) has no datatype in the v2 protocol; export the",
        ),
        (
            odd_models.classifier,
            'max_batch_size: 4 input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 2 ] } '
            'output { name: "OUTPUT1" data_type: TYPE_FP32 dims: [ 2 ] }',
            "output 'OUTPUT1': seq(map(int64,tensor(float))) has no datatype in the v2 protocol; convert",
        ),
    ],
    ids=["maps alone", "a sequence alone", "an input", "one that is asked for"],
)
async def test_model_that_needs_such_a_tensor_is_unavailable_saying_what_to_change(
    tmp_path: Path, maker: Callable[[], onnx.ModelProto], config: str, words: str
) -> None:
    path = models.write(maker(), tmp_path / "m" / "1" / "model.onnx")
    (path.parents[1] / "config.pbtxt").write_text(config)
    models.write(models.mlp(), tmp_path / "other" / "1" / "model.onnx")
    async with serving(tmp_path) as served:
        code, text = await failure_of(served.infer(infer("m", {"INPUT0": rows_of_floats(1, 2)})))
        assert (code, words in text) == (grpc.StatusCode.UNAVAILABLE, True), text


async def test_output_omitted_by_a_configuration_does_not_prevent_batching(tmp_path: Path) -> None:
    model = odd_models.shapeless("Neg", ["batch", 2])
    model.graph.node.append(helper.make_node("ReduceSum", ["INPUT0"], ["OUTPUT1"], keepdims=0))
    model.graph.output.append(helper.make_tensor_value_info("OUTPUT1", TensorProto.FLOAT, []))
    path = models.write(model, tmp_path / "m" / "1" / "model.onnx")
    outputs = 'output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 2 ] }'
    # Two requests per batch: the first to arrive waits for the other.
    batching = "dynamic_batching { preferred_batch_size: 4 max_queue_delay_microseconds: 60000000 }"
    (path.parents[1] / "config.pbtxt").write_text(f"max_batch_size: 8 {outputs} {batching}")
    rows = [rows_of_floats(2, 2, first) for first in (0, 10)]
    async with serving(tmp_path) as served:
        answers = await asyncio.gather(*(served.infer(infer("m", {"INPUT0": one})) for one in rows))
        assert [answer.raw_output_contents[0] for answer in answers] == [(-one).tobytes() for one in rows]
