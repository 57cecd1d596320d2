"""What is different in decoders of onnxruntime-genai's builder.

Lives here: attention in the operator GroupQueryAttention, and what the builder writes beside the model. Must not: the
rest of the graph (`decoder_models`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import helper

if TYPE_CHECKING:
    from tests.decoder_models import Decoder, Graph

__all__ = ["MICROSOFT", "genai_config", "in_operators"]

MICROSOFT = "com.microsoft"


def genai_config(decoder: Decoder, tokens: dict[str, Any]) -> dict[str, Any]:
    sizes: dict[str, Any] = {
        "head_size": decoder.head_size,
        "hidden_size": decoder.width,
        "num_attention_heads": decoder.heads,
        "num_hidden_layers": decoder.layers,
        "num_key_value_heads": decoder.kv_heads,
    }
    if decoder.slides:
        sizes["sliding_window"] = {"window_size": decoder.window, "layers": [*range(decoder.layers)]}
    stepped = {"session_options": {"log_id": "onnxruntime-genai"}, "filename": "model.onnx", **sizes}
    model = {"context_length": decoder.positions, "decoder": stepped, "type": "llama", "vocab_size": decoder.vocabulary}
    return {"model": {**tokens, **model}, "search": {"do_sample": False, "max_length": decoder.positions}}


def in_operators(graph: Graph) -> Callable[[int, str], str]:
    """What each query of a layer sees in [batch, now, width], by position."""
    decoder = graph.decoder

    def attention(layer: int, x: str) -> str:
        sizes = [count * decoder.head_size for count in (decoder.heads, decoder.kv_heads, decoder.kv_heads)]
        parts = [graph.project(x, one) for one in ([sum(sizes)] if decoder.packed else sizes)]
        if not in_operator:
            for part, heads in ((0, decoder.heads), (1, decoder.kv_heads)):
                turned = (parts[part], "position_ids", *rotations)
                parts[part] = graph.node("RotaryEmbedding", *turned, domain=MICROSOFT, num_heads=heads)
        pasts, presents = (
            [f"{prefix}.{layer}.{part}" for part in ("key", "value")] for prefix in ("past_key_values", "present")
        )
        node = helper.make_node(
            "GroupQueryAttention",
            [*parts, *[""] * (3 - len(parts)), *pasts, *lengths, *(rotations if in_operator else ())],
            [f"seen_{layer}", *presents],
            domain=MICROSOFT,
            num_heads=decoder.heads,
            kv_num_heads=decoder.kv_heads,
            scale=decoder.head_size**-0.5,
            local_window_size=decoder.window,
            do_rotary=int(in_operator),
            **({"sliding_window_cache": 1} if decoder.slides else {}),
        )
        graph.nodes.append(node)
        return f"seen_{layer}"

    in_operator = decoder.places == "counted"
    half = decoder.head_size // 2
    angles = np.outer(np.arange(decoder.positions), 10_000.0 ** -(np.arange(half) / half))
    rotations = [graph.constant(of(angles), graph.type) for of in (np.cos, np.sin)]
    lengths = ["seqlens_k", "total_sequence_length"]
    if decoder.lengths == "mask":
        counted = graph.node("ReduceSum", "attention_mask", graph.constant([1]), keepdims=0)
        longest = graph.node("Gather", graph.node("Shape", "attention_mask"), graph.constant(1), axis=0)
        of_rows = graph.node("Sub", counted, graph.constant([1]))
        lengths = [graph.cast(of_rows, np.int32), graph.cast(longest, np.int32)]
    return attention
