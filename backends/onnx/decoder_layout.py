"""Which ONNX models are decoders that can be stepped, as Hugging Face's exporters and onnxruntime-genai write them.

Lives here: recognizing them by names, types and shapes, and reading what the files beside them say of limits and end
tokens. Must not: execute anything. Source of names: optimum's exporters, onnxruntime-genai's model builder.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.backends.errors import LoadError
from paceline.backends.paths import open_inside
from paceline.backends.spec import ModelSpec, TensorSpec

_PAST = re.compile(r"past_key_values\.(\d+)\.(decoder\.)?(key|value)")
_CROSS = re.compile(r"past_key_values\.(\d+)\.encoder\.(key|value)")
_FLOATS = {"FP32": 4, "FP16": 2}
"""Their bytes."""
_IDS = ("INT64", ((-1, -1),), "two free axes")
_LEADS: Mapping[str, tuple[str, Sequence[tuple[int, ...]], str]] = {
    "input_ids": _IDS,
    "attention_mask": _IDS,
    "position_ids": _IDS,
    # Of two graphs in one: whether it is the one that has pasts. The other one ignores them.
    "use_cache_branch": ("BOOL", ((1,),), "one element"),
    "encoder_attention_mask": _IDS,
}
"""Inputs that a decoder may have besides its pasts: datatype and possible dims, the latter also in words."""
_GROUPED: Mapping[str, tuple[str, Sequence[tuple[int, ...]], str]] = {
    **{name: _LEADS[name] for name in ("input_ids", "attention_mask", "position_ids")},
    "seqlens_k": ("INT32", ((-1,), (-1, 1)), "an element for each row"),
    "total_sequence_length": ("INT32", ((), (1,)), "one element"),
}
"""The same for GroupQueryAttention. The last two may be there in place of the mask."""
_GENAI = "genai_config.json"
_SOURCE = "encoder_hidden_states"
_LONGEST_BYTES = 2**24
"""Of a file beside the model."""


@dataclass(frozen=True, slots=True)
class DecoderLayout:
    """`executed`: what is fed, first the inputs of these names in this order, `leads`, then the pasts, each [rows,
    heads, past, size]; and what comes back, `logits` and for each past what it will be in the next step, in the same
    order. If it has an encoder, the last of `leads` is `encoder_hidden_states`, what that has left, [rows, length,
    size]. The last `crosses` inputs are keys and values of that, [rows, heads, length, size], which are made by the
    execution that has no past, as the last outputs, and stay.

    `in_place`: its attention may write to pasts that are longer than what it has read, and knows lengths of rows.
    `least_past`: pasts are never shorter."""

    executed: ModelSpec
    leads: tuple[str, ...]
    in_place: bool = False
    least_past: int = 0
    crosses: int = 0

    @property
    def pasts(self) -> tuple[TensorSpec, ...]:
        inputs = self.executed.inputs
        return inputs[len(self.leads) : len(inputs) - self.crosses]

    @property
    def of_source(self) -> tuple[TensorSpec, ...]:
        """What a row has that doesn't grow: `encoder_hidden_states`, with its keys and values."""
        inputs = self.executed.inputs
        return inputs[len(self.leads) - 1 : len(self.leads)] + inputs[len(inputs) - self.crosses :]

    @property
    def has_encoder(self) -> bool:
        return self.leads[-1] == _SOURCE

    @property
    def token_bytes(self) -> int:
        """What the keys and values of one token take."""
        return sum(one.dims[1] * one.dims[3] * _FLOATS[one.datatype] for one in self.pasts)

    @property
    def source_bytes(self) -> int:
        """What a row has of each place of what its encoder has left."""
        if not self.has_encoder:
            return 0
        return sum(math.prod(max(1, dim) for dim in one.dims) * _FLOATS[one.datatype] for one in self.of_source)


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
    leads = tuple(name for name in (*known, *([] if grouped else [_SOURCE])) if name in inputs)
    pasts, crosses = (
        sorted(filter(pattern.fullmatch, inputs), key=lambda name: (int(name.split(".")[1]), name))
        for pattern in (_PAST, _CROSS)
    )
    if others := inputs.keys() - {*leads, *pasts, *crosses}:
        return f"it has an input '{min(others)}'"
    # Without a mask, rows of equal length share steps.
    encoded = bool(crosses) or any(name in inputs for name in (_SOURCE, "encoder_attention_mask"))
    has_lengths = grouped and {"seqlens_k", "total_sequence_length"} <= inputs.keys()
    needed = [_SOURCE] if encoded else [] if has_lengths else ["attention_mask"]
    for name in ("input_ids", *needed, *(["use_cache_branch"] if crosses else [])):
        if name not in inputs:
            return f"it has no input '{name}'"
    if not pasts:
        return "it has keys and values of its encoder alone"
    presents = {name: name.replace("past_key_values", "present", 1) for name in (*pasts, *crosses)}
    for name in ("logits", *presents.values()):
        if name not in outputs:
            return f"it has no output '{name}'"
    for name in leads:
        if name == _SOURCE:
            continue
        datatype, dims, in_words = known[name]
        if inputs[name].datatype != datatype or inputs[name].dims not in dims:
            return f"input '{name}' isn't of {datatype} with {in_words}"
    for name in pasts if grouped and type(said.get("head_size")) is int else ():
        if len(inputs[name].dims) == 4 and inputs[name].dims[3] == -1:
            # The builder leaves it free, and says it in its configuration.
            inputs[name] = replace(inputs[name], dims=(*inputs[name].dims[:3], said["head_size"]))
    if why_not := _why_unfit(inputs, outputs, presents):
        return why_not
    fed = tuple(inputs[name] for name in (*leads, *pasts, *crosses))
    left = tuple(outputs[name] for name in ("logits", *presents.values()))
    return DecoderLayout(ModelSpec(fed, left), leads, grouped, crosses=len(crosses))


