"""Models that together have everything that requests are checked against; each returns its inputs.

Lives here: their specs, and opening them. Must not: judge.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.backends.base import Device, ModelInstance
from paceline.backends.spec import BatchOutput, ModelSpec, SequenceSpec, TensorSpec
from paceline.protos.datatypes import DATATYPES
from paceline.server.codec.adapting_codec import codec_for
from paceline.server.codec.codec import ModelCodec
from paceline.server.memory.reading import ExecuteInputs, reading
from paceline.server.memory.regions import Regions
from tests.memory_models import MemoryModel

__all__ = ["MAX_ROWS", "FuzzedModel", "open_model"]

MAX_ROWS = 4

_LABELS = {"x": (b"cat", b"dog")}


def _paired(*inputs: TensorSpec, batched: bool = True, **more: Any) -> ModelSpec:
    """Outputs like `inputs`, named x, y, z, …, optional where those are."""
    outputs = tuple(
        TensorSpec(chr(ord("x") + number) if number < 3 else f"o{number}", one.datatype, one.dims, one.utf8,
                   one.reshape, one.optional, False, one.shape_tensor, one.any_rank)
        for number, one in enumerate(inputs)
    )  # fmt: skip
    return ModelSpec(inputs, outputs, batched=batched, **more)


SPECS: dict[str, ModelSpec] = {
    "rows": _paired(TensorSpec("a", "FP32", (2, -1)), TensorSpec("b", "BYTES", (-1,))),
    "text": _paired(TensorSpec("a", "BYTES", (-1,), utf8=True), TensorSpec("b", "BOOL", (2,)), batched=False),
    "scalar": _paired(TensorSpec("a", "INT64", ()), batched=False),
    "any": _paired(
        TensorSpec("a", "FP32", (), any_rank=True), TensorSpec("b", "BYTES", (), any_rank=True), batched=False
    ),
    "any_rows": _paired(TensorSpec("a", "FP32", (), any_rank=True), TensorSpec("b", "BYTES", (-1,))),
    "every": _paired(
        *(TensorSpec(name, name, (-1,), optional=True) for name in DATATYPES if name != "FP32"),
        TensorSpec("FP32", "FP32", (-1,)),
        batched=False,
    ),
    "adapting": _paired(
        TensorSpec("a", "FP32", (2, -1, 3), reshape=(-1, 6)),
        TensorSpec("b", "INT32", (-1,), shape_tensor=True),
        TensorSpec("c", "BYTES", (2,), optional=True),
    ),
    "steps": _paired(
        TensorSpec("a", "FP32", (2,)), TensorSpec("b", "INT64", (), shape_tensor=True), sequence=SequenceSpec()
    ),
    "ragged": _paired(
        TensorSpec("a", "FP32", (-1,), ragged=True), batch_outputs=(BatchOutput(("x",), "a"),)
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class FuzzedModel:
    """A model, with what decodes requests for it, executes them, alone and together, and encodes their results."""

    name: str
    spec: ModelSpec
    codec: ModelCodec
    execute: ExecuteInputs


def open_model(name: str, regions: Regions) -> FuzzedModel:
    """The model `name`, or else the first, as the server would open it where clients may register `regions`."""
    name = name if name in SPECS else next(iter(SPECS))
    spec = SPECS[name]
    rows = MAX_ROWS if spec.batched else 0
    instance: ModelInstance = MemoryModel(spec).instance(spec, Device())
    codec = codec_for(name, "1", spec, rows, _LABELS, regions)
    return FuzzedModel(name, spec, codec, reading(instance.execute, spec))
