"""Small decoders, built on the fly, as Hugging Face's exporters and onnxruntime-genai's builder write them: names,
shapes, datatypes and axes are theirs, the weights random.

Lives here: the graphs of two families, and folders of them. Must not: anything of the server, or run a model. The
exporters' apply their masks as given: a query sees a key that `attention_mask` leaves and that isn't behind it, by
index, with the past in front. So rows padded on the left compute what they compute alone. The builder's have the
operator GroupQueryAttention, to which a row's mask only says how long it is: rows are padded on the right.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import DTypeLike
from onnx import TensorProto, helper, numpy_helper

from tests import models
from tests.grouped_decoders import MICROSOFT, genai_config, in_operators
from tests.merged_decoders import merge, without_pasts

__all__ = ["FIXED_COST", "LARGE", "TINY", "TINY_GPT2", "TINY_GROUPED", "Decoder", "Graph", "build", "write"]

_WIDTH = 256
"""Of the square matrices that make up a fixed cost: a product takes about 0.7 ms on one thread."""

_LOGITS_DEVIATION = 4.0
"""As sharp as those of trained models: the best two of a vocabulary are rarely within rounding of each other."""

_PAST, _NOW, _ALL = "past_sequence_length", "sequence_length", "past_sequence_length + sequence_length"


@dataclass(frozen=True, slots=True)
class Decoder:
    """What a decoder is like. `family`: "llama" (RMSNorm, rotary positions, heads that share keys, a SiLU gate) or
    "gpt2" (learned positions, LayerNorm, GELU). `inner`: the width of its feed-forward layers. `datatype`: FP32 or
    FP16, of weights and caches; `logits`: of these, if another. `end_tokens`: what its configuration says ends an
    answer. `places`: where positions come from: "given" as `position_ids`; without that input, "counted" in the mask,
    or by "index" as in older exports, which padding spoils. `fixed_products`: products of matrices in each execution,
    whatever its rows, of which nothing remains; `waits`: in each, the operator of `tests/operators.py`, whose library
    says for how long. `merged`: two graphs in one, of which the one with pasts takes "many"
    or "one" token.

    `grouped`: a "llama" of onnxruntime-genai's builder, which rotates "counted" positions in its operator. `packed`:
    queries, keys and values are one product there; `window`: how many tokens each sees, if not all, and with `slides`
    the operator may keep no others; `lengths`: what tells those of rows, the "mask", or inputs of their own that are
    "given" in its place."""

    family: str = "llama"
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 8
    inner: int = 64
    vocabulary: int = 128
    positions: int = 512
    datatype: str = "FP32"
    logits: str = ""
    end_tokens: tuple[int, ...] = (2,)
    places: str = "given"
    fixed_products: int = 0
    waits: bool = False
    merged: str = ""
    grouped: bool = False
    packed: bool = False
    window: int = -1
    slides: bool = False
    lengths: str = "mask"
    seed: int = 0

    @property
    def width(self) -> int:
        return self.heads * self.head_size


TINY = Decoder()
TINY_GPT2 = Decoder(family="gpt2", kv_heads=4)
TINY_GROUPED = Decoder(head_size=16, grouped=True, places="counted")
FIXED_COST = Decoder(vocabulary=4096, end_tokens=(), fixed_products=8)
"""Its steps cost the same whatever their rows, or nearly so."""
LARGE = Decoder(layers=3, heads=8, kv_heads=4, head_size=64, inner=1024, vocabulary=4096, positions=2048, end_tokens=())
"""45 MB of weights in FP32."""


def write(decoder: Decoder, folder: Path) -> Path:
    """Write the model, and `config.json` and `generation_config.json`, or `genai_config.json` as the builder does,
    making the folder; the folder again."""
    model = build(decoder)
    if decoder.merged:
        model = merge(model, without_pasts(model), takes_many=decoder.merged == "many")
    models.write(model, folder / ("decoder_model_merged.onnx" if decoder.merged else "model.onnx"))
    ends = list(decoder.end_tokens)
    tokens: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": ends[0] if len(ends) == 1 else ends or None}
    if decoder.grouped:
        (folder / "genai_config.json").write_text(json.dumps(genai_config(decoder, tokens), indent=4))
        return folder
    (folder / "config.json").write_text(json.dumps({**_config(decoder), **tokens}, indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"_from_model_config": True, **tokens}, indent=2))
    return folder


def _config(decoder: Decoder) -> dict[str, Any]:
    shared = {
        "model_type": decoder.family,
        "vocab_size": decoder.vocabulary,
        "torch_dtype": "float16" if decoder.datatype == "FP16" else "float32",
        "use_cache": True,
    }
    if decoder.family == "gpt2":
        return {
            **shared,
            "architectures": ["GPT2LMHeadModel"],
            "activation_function": "gelu_new",
            "n_ctx": decoder.positions,
            "n_embd": decoder.width,
            "n_head": decoder.heads,
            "n_inner": decoder.inner,
            "n_layer": decoder.layers,
            "n_positions": decoder.positions,
        }
    return {
        **shared,
        "architectures": ["LlamaForCausalLM"],
        "head_dim": decoder.head_size,
        "hidden_act": "silu",
        "hidden_size": decoder.width,
        "intermediate_size": decoder.inner,
        "max_position_embeddings": decoder.positions,
        "num_attention_heads": decoder.heads,
        "num_hidden_layers": decoder.layers,
        "num_key_value_heads": decoder.kv_heads,
        "tie_word_embeddings": False,
    }


def build(decoder: Decoder) -> onnx.ModelProto:
    graph = Graph(decoder)
    hidden = _gpt2(graph) if decoder.family == "gpt2" else _llama(graph)
    logits = graph.project(hidden, decoder.vocabulary, _LOGITS_DEVIATION)
    if decoder.fixed_products or decoder.waits:
        logits = graph.node("Add", logits, graph.fixed_cost())
    logits_type = decoder.logits or decoder.datatype
    graph.node("Cast", logits, to=models.ELEMENT_TYPES[logits_type], output="logits")

    def caches(prefix: str, axis: str) -> list[onnx.ValueInfoProto]:
        # The builder leaves the size free: it may be that of quantized caches.
        size = "kv_cache_dim" if decoder.grouped else decoder.head_size
        dims = ("batch_size", decoder.kv_heads, axis, size)
        names = (f"{prefix}.{layer}.{part}" for layer in range(decoder.layers) for part in ("key", "value"))
        return [models.tensor(name, decoder.datatype, dims) for name in names]

    ids, *positions = (
        models.tensor(name, "INT64", ("batch_size", _NOW))
        for name in ("input_ids", *(["position_ids"] if decoder.places == "given" else []))
    )
    every = "total_sequence_length" if decoder.grouped else _ALL
    masks = [models.tensor("attention_mask", "INT64", ("batch_size", every))]
    if decoder.lengths == "given":
        masks = [models.tensor("seqlens_k", "INT32", ("batch_size",)), models.tensor(every, "INT32", ())]
    past = caches("past_key_values", _PAST)
    # The exporters keep the order of the arguments in Python, which isn't the same in both families.
    inputs = [ids, *past, *masks, *positions] if decoder.family == "gpt2" else [ids, *masks, *positions, *past]
    outputs = [
        models.tensor("logits", logits_type, ("batch_size", _NOW, decoder.vocabulary)),
        *caches("present", every),
    ]
    model = models.model(graph.nodes, inputs, outputs, graph.constants)
    if decoder.grouped:
        model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
    if decoder.waits:
        model.opset_import.append(helper.make_opsetid("test", 1))
    return model


class Graph:
    """Nodes and constants so far. Its functions add to them and return the name of what is computed."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.type = np.float16 if decoder.datatype == "FP16" else np.float32
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self._random = np.random.default_rng(decoder.seed)

    def node(self, kind: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        name = output or f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], **attributes))
        return name

    def constant(self, value: Any, dtype: DTypeLike = np.int64) -> str:
        name = f"constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.array(value, dtype), name))
        return name

    def weights(self, *shape: int, deviation: float = 1.0) -> str:
        drawn = self._random.standard_normal(shape, np.float32)
        return self.constant(drawn * np.float32(deviation), self.type)

    def project(self, x: str, columns: int, deviation: float = 1.0, *, rows: int = 0) -> str:
        """`x` times a matrix, so that elements of deviation 1 become elements of `deviation`."""
        rows = rows or self.decoder.width
        return self.node("MatMul", x, self.weights(rows, columns, deviation=deviation * rows**-0.5))

    def size(self, tensor: str, axis: int) -> str:
        """A size of a tensor, as a number."""
        return self.node("Squeeze", self.node("Shape", tensor, start=axis, end=axis + 1))

    def cast(self, x: str, dtype: DTypeLike) -> str:
        return self.node("Cast", x, to=helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))

    def indices(self) -> tuple[str, str]:
        """Those of all tokens [all], and of the new ones [now], of which the past has none."""
        past = self.size("past_key_values.0.key", 2)
        total = self.node("Add", past, self.size("input_ids", 1))
        every, new = (self.node("Range", first, total, self.constant(1)) for first in (self.constant(0), past))
        return every, new

    def places(self) -> str:
        """The positions of the new tokens: [batch, now], or [1, now] for those of all rows."""
        if self.decoder.places == "given":
            return "position_ids"
        _, new = self.indices()
        if self.decoder.places == "index":
            return self.node("Unsqueeze", new, self.constant([0]))
        counted = self.node("Sub", self.node("CumSum", "attention_mask", self.constant(1)), self.constant(1))
        return self.node("Gather", self.node("Max", counted, self.constant(0)), new, axis=1)

    def bias(self) -> str:
        """What is added to the scores [batch, heads, now, all]: nothing where a query sees a key, a lot below where
        not."""
        every, new = self.indices()
        before = self.node("LessOrEqual", every, self.node("Unsqueeze", new, self.constant([1])))
        given = self.node("Cast", "attention_mask", to=TensorProto.BOOL)
        seen = self.node("And", before, self.node("Unsqueeze", given, self.constant([1, 2])))
        nothing, below = (self.constant(value, self.type) for value in (0, np.finfo(self.type).min))
        return self.node("Where", seen, nothing, below)

    def heads(self, x: str, count: int) -> str:
        """[batch, now, count x size] as [batch, count, now, size]."""
        apart = self.node("Reshape", x, self.constant([0, 0, count, self.decoder.head_size]))
        return self.node("Transpose", apart, perm=[0, 2, 1, 3])

    def attention(self, layer: int, query: str, key: str, value: str, bias: str) -> str:
        """What each query sees [batch, now, width]; keys and values are kept behind those of the past."""
        decoder = self.decoder
        kept = []
        for part, new in (("key", key), ("value", value)):
            past = f"past_key_values.{layer}.{part}"
            all_of = self.node("Concat", past, new, output=f"present.{layer}.{part}", axis=2)
            if (shared_by := decoder.heads // decoder.kv_heads) > 1:
                spread = self.node("Unsqueeze", all_of, self.constant([2]))
                spread = self.node("Expand", spread, self.constant([1, 1, shared_by, 1, 1]))
                all_of = self.node("Reshape", spread, self.constant([0, decoder.heads, -1, decoder.head_size]))
            kept.append(all_of)
        scores = self.node("MatMul", query, self.node("Transpose", kept[0], perm=[0, 1, 3, 2]))
        scaled = self.node("Mul", scores, self.constant(decoder.head_size**-0.5, self.type))
        # In FP32 as theirs: a row that sees nothing would be NaN in FP16, and so would be whoever skips it later.
        shares = self.node("Softmax", self.cast(self.node("Add", scaled, bias), np.float32), axis=-1)
        seen = self.node("MatMul", self.cast(shares, self.type), kept[1])
        joined = self.node("Transpose", seen, perm=[0, 2, 1, 3])
        return self.node("Reshape", joined, self.constant([0, 0, decoder.width]))

    def fixed_cost(self) -> str:
        """Zero, as late as the products and the waiting take."""
        all_ids = self.cast(self.node("ReduceSum", "input_ids", keepdims=0), np.float32)
        zero = self.constant(0, np.float32)
        drawn = self._random.standard_normal((_WIDTH, _WIDTH), np.float32) * np.float32(_WIDTH**-0.5)
        matrix = self.constant(drawn, np.float32)
        product = self.node("Add", matrix, self.node("Mul", all_ids, zero))
        for _ in range(self.decoder.fixed_products):
            product = self.node("MatMul", product, matrix)
        nothing = self.node("Mul", self.node("ReduceSum", product, keepdims=0), zero)
        if self.decoder.waits:
            nothing = self.node("Twice", nothing, domain="test")
        return self.cast(nothing, self.type)


def _llama(graph: Graph) -> str:
    decoder = graph.decoder

    def norm(x: str) -> str:
        x = graph.cast(x, np.float32)
        mean = graph.node("ReduceMean", graph.node("Mul", x, x), graph.constant([-1]))
        root = graph.node("Sqrt", graph.node("Add", mean, graph.constant(1e-5, np.float32)))
        return graph.node("Mul", graph.cast(graph.node("Div", x, root), graph.type), ones)

    ones = graph.constant(np.ones(decoder.width), graph.type)
    x = graph.node("Gather", graph.weights(decoder.vocabulary, decoder.width), "input_ids")
    attention = in_operators(graph) if decoder.grouped else _in_nodes(graph)
    for layer in range(decoder.layers):
        x = graph.node("Add", x, graph.project(attention(layer, norm(x)), decoder.width))
        inner = norm(x)
        gate = graph.project(inner, decoder.inner)
        gated = graph.node(
            "Mul", graph.node("Mul", gate, graph.node("Sigmoid", gate)), graph.project(inner, decoder.inner)
        )
        x = graph.node("Add", x, graph.project(gated, decoder.width, rows=decoder.inner))
    return norm(x)


_Attention = Callable[[int, str], str]
"""What each query of a layer sees in [batch, now, width], by position."""


def _in_nodes(graph: Graph) -> _Attention:
    """As the exporters write it."""
    decoder = graph.decoder

    def rotated(x: str) -> str:
        first, second = (
            graph.node("Slice", x, *(graph.constant([at]) for at in (begin, end, 3)))
            for begin, end in ((0, half), (half, decoder.head_size))
        )
        turned = graph.node("Concat", graph.node("Neg", second), first, axis=-1)
        return graph.node("Add", graph.node("Mul", x, cosine), graph.node("Mul", turned, sine))

    def attention(layer: int, x: str) -> str:
        counts = (decoder.heads, decoder.kv_heads, decoder.kv_heads)
        query, key, value = (graph.heads(graph.project(x, count * decoder.head_size), count) for count in counts)
        return graph.attention(layer, rotated(query), rotated(key), value, bias)

    half = decoder.head_size // 2
    bias = graph.bias()
    frequencies = graph.constant(10_000.0 ** -(np.arange(half) / half), np.float32)
    places = graph.node("Unsqueeze", graph.cast(graph.places(), np.float32), graph.constant([1, 3]))
    angles = graph.node("Mul", places, frequencies)
    angles = graph.node("Concat", angles, angles, axis=-1)
    cosine, sine = (graph.cast(graph.node(kind, angles), graph.type) for kind in ("Cos", "Sin"))
    return attention


def _gpt2(graph: Graph) -> str:
    decoder = graph.decoder

    def norm(x: str) -> str:
        return graph.node("LayerNormalization", x, ones, zeros, epsilon=1e-5)

    def biased(x: str, columns: int, rows: int = 0) -> str:
        return graph.node("Add", graph.project(x, columns, rows=rows), graph.weights(columns, deviation=0.1))

    def gelu(x: str) -> str:
        half, one, root, cubic = (graph.constant(v, graph.type) for v in (0.5, 1, (2 / np.pi) ** 0.5, 0.044715))
        cube = graph.node("Mul", graph.node("Mul", graph.node("Mul", x, x), x), cubic)
        inner = graph.node("Tanh", graph.node("Mul", graph.node("Add", x, cube), root))
        return graph.node("Mul", graph.node("Mul", x, half), graph.node("Add", inner, one))

    ones, zeros = (graph.constant(np.full(decoder.width, value), graph.type) for value in (1, 0))
    tokens = graph.node("Gather", graph.weights(decoder.vocabulary, decoder.width), "input_ids")
    places = graph.node("Gather", graph.weights(decoder.positions, decoder.width), graph.places())
    x = graph.node("Add", tokens, places)
    bias = graph.bias()
    for layer in range(decoder.layers):
        packed = biased(norm(x), 3 * decoder.width)
        parts = [f"{packed}_{part}" for part in ("query", "key", "value")]
        graph.nodes.append(helper.make_node("Split", [packed], parts, axis=-1, num_outputs=3))
        query, key, value = (graph.heads(part, decoder.heads) for part in parts)
        x = graph.node("Add", x, biased(graph.attention(layer, query, key, value, bias), decoder.width))
        inner = gelu(biased(norm(x), decoder.inner))
        x = graph.node("Add", x, biased(inner, decoder.width, rows=decoder.inner))
    return norm(x)
