"""Models of the shapes that people serve on GPUs, made on the spot with random weights: ResNet-50 and BERT-base.

Lives here: their graphs, sizes, requests and places in a repository. Must not: serve or measure. Weights are scaled so
that activations stay around one through all layers: the results may mean nothing, but take as long to compute and are
as exact as if they did. The BERT model has no masks and returns the first token's vector, as classifiers use it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from bench.sessions import instance_group
from paceline.protos.inference_pb2 import ModelInferRequest
from tests import models
from tests.wire import Array

__all__ = [
    "FULL",
    "INPUT",
    "OUTPUT",
    "QUICK",
    "SMALL",
    "GpuModel",
    "Graph",
    "Sizes",
    "add",
    "batch_of",
    "chosen",
    "request",
    "tolerance",
    "write",
]

INPUT, OUTPUT = "INPUT0", "OUTPUT0"
_OPSET = 18
_GRAPHS = (
    'optimization { execution_accelerators { gpu_execution_accelerator { name: "cuda" '
    'parameters { key: "enable_cuda_graph" value: "1" } } } }'
)
_TYPES = {"FP32": np.float32, "FP16": np.float16, "INT64": np.int64}


@dataclass(frozen=True, slots=True)
class Sizes:
    """What makes the models as large as those whose shapes they have, or small enough to check that everything
    works."""

    image: int
    width: int
    blocks: tuple[int, ...]
    classes: int
    layers: int
    hidden: int
    heads: int
    tokens: int
    vocabulary: int


FULL = Sizes(224, 64, (3, 4, 6, 3), 1000, 12, 768, 12, 128, 30_522)
SMALL = Sizes(96, 32, (3, 4, 6, 3), 1000, 12, 192, 4, 16, 1000)
"""For a core or two: all layers, half of ResNet's channels, a quarter of BERT's width, small images, short texts."""
QUICK = Sizes(32, 8, (1, 1, 1, 1), 10, 2, 32, 4, 16, 100)


@dataclass(frozen=True, slots=True)
class GpuModel:
    """A model to measure. Requests have `rows` rows of `shape`, or `few_rows` if they are sent at random; batches have
    one of `sizes`, ascending; `shared`: requests have their tensors in shared memory. `tolerance`: how far answers may
    be from the CPU's, as a share of the largest value."""

    name: str
    datatype: str
    input_datatype: str
    shape: tuple[int, ...]
    outputs: int
    rows: int
    few_rows: int
    sizes: tuple[int, ...]
    shared: bool
    tolerance: float
    largest_input: int
    make: Callable[[], onnx.ModelProto]

    @property
    def batch_rows(self) -> int:
        """Rows of the largest batch."""
        return self.sizes[-1]


