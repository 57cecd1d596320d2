"""Small ONNX models with memory, built on the fly.

Lives here: one function per model, each with an input STATE whose next value is the output STATE_OUT, or with controls.
Must not: anything of the server.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.models import Dims, model, tensor

__all__ = [
    "accumulator", "attentive", "counter", "growing", "history", "last_chunk", "marked", "picky", "recurrent", "told",
    "two_memories", "words",
]  # fmt: skip


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


def counter(kind: str = "alone") -> onnx.ModelProto:
    """OUTPUT0, FP32 [batch, 1], is STATE, and STATE_OUT one more. "scalar": as many more as INPUT0, without dimensions,
    says."""
    is_scalar = kind == "scalar"
    return model(
        [
            helper.make_node("Identity", ["STATE"], ["OUTPUT0"]),
            helper.make_node("Add", ["STATE", "INPUT0" if is_scalar else "one"], ["STATE_OUT"]),
        ],
        [*([tensor("INPUT0", "FP32", [])] if is_scalar else []), tensor("STATE", "FP32", ["batch", 1])],
        [tensor(name, "FP32", ["batch", 1]) for name in ("OUTPUT0", "STATE_OUT")],
        [numpy_helper.from_array(np.array(1, np.float32), "one")],
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


def growing(now: int | str = 1, kind: str = "behind") -> onnx.ModelProto:
    """STATE_OUT, FP32 [batch, n], is STATE with INPUT0, FP32 [batch, `now`], behind it; OUTPUT0 is its sum. "front":
    INPUT0 is in front of it; "window": behind it, and the first of STATE is dropped. "picky": fails if an element of
    INPUT0 isn't below 100."""
    past = {
        "window": [helper.make_node("Slice", ["STATE", "second", "end", "second"], ["kept"])],
        "picky": [
            helper.make_node("Cast", ["INPUT0"], ["whole"], to=TensorProto.INT64),
            helper.make_node("Gather", ["zeros", "whole"], ["nothing"], axis=0),
            helper.make_node("Add", ["INPUT0", "nothing"], ["below"]),
        ],
    }
    parts = {"front": ["INPUT0", "STATE"], "window": ["kept", "INPUT0"], "picky": ["STATE", "below"]}
    return model(
        [
            *past.get(kind, []),
            helper.make_node("Concat", parts.get(kind, ["STATE", "INPUT0"]), ["STATE_OUT"], axis=1),
            helper.make_node("ReduceSum", ["STATE_OUT", "second"], ["OUTPUT0"], keepdims=1),
        ],
        [tensor("INPUT0", "FP32", ["batch", now]), tensor("STATE", "FP32", ["batch", "past"])],
        [tensor("OUTPUT0", "FP32", ["batch", 1]), tensor("STATE_OUT", "FP32", ["batch", "longer"])],
        [
            numpy_helper.from_array(np.array([1], np.int64), "second"),
            numpy_helper.from_array(np.array([np.iinfo(np.int64).max], np.int64), "end"),
            numpy_helper.from_array(np.zeros(100, np.float32), "zeros"),
        ],
    )


def history(datatype: str) -> onnx.ModelProto:
    """STATE_OUT [batch, n] is STATE with INPUT0 [batch, now] behind it, and OUTPUT0 is INPUT0."""
    return model(
        [
            helper.make_node("Concat", ["STATE", "INPUT0"], ["STATE_OUT"], axis=1),
            helper.make_node("Identity", ["INPUT0"], ["OUTPUT0"]),
        ],
        [tensor("INPUT0", datatype, ["batch", "now"]), tensor("STATE", datatype, ["batch", "past"])],
        [tensor("STATE_OUT", datatype, ["batch", "longer"]), tensor("OUTPUT0", datatype, ["batch", "now"])],
    )


def marked() -> onnx.ModelProto:
    """STATE_OUT, FP32 [batch, n], is STATE with INPUT0, FP32 [batch, 1], behind it; OUTPUT0 is the sum of those of
    STATE that MARKS, FP32 of the same shape, leave."""
    return model(
        [
            helper.make_node("Concat", ["STATE", "INPUT0"], ["STATE_OUT"], axis=1),
            helper.make_node("Mul", ["STATE", "MARKS"], ["left"]),
            helper.make_node("ReduceSum", ["left", "second"], ["OUTPUT0"], keepdims=1),
        ],
        [
            tensor("INPUT0", "FP32", ["batch", 1]),
            tensor("MARKS", "FP32", ["batch", "past"]),
            tensor("STATE", "FP32", ["batch", "past"]),
        ],
        [tensor("OUTPUT0", "FP32", ["batch", 1]), tensor("STATE_OUT", "FP32", ["batch", "longer"])],
        [numpy_helper.from_array(np.array([1], np.int64), "second")],
    )


def two_memories() -> onnx.ModelProto:
    """STATE and OTHER, FP32 [batch, past], of which STATE grows by INPUT0, FP32 [batch, 1], and OTHER is INPUT0."""
    return model(
        [
            helper.make_node("Concat", ["STATE", "INPUT0"], ["STATE_OUT"], axis=1),
            helper.make_node("Identity", ["INPUT0"], ["OTHER_OUT"]),
            helper.make_node("Concat", ["STATE", "OTHER"], ["both"], axis=1),
            helper.make_node("ReduceSum", ["both", "second"], ["OUTPUT0"], keepdims=1),
        ],
        [
            tensor("INPUT0", "FP32", ["batch", 1]),
            *(tensor(one, "FP32", ["batch", "past"]) for one in ("STATE", "OTHER")),
        ],
        [
            tensor("OUTPUT0", "FP32", ["batch", 1]),
            *(tensor(one, "FP32", ["batch", None]) for one in ("STATE_OUT", "OTHER_OUT")),
        ],
        [numpy_helper.from_array(np.array([1], np.int64), "second")],
    )


