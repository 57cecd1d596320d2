"""Small ONNX models that are other than they look, or that hardly anything can be done with: wrong or missing shapes,
values that aren't tensors, executions that don't end or take much memory.

Lives here: one function per model, as in `tests.models`. Must not: models that are served as any other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.models import Dims, model, tensor


def misdeclared_scalar(shape: Sequence[int]) -> onnx.ModelProto:
    """OUTPUT0 = INPUT0, FP32 of one axis, in `shape`, although declared to be of rank 0. ONNX Runtime can't know
    better, as the shape is computed."""
    size = numpy_helper.from_array(np.array([*shape, 0], np.int64), "shape")
    ends = [numpy_helper.from_array(np.array([value], np.int64), name) for name, value in (("zero", 0), ("end", -1))]
    nodes = [
        helper.make_node("Cast", ["INPUT0"], ["ints"], to=TensorProto.INT64),
        helper.make_node("ReduceSum", ["ints"], ["some"], keepdims=1),
        helper.make_node("Mul", ["some", "zero"], ["none"]),
        helper.make_node("Add", ["end", "none"], ["stop"]),
        helper.make_node("Slice", ["shape", "zero", "stop"], ["taken"]),
        helper.make_node("Reshape", ["INPUT0", "taken"], ["OUTPUT0"]),
    ]
    return model(nodes, [tensor("INPUT0", "FP32", ["n"])], [tensor("OUTPUT0", "FP32", [])], [size, *ends])


def sequence_output() -> onnx.ModelProto:
    """An output that is a sequence of tensors, which the protocol can't carry."""
    element = helper.make_tensor_type_proto(TensorProto.FLOAT, ["batch", 2])
    return model(
        [helper.make_node("SequenceConstruct", ["INPUT0"], ["OUTPUT0"])],
        [tensor("INPUT0", "FP32", ["batch", 2])],
        [helper.make_value_info("OUTPUT0", helper.make_sequence_type_proto(element))],
    )


def sequence_input() -> onnx.ModelProto:
    """An input that is a sequence of tensors."""
    element = helper.make_tensor_type_proto(TensorProto.FLOAT, ["batch", 2])
    return model(
        [helper.make_node("ConcatFromSequence", ["INPUT0"], ["OUTPUT0"], axis=0)],
        [helper.make_value_info("INPUT0", helper.make_sequence_type_proto(element))],
        [tensor("OUTPUT0", "FP32", ["batch", 2])],
    )


def map_output() -> onnx.ModelProto:
    """An output that is a sequence of maps, as classifiers of classic machine learning have."""
    element = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    return model(
        [helper.make_node("ZipMap", ["INPUT0"], ["OUTPUT0"], domain="ai.onnx.ml", classlabels_int64s=[0, 1])],
        [tensor("INPUT0", "FP32", ["batch", 2])],
        [helper.make_value_info("OUTPUT0", helper.make_sequence_type_proto(element))],
    )


def float8_output() -> onnx.ModelProto:
    """An output of an element type that the protocol has no datatype for."""
    return model(
        [helper.make_node("Cast", ["INPUT0"], ["OUTPUT0"], to=TensorProto.FLOAT8E4M3FN)],
        [tensor("INPUT0", "FP32", ["batch", 2])],
        [helper.make_tensor_value_info("OUTPUT0", TensorProto.FLOAT8E4M3FN, ["batch", 2])],
        opset=19,
    )


def memory_hungry(rows: int) -> onnx.ModelProto:
    """OUTPUT0 = INPUT0, FP32 [batch, 1]; with more than `rows` rows by way of a tensor of 2^47 bytes a row, which no
    machine has."""
    constants = [
        numpy_helper.from_array(np.array(value, np.int64), name)
        for name, value in (("zero", [0]), ("most", [rows]), ("one", [1]), ("huge", [1 << 45]), ("axes", [1]))
    ]
    nodes = [
        helper.make_node("Shape", ["INPUT0"], ["shape"]),
        helper.make_node("Gather", ["shape", "zero"], ["rows"]),
        helper.make_node("Greater", ["rows", "most"], ["too_many"]),
        helper.make_node("Where", ["too_many", "huge", "one"], ["columns"]),
        helper.make_node("Concat", ["rows", "columns"], ["wide"], axis=0),
        helper.make_node("Expand", ["INPUT0", "wide"], ["expanded"]),
        helper.make_node("ReduceMax", ["expanded", "axes"], ["OUTPUT0"], keepdims=1),
    ]
    return model(nodes, [tensor("INPUT0", "FP32", ["batch", 1])], [tensor("OUTPUT0", "FP32", ["batch", 1])], constants)


