"""Which ONNX models are decoders that can be stepped, as Hugging Face's exporters and onnxruntime-genai write them.

Lives here: recognizing them by names, types and shapes, and reading what the files beside them say of limits and end
tokens. Must not: execute anything. Source of names: optimum's exporters, onnxruntime-genai's model builder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.backends.errors import LoadError
from paceline.backends.paths import open_inside
from paceline.backends.spec import ModelSpec, TensorSpec

__all__ = ["DecoderLayout", "find_layout", "is_decoder", "read_settings"]

_PAST = re.compile(r"past_key_values\.(\d+)\.(key|value)")
_IDS = ("INT64", ((-1, -1),), "two free axes")
_LEADS: Mapping[str, tuple[str, Sequence[tuple[int, ...]], str]] = {
    "input_ids": _IDS,
    "attention_mask": _IDS,
    "position_ids": _IDS,
    # Of two graphs in one: whether it is the one that has pasts. The other one ignores them.
    "use_cache_branch": ("BOOL", ((1,),), "one element"),
}
"""Inputs that a decoder may have besides its pasts: datatype and possible dims, the latter also in words."""
_GROUPED: Mapping[str, tuple[str, Sequence[tuple[int, ...]], str]] = {
    **{name: _LEADS[name] for name in ("input_ids", "attention_mask", "position_ids")},
    "seqlens_k": ("INT32", ((-1,), (-1, 1)), "an element for each row"),
    "total_sequence_length": ("INT32", ((), (1,)), "one element"),
}
"""The same for GroupQueryAttention. The last two may be there in place of the mask."""
_GENAI = "genai_config.json"
_LONGEST_BYTES = 2**24
"""Of a file beside the model."""


@dataclass(frozen=True, slots=True)
class DecoderLayout:
    """`executed`: what is fed, first the inputs of these names in this order, `leads`, then the pasts, each [rows,
    heads, past, size]; and what comes back, `logits` and for each past what it will be in the next step, in the same
    order.

    `in_place`: its attention may write to pasts that are longer than what it has read, and knows lengths of rows.
    `least_past`: pasts are never shorter."""

    executed: ModelSpec
    leads: tuple[str, ...]
    in_place: bool = False
    least_past: int = 0

    @property
    def pasts(self) -> tuple[TensorSpec, ...]:
        return self.executed.inputs[len(self.leads) :]

    @property
    def token_bytes(self) -> int:
        """What the keys and values of one token take."""
        return sum(one.dims[1] * one.dims[3] * (2 if one.datatype == "FP16" else 4) for one in self.pasts)


def is_decoder(spec: ModelSpec) -> bool:
    return any(one.name.startswith("past_key_values.") for one in spec.inputs if not one.optional)


def find_layout(spec: ModelSpec, operators: frozenset[str], said: Mapping[str, Any]) -> DecoderLayout | str:
    """How a decoder of `spec` is stepped, of which `read_settings` has `said` more. A text: why it can't be."""
    inputs = {one.name: one for one in spec.inputs if not one.optional}
    outputs = {one.name: one for one in spec.outputs}
    grouped = "GroupQueryAttention" in operators
    if grouped and "If" in operators:
        return "beside GroupQueryAttention it has an If, as where rotations depend on the longest row"
    known = _GROUPED if grouped else _LEADS
    leads = tuple(name for name in known if name in inputs)
    pasts = sorted(filter(_PAST.fullmatch, inputs), key=lambda name: (int(name.split(".")[1]), name))
    if others := inputs.keys() - {*leads, *pasts}:
        return f"it has an input '{min(others)}'"
    has_lengths = grouped and {"seqlens_k", "total_sequence_length"} <= inputs.keys()
    for name in ("input_ids", "attention_mask"):
        if name not in inputs and not (has_lengths and name == "attention_mask"):
            return f"it has no input '{name}'"
    presents = {name: name.replace("past_key_values", "present", 1) for name in pasts}
    for name in ("logits", *presents.values()):
        if name not in outputs:
            return f"it has no output '{name}'"
    for name in leads:
        datatype, dims, in_words = known[name]
        if inputs[name].datatype != datatype or inputs[name].dims not in dims:
            return f"input '{name}' isn't of {datatype} with {in_words}"
    datatype = inputs[pasts[0]].datatype
    for name in pasts:
        one, present = inputs[name], outputs[presents[name]]
        if grouped and len(one.dims) == 4 and one.dims[3] == -1 and type(said.get("head_size")) is int:
            # The builder leaves it free, and says it in its configuration.
            inputs[name] = one = replace(one, dims=(*one.dims[:3], said["head_size"]))
        sizes = one.dims[1::2]
        if one.datatype not in ("FP32", "FP16") or {datatype, present.datatype} != {one.datatype}:
            return f"input '{name}' isn't of FP32 or FP16 like all others and output '{presents[name]}'"
        if len(one.dims) != 4 or one.dims[::2] != (-1, -1) or min(sizes) < 1:
            return f"input '{name}' isn't [free, heads, free, size] with fixed heads and size"
    if outputs["logits"].datatype not in ("FP32", "FP16"):
        return "output 'logits' isn't of FP32 or FP16"
    fed = tuple(inputs[name] for name in (*leads, *pasts))
    left = tuple(outputs[name] for name in ("logits", *presents.values()))
    return DecoderLayout(ModelSpec(fed, left), leads, grouped)


def read_settings(model: str, path: Path) -> Mapping[str, Any]:
    """What `genai_config.json`, `config.json` and `generation_config.json` say, the last first, beside the model file
    `path`, or if that is in a folder for a version or in an export's `onnx`, in the model's folder. Raises LoadError
    for a file that isn't a JSON object."""
    is_inside = path.parent.name.isdecimal() or path.parent.name == "onnx"
    places = [path.parent, *([path.parent.parent] if is_inside else [])]
    settings: dict[str, Any] = {}
    for name in (_GENAI, "config.json", "generation_config.json"):
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
                said = _flat(content) if name == _GENAI else content
                settings |= {key: value for key, value in said.items() if value is not None}
                break
    return settings


def _flat(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """What `genai_config.json` says of a decoder, by the names of the other files where these have one for it."""
    model = content.get("model")
    model = model if isinstance(model, dict) else {}
    decoder = model.get("decoder")
    said = {**model, **(decoder if isinstance(decoder, dict) else {})}
    window = said.get("sliding_window")
    return {**said, "sliding_window": window.get("window_size") if isinstance(window, dict) else None}
