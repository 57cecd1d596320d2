"""The model repository that third-party clients are tested with, and ONNX Runtime's own answers to the same inputs.

Lives here: the models, and a reference session for each. Must not: anything of the server or its clients. All of them
run on the CPU with one thread, on the server as in the sessions, so that equal batches give equal bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort  # type: ignore[import-untyped,unused-ignore]

from tests import models
from tests.harness import write_identity

__all__ = ["DATATYPES", "LABELS", "SIMPLE", "answer", "identity_of", "samples", "write_repository"]

Array = np.ndarray[Any, np.dtype[Any]]

DATATYPES = tuple(models.ELEMENT_TYPES)
SIMPLE = {
    "simple": "INT32",
    "simple_fp32": "FP32",
    "simple_fp16": "FP16",
    "simple_fp64": "FP64",
    "simple_int64": "INT64",
}
"""The models that add and subtract, with their datatypes."""

_FAR_OFF_US = 60_000_000
_CPU_ALONE = """
instance_group { kind: KIND_CPU }
parameters { key: "intra_op_thread_count" value { string_value: "1" } }
"""
_SIX_OR_NEVER = f"""
max_batch_size: 8
dynamic_batching {{ preferred_batch_size: 6 max_queue_delay_microseconds: {_FAR_OFF_US} }}
"""
_LABELLED = 'output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] label_filename: "labels.txt" }'
_MORE = {"mlp_six": _SIX_OR_NEVER, "classifier": _LABELLED}

LABELS = ("cat", "dog", "bird")
"""Labels of the first classes of model `classifier`, which has four."""

# A request waits in its queue until its own timeout, the client or the server ends the wait.
_PATIENT = f"""
dynamic_batching {{
  preferred_batch_size: 8
  max_queue_delay_microseconds: {_FAR_OFF_US}
  default_queue_policy {{ allow_timeout_override: true }}
}}
"""


def identity_of(datatype: str) -> str:
    """The name of the model that returns its INPUT0 of this datatype, dims [-1], as OUTPUT0."""
    return f"identity_{datatype.lower()}"


def samples(datatype: str) -> Array:
    """Shape [2, 4]: the values that go wrong first, such as the smallest and largest, NaN, -0.0, an empty element."""
    dtype = {"BYTES": np.dtype(object), "BF16": np.dtype(ml_dtypes.bfloat16)}.get(datatype) or _numpy(datatype)
    values: list[Any]
    if datatype == "BYTES":
        values = [b"", b"a", "grün €".encode(), b"\x00", b"a\x00b\x00", b" ", b"x" * 3000, "日本".encode()]
    elif datatype == "BOOL":
        values = [True, False, False, True, True, True, False, False]
    elif dtype.kind in "iu":
        limits = np.iinfo(dtype)
        values = [limits.min, limits.max, 0, 1, 2, 3, limits.max - 1, limits.min + 1]
    else:
        values = [-0.0, 0.0, 1.5, np.nan, np.inf, -np.inf, 1e-7, -3.140625]
    return np.array(values, dtype).reshape(2, 4)


def write_repository(root: Path) -> Path:
    """All models, in Triton's layout, below `root`."""
    for name in _models():
        models.write(_model(name), root / name / "1" / "model.onnx")
        (root / name / "config.pbtxt").write_text(_CPU_ALONE + _MORE.get(name, ""))
    (root / "classifier" / "labels.txt").write_text("\n".join(LABELS))
    write_identity(root, "patient", extra=_PATIENT)
    return root


def answer(name: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """ONNX Runtime's own outputs for `inputs`, in one run of model `name`. Texts are returned as `bytes`."""
    session = _session(name)
    names = [output.name for output in session.get_outputs()]
    outputs = session.run(names, {name: _texts(array) for name, array in inputs.items()})
    return {name: _bytes(output) for name, output in zip(names, outputs, strict=True)}


def _models() -> dict[str, onnx.ModelProto]:
    return {
        **{name: models.add_sub(datatype) for name, datatype in SIMPLE.items()},
        **{identity_of(datatype): models.identity(datatype) for datatype in DATATYPES},
        "from_bf16": models.cast("BF16", "FP32"),
        "to_bf16": models.cast("FP32", "BF16"),
        "product": models.matrix_product(),
        "three": models.identity("FP32", count=3),
        "unbatched": models.add_sub("FP32", batched=False),
        # Used by one test only, which relies on what the server has counted since it started.
        "counted": models.add_sub("INT64"),
        "scalar": models.scalar(),
        "gather": models.gather(),
        "mlp": models.mlp(),
        "mlp_six": models.mlp(),
        "classifier": models.mlp(),
    }


@cache
def _model(name: str) -> onnx.ModelProto:
    return _models()[name]


@cache
def _session(name: str) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(_model(name).SerializeToString(), options, providers=["CPUExecutionProvider"])


def _numpy(datatype: str) -> np.dtype[Any]:
    return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(models.ELEMENT_TYPES[datatype]))


def _texts(array: Array) -> Array:
    if array.dtype != object:
        return array
    return np.array([text.decode() for text in array.ravel()], object).reshape(array.shape)


def _bytes(array: Array) -> Array:
    if array.dtype != object:
        return array
    return np.array([text.encode() for text in array.ravel()], object).reshape(array.shape)
