"""The models that both servers have: `model.py` beside this file, under many configurations, and the puppets of
`tests.triton_puppet`.

Lives here: the configurations, as data. Must not: servers, requests. To add a model, add a line to MODELS.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.triton_puppet import SOURCE

__all__ = ["DATATYPES", "MODELS", "model_config", "write_model", "write_repository"]

DATATYPES: Mapping[str, str] = {
    "BOOL": "?", "UINT8": "u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8", "INT8": "i1", "INT16": "<i2",
    "INT32": "<i4", "INT64": "<i8", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8", "BYTES": "O",
}  # fmt: skip
"""By numpy's names. numpy has no BF16, and so Triton's Python backend has none either."""


def model_config(head: str = "", *tensors: str, more: str = "", **parameters: object) -> str:
    """A `config.pbtxt`. Each of `tensors` is `NAME DATATYPE DIMS` of an input and an output, where `NAME` is the end of
    their names. Fields of the input may follow and, after a `|`, fields of the output."""
    sides: dict[str, list[str]] = {"input": [], "output": []}
    outputs = []
    for tensor in tensors or ("0 FP32 [4]",):
        name, datatype, rest = tensor.split(" ", 2)
        dims, _, fields = rest.partition("]")
        of_input, _, of_output = fields.partition("|")
        kind = f"data_type: TYPE_{'STRING' if datatype == 'BYTES' else datatype} dims: {dims} ]"
        sides["input"].append(f'{{ name: "INPUT{name}" {kind} {of_input} }}')
        sides["output"].append(f'{{ name: "OUTPUT{name}" {kind} {of_output} }}')
        outputs.append(f"OUTPUT{name}:{DATATYPES[datatype]}")
    lines = [
        'backend: "python"',
        head,
        *(f"{side} {tensor}" for side, found in sides.items() for tensor in found),
        more,
    ]
    lines += [f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in parameters.items()]
    return "\n".join((*lines, f'parameters {{ key: "outputs" value {{ string_value: "{" ".join(outputs)}" }} }}'))


_BATCHED = "max_batch_size: 8 dynamic_batching { }"
_QUEUES = """
max_batch_size: 2
dynamic_batching {
  priority_levels: 3 default_priority_level: 2
  default_queue_policy { max_queue_size: 2 allow_timeout_override: true default_timeout_microseconds: 5000000 }
}
"""
_SQUARE = "0 FP32 [2, 2] reshape { shape: [4] } | reshape { shape: [4] }"
_POINT = "1 FP32 [1] reshape { shape: [] } | reshape { shape: [] }"
_THREE = "version_policy { specific { versions: [1, 3] } }"
_TWO = "version_policy { latest { num_versions: 2 } }"

MODELS: Mapping[str, str] = {
    "pair": model_config(_BATCHED, "0 INT32 [4]", "1 INT32 [4]", does="pair"),
    "whole": model_config("", "0 INT32 [4]", "1 INT32 [4]", does="pair"),
    "free": model_config(_BATCHED, "0 FP32 [-1]"),
    "grid": model_config(_BATCHED, "0 INT64 [-1, 2]"),
    "text": model_config(_BATCHED, "0 BYTES [-1]"),
    "types": model_config(_BATCHED, *(f"_{name} {name} [-1] optional: true" for name in DATATYPES)),
    "optional": model_config(_BATCHED, "0 FP32 [-1]", "1 FP32 [-1] optional: true"),
    "reshaped": model_config(_BATCHED, _SQUARE, _POINT),
    "labelled": model_config(_BATCHED, '0 FP32 [4] | label_filename: "labels.txt"'),
    "flat": model_config("", "0 FP32 [4]"),
    "fails": model_config(_BATCHED, fails=1),
    "slow": model_config(_QUEUES, "0 FP32 [-1]", delay_ms=1000),
    "serial": model_config("max_batch_size: 4", "0 FP32 [-1]"),
    "versions": model_config(f"{_THREE} {_BATCHED}", does="version"),
    "latest": model_config(f"{_TWO} {_BATCHED}", does="version"),
    "broken": model_config(_BATCHED, does="not load"),
}
_VERSIONS: Mapping[str, Sequence[int]] = {"versions": (1, 2, 3), "latest": (1, 2, 3)}
LABELS = ("cat", "dog")
"""Of the first two of four classes."""


def write_repository(root: Path, models: Mapping[str, str] = MODELS) -> Path:
    """Write `models` below `root`; returns `root`, for chaining."""
    for name, config in models.items():
        write_model(root / name, config, _VERSIONS.get(name, (1,)))
    return root


def write_model(folder: Path, config: str, versions: Sequence[int] = (1,)) -> None:
    """Write one model's folder. One that isn't told its `outputs` runs what its requests say."""
    for version in versions:
        (folder / str(version)).mkdir(parents=True)
        if 'backend: "python"' not in config:
            continue  # an ensemble
        if 'key: "outputs"' in config:
            shutil.copy(Path(__file__).with_name("model.py"), folder / str(version))
        else:
            (folder / str(version) / "model.py").write_text(SOURCE)
    (folder / "config.pbtxt").write_text(config)
    (folder / "labels.txt").write_text("\n".join(LABELS))
