"""Small ONNX models with memory, built on the fly.

Lives here: one function per model, each with an input STATE whose next value is the output STATE_OUT, or with controls.
Must not: anything of the server.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.models import Dims, model, tensor

__all__ = ["accumulator", "growing", "picky", "recurrent", "told"]


def accumulator(datatype: str = "FP32", dims: Dims = ("batch", 2)) -> onnx.ModelProto:
    """OUTPUT0 = STATE_OUT = INPUT0 + STATE."""
    return model(
        [
            helper.make_node("Add", ["INPUT0", "STATE"], ["OUTPUT0"]),
            helper.make_node("Identity", ["OUTPUT0"], ["STATE_OUT"]),
        ],
        [tensor("INPUT0", datatype, dims), tensor("STATE", datatype, dims)],
        [tensor("OUTPUT0", datatype, dims), tensor("STATE_OUT", datatype, dims)],
    )


def picky() -> onnx.ModelProto:
    """As the accumulator; fails if an element of INPUT0 isn't below 100: there is nothing then to index."""
    return model(
        [
            helper.make_node("Cast", ["INPUT0"], ["whole"], to=TensorProto.INT64),
            helper.make_node("Gather", ["zeros", "whole"], ["nothing"], axis=0),
            helper.make_node("Add", ["INPUT0", "STATE"], ["sum"]),
            helper.make_node("Add", ["sum", "nothing"], ["OUTPUT0"]),
            helper.make_node("Identity", ["OUTPUT0"], ["STATE_OUT"]),
        ],
        [tensor(name, "FP32", ["batch", 2]) for name in ("INPUT0", "STATE")],
        [tensor(name, "FP32", ["batch", 2]) for name in ("OUTPUT0", "STATE_OUT")],
        [numpy_helper.from_array(np.zeros(100, np.float32), "zeros")],
    )


def recurrent(size: int = 3) -> onnx.ModelProto:
    """Two layers, FP32, with the batch on the second axis of their state [2, batch, size], and an INT64 RATE without
    any dimensions: STATE_OUT = STATE / 2 + INPUT0, OUTPUT0 = RATE times the sum of both layers."""
    return model(
        [
            helper.make_node("Mul", ["STATE", "half"], ["faded"]),
            helper.make_node("Unsqueeze", ["INPUT0", "first"], ["now"]),
            helper.make_node("Add", ["faded", "now"], ["STATE_OUT"]),
            helper.make_node("ReduceSum", ["STATE_OUT", "first"], ["sum"], keepdims=0),
            helper.make_node("Cast", ["RATE"], ["rate"], to=TensorProto.FLOAT),
            helper.make_node("Mul", ["sum", "rate"], ["OUTPUT0"]),
        ],
        [
            tensor("INPUT0", "FP32", ["batch", size]),
            tensor("RATE", "INT64", []),
            tensor("STATE", "FP32", [2, "batch", size]),
        ],
        [tensor("OUTPUT0", "FP32", ["batch", size]), tensor("STATE_OUT", "FP32", [2, "batch", size])],
        [
            numpy_helper.from_array(np.array(0.5, np.float32), "half"),
            numpy_helper.from_array(np.array([0], np.int64), "first"),
        ],
    )


def growing() -> onnx.ModelProto:
    """STATE_OUT, FP32 [batch, n], is STATE with INPUT0, FP32 [batch, 1], behind it; OUTPUT0 is its sum."""
    return model(
        [
            helper.make_node("Concat", ["STATE", "INPUT0"], ["STATE_OUT"], axis=1),
            helper.make_node("ReduceSum", ["STATE_OUT", "second"], ["OUTPUT0"], keepdims=1),
        ],
        [tensor("INPUT0", "FP32", ["batch", 1]), tensor("STATE", "FP32", ["batch", "past"])],
        [tensor("OUTPUT0", "FP32", ["batch", 1]), tensor("STATE_OUT", "FP32", ["batch", "longer"])],
        [numpy_helper.from_array(np.array([1], np.int64), "second")],
    )


def told() -> onnx.ModelProto:
    """OUTPUT0 = READY x (INPUT0 + START) of Triton's tests, all INT32 [1], and OUTPUT1 = CORRID, UINT64 [1]."""
    return model(
        [
            helper.make_node("Add", ["INPUT0", "START"], ["sum"]),
            helper.make_node("Mul", ["sum", "READY"], ["OUTPUT0"]),
            helper.make_node("Identity", ["CORRID"], ["OUTPUT1"]),
        ],
        [
            *(tensor(name, "INT32", ["batch", 1]) for name in ("INPUT0", "START", "READY")),
            tensor("CORRID", "UINT64", ["batch", 1]),
        ],
        [tensor("OUTPUT0", "INT32", ["batch", 1]), tensor("OUTPUT1", "UINT64", ["batch", 1])],
    )