def declared_dims(dims: Dims) -> onnx.ModelProto:
    """OUTPUT0 = -INPUT0, FP32 [batch, 3], which the model declares with `dims`."""
    return model(
        [helper.make_node("Neg", ["INPUT0"], ["negated"]), helper.make_node("Reshape", ["negated", "s"], ["OUTPUT0"])],
        [tensor("INPUT0", "FP32", ["batch", 3])],
        [tensor("OUTPUT0", "FP32", dims)],
        [numpy_helper.from_array(np.array([-1, 3], np.int64), "s")],
    )


def shapeless(kind: str = "Neg", dims: Dims | None = None) -> onnx.ModelProto:
    """OUTPUT0 = the operator `kind` of INPUT0, FP32, without shapes: any rank is accepted, unless INPUT0 has `dims`."""
    return model(
        [helper.make_node(kind, ["INPUT0"], ["OUTPUT0"])],
        [helper.make_tensor_value_info("INPUT0", TensorProto.FLOAT, dims)],
        [helper.make_tensor_value_info("OUTPUT0", TensorProto.FLOAT, None)],
    )


def hidden_rank(dims: Dims | None = None) -> onnx.ModelProto:
    """OUTPUT0 = INPUT0, FP32 [batch, 3], computed so that its rank is unknown before it has run; declared with
    `dims`."""
    return model(
        [
            helper.make_node("Shape", ["INPUT0"], ["shape"]),
            helper.make_node("Compress", ["shape", "both"], ["hidden"]),
            helper.make_node("Reshape", ["INPUT0", "hidden"], ["OUTPUT0"]),
        ],
        [tensor("INPUT0", "FP32", ["batch", 3])],
        [helper.make_tensor_value_info("OUTPUT0", TensorProto.FLOAT, dims)],
        [numpy_helper.from_array(np.array([True, True]), "both")],
    )


def endless() -> onnx.ModelProto:
    """OUTPUT0 = INPUT0, FP32 [batch, 1], after a loop of as many steps as the first number of INPUT0."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Sqrt", ["given"], ["next"])],
        "step",
        [tensor("step", "INT64", []), tensor("go", "BOOL", []), tensor("given", "FP32", [])],
        [tensor("on", "BOOL", []), tensor("next", "FP32", [])],
    )
    return model(
        [
            helper.make_node("Gather", ["INPUT0", "first"], ["row"], axis=0),
            helper.make_node("Squeeze", ["row"], ["number"]),
            helper.make_node("Cast", ["number"], ["steps"], to=TensorProto.INT64),
            helper.make_node("Loop", ["steps", "", "number"], ["ended"], body=body),
            helper.make_node("Mul", ["ended", "zero"], ["nothing"]),
            helper.make_node("Add", ["INPUT0", "nothing"], ["OUTPUT0"]),
        ],
        [tensor("INPUT0", "FP32", ["batch", 1])],
        [tensor("OUTPUT0", "FP32", ["batch", 1])],
        [numpy_helper.from_array(np.array([0], np.int64), "first"), numpy_helper.from_array(np.float32(0), "zero")],
    )


def growing() -> onnx.ModelProto:
    """OUTPUT0 = 0, FP32 [1, 1], after as many zeros as the only number of INPUT0, FP32 [batch, 1], were added up."""
    return model(
        [
            helper.make_node("Cast", ["INPUT0"], ["number"], to=TensorProto.INT64),
            helper.make_node("Reshape", ["number", "flat"], ["shape"]),
            helper.make_node("ConstantOfShape", ["shape"], ["zeros"]),
            helper.make_node("ReduceSum", ["zeros"], ["sum"], keepdims=0),
            helper.make_node("Reshape", ["sum", "single"], ["OUTPUT0"]),
        ],
        [tensor("INPUT0", "FP32", ["batch", 1])],
        [tensor("OUTPUT0", "FP32", ["batch", 1])],
        [
            numpy_helper.from_array(np.array([-1], np.int64), "flat"),
            numpy_helper.from_array(np.array([1, 1], np.int64), "single"),
        ],
    )


def classifier() -> onnx.ModelProto:
    """What skl2onnx makes of scikit-learn's classifiers by default: INPUT0, FP32 [batch, 2], to a label, OUTPUT0, INT64
    [batch], 1 if the second column is larger, else 0; and to OUTPUT1, a map of labels to scores for each row."""
    element = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    return model(
        [
            helper.make_node("ArgMax", ["INPUT0"], ["OUTPUT0"], axis=1, keepdims=0),
            helper.make_node("ZipMap", ["INPUT0"], ["OUTPUT1"], domain="ai.onnx.ml", classlabels_int64s=[0, 1]),
        ],
        [tensor("INPUT0", "FP32", [None, 2])],
        [
            tensor("OUTPUT0", "INT64", [None]),
            helper.make_value_info("OUTPUT1", helper.make_sequence_type_proto(element)),
        ],
    )