def _why_unfit(inputs: Mapping[str, TensorSpec], outputs: Mapping[str, TensorSpec], presents: Mapping[str, str]) -> str:
    """What is wrong with a decoder's floats, of which `presents` are the names of pasts and of what these become."""
    datatype = inputs[next(iter(presents))].datatype
    for name, present in presents.items():
        one = inputs[name]
        sizes = one.dims[1::2]
        if one.datatype not in _FLOATS or {datatype, outputs[present].datatype} != {one.datatype}:
            return f"input '{name}' isn't of FP32 or FP16 like all others and output '{present}'"
        if len(one.dims) != 4 or one.dims[::2] != (-1, -1) or min(sizes) < 1:
            return f"input '{name}' isn't [free, heads, free, size] with fixed heads and size"
    source = inputs.get(_SOURCE)
    if source is not None and (source.datatype not in _FLOATS or source.dims[:-1] != (-1, -1) or source.dims[-1] < 1):
        return f"input '{_SOURCE}' isn't of FP32 or FP16, [free, free, size] with a fixed size"
    return "" if outputs["logits"].datatype in _FLOATS else "output 'logits' isn't of FP32 or FP16"


def read_settings(model: str, path: Path) -> Mapping[str, Any]:
    """What `genai_config.json`, `config.json` and `generation_config.json` say, the last first, beside the model file
    `path`, or if that is in a folder for a version or in an export's `onnx`, in the model's folder. Raises LoadError
    for a file that isn't a JSON object."""
    is_inside = path.parent.name.isdecimal() or path.parent.name == "onnx"
    places = [path.parent, *([path.parent.parent] if is_inside else [])]
    settings: dict[str, Any] = {}
    for name in (_GENAI, "config.json", "generation_config.json"):
        for place in places:
            try:
                if (file := open_inside(place, name)) is None:
                    continue
                with file:
                    content: object = json.loads(file.read(_LONGEST_BYTES))
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                raise LoadError(f"model '{model}': {place / name}: {error}") from error
            if not isinstance(content, dict):
                raise LoadError(f"model '{model}': {place / name}: expected a JSON object")
            said = _flat(content) if name == _GENAI else content
            settings |= _without_nulls(said)
            break
    return settings


def _without_nulls(said: Mapping[str, Any]) -> dict[str, Any]:
    """Exporters write null for what they don't know, also of each of two models that were put together."""
    given = {key: value for key, value in said.items() if value is not None}
    return {key: _without_nulls(value) if isinstance(value, dict) else value for key, value in given.items()}


def _flat(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """What `genai_config.json` says of a decoder, by the names of the other files where these have one for it."""
    model = content.get("model")
    model = model if isinstance(model, dict) else {}
    decoder = model.get("decoder")
    said = {**model, **(decoder if isinstance(decoder, dict) else {})}
    window = said.get("sliding_window")
    return {**said, "sliding_window": window.get("window_size") if isinstance(window, dict) else None}
