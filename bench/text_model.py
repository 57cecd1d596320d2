"""A masked encoder of texts, made on the spot with random weights, and texts of the lengths that people send.

Lives here: its graph, its place in a repository, token ids, requests. Must not: serve or measure. It takes what exports
of Hugging Face's encoders take, and returns the mean of the tokens' vectors, as they are used for embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
from onnx import TensorProto

from bench.gpu_models import Graph
from bench.sessions import instance_group
from paceline.clients.messages import infer_request
from tests import models
from tests.wire import Array

__all__ = ["BERT_BASE", "FULL", "IDS", "MASK", "QUICK", "Sizes", "add", "feeds", "lengths", "request", "write"]

IDS, MASK, OUTPUT = "input_ids", "attention_mask", "embedding"
_WORDS = 1_000


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the encoder is."""

    layers: int
    hidden: int
    heads: int


FULL = Sizes(layers=4, hidden=256, heads=4)
BERT_BASE = Sizes(layers=12, hidden=768, heads=12)
QUICK = Sizes(layers=1, hidden=16, heads=2)


class _Graph(Graph):
    """With what an encoder is made of."""

    def numbers(self, *values: float) -> str:
        return self.constant(np.array(values, np.float32))

    def integers(self, *values: int) -> str:
        return self.constant(np.array(values, np.int64))

    def linear(self, x: str, inputs: int, outputs: int) -> str:
        return self.add("MatMul", x, self.weights((inputs, outputs), inputs**-0.5))

    def norm(self, x: str, hidden: int) -> str:
        return self.add("LayerNormalization", x, self.numbers(*np.ones(hidden)), axis=-1)

    def attention(self, x: str, bias: str, sizes: Sizes) -> str:
        """Multi-head self-attention; `bias` is added to the scores."""
        head = sizes.hidden // sizes.heads
        shape = self.integers(0, 0, sizes.heads, head)
        by_head = [
            self.add("Transpose", self.add("Reshape", self.linear(x, sizes.hidden, sizes.hidden), shape), perm=perm)
            for perm in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3])
        ]
        scores = self.add("Mul", self.add("MatMul", *by_head[:2]), self.numbers(head**-0.5))
        shares = self.add("Softmax", self.add("Add", scores, bias), axis=-1)
        mixed = self.add("Transpose", self.add("MatMul", shares, by_head[2]), perm=[0, 2, 1, 3])
        joined = self.add("Reshape", mixed, self.integers(0, 0, sizes.hidden))
        return self.linear(joined, sizes.hidden, sizes.hidden)


def write(folder: Path, sizes: Sizes = FULL) -> Path:
    """Write the encoder into `folder`; returns its file."""
    graph, hidden = _Graph("FP32"), sizes.hidden
    mask = graph.add("Cast", MASK, to=TensorProto.FLOAT)
    hides = graph.add("Mul", graph.add("Sub", mask, graph.numbers(1.0)), graph.numbers(1e9))
    bias = graph.add("Unsqueeze", hides, graph.integers(1, 2))
    x = graph.add("Gather", graph.weights((_WORDS, hidden), 1.0), IDS)
    for _ in range(sizes.layers):
        x = graph.norm(graph.add("Add", x, graph.attention(x, bias, sizes)), hidden)
        wide = graph.add("Relu", graph.linear(x, hidden, 4 * hidden))
        x = graph.norm(graph.add("Add", x, graph.linear(wide, 4 * hidden, hidden)), hidden)
    column = graph.add("Unsqueeze", mask, graph.integers(2))
    total = graph.add("ReduceSum", graph.add("Mul", x, column), graph.integers(1), keepdims=0)
    graph.add("Div", total, graph.add("ReduceSum", column, graph.integers(1), keepdims=0), output=OUTPUT)
    inputs = [models.tensor(name, "INT64", ["batch", "words"]) for name in (IDS, MASK)]
    outputs = [models.tensor(OUTPUT, "FP32", ["batch", hidden])]
    return models.write(models.model(graph.nodes, inputs, outputs, graph.constants), folder / "encoder.onnx")


def add(name: str, file: Path, repository: Path, device: str = "cpu", *, pads: bool) -> None:
    """Put the encoder into a repository as model `name`, on a device, of a CPU one thread: its lengths are found, or
    left alone."""
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "1" / "model.onnx").symlink_to(file)
    off = "" if pads else 'parameters { key: "paceline.pad" value { string_value: "off" } }'
    (repository / name / "config.pbtxt").write_text(
        f'backend: "onnxruntime" max_batch_size: 32 dynamic_batching {{ }} {instance_group(device)} '
        f'parameters {{ key: "intra_op_thread_count" value {{ string_value: "1" }} }} {off}'
    )


def lengths(count: int, seed: int = 0) -> list[int]:
    """Numbers of words: log-normal, median 40, sigma 0.8, from 5 to 256."""
    random = Random(seed)
    return [min(256, max(5, round(40 * math.exp(random.gauss(0, 0.8))))) for _ in range(count)]


def feeds(sizes: Sequence[int]) -> dict[str, Array]:
    """One batch of texts of these numbers of words, filled up to the longest: ids and mask."""
    random, longest = np.random.default_rng(sum(sizes)), max(sizes)
    mask = np.array([[int(at < size) for at in range(longest)] for size in sizes], np.int64)
    return {IDS: random.integers(1, _WORDS, mask.shape) * mask, MASK: mask}


def request(model: str, size: int) -> bytes:
    """A request of one text of `size` words, ready for the wire."""
    return infer_request(model, feeds([size])).SerializeToString()