def words(kind: str = "masked") -> onnx.ModelProto:
    """OUTPUT0, FP32 [batch, words], is STATE, FP32 [batch, 1], plus the running sum of those INPUT0, INT64 [batch,
    words], that MASK leaves; STATE_OUT is STATE plus all of these. "leaky": OUTPUT0 is as before, but what is added to
    the state is their mean over all places, masked or not. "told": nothing is added where READY, FP32 [batch, 1], isn't
    1, and the state is zero where START is."""
    is_told = kind == "told"
    before = [helper.make_node("Identity", ["STATE"], ["state"])]
    if is_told:
        before = [
            helper.make_node("Sub", ["one", "START"], ["goes_on"]),
            helper.make_node("Mul", ["goes_on", "READY"], ["counts"]),
            helper.make_node("Mul", ["STATE", "counts"], ["state"]),
        ]
    return model(
        [
            *before,
            helper.make_node("Mul", ["INPUT0", "MASK"], ["left"]),
            helper.make_node("Cast", ["left"], ["float"], to=TensorProto.FLOAT),
            helper.make_node("CumSum", ["float", "axis"], ["running"]),
            helper.make_node("Add", ["running", "state"], ["OUTPUT0"]),
            helper.make_node("ReduceMean" if kind == "leaky" else "ReduceSum", ["float", "axes"], ["all"], keepdims=1),
            helper.make_node("Add", ["all", "state"], ["STATE_OUT"]),
        ],
        [
            *(tensor(name, "INT64", ["batch", "words"]) for name in ("INPUT0", "MASK")),
            *(tensor(name, "FP32", ["batch", 1]) for name in ("START", "READY") if is_told),
            tensor("STATE", "FP32", ["batch", 1]),
        ],
        [tensor("OUTPUT0", "FP32", ["batch", "words"]), tensor("STATE_OUT", "FP32", ["batch", 1])],
        [
            numpy_helper.from_array(np.array(1, np.int64), "axis"),
            numpy_helper.from_array(np.array([1], np.int64), "axes"),
            numpy_helper.from_array(np.array(1, np.float32), "one"),
        ],
    )


def last_chunk() -> onnx.ModelProto:
    """FP32: OUTPUT0 [batch, now] is INPUT0 plus the sum of STATE [batch, before], and STATE_OUT is INPUT0."""
    return model(
        [
            helper.make_node("ReduceSum", ["STATE", "axes"], ["sum"], keepdims=1),
            helper.make_node("Add", ["INPUT0", "sum"], ["OUTPUT0"]),
            helper.make_node("Identity", ["INPUT0"], ["STATE_OUT"]),
        ],
        [tensor("INPUT0", "FP32", ["batch", "now"]), tensor("STATE", "FP32", ["batch", "before"])],
        [tensor("OUTPUT0", "FP32", ["batch", "now"]), tensor("STATE_OUT", "FP32", ["batch", "now"])],
        [numpy_helper.from_array(np.array([1], np.int64), "axes")],
    )


def attentive(seen: str = "SEEN", size: int = 4) -> onnx.ModelProto:
    """OUTPUT0, FP32 [batch, now, size], is what INPUT0 sees of itself and of all steps before it, which STATE keeps
    [1, batch, past, size], with the batch on its second axis, and `seen` [batch, past] says which of these there are,
    as MASK [batch, now] says it of INPUT0."""
    return model(
        [
            helper.make_node("Unsqueeze", ["INPUT0", "first"], ["layer"]),
            helper.make_node("Concat", ["STATE", "layer"], ["STATE_OUT"], axis=2),
            helper.make_node("Concat", [seen, "MASK"], [f"{seen}_OUT"], axis=1),
            helper.make_node("Squeeze", ["STATE_OUT", "first"], ["keys"]),
            helper.make_node("Transpose", ["keys"], ["turned"], perm=[0, 2, 1]),
            helper.make_node("MatMul", ["INPUT0", "turned"], ["scores"]),
            helper.make_node("Sub", ["one", f"{seen}_OUT"], ["unseen"]),
            helper.make_node("Mul", ["unseen", "far"], ["away"]),
            helper.make_node("Unsqueeze", ["away", "second"], ["apart"]),
            helper.make_node("Sub", ["scores", "apart"], ["masked"]),
            helper.make_node("Softmax", ["masked"], ["weights"], axis=-1),
            helper.make_node("MatMul", ["weights", "keys"], ["OUTPUT0"]),
        ],
        [
            tensor("INPUT0", "FP32", ["batch", "now", size]),
            tensor("MASK", "FP32", ["batch", "now"]),
            tensor("STATE", "FP32", [1, "batch", "past", size]),
            tensor(seen, "FP32", ["batch", "past"]),
        ],
        [
            tensor("OUTPUT0", "FP32", ["batch", "now", size]),
            tensor("STATE_OUT", "FP32", [1, "batch", "all", size]),
            tensor(f"{seen}_OUT", "FP32", ["batch", "all"]),
        ],
        [
            numpy_helper.from_array(np.array([0], np.int64), "first"),
            numpy_helper.from_array(np.array([1], np.int64), "second"),
            numpy_helper.from_array(np.array(1, np.float32), "one"),
            numpy_helper.from_array(np.array(1e9, np.float32), "far"),
        ],
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
