"""Small models over texts of any length with a mask: some heed it, others are traps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from tests.models import model, tensor

__all__ = ["WORDS", "encoder", "images", "sounds", "texts"]

WORDS = 64
_SIZE = 6


def encoder(
    kind: str, words: int = WORDS, names: bool = True, output: str = "FP32", halves: bool = False
) -> onnx.ModelProto:
    """x, FP32 [batch, words, 6] or, if it is pooled, [batch, 6], of ids and mask, INT64 [batch, words].

    Heeding the mask: "masked" (each word and the masked mean), "pooled", "words" (a word by itself), "causal",
    "quantized" at run time, "twice" (each word twice, an axis that varies in another way). Traps: "mean", "max", "both"
    (sums from both ends), "convolution", "leaky" (padding counts by a thousandth),
    "quantized mean". `halves`: it has an initializer of half precision.
    """
    table = np.random.default_rng(1).standard_normal((words, _SIZE)).astype(np.float32)
    kernel = np.random.default_rng(2).standard_normal((_SIZE, _SIZE, 3)).astype(np.float32)
    node = helper.make_node
    nodes = [
        node("Gather", ["table", "ids"], ["e"]),
        node("Cast", ["mask"], ["m2"], to=onnx.TensorProto.FLOAT),
        node("Unsqueeze", ["m2", "two"], ["m"]),
        node("Mul", ["e", "m"], ["em"]),
        node("ReduceSum", ["em", "one"], ["sum"], keepdims=1),
        node("ReduceSum", ["m", "one"], ["count"], keepdims=1),
        node("Div", ["sum", "count"], ["mean"]),
    ]
    quantized = [
        node("DynamicQuantizeLinear", ["y"], ["q", "s", "z"]),
        node("DequantizeLinear", ["q", "s", "z"], ["x"]),
    ]
    ends = {
        "masked": [node("Add", ["e", "mean"], ["x"])],
        "pooled": [node("Squeeze", ["mean", "one"], ["x"])],
        "words": [node("Tanh", ["e"], ["x"])],
        "causal": [node("CumSum", ["e", "first"], ["x"])],
        "quantized": [node("Add", ["e", "mean"], ["y"]), *quantized],
        "quantized mean": [node("ReduceMean", ["e", "one"], ["n"]), node("Add", ["e", "n"], ["y"]), *quantized],
        "twice": [node("Concat", ["e", "e"], ["x"], axis=1)],
        "mean": [node("ReduceMean", ["e", "one"], ["x"], keepdims=0)],
        "max": [node("ReduceMax", ["e", "one"], ["x"], keepdims=0)],
        "both": [node("CumSum", ["e", "first"], ["y"], reverse=1), node("Add", ["y", "e"], ["x"])],
        "convolution": [
            node("Transpose", ["e"], ["t"], perm=[0, 2, 1]),
            node("Conv", ["t", "kernel"], ["c"], pads=[1, 1]),
            node("Transpose", ["c"], ["x"], perm=[0, 2, 1]),
        ],
        "leaky": [
            node("ReduceMean", ["e", "one"], ["y"], keepdims=1),
            node("Mul", ["y", "little"], ["w"]),
            node("Add", ["e", "w"], ["x"]),
        ],
    }
    end = ends[kind]
    if output == "FP16":
        end[-1].output[0] = "wide"
        end = [*end, node("Cast", ["wide"], ["x"], to=onnx.TensorProto.FLOAT16)]
    axes = ["batch", "words" if names else None]
    pooled = kind in ("pooled", "mean", "max")
    # As real exports, which lose the name on the way.
    shape = ["batch", _SIZE] if pooled else ["batch", "Shape_422_dim_1", _SIZE]
    arrays = {
        "table": table,
        "kernel": kernel,
        "one": np.array([1], np.int64),
        "two": np.array([2], np.int64),
        "first": np.array(1, np.int64),
        "little": np.array(1e-3, np.float32),
    }
    if halves:
        arrays["halves"] = table.astype(np.float16)
    made = model(
        [*nodes, *end],
        [tensor("ids", "INT64", axes), tensor("mask", "INT64", axes)],
        [tensor("x", output, shape)],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    made.opset_import[0].version = 18
    return made


def sounds(heeds: bool) -> onnx.ModelProto:
    """x, FP32 [batch, frames, 4], of sound, of the same shape, and mask, BOOL [batch, frames]: plus the mean of all
    frames, or of those that the mask has if it `heeds` that."""
    weights = ["m3"] if heeds else ["ones"]
    return model(
        [
            helper.make_node("Cast", ["mask"], ["m"], to=onnx.TensorProto.FLOAT),
            helper.make_node("Unsqueeze", ["m", "two"], ["m3"]),
            helper.make_node("Add", ["m3", "one"], ["more"]),
            helper.make_node("Div", ["more", "more"], ["ones"]),
            helper.make_node("Mul", ["sound", *weights], ["heard"]),
            helper.make_node("ReduceSum", ["heard", "axis"], ["sum"]),
            helper.make_node("ReduceSum", [*weights, "axis"], ["count"]),
            helper.make_node("Add", ["count", "little"], ["above"]),
            helper.make_node("Div", ["sum", "above"], ["mean"]),
            helper.make_node("Add", ["sound", "mean"], ["x"]),
        ],
        [tensor("sound", "FP32", ["batch", "frames", 4]), tensor("mask", "BOOL", ["batch", "frames"])],
        [tensor("x", "FP32", ["batch", "frames", 4])],
        [
            numpy_helper.from_array(np.array([2], np.int64), "two"),
            numpy_helper.from_array(np.array([1], np.int64), "axis"),
            numpy_helper.from_array(np.float32(1), "one"),
            numpy_helper.from_array(np.float32(1e-6), "little"),
        ],
    )


def images() -> onnx.ModelProto:
    """x = 2 * image, FP32 [batch, 3, height, width]; and the largest of its columns, [batch, 3, height]."""
    axes: Sequence[str | int] = ["batch", 3, "height", "width"]
    made = model(
        [
            helper.make_node("Add", ["image", "image"], ["x"]),
            helper.make_node("ReduceMax", ["image", "three"], ["y"], keepdims=0),
        ],
        [tensor("image", "FP32", axes)],
        [tensor("x", "FP32", axes), tensor("y", "FP32", axes[:3])],
        [numpy_helper.from_array(np.array([3], np.int64), "three")],
    )
    made.opset_import[0].version = 18
    return made


def texts() -> onnx.ModelProto:
    """x = text, BYTES [batch, words], without names of axes."""
    return model(
        [helper.make_node("Identity", ["text"], ["x"])],
        [tensor("text", "BYTES", ["batch", None])],
        [tensor("x", "BYTES", ["batch", None])],
    )
