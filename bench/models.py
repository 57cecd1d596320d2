"""What is measured: models and requests, made on the spot.

Lives here: a model repository and the serialized requests for it, in a folder of the caller's. Must not: serve or
measure. All weights are FP32, everything runs on the CPU with one thread, whatever else the machine has.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from clients.messages import infer_request
from tests import models

__all__ = ["MLP_FLOATS", "Bench", "build"]

MLP_SIZES = (1024, 4096, 4096, 1024)
MLP_FLOATS = MLP_SIZES[0]
_TINY_FLOATS = 16
_MAX_ROWS = 64

_CONFIG = """
backend: "onnxruntime"
max_batch_size: {rows}
input {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ {floats} ] }}
output {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ {floats} ] }}
instance_group {{ kind: KIND_CPU count: 1 }}
parameters {{ key: "intra_op_thread_count" value {{ string_value: "1" }} }}
{batching}
"""
_ON = "dynamic_batching { }"
_OFF = ""  # tensors spelled out and nothing said of batching: requests run one by one


@dataclass(frozen=True, slots=True)
class Bench:
    """The folder's contents: a repository with the models tiny, mlp and mlp_unbatched, a one-row request for each by
    the model's name, and the perceptron's file."""

    repository: Path
    requests: dict[str, Path]
    mlp: Path


def build(folder: Path) -> Bench:
    """Write everything into `folder`; takes a second or two and 100 MB."""
    repository = folder / "models"
    tiny, mlp = folder / "tiny.onnx", folder / "mlp.onnx"
    models.write(models.identity("FP32", ("batch", _TINY_FLOATS)), tiny)
    models.write(models.mlp(MLP_SIZES), mlp)
    _add(repository / "tiny", tiny, _TINY_FLOATS, _ON)
    _add(repository / "mlp", mlp, MLP_FLOATS, _ON)
    _add(repository / "mlp_unbatched", mlp, MLP_FLOATS, _OFF)
    floats = {"tiny": _TINY_FLOATS, "mlp": MLP_FLOATS, "mlp_unbatched": MLP_FLOATS}
    return Bench(repository, {name: _request(folder, name, count) for name, count in floats.items()}, mlp)


def _add(model: Path, file: Path, floats: int, batching: str) -> None:
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.onnx").symlink_to(file)
    (model / "config.pbtxt").write_text(_CONFIG.format(rows=_MAX_ROWS, floats=floats, batching=batching))


def _request(folder: Path, model: str, floats: int) -> Path:
    row = np.random.default_rng(0).standard_normal((1, floats)).astype(np.float32)
    path = folder / f"{model}.request"
    path.write_bytes(infer_request(model, {"INPUT0": row}).SerializeToString())
    return path
