"""Small ONNX models, built on the fly: tests serve them, and check answers against them.

Lives here: one function per model, each naming its tensors INPUT0, INPUT1, …, OUTPUT0, … as Triton's own test models
do, with a free batch axis in front unless it says otherwise. Must not: anything of the server. `write` writes one to
disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

ELEMENT_TYPES = {
    "BOOL": TensorProto.BOOL,
    "UINT8": TensorProto.UINT8,
    "UINT16": TensorProto.UINT16,
    "UINT32": TensorProto.UINT32,
    "UINT64": TensorProto.UINT64,
    "INT8": TensorProto.INT8,
    "INT16": TensorProto.INT16,
    "INT32": TensorProto.INT32,
    "INT64": TensorProto.INT64,
    "FP16": TensorProto.FLOAT16,
    "FP32": TensorProto.FLOAT,
    "FP64": TensorProto.DOUBLE,
    "BF16": TensorProto.BFLOAT16,
    "BYTES": TensorProto.STRING,
}
"""ONNX's number for each v2 datatype."""

Dims = Sequence[int | str | None]


def write(model: onnx.ModelProto, path: Path) -> Path:
    """Write `model` to `path`, making its folders; the path again, for chaining."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.SerializeToString())
    return path


def tensor(name: str, datatype: str, dims: Dims) -> onnx.ValueInfoProto:
    """An input or output; a free dimension is a name or None."""
    return helper.make_tensor_value_info(name, ELEMENT_TYPES[datatype], dims)


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    constants: Sequence[onnx.TensorProto] = (),
    opset: int = 18,
) -> onnx.ModelProto:
    """A model of these parts, in a format old enough for every ONNX Runtime that the product allows."""
    graph = helper.make_graph(nodes, "test", inputs, outputs, initializer=constants)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def add_sub(datatype: str = "INT32", size: int = 16, batched: bool = True) -> onnx.ModelProto:
    """OUTPUT0 = INPUT0 + INPUT1, OUTPUT1 = INPUT0 - INPUT1, each [size]: Triton's 'simple' for INT32."""
    dims: Dims = ["batch", size] if batched else [size]
    return model(
        [
            helper.make_node("Add", ["INPUT0", "INPUT1"], ["OUTPUT0"]),
            helper.make_node("Sub", ["INPUT0", "INPUT1"], ["OUTPUT1"]),
        ],
        [tensor("INPUT0", datatype, dims), tensor("INPUT1", datatype, dims)],
        [tensor("OUTPUT0", datatype, dims), tensor("OUTPUT1", datatype, dims)],
    )


def identity(datatype: str = "FP32", dims: Dims = ("batch", None), count: int = 1) -> onnx.ModelProto:
    """OUTPUTi = INPUTi for i below `count`. `dims` are whole: () is rank 0, ("batch", None, None) has two free ones."""
    return model(
        [helper.make_node("Identity", [f"INPUT{i}"], [f"OUTPUT{i}"]) for i in range(count)],
        [tensor(f"INPUT{i}", datatype, dims) for i in range(count)],
        [tensor(f"OUTPUT{i}", datatype, dims) for i in range(count)],
    )


def cast(source: str, target: str, dims: Dims = ("batch", None)) -> onnx.ModelProto:
    """OUTPUT0 = INPUT0 as another datatype."""
    return model(
        [helper.make_node("Cast", ["INPUT0"], ["OUTPUT0"], to=ELEMENT_TYPES[target])],
        [tensor("INPUT0", source, dims)],
        [tensor("OUTPUT0", target, dims)],
    )


