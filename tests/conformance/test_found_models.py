"""Models as found in the wild, without a configuration: answers equal ONNX Runtime's, one by one and concurrently.

Lives here: what exporters and people do to models that ours don't. Each model gets its requests one after the other,
then all at once, several times.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx
import onnxruntime as ort  # type: ignore[import-untyped,unused-ignore]
import pytest
from onnx import TensorProto, helper, numpy_helper

from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests import models, odd_models
from tests.harness import ServerProcess
from tests.models import model, tensor
from tests.wire import Array, infer

Request = Mapping[str, Array]

_RANDOM = np.random.default_rng(0)


def _floats(*shape: int) -> Array:
    return _RANDOM.standard_normal(shape).astype(np.float32)


def _rows(*dims: int, name: str = "INPUT0") -> list[Request]:
    return [{name: _floats(rows, *dims)} for rows in (1, 2, 3)]


def _constant(name: str, value: Any) -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray(value), name)


def _node(kind: str, inputs: str, outputs: str = "OUTPUT0", **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(kind, inputs.split(), outputs.split(), **attributes)


def _named(name: str) -> onnx.ModelProto:
    nodes = [helper.make_node("Relu", [name], [f"{name}_out"])]
    return model(nodes, [tensor(name, "FP32", ["N", 3])], [tensor(f"{name}_out", "FP32", ["N", 3])])


def _many_inputs() -> onnx.ModelProto:
    names = [f"i{index}" for index in range(200)]
    inputs = [tensor(name, "FP32", ["batch", 2]) for name in names]
    return model([_node("Sum", " ".join(names))], inputs, [tensor("OUTPUT0", "FP32", ["batch", 2])])


def _initializers_among_inputs() -> onnx.ModelProto:
    made = model(
        [_node("Gemm", "INPUT0 w b")],
        [tensor("INPUT0", "FP32", ["unk__0", 4]), tensor("w", "FP32", [4, 2]), tensor("b", "FP32", [2])],
        [tensor("OUTPUT0", "FP32", ["unk__1", 2])],
        [_constant("w", _floats(4, 2)), _constant("b", _floats(2))],
        opset=8,
    )
    made.ir_version = 3
    del made.opset_import[1:]
    return made


def _boxes() -> onnx.ModelProto:
    return model(
        [_node("NonMaxSuppression", "boxes scores most overlap")],
        [tensor("boxes", "FP32", ["batch", "n", 4]), tensor("scores", "FP32", ["batch", "classes", "n"])],
        [tensor("OUTPUT0", "INT64", ["selected", 3])],
        [_constant("most", np.int64([5])), _constant("overlap", np.float32([0.5]))],
    )


def _recurrent() -> onnx.ModelProto:
    return model(
        [_node("LSTM", "INPUT0 w r", "steps OUTPUT1", hidden_size=2), _node("Squeeze", "steps axis")],
        [tensor("INPUT0", "FP32", ["time", "batch", 3])],
        [tensor("OUTPUT0", "FP32", ["time", "batch", 2]), tensor("OUTPUT1", "FP32", [1, "batch", 2])],
        [_constant("w", _floats(1, 8, 3)), _constant("r", _floats(1, 8, 2)), _constant("axis", np.int64([1]))],
    )


def _states() -> onnx.ModelProto:
    dims = ["batch", 2]
    return model(
        [_node("Add", "INPUT0 state", "next_state"), _node("Relu", "next_state")],
        [tensor("INPUT0", "FP32", dims), tensor("state", "FP32", dims)],
        [tensor("OUTPUT0", "FP32", dims), tensor("next_state", "FP32", dims)],
    )


def _loop() -> onnx.ModelProto:
    """Nobody knows the rank of its output before it has run."""
    body = helper.make_graph(
        [_node("Identity", "go", "on"), _node("Add", "x x", "y")],
        "body",
        [
            tensor("i", "INT64", []),
            tensor("go", "BOOL", []),
            helper.make_tensor_value_info("x", TensorProto.FLOAT, None),
        ],
        [tensor("on", "BOOL", []), helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    return model(
        [helper.make_node("Loop", ["n", "", "INPUT0"], ["OUTPUT0"], body=body)],
        [tensor("n", "INT64", []), tensor("INPUT0", "FP32", ["batch", 3])],
        [helper.make_tensor_value_info("OUTPUT0", TensorProto.FLOAT, None)],
    )


def _function() -> onnx.ModelProto:
    made = model(
        [_node("Twice", "INPUT0", domain="local")],
        [tensor("INPUT0", "FP32", ["batch", 3])],
        [tensor("OUTPUT0", "FP32", ["batch", 3])],
    )
    opset = [helper.make_opsetid("", 18)]
    made.functions.append(helper.make_function("local", "Twice", ["a"], ["b"], [_node("Add", "a a", "b")], opset))
    made.opset_import.append(helper.make_opsetid("local", 1))
    return made


def _small_weights() -> onnx.ModelProto:
    made = model(
        [_node("DequantizeLinear", "w scale", "weights"), _node("MatMul", "INPUT0 weights")],
        [tensor("INPUT0", "FP32", ["batch", 4])],
        [tensor("OUTPUT0", "FP32", ["batch", 2])],
        [helper.make_tensor("w", TensorProto.INT4, [4, 2], range(-4, 4)), _constant("scale", np.float32(0.5))],
        opset=21,
    )
    made.ir_version = 10
    return made


def _pairs() -> onnx.ModelProto:
    return model(
        [_node("Transpose", "documents", "t"), _node("MatMul", "queries t")],
        [tensor("queries", "FP32", ["q", 3]), tensor("documents", "FP32", ["d", 3])],
        [tensor("OUTPUT0", "FP32", ["q", "d"])],
    )


def _found(*, transposed: bool) -> onnx.ModelProto:
    nodes = [_node("NonZero", "INPUT0", "found")]
    nodes += [_node("Transpose", "found", perm=[1, 0])] if transposed else [_node("Identity", "found")]
    dims = ["nnz", 2] if transposed else [2, "nnz"]
    return model(nodes, [tensor("INPUT0", "FP32", ["batch", 3])], [tensor("OUTPUT0", "INT64", dims)])


def _square() -> onnx.ModelProto:
    """The same dimension name twice: no batch axis, as rows are columns too."""
    dims = ["n", "n"]
    nodes = [_node("Transpose", "INPUT0", "t"), _node("Add", "INPUT0 t")]
    return model(nodes, [tensor("INPUT0", "FP32", dims)], [tensor("OUTPUT0", "FP32", dims)])


def _masked() -> onnx.ModelProto:
    """The same dimension names in two inputs."""
    dims = ["batch", "length"]
    return model(
        [_node("Mul", "INPUT0 mask")],
        [tensor("INPUT0", "FP32", dims), tensor("mask", "FP32", dims)],
        [tensor("OUTPUT0", "FP32", dims)],
    )


def _mean() -> onnx.ModelProto:
    nodes = [_node("ReduceMean", "INPUT0", keepdims=0)]
    return model(nodes, [tensor("INPUT0", "FP32", ["batch", 3])], [tensor("OUTPUT0", "FP32", [])])


def _centered() -> onnx.ModelProto:
    """By the mean of the whole batch, which for these rows is nearly the mean of each."""
    dims = ["batch", 3000]
    nodes = [_node("ReduceMean", "INPUT0", "mean"), _node("Sub", "INPUT0 mean")]
    return model(nodes, [tensor("INPUT0", "FP32", dims)], [tensor("OUTPUT0", "FP32", dims)])


def _looked_up() -> onnx.ModelProto:
    """It runs with as many rows as indices, too."""
    nodes = [_node("Mul", "which two", "even"), _node("Gather", "rows even")]
    inputs = [tensor("rows", "FP32", ["n", 3]), tensor("which", "INT64", ["k"])]
    return model(nodes, inputs, [tensor("OUTPUT0", "FP32", ["k", 3])], [_constant("two", np.int64(2))])


_NAMES = (
    "serving_default_x:0",
    "a/b/c:0",
    "入力",
    "naïve €",
    "x" * 3000,
    " in\tput",
    "a\nb",
    "{x}",
    "%s",
    "onnx::Gemm_0",
)

_SEQUENCES = [{"INPUT0": _floats(steps, 1, 3)} for steps in (1, 2, 5)]

FOUND: dict[str, tuple[onnx.ModelProto, list[Request]]] = {
    **{f"name{index}": (_named(name), _rows(3, name=name)) for index, name in enumerate(_NAMES)},
    "many_inputs": (_many_inputs(), [{f"i{index}": _floats(rows, 2) for index in range(200)} for rows in (1, 2)]),
    "initializers_among_inputs": (_initializers_among_inputs(), _rows(4)),
    "boxes": (_boxes(), [{"boxes": abs(_floats(1, n, 4)), "scores": abs(_floats(1, 1, n))} for n in (1, 3, 6)]),
    "recurrent": (_recurrent(), _SEQUENCES),
    "states": (_states(), [{"INPUT0": _floats(rows, 2), "state": _floats(rows, 2)} for rows in (1, 2)]),
    "loop": (_loop(), [{"n": np.array(n), "INPUT0": _floats(2, 3)} for n in (0, 1, 3)]),
    "function": (_function(), _rows(3)),
    "small_weights": (_small_weights(), _rows(4)),
    "pairs": (_pairs(), [{"queries": _floats(q, 3), "documents": _floats(4 - q, 3)} for q in (1, 2, 3)]),
    "found": (_found(transposed=False), [*_rows(3), {"INPUT0": np.zeros((2, 3), np.float32)}]),
    "found_rows": (_found(transposed=True), [{"INPUT0": np.float32([[0, 1, 0], [1, 1, 0]])}, *_rows(3)]),
    "no_columns": (models.identity(dims=("batch", 0)), _rows(0)),
    "free_columns": (models.identity(), [{"INPUT0": _floats(2, columns)} for columns in (0, 1, 7)]),
    "no_rank": (models.scalar(), [{"INPUT0": _floats()} for _ in range(3)]),
    "wrong_dims": (odd_models.declared_dims((1, 3)), _rows(3)),
    "square": (_square(), [{"INPUT0": _floats(n, n)} for n in (1, 2, 3)]),
    "masked": (_masked(), [{"INPUT0": _floats(2, n), "mask": _floats(2, n)} for n in (0, 1, 3)]),
    "mean": (_mean(), _rows(3)),
    "centered": (_centered(), [{"INPUT0": _floats(rows, 3000) + rows} for rows in (1, 2, 3)]),
    "looked_up": (
        _looked_up(),
        [{"rows": _floats(5, 3), "which": np.array(which)} for which in ([2], [1, 0], [0] * 9)],
    ),
    "nothing": (models.identity(dims=(0, 3)), [{"INPUT0": _floats(0, 3)}]),
    "any_rank": (odd_models.shapeless(), [{"INPUT0": _floats(*dims)} for dims in [(), (3,), (2, 0), (2, 3)]]),
    "squeezed": (
        odd_models.shapeless("Squeeze", ["n", None]),
        [{"INPUT0": _floats(*dims)} for dims in [(1, 1), (2, 3)]],
    ),
    "hidden_rank": (odd_models.hidden_rank(), _rows(3)),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root: Path = tmp_path_factory.mktemp("found")
    for name, (found, _) in FOUND.items():
        models.write(found, root / name / "1" / "model.onnx")
    with ServerProcess(root) as server:
        yield server.target


@pytest.fixture
async def stub(target: str) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(target) as channel:
        yield GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("name", FOUND)
async def test_found_model_answers_as_onnxruntime_alone_and_concurrently(stub: Any, name: str) -> None:
    found, requests = FOUND[name]
    session = ort.InferenceSession(found.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = [session.run(None, dict(request)) for request in requests]
    alone = [await _answer(stub, name, request) for request in requests]
    company = await asyncio.gather(*(_answer(stub, name, request) for request in requests * 5))
    for answer, outputs in zip([*alone, *company], expected * 6, strict=True):
        for array, output in zip(answer, outputs, strict=True):
            assert array.shape == output.shape
            np.testing.assert_allclose(array, output, rtol=1e-5, atol=1e-6)


async def _answer(stub: Any, name: str, request: Request) -> list[Array]:
    response = await stub.ModelInfer(infer(name, request))
    return [
        np.frombuffer(raw, {"FP32": np.float32, "INT64": np.int64}[output.datatype]).reshape(output.shape)
        for raw, output in zip(response.raw_output_contents, response.outputs, strict=True)
    ]