class Graph:
    """Collects nodes and weights; `datatype` is that of all weights."""

    def __init__(self, datatype: str) -> None:
        self._dtype = _TYPES[datatype]
        self._chance = np.random.default_rng(7)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def weights(self, shape: Sequence[int], scale: float, mean: float = 0.0) -> str:
        return self.constant((self._chance.standard_normal(shape, np.float32) * scale + mean).astype(self._dtype))

    def constant(self, array: Array) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(array, name))
        return name

    def number(self, value: float) -> str:
        return self.constant(np.array(value, self._dtype))

    def add(self, operator: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        output = output or f"n{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [output], **attributes))
        return output

    def model(self, input_: onnx.ValueInfoProto, outputs: int, datatype: str) -> onnx.ModelProto:
        output = models.tensor(OUTPUT, datatype, ["batch", outputs])
        return models.model(self.nodes, [input_], [output], self.constants, opset=_OPSET)


def _resnet(sizes: Sizes, datatype: str) -> onnx.ModelProto:
    """Bottlenecks as in "Deep Residual Learning for Image Recognition" (arXiv 1512.03385), normalisation folded in."""
    graph = Graph(datatype)

    def conv(x: str, taken: int, given: int, kernel: int, stride: int = 1, gain: float = 2.0) -> str:
        weights = graph.weights((given, taken, kernel, kernel), (gain / (taken * kernel**2)) ** 0.5)
        padding, shape = [kernel // 2] * 4, [kernel, kernel]
        bias = graph.weights((given,), 0.01)
        return graph.add("Conv", x, weights, bias, kernel_shape=shape, strides=[stride] * 2, pads=padding)

    x = graph.add("Relu", conv(INPUT, 3, sizes.width, 7, 2))
    x = graph.add("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    taken = sizes.width
    for stage, blocks in enumerate(sizes.blocks):
        inner = sizes.width << stage
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            short = conv(x, taken, 4 * inner, 1, stride, 1.0) if not block else x
            deep = graph.add("Relu", conv(x, taken, inner, 1))
            deep = graph.add("Relu", conv(deep, inner, inner, 3, stride))
            deep = conv(deep, inner, 4 * inner, 1, gain=0.2)
            x, taken = graph.add("Relu", graph.add("Add", deep, short)), 4 * inner
    x = graph.add("Flatten", graph.add("GlobalAveragePool", x))
    graph.add(
        "Gemm",
        x,
        graph.weights((taken, sizes.classes), taken**-0.5),
        graph.weights((sizes.classes,), 0.1),
        output=OUTPUT,
    )
    return graph.model(models.tensor(INPUT, datatype, ["batch", 3, sizes.image, sizes.image]), sizes.classes, datatype)


def _bert(sizes: Sizes, datatype: str) -> onnx.ModelProto:
    """The encoder of "BERT" (arXiv 1810.04805), normalisation after each half of a layer."""
    graph = Graph(datatype)
    hidden, head = sizes.hidden, sizes.hidden // sizes.heads

    def linear(x: str, taken: int, given: int) -> str:
        product = graph.add("MatMul", x, graph.weights((taken, given), taken**-0.5))
        return graph.add("Add", product, graph.weights((given,), 0.1))

    def normal(x: str) -> str:
        scale, bias = graph.weights((hidden,), 0.1, 1.0), graph.weights((hidden,), 0.1)
        return graph.add("LayerNormalization", x, scale, bias, axis=-1, epsilon=1e-5)

    def by_head(x: str, order: Sequence[int]) -> str:
        return graph.add("Transpose", graph.add("Reshape", linear(x, hidden, hidden), split), perm=order)

    split = graph.constant(np.array([0, 0, sizes.heads, head], np.int64))
    joined = graph.constant(np.array([0, 0, hidden], np.int64))
    half, one, root, scale = (graph.number(value) for value in (0.5, 1.0, 2**0.5, head**0.5))
    embedded = graph.add("Gather", graph.weights((sizes.vocabulary, hidden), 1.0), INPUT)
    x = normal(graph.add("Add", embedded, graph.weights((1, sizes.tokens, hidden), 1.0)))
    for _ in range(sizes.layers):
        query, value = by_head(x, (0, 2, 1, 3)), by_head(x, (0, 2, 1, 3))
        scores = graph.add("Div", graph.add("MatMul", query, by_head(x, (0, 2, 3, 1))), scale)
        mixed = graph.add("MatMul", graph.add("Softmax", scores, axis=-1), value)
        mixed = graph.add("Reshape", graph.add("Transpose", mixed, perm=(0, 2, 1, 3)), joined)
        x = normal(graph.add("Add", x, linear(mixed, hidden, hidden)))
        wide = linear(x, hidden, 4 * hidden)
        gate = graph.add("Add", graph.add("Erf", graph.add("Div", wide, root)), one)
        wide = graph.add("Mul", graph.add("Mul", wide, gate), half)
        x = normal(graph.add("Add", x, linear(wide, 4 * hidden, hidden)))
    graph.add("Gather", x, graph.constant(np.array(0, np.int64)), axis=1, output=OUTPUT)
    return graph.model(models.tensor(INPUT, "INT64", ["batch", sizes.tokens]), hidden, datatype)


def tolerance(datatype: str, device: str) -> float:
    """How far answers may be from a CPU's, as a share of the largest value. A GPU multiplies FP32 as TF32, with ten
    bits of fraction, unless it is told otherwise."""
    if datatype == "FP16":
        return 3e-2
    return 1e-4 if device == "cpu" else 1e-2


def chosen(device: str, sizes: Sizes) -> list[GpuModel]:
    """The models to measure, of `sizes`.

    ResNets have batches of one size, because each change of size has ONNX Runtime plan every convolution anew. Why
    requests have so few rows, and BERTs so many sizes: bench/README.md, p99.
    """
    found = []
    for datatype in ("FP32", "FP16"):
        small, apart = datatype.lower(), tolerance(datatype, device)
        image = (3, sizes.image, sizes.image)
        found += [
            GpuModel(
                f"resnet50_{small}", datatype, datatype, image, sizes.classes, 8, 2, (32,), True, apart, 1,
                lambda datatype=datatype: _resnet(sizes, datatype),
            ),
            GpuModel(
                f"bert_base_{small}", datatype, "INT64", (sizes.tokens,), sizes.hidden, 4, 4, (4, 8, 16, 24, 32), False,
                apart, sizes.vocabulary, lambda datatype=datatype: _bert(sizes, datatype),
            ),
        ]  # fmt: skip
    return found


def write(model: GpuModel, folder: Path) -> Path:
    """The model's ONNX file in `folder`; takes seconds, and up to 440 MB."""
    return models.write(model.make(), folder / f"{model.name}.onnx")


def add(model: GpuModel, file: Path, repository: Path, device: str, *, graphs: bool = False) -> None:
    """Put the model into a repository; `file` stays where it is. `graphs`: batches are replayed as CUDA graphs."""
    place = repository / model.name
    (place / "1").mkdir(parents=True)
    (place / "1" / "model.onnx").symlink_to(file)
    sizes = ",".join(map(str, model.sizes))
    parameters: Mapping[str, str] = {"paceline.batch_sizes": sizes, "intra_op_thread_count": "1"}
    lines = [f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in parameters.items()]
    (place / "config.pbtxt").write_text(
        f"max_batch_size: {model.batch_rows} dynamic_batching {{ }} "
        f"{instance_group(device)} {' '.join(lines)} {_GRAPHS if graphs else ''}\n"
    )


def batch_of(model: GpuModel, rows: int, seed: int = 0) -> Array:
    """Random rows of the model's input."""
    chance = np.random.default_rng(seed)
    if model.input_datatype == "INT64":
        return chance.integers(0, model.largest_input, (rows, *model.shape))
    return chance.standard_normal((rows, *model.shape), np.float32).astype(_TYPES[model.input_datatype])


def request(model: GpuModel, batch: Array, region: str = "", offset: int = 0) -> ModelInferRequest:
    """A request with `batch`, in the message or at `offset` in the shared memory `region`."""
    message = ModelInferRequest(model_name=model.name)
    given: Any = message.inputs.add(name=INPUT, datatype=model.input_datatype, shape=batch.shape)
    if region:
        given.parameters["shared_memory_region"].string_param = region
        given.parameters["shared_memory_offset"].int64_param = offset
        given.parameters["shared_memory_byte_size"].int64_param = batch.nbytes
    else:
        message.raw_input_contents.append(batch.tobytes())
    return message