def mlp(sizes: Sequence[int] = (16, 32, 4), seed: int = 0) -> onnx.ModelProto:
    """A perceptron: FP32 [sizes[0]] -> FP32 [sizes[-1]], ReLU between layers, fixed pseudo-random weights."""
    random = np.random.default_rng(seed)
    nodes, constants, x = [], [], "INPUT0"
    last = len(sizes) - 2
    for i, (fan_in, fan_out) in enumerate(pairwise(sizes)):
        weights = (random.standard_normal((fan_in, fan_out)) / np.sqrt(fan_in)).astype(np.float32)
        bias = random.standard_normal(fan_out).astype(np.float32)
        constants += [numpy_helper.from_array(weights, f"w{i}"), numpy_helper.from_array(bias, f"b{i}")]
        y = "OUTPUT0" if i == last else f"h{i}"
        nodes.append(helper.make_node("Gemm", [x, f"w{i}", f"b{i}"], [y]))
        x = y
        if i != last:
            x = f"r{i}"
            nodes.append(helper.make_node("Relu", [y], [x]))
    inputs, outputs = [tensor("INPUT0", "FP32", ["batch", sizes[0]])], [tensor("OUTPUT0", "FP32", ["batch", sizes[-1]])]
    return model(nodes, inputs, outputs, constants)


def batch_sum(size: int = 4) -> onnx.ModelProto:
    """An output without a batch axis: FP32 [1, size], the sum of all rows."""
    return model(
        [helper.make_node("ReduceSum", ["INPUT0", "axes"], ["OUTPUT0"], keepdims=1)],
        [tensor("INPUT0", "FP32", ["batch", size])],
        [tensor("OUTPUT0", "FP32", [1, size])],
        [numpy_helper.from_array(np.array([0], np.int64), "axes")],
    )


def row_sums(size: int | None = None) -> onnx.ModelProto:
    """OUTPUT0 = the sum of each row of INPUT0, FP32 [batch]."""
    return model(
        [helper.make_node("ReduceSum", ["INPUT0", "axes"], ["OUTPUT0"], keepdims=0)],
        [tensor("INPUT0", "FP32", ["batch", size])],
        [tensor("OUTPUT0", "FP32", ["batch"])],
        [numpy_helper.from_array(np.array([1], np.int64), "axes")],
    )


def positive_rows(size: int = 4) -> onnx.ModelProto:
    """An output that only looks like it carries the batch axis: the rows of INPUT0 whose first element is above 0."""
    return model(
        [
            helper.make_node("Gather", ["INPUT0", "first"], ["firsts"], axis=1),
            helper.make_node("Greater", ["firsts", "zero"], ["keep"]),
            helper.make_node("Compress", ["INPUT0", "keep"], ["OUTPUT0"], axis=0),
        ],
        [tensor("INPUT0", "FP32", ["batch", size])],
        [tensor("OUTPUT0", "FP32", ["rows", size])],
        [
            numpy_helper.from_array(np.array(0, np.int64), "first"),
            numpy_helper.from_array(np.array(0, np.float32), "zero"),
        ],
    )


def gather(table: Sequence[float] = (0.0, 10.0, 20.0, 30.0), size: int = 1) -> onnx.ModelProto:
    """OUTPUT0 = table[INPUT0], FP32 [size] from INT64 [size]: an index outside of the table fails the batch (CPU)."""
    return model(
        [helper.make_node("Gather", ["table", "INPUT0"], ["OUTPUT0"])],
        [tensor("INPUT0", "INT64", ["batch", size])],
        [tensor("OUTPUT0", "FP32", ["batch", size])],
        [numpy_helper.from_array(np.array(table, np.float32), "table")],
    )


def fixed_batch(rows: int = 4, size: int = 3) -> onnx.ModelProto:
    """OUTPUT0 = -INPUT0, FP32, for exactly `rows` rows."""
    return model(
        [helper.make_node("Neg", ["INPUT0"], ["OUTPUT0"])],
        [tensor("INPUT0", "FP32", [rows, size])],
        [tensor("OUTPUT0", "FP32", [rows, size])],
    )


def quotient() -> onnx.ModelProto:
    """OUTPUT0 = INPUT0 / INPUT1, INT64 [batch, 1]. Dividing the smallest number by -1 kills ONNX Runtime's process."""
    return model(
        [helper.make_node("Div", ["INPUT0", "INPUT1"], ["OUTPUT0"])],
        [tensor(name, "INT64", ["batch", 1]) for name in ("INPUT0", "INPUT1")],
        [tensor("OUTPUT0", "INT64", ["batch", 1])],
    )


