"""Which ONNX models are decoders that can be stepped, as Hugging Face's exporters write them.

Lives here: recognizing them by names, types and shapes, and reading what the files beside them say of limits and end
tokens. Must not: execute anything. Source of names: optimum's exporters, onnxruntime-genai's model builder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.backends.errors import LoadError
from paceline.backends.paths import open_inside
from paceline.backends.spec import ModelSpec, TensorSpec

__all__ = ["DecoderLayout", "find_layout", "read_settings"]

_PAST = re.compile(r"past_key_values\.(\d+)\.(key|value)")
_LONGEST_BYTES = 2**24
"""Of a file beside the model."""


@dataclass(frozen=True, slots=True)
class DecoderLayout:
    """`executed`: what is fed, `input_ids`, `attention_mask`, maybe `position_ids`, and the pasts, each [rows, heads,
    past, size]; and what comes back, `logits` and for each past what it will be in the next step, in the same order."""

    executed: ModelSpec
    has_positions: bool

    @property
    def pasts(self) -> tuple[TensorSpec, ...]:
        return self.executed.inputs[3 if self.has_positions else 2 :]

    @property
    def token_bytes(self) -> int:
        """What the keys and values of one token take."""
        return sum(one.dims[1] * one.dims[3] * (2 if one.datatype == "FP16" else 4) for one in self.pasts)


def find_layout(spec: ModelSpec, operators: frozenset[str]) -> DecoderLayout | str | None:
    """How a model of `spec` is stepped. A text: it is a decoder, but this is why it can't be; None: it is none."""
    inputs = {one.name: one for one in spec.inputs if not one.optional}
    outputs = {one.name: one for one in spec.outputs}
    if not any(name.startswith("past_key_values.") for name in inputs):
        return None
    if "GroupQueryAttention" in operators:
        return "its attention is GroupQueryAttention"
    lead = [name for name in ("input_ids", "attention_mask", "position_ids") if name in inputs]
    pasts = sorted(filter(_PAST.fullmatch, inputs), key=lambda name: (int(name.split(".")[1]), name))
    if others := inputs.keys() - {*lead, *pasts}:
        return f"it has an input '{min(others)}'"
    for name in ("input_ids", "attention_mask"):
        if name not in inputs:
            return f"it has no input '{name}'"
    wanted = [*lead, *pasts]
    presents = {name: name.replace("past_key_values", "present", 1) for name in pasts}
    for name in ("logits", *presents.values()):
        if name not in outputs:
            return f"it has no output '{name}'"
    for name in lead:
        if inputs[name].datatype != "INT64" or inputs[name].dims != (-1, -1):
            return f"input '{name}' isn't of INT64 with two free axes"
    datatype = inputs[pasts[0]].datatype
    for name in pasts:
        one, present = inputs[name], outputs[presents[name]]
        sizes = one.dims[1::2]
        if one.datatype not in ("FP32", "FP16") or {datatype, present.datatype} != {one.datatype}:
            return f"input '{name}' isn't of FP32 or FP16 like all others and output '{presents[name]}'"
        if len(one.dims) != 4 or one.dims[::2] != (-1, -1) or min(sizes) < 1:
            return f"input '{name}' isn't [free, heads, free, size] with fixed heads and size"
    if outputs["logits"].datatype not in ("FP32", "FP16"):
        return "output 'logits' isn't of FP32 or FP16"
    fed = tuple(inputs[name] for name in wanted)
    left = tuple(outputs[name] for name in ("logits", *presents.values()))
    return DecoderLayout(ModelSpec(fed, left), "position_ids" in inputs)


def read_settings(model: str, path: Path) -> Mapping[str, Any]:
    """What `config.json` and `generation_config.json` say, the latter first, beside the model file `path`, or if that
    is in a folder for a version, in the model's folder. Raises LoadError for a file that isn't a JSON object."""
    places = [path.parent, *([path.parent.parent] if path.parent.name.isdecimal() else [])]
    settings: dict[str, Any] = {}
    for name in ("config.json", "generation_config.json"):
        for place in places:
            content: object = None
            with suppress(FileNotFoundError):
                try:
                    if (file := open_inside(place, name)) is None:
                        continue
                    with file:
                        content = json.loads(file.read(_LONGEST_BYTES))
                except FileNotFoundError:
                    raise
                except (OSError, ValueError) as error:
                    raise LoadError(f"model '{model}': {place / name}: {error}") from error
                if not isinstance(content, dict):
                    raise LoadError(f"model '{model}': {place / name}: expected a JSON object")
                settings |= {key: value for key, value in content.items() if value is not None}
                break
    return settings
