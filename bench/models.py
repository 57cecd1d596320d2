"""What is measured: models, made on the spot, and requests for them.

Lives here: each model's inputs and outputs, its ONNX file, its place in a repository, the bytes of a request. Must not:
serve or measure. All weights are FP32, everything runs on the CPU with one thread, whatever else the machine has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from paceline.protos.inference_pb2 import ModelInferRequest
from tests import models

__all__ = ["INPUT", "MAX_ROWS", "MODELS", "OUTPUT", "Model", "add", "in_memory", "request", "write"]

INPUT, OUTPUT = "INPUT0", "OUTPUT0"
MAX_ROWS = 64
_FIXED_ROWS = 16
_MLP_SIZES = (1024, 4096, 4096, 1024)
_IMAGE, _CLASSES = 3 * 224 * 224, 1_000

_CONFIG = """
backend: "onnxruntime"
max_batch_size: {rows}
input {{ name: "INPUT0" data_type: TYPE_FP32 dims: {dims} }}
output {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: {output_dims} }}
instance_group {{ kind: KIND_CPU count: 1 }}
parameters {{ key: "intra_op_thread_count" value {{ string_value: "1" }} }}
{batching}
"""


@dataclass(frozen=True, slots=True)
class Model:
    """One FP32 tensor in, one FP32 tensor out, a batch axis in front. -1 is a free dimension; `shape` is used if a
    scenario gives none. Without `batched`, the file is the same but no batching is configured, so that rows run one by
    one. `rows`: of its largest batch."""

    dims: tuple[int, ...]
    output_dims: tuple[int, ...]
    shape: tuple[int, ...]
    make: Callable[[], onnx.ModelProto]
    batched: bool = True
    rows: int = MAX_ROWS

    def output_bytes(self, input_bytes: int) -> int:
        """Bytes of one row's output, for a row of `input_bytes`."""
        return input_bytes if -1 in self.output_dims else 4 * int(np.prod(self.output_dims))


def _first_of_image() -> onnx.ModelProto:
    """600 KB in, as for an image, 4 KB out, as from a classifier, and next to no work between: it returns the first
    values."""
    starts, ends, axes = (
        numpy_helper.from_array(np.array([value], np.int64), name)
        for name, value in (("starts", 0), ("ends", _CLASSES), ("axes", 1))
    )
    return models.model(
        [helper.make_node("Slice", [INPUT, "starts", "ends", "axes"], [OUTPUT])],
        [models.tensor(INPUT, "FP32", ["batch", _IMAGE])],
        [models.tensor(OUTPUT, "FP32", ["batch", _CLASSES])],
        [starts, ends, axes],
    )


def _mlp() -> onnx.ModelProto:
    return models.mlp(_MLP_SIZES)


def _fixed_mlp() -> onnx.ModelProto:
    """The same as an export for batches of one size."""
    made = _mlp()
    for tensor in (*made.graph.input, *made.graph.output):
        tensor.type.tensor_type.shape.dim[0].dim_value = _FIXED_ROWS
    return made


MODELS: Mapping[str, Model] = {
    "tiny": Model((16,), (16,), (16,), lambda: models.identity("FP32", ("batch", 16))),
    "free": Model((-1,), (-1,), (16,), lambda: models.identity("FP32", ("batch", "length"))),
    "image": Model((_IMAGE,), (_CLASSES,), (_IMAGE,), _first_of_image),
    "mlp": Model((1024,), (1024,), (1024,), _mlp),
    "mlp_unbatched": Model((1024,), (1024,), (1024,), _mlp, batched=False),
    "mlp_to_16": Model((1024,), (1024,), (1024,), _mlp, rows=_FIXED_ROWS),
    "mlp_fixed_16": Model((1024,), (1024,), (1024,), _fixed_mlp, rows=_FIXED_ROWS),
}


def write(name: str, folder: Path) -> Path:
    """The model's ONNX file in `folder`; takes up to a second and 100 MB."""
    return models.write(MODELS[name].make(), folder / f"{name}.onnx")


def add(name: str, file: Path, repository: Path) -> None:
    """Put the model into a repository; `file` stays where it is."""
    model, folder = MODELS[name], repository / name
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.onnx").symlink_to(file)
    (folder / "config.pbtxt").write_text(
        _CONFIG.format(
            rows=model.rows,
            dims=list(model.dims),
            output_dims=list(model.output_dims),
            batching="dynamic_batching { }" if model.batched else "",
        )
    )


def request(name: str, shape: Sequence[int]) -> bytes:
    """One row of random values for the model, ready for the wire."""
    message = ModelInferRequest(model_name=name)
    message.inputs.add(name=INPUT, datatype="FP32", shape=(1, *shape))
    message.raw_input_contents.append(row(shape))
    return message.SerializeToString()


def in_memory(name: str, shape: Sequence[int], region: str, output_at: int) -> bytes:
    """The same with its tensors in the shared memory `region`: the row at its beginning, the output at `output_at`."""
    model, input_bytes = MODELS[name], 4 * int(np.prod(shape))
    message = ModelInferRequest(model_name=name)
    given = message.inputs.add(name=INPUT, datatype="FP32", shape=(1, *shape))
    asked = message.outputs.add(name=OUTPUT)
    sizes = (input_bytes, model.output_bytes(input_bytes))
    for place, byte_size, offset in zip((given, asked), sizes, (0, output_at), strict=True):
        tensor: Any = place
        tensor.parameters["shared_memory_region"].string_param = region
        tensor.parameters["shared_memory_byte_size"].int64_param = byte_size
        tensor.parameters["shared_memory_offset"].int64_param = offset
    return message.SerializeToString()


def row(shape: Sequence[int]) -> bytes:
    """The values that `request` sends."""
    return np.random.default_rng(0).standard_normal(tuple(shape)).astype(np.float32).tobytes()