def dynamically_quantized() -> onnx.ModelProto:
    """OUTPUT0, FP32 [batch, 1, 2]: the rows of a table that INPUT0 [batch, 1], INT64 0 to 3, selects, each rounded by
    the largest number of all."""
    table = np.array([[1, 2], [3, 4], [5, 600], [7, 8]], np.float32)
    return model(
        [
            helper.make_node("Gather", ["table", "INPUT0"], ["rows"]),
            helper.make_node("DynamicQuantizeLinear", ["rows"], ["quantized", "scale", "zero"]),
            helper.make_node("DequantizeLinear", ["quantized", "scale", "zero"], ["OUTPUT0"]),
        ],
        [tensor("INPUT0", "INT64", ["batch", 1])],
        [tensor("OUTPUT0", "FP32", ["batch", 1, 2])],
        [numpy_helper.from_array(table, "table")],
    )


def matrix_product() -> onnx.ModelProto:
    """OUTPUT0 = INPUT0 x INPUT1 per row, FP32: dims [-1, -1] each, whose sizes must agree where matrices multiply."""
    return model(
        [helper.make_node("MatMul", ["INPUT0", "INPUT1"], ["OUTPUT0"])],
        [tensor("INPUT0", "FP32", ["batch", "n", "k"]), tensor("INPUT1", "FP32", ["batch", "k", "m"])],
        [tensor("OUTPUT0", "FP32", ["batch", "n", "m"])],
    )


def ragged(step: float = 1.0) -> onnx.ModelProto:
    """OUTPUT0 = INPUT0 + `step`, FP32, for all elements of a batch, concatenated: no batch axis."""
    return model(
        [helper.make_node("Add", ["INPUT0", "step"], ["OUTPUT0"])],
        [tensor("INPUT0", "FP32", ["elements"])],
        [tensor("OUTPUT0", "FP32", ["elements"])],
        [numpy_helper.from_array(np.array(step, np.float32), "step")],
    )


def batch_input_echo(datatype: str = "INT32", rank: int = 1) -> onnx.ModelProto:
    """OUTPUT0, FP32: for each row of ROWS, FP32 [1], all of MADE, of `datatype`, if MADE is a vector, and the row's own
    row of it if it is a matrix. RAGGED, FP32, is only there to be measured."""
    return model(
        [
            helper.make_node("Cast", ["MADE"], ["made"], to=TensorProto.FLOAT),
            helper.make_node("ReduceSum", ["RAGGED"], ["sum"], keepdims=0),
            helper.make_node("Mul", ["sum", "zero"], ["nothing"]),
            helper.make_node("Mul", ["ROWS", "zero"], ["nothings"]),
            helper.make_node("Add", ["made", "nothing"], ["there"]),
            helper.make_node("Add", ["nothings", "there"], ["OUTPUT0"]),
        ],
        [
            tensor("RAGGED", "FP32", ["elements"]),
            tensor("ROWS", "FP32", ["batch", 1]),
            tensor("MADE", datatype, [f"made{axis}" for axis in range(rank)]),
        ],
        [tensor("OUTPUT0", "FP32", ["batch", None])],
        [numpy_helper.from_array(np.array(0, np.float32), "zero")],
    )


def transpose() -> onnx.ModelProto:
    """OUTPUT0 = INPUT0 transposed per row, FP32 [2, n] -> [n, 2]."""
    return model(
        [helper.make_node("Transpose", ["INPUT0"], ["OUTPUT0"], perm=[0, 2, 1])],
        [tensor("INPUT0", "FP32", ["batch", 2, "n"])],
        [tensor("OUTPUT0", "FP32", ["batch", "n", 2])],
    )


def with_default(
    datatype: str = "FP32", default: Sequence[float | str] = (10.0,), batched: bool = False
) -> onnx.ModelProto:
    """OUTPUT0 = INPUT0, OUTPUT1 = BIAS, which is `default` if it isn't given; both [-1] unless `batched`."""
    dims: Dims = ["batch", None] if batched else [None]
    value = helper.make_tensor(
        "BIAS", ELEMENT_TYPES[datatype], [1, len(default)] if batched else [len(default)], default
    )
    return model(
        [
            helper.make_node("Identity", ["INPUT0"], ["OUTPUT0"]),
            helper.make_node("Identity", ["BIAS"], ["OUTPUT1"]),
        ],
        [tensor("INPUT0", datatype, dims), tensor("BIAS", datatype, dims)],
        [tensor("OUTPUT0", datatype, dims), tensor("OUTPUT1", datatype, dims)],
        [value],
    )


