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
_IDS = ("INT64", (-1, -1), "two free axes")
_LEADS: Mapping[str, tuple[str, tuple[int, ...], str]] = {
    "input_ids": _IDS,
    "attention_mask": _IDS,
    "position_ids": _IDS,
    # Of two graphs in one: whether it is the one that has pasts. The other one ignores them.
    "use_cache_branch": ("BOOL", (1,), "one element"),
}
"""Inputs that a decoder may have besides its pasts: datatype and dims, the latter also in words."""
_LONGEST_BYTES = 2**24
"""Of a file beside the model."""


@dataclass(frozen=True, slots=True)
class DecoderLayout:
    """`executed`: what is fed, first the inputs of these names in this order, `leads`, then the pasts, each [rows,
    heads, past, size]; and what comes back, `logits` and for each past what it will be in the next step, in the same
    order."""

    executed: ModelSpec
    leads: tuple[str, ...]

    @property
    def pasts(self) -> tuple[TensorSpec, ...]:
        return self.executed.inputs[len(self.leads) :]

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
    leads = tuple(name for name in _LEADS if name in inputs)
    pasts = sorted(filter(_PAST.fullmatch, inputs), key=lambda name: (int(name.split(".")[1]), name))
    if others := inputs.keys() - {*leads, *pasts}:
        return f"it has an input '{min(others)}'"
    for name in ("input_ids", "attention_mask"):
        if name not in inputs:
            return f"it has no input '{name}'"
    presents = {name: name.replace("past_key_values", "present", 1) for name in pasts}
    for name in ("logits", *presents.values()):
        if name not in outputs:
            return f"it has no output '{name}'"
    for name in leads:
        datatype, dims, in_words = _LEADS[name]
        if (inputs[name].datatype, inputs[name].dims) != (datatype, dims):
            return f"input '{name}' isn't of {datatype} with {in_words}"
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
    fed = tuple(inputs[name] for name in (*leads, *pasts))
    left = tuple(outputs[name] for name in ("logits", *presents.values()))
    return DecoderLayout(ModelSpec(fed, left), leads)


def read_settings(model: str, path: Path) -> Mapping[str, Any]:
    """What `config.json` and `generation_config.json` say, the latter first, beside the model file `path`, or if that
    is in a folder for a version or in an export's `onnx`, in the model's folder. Raises LoadError for a file that isn't
    a JSON object."""
    is_inside = path.parent.name.isdecimal() or path.parent.name == "onnx"
    places = [path.parent, *([path.parent.parent] if is_inside else [])]
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
