"""Small pairs of an encoder and a decoder, built on the fly, as Hugging Face's exporters write them: names, shapes,
datatypes and axes are theirs, the weights random.

Lives here: the graphs of three families, and folders of them. Must not: anything of the server, or run a model. The
decoder is two graphs in one: the one for prompts makes keys and values of what the encoder has left, the other one is
given them, and has nothing in their place among its outputs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import DTypeLike
from onnx import helper, numpy_helper

from tests import models
from tests.decoder_models import Decoder, Graph
from tests.merged_decoders import merge

__all__ = ["SPEECH", "TRANSLATION", "VISION", "Pair", "write"]

_LOGITS_DEVIATION = 4.0
_PAST, _NOW = "past_decoder_sequence_length", "decoder_sequence_length"


@dataclass(frozen=True, slots=True)
class Pair:
    """What a pair is like. `family`: "t5" (texts with a mask, positions relative to each other), "whisper" (sounds of
    one size, learned positions) or "trocr" (pictures; axes that are free in the file although there is one size).
    `datatype`: FP32 or FP16, of weights and caches, of sounds and pictures. `takes`: how many tokens the decoder's
    graph with pasts takes, "many" or "one". `says`: more of its `generation_config.json`."""

    family: str = "t5"
    layers: int = 2
    heads: int = 4
    head_size: int = 8
    inner: int = 64
    vocabulary: int = 128
    positions: int = 96
    datatype: str = "FP32"
    start_token: int = 0
    end_tokens: tuple[int, ...] = (1,)
    takes: str = "many"
    says: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    @property
    def width(self) -> int:
        return self.heads * self.head_size

    @property
    def source_shape(self) -> tuple[int, ...]:
        """Of what a request has, if there is one."""
        return {"whisper": (6, 20), "trocr": (3, 12, 8)}.get(self.family, ())

    @property
    def source_name(self) -> str:
        return {"t5": "input_ids", "whisper": "input_features", "trocr": "pixel_values"}[self.family]


TRANSLATION = Pair()
SPEECH = Pair(
    "whisper",
    start_token=3,
    end_tokens=(2,),
    says={"forced_decoder_ids": [[1, 7], [2, 9]], "suppress_tokens": [5, 6, 11], "begin_suppress_tokens": [2, 20]},
)
VISION = Pair("trocr", end_tokens=(2,), says={"decoder_start_token_id": 4})


def write(pair: Pair, folder: Path) -> Path:
    """Write the two models and `config.json` and `generation_config.json`, making the folder; the folder again."""
    models.write(_encoder(pair), folder / "encoder_model.onnx")
    with_pasts, without = (_decoder(pair, has_past=has_past) for has_past in (True, False))
    merged = merge(with_pasts, without, takes_many=pair.takes == "many")
    models.write(merged, folder / "decoder_model_merged.onnx")
    (folder / "config.json").write_text(json.dumps(_config(pair), indent=2))
    ends = list(pair.end_tokens)
    said = {"eos_token_id": ends[0] if len(ends) == 1 else ends, "max_length": 40, **pair.says}
    if pair.family != "trocr":
        said["decoder_start_token_id"] = pair.start_token
    (folder / "generation_config.json").write_text(json.dumps(said, indent=2))
    return folder


def _config(pair: Pair) -> dict[str, Any]:
    if pair.family == "t5":
        return {
            "architectures": ["T5ForConditionalGeneration"],
            "d_kv": pair.head_size,
            "d_model": pair.width,
            "decoder_start_token_id": pair.start_token,
            "is_encoder_decoder": True,
            "model_type": "t5",
            "n_positions": 16,  # which isn't a limit, as positions are relative
            "num_heads": pair.heads,
            "vocab_size": pair.vocabulary,
        }
    if pair.family == "whisper":
        mels, frames = pair.source_shape
        return {
            "architectures": ["WhisperForConditionalGeneration"],
            "d_model": pair.width,
            "is_encoder_decoder": True,
            "max_source_positions": frames // 2,
            "max_target_positions": pair.positions,
            "model_type": "whisper",
            "num_mel_bins": mels,
            "vocab_size": pair.vocabulary,
        }
    channels, *size = pair.source_shape
    return {
        "architectures": ["VisionEncoderDecoderModel"],
        "decoder": {"max_position_embeddings": pair.positions, "model_type": "trocr", "vocab_size": pair.vocabulary},
        "encoder": {"image_size": size, "model_type": "vit", "num_channels": channels},
        "is_encoder_decoder": True,
        "model_type": "vision-encoder-decoder",
    }


class _Layers(Graph):
    """Layers of a transformer. `name`: in front of those of constants, as two graphs come into one."""

    def __init__(self, pair: Pair, name: str, seed: int) -> None:
        sizes = {"heads": pair.heads, "kv_heads": pair.heads, "head_size": pair.head_size, "inner": pair.inner}
        super().__init__(
            Decoder(layers=pair.layers, vocabulary=pair.vocabulary, datatype=pair.datatype, seed=seed, **sizes)
        )
        self.name = name

    def constant(self, value: Any, dtype: DTypeLike = np.int64) -> str:
        name = f"{self.name}_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.array(value, dtype), name))
        return name

    def norm(self, x: str) -> str:
        ones, zeros = (self.constant(np.full(self.decoder.width, value), self.type) for value in (1, 0))
        return self.node("LayerNormalization", x, ones, zeros, epsilon=1e-5)

    def embedded(self, ids: str) -> str:
        return self.node("Gather", self.weights(self.decoder.vocabulary, self.decoder.width), ids)

    def split(self, x: str) -> str:
        """A product with weights, apart by heads."""
        return self.heads(self.project(x, self.decoder.width), self.decoder.heads)

    def seen(self, query: str, key: str, value: str, bias: str = "") -> str:
        """What queries see [batch, now, width]."""
        scores = self.node("MatMul", query, self.node("Transpose", key, perm=[0, 1, 3, 2]))
        scores = self.node("Mul", scores, self.constant(self.decoder.head_size**-0.5, self.type))
        shares = self.node("Softmax", self.node("Add", scores, bias) if bias else scores, axis=-1)
        joined = self.node("Transpose", self.node("MatMul", shares, value), perm=[0, 2, 1, 3])
        joined = self.node("Reshape", joined, self.constant([0, 0, self.decoder.width]))
        return self.project(joined, self.decoder.width)

    def fed_forward(self, x: str) -> str:
        inner = self.node("Relu", self.project(self.norm(x), self.decoder.inner))
        return self.node("Add", x, self.project(inner, self.decoder.width, rows=self.decoder.inner))

    def masked(self, mask: str) -> str:
        """What is added to scores [batch, heads, now, all]."""
        given = self.node("Cast", mask, to=onnx.TensorProto.BOOL)
        nothing, below = (self.constant(value, self.type) for value in (0, np.finfo(self.type).min / 2))
        return self.node("Where", self.node("Unsqueeze", given, self.constant([1, 2])), nothing, below)

    def by_distance(self, first: str, second: str) -> str:
        """The same, by how far places are from each other."""
        apart = self.node("Sub", self.node("Unsqueeze", first, self.constant([1])), second)
        slopes = self.constant(-(2.0 ** -np.arange(1, self.decoder.heads + 1)).reshape(1, -1, 1, 1), self.type)
        return self.node("Mul", self.node("Abs", self.cast(apart, self.type)), slopes)

    def places(self, begin: str, end: str) -> str:
        return self.node("Range", begin, end, self.constant(1))

    def learned(self, x: str, places: str, count: int) -> str:
        return self.node("Add", x, self.node("Gather", self.weights(count, self.decoder.width), places))


def _encoder(pair: Pair) -> onnx.ModelProto:
    graph, bias = _Layers(pair, "encoder", pair.seed + 1), ""
    axes = {"t5": ("encoder_sequence_length",), "trocr": ("num_channels", "height", "width")}
    shape = ("batch_size", *axes.get(pair.family, pair.source_shape))
    inputs = [models.tensor(pair.source_name, "INT64" if pair.family == "t5" else pair.datatype, shape)]
    if pair.family == "t5":
        inputs.append(models.tensor("attention_mask", "INT64", shape))
        x = graph.embedded("input_ids")
        places = graph.places(graph.constant(0), graph.size("input_ids", 1))
        bias = graph.node("Add", graph.masked("attention_mask"), graph.by_distance(places, places))
    else:
        # One place for each two frames of a sound, or patch of 4 by 4 of a picture.
        size = [2] if pair.family == "whisper" else [4, 4]
        channels, count = pair.source_shape[0], np.prod(pair.source_shape[1:]) // np.prod(size)
        weights = graph.weights(pair.width, channels, *size, deviation=(channels * np.prod(size)) ** -0.5)
        x = graph.node("Conv", pair.source_name, weights, strides=size, kernel_shape=size)
        x = graph.node("Reshape", x, graph.constant([0, pair.width, -1]))
        x = graph.learned(graph.node("Transpose", x, perm=[0, 2, 1]), graph.constant(range(count)), count)
    for _ in range(pair.layers):
        inner = graph.norm(x)
        query, key, value = (graph.split(inner) for _ in range(3))
        x = graph.fed_forward(graph.node("Add", x, graph.seen(query, key, value, bias)))
    graph.node("Identity", graph.norm(x), output="last_hidden_state")
    left = models.tensor("last_hidden_state", pair.datatype, ("batch_size", "encoder_sequence_length", pair.width))
    return models.model(graph.nodes, inputs, [left], graph.constants)


def _decoder(pair: Pair, *, has_past: bool) -> onnx.ModelProto:
    """One of the two graphs. Both draw all weights, so that these are the same."""
    graph = _Layers(pair, "with_past" if has_past else "no_past", pair.seed + 2)
    past = graph.size("past_key_values.0.decoder.key", 2) if has_past else graph.constant(0)
    total = graph.node("Add", past, graph.size("input_ids", 1))
    new, every = graph.places(past, total), graph.places(graph.constant(0), total)
    before = graph.node("LessOrEqual", every, graph.node("Unsqueeze", new, graph.constant([1])))
    nothing, below = (graph.constant(value, graph.type) for value in (0, np.finfo(graph.type).min / 2))
    bias, cross_bias, x = graph.node("Where", before, nothing, below), "", graph.embedded("input_ids")
    if pair.family == "t5":
        bias = graph.node("Add", bias, graph.by_distance(new, every))
        cross_bias = graph.masked("encoder_attention_mask")
    else:
        x = graph.learned(x, new, pair.positions)
    for layer in range(pair.layers):
        inner = graph.norm(x)
        query, *own = (graph.split(inner) for _ in range(3))
        for place, part in enumerate(("key", "value")):
            name = f"{layer}.decoder.{part}"
            parts = [f"past_key_values.{name}", own[place]] if has_past else [own[place]]
            own[place] = graph.node("Concat", *parts, output=f"present.{name}", axis=2)
        x = graph.node("Add", x, graph.seen(query, *own, bias))
        query, cross = graph.split(graph.norm(x)), []
        for part in ("key", "value"):
            name, made = f"{layer}.encoder.{part}", graph.split("encoder_hidden_states")
            if has_past:
                empty = helper.make_tensor(
                    "nothing", models.ELEMENT_TYPES[pair.datatype], [0, pair.heads, 1, pair.head_size], []
                )
                graph.node("Constant", output=f"present.{name}", value=empty)
                cross.append(f"past_key_values.{name}")
            else:
                cross.append(graph.node("Identity", made, output=f"present.{name}"))
        x = graph.node("Add", x, graph.seen(query, *cross, cross_bias))
        x = graph.fed_forward(x)
    graph.node("Identity", graph.project(graph.norm(x), pair.vocabulary, _LOGITS_DEVIATION), output="logits")
    return models.model(graph.nodes, *_tensors_of_decoder(pair), graph.constants)


def _tensors_of_decoder(pair: Pair) -> tuple[Sequence[onnx.ValueInfoProto], Sequence[onnx.ValueInfoProto]]:
    def caches(prefix: str, axis: str) -> list[onnx.ValueInfoProto]:
        axes = {"decoder": axis, "encoder": "encoder_sequence_length"}
        return [
            models.tensor(
                f"{prefix}.{layer}.{of}.{part}", pair.datatype, ("batch_size", pair.heads, axes[of], pair.head_size)
            )
            for layer in range(pair.layers)
            for of in axes
            for part in ("key", "value")
        ]

    source = ("batch_size", "encoder_sequence_length")
    masks = [models.tensor("encoder_attention_mask", "INT64", source)] if pair.family == "t5" else []
    ids = models.tensor("input_ids", "INT64", ("batch_size", _NOW))
    hidden = models.tensor("encoder_hidden_states", pair.datatype, (*source, pair.width))
    logits = models.tensor("logits", pair.datatype, ("batch_size", _NOW, pair.vocabulary))
    inputs = [*masks, ids, hidden, *caches("past_key_values", _PAST)]
    return inputs, [logits, *caches("present", f"{_PAST} + {_NOW}")]