def reshape() -> onnx.ModelProto:
    """OUTPUT0 = INPUT0, FP32 [6], in the shape given by SHAPE, INT64 [3], whose first number is the batch axis (0 or
    -1: unchanged)."""
    return model(
        [helper.make_node("Reshape", ["INPUT0", "SHAPE"], ["OUTPUT0"])],
        [tensor("INPUT0", "FP32", ["batch", 6]), tensor("SHAPE", "INT64", [3])],
        [tensor("OUTPUT0", "FP32", ["batch", None, None])],
    )


def scalar() -> onnx.ModelProto:
    """OUTPUT0 = INPUT0 + INPUT0, FP32 of rank 0: there is no axis that could be a batch axis."""
    return model(
        [helper.make_node("Add", ["INPUT0", "INPUT0"], ["OUTPUT0"])],
        [tensor("INPUT0", "FP32", [])],
        [tensor("OUTPUT0", "FP32", [])],
    )


def over_rows(kind: str, rows: int | str = "batch") -> onnx.ModelProto:
    """OUTPUT0, FP32, whose rows depend on other rows of INPUT0 [rows, 3]: `softmax`, `cumulate`, `compare` (with every
    other row) or `quantize` (by the largest number), or which may have one row only: `reshape`."""
    nodes = {
        "softmax": [helper.make_node("Softmax", ["INPUT0"], ["OUTPUT0"], axis=0)],
        "cumulate": [helper.make_node("CumSum", ["INPUT0", "axis"], ["OUTPUT0"])],
        "compare": [
            helper.make_node("Transpose", ["INPUT0"], ["columns"]),
            helper.make_node("MatMul", ["INPUT0", "columns"], ["OUTPUT0"]),
        ],
        "quantize": [
            helper.make_node("DynamicQuantizeLinear", ["INPUT0"], ["quantized", "scale", "zero"]),
            helper.make_node("DequantizeLinear", ["quantized", "scale", "zero"], ["OUTPUT0"]),
        ],
        "reshape": [helper.make_node("Reshape", ["INPUT0", "shape"], ["OUTPUT0"])],
    }
    constants = [
        numpy_helper.from_array(np.array(0, np.int64), "axis"),
        numpy_helper.from_array(np.array([1, 3], np.int64), "shape"),
    ]
    return model(
        nodes[kind],
        [tensor("INPUT0", "FP32", [rows, 3])],
        [tensor("OUTPUT0", "FP32", [rows, None])],
        constants,
    )


def normalizing(training: bool, statistics: Sequence[str] = ("mean", "variance")) -> onnx.ModelProto:
    """OUTPUT0 = INPUT0, FP32 [batch, 3, n], normalized; if `training`, by the numbers of all rows. ONNX Runtime then
    dies of an execution if `statistics`, the names of its further results, are empty."""
    values = [
        numpy_helper.from_array(np.full(3, one, np.float32), name)
        for name, one in zip("sbmv", (1, 0, 0, 1), strict=True)
    ]
    outputs = ["OUTPUT0", *statistics] if training else ["OUTPUT0"]
    return model(
        [helper.make_node("BatchNormalization", ["INPUT0", *"sbmv"], outputs, training_mode=int(training))],
        [tensor("INPUT0", "FP32", ["batch", 3, "n"])],
        [tensor("OUTPUT0", "FP32", ["batch", 3, "n"])],
        values,
    )


def dice() -> onnx.ModelProto:
    """OUTPUT0, FP32 [3]: other random numbers each time."""
    return model(
        [helper.make_node("RandomUniformLike", ["INPUT0"], ["OUTPUT0"])],
        [tensor("INPUT0", "FP32", ["batch", 3])],
        [tensor("OUTPUT0", "FP32", ["batch", 3])],
    )
