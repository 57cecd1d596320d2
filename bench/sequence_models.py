"""Models with memory, what their clients send, and what they answer to one sequence alone.

Lives here: Silero's voice detector, whose ONNX file comes from the wheel `silero-vad`; a model whose executions cost
the same whatever their rows, and one that also remembers all that it was sent; the former in Python, for this server
and for Triton's. Their configuration, made-up sequences, requests ready for the wire. Must not: serve or measure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from bench.sessions import instance_group, open_session
from paceline.clients.messages import infer_request
from tests import models
from tests.wire import Array

__all__ = [
    "EXACT",
    "FIXED",
    "GROWING",
    "PLAIN",
    "PYTHON",
    "VAD",
    "WIDE",
    "Recurrent",
    "add",
    "add_python",
    "alone",
    "messages",
    "plain_message",
    "write_fixed",
    "write_growing",
]

RATE = 16_000
_CHUNK, _CONTEXT = 512, 64
_WIDTH = 256
PLAIN, PYTHON = "plain", "python"
_ONE_THREAD = 'parameters { key: "intra_op_thread_count" value { string_value: "1" } }'
_PYTHON_CONFIG = """
backend: "python" max_batch_size: 64 instance_group { kind: KIND_CPU count: 1 }
input { name: "INPUT" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "OUTPUT" data_type: TYPE_FP32 dims: [ 1 ] }
sequence_batching {
  max_sequence_idle_microseconds: 5000000
  oldest { max_candidate_sequences: 64 }
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
  control_input { name: "CORRID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
}
"""
_OURS = '''"""Sums up each sequence, and sleeps in each execution, whatever its rows."""

import time

import numpy as np


class Model:
    inputs = {{"INPUT": ("FP32", [-1, 1])}}
    outputs = {{"OUTPUT": ("FP32", [-1, 1])}}

    def load(self, context):
        self.sums = {{}}

    def execute(self, inputs):
        time.sleep({delay_s})
        rows = zip(inputs["INPUT"].ravel(), inputs["START"].ravel(), inputs["CORRID"].ravel().tolist())
        for value, start, key in rows:
            self.sums[key] = value if start else self.sums[key] + value
        sums = [self.sums[key] for key in inputs["CORRID"].ravel().tolist()]
        return {{"OUTPUT": np.array(sums, np.float32).reshape(-1, 1)}}
'''
_TRITONS = '''"""Sums up each sequence, and sleeps in each execution, whatever its rows."""

import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.sums = {{}}

    def execute(self, requests):
        time.sleep({delay_s})
        answers = []
        for request in requests:
            value, start, sequence = (
                pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("INPUT", "START", "CORRID")
            )
            key = int(sequence.ravel()[0])
            self.sums[key] = value if start.ravel()[0] else self.sums[key] + value
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", self.sums[key])]))
        return answers
'''


@dataclass(frozen=True, slots=True)
class Recurrent:
    """An ONNX model with one state, named as its input and output. `first` is the state that a sequence begins with,
    for one row, whose axis is `axis`. `inputs` makes those of the steps of a sequence, by its number; those with a
    dimension have their row in front. `config`: beside backend, batch size and instances."""

    name: str
    state: tuple[str, str]
    output: str
    first: Array
    axis: int
    inputs: Callable[[int, int], list[dict[str, Array]]]
    config: str


def _speech(number: int, steps: int) -> list[dict[str, Array]]:
    """Chunks of sound as a client of the detector sends them: noise, in parts with a voice-like buzz, each chunk after
    the end of the one before."""
    random, samples = np.random.default_rng(number), steps * _CHUNK
    seconds = np.arange(samples) / RATE
    pitch = random.uniform(90, 250)
    buzz = sum(np.sin(2 * np.pi * pitch * overtone * seconds) / overtone for overtone in range(1, 12))
    loud = np.repeat(random.random(-(-samples // 4_000)) > 0.5, 4_000)[:samples]
    sound = (0.2 * buzz * loud + 0.01 * random.standard_normal(samples)).astype(np.float32)
    sound = np.concatenate([np.zeros(_CONTEXT, np.float32), sound])
    rate = np.array(RATE, np.int64)
    return [{"input": sound[None, at * _CHUNK : (at + 1) * _CHUNK + _CONTEXT], "sr": rate} for at in range(steps)]


def _numbers(number: int, steps: int) -> list[dict[str, Array]]:
    values = np.random.default_rng(number).integers(0, 100, steps).astype(np.float32)
    return [{"INPUT": value.reshape(1, 1)} for value in values]


VAD = Recurrent(
    "vad",
    ("state", "stateN"),
    "output",
    np.zeros((2, 1, 128), np.float32),
    1,
    _speech,
    "sequence_batching { max_sequence_idle_microseconds: 60000000 oldest { } "
    'state { input_name: "state" output_name: "stateN" } }',
)
FIXED = Recurrent(
    "fixed",
    ("STATE", "NEXT"),
    "OUTPUT",
    np.zeros((1, 1), np.float32),
    0,
    _numbers,
    "sequence_batching { max_sequence_idle_microseconds: 60000000 oldest { } "
    'state { input_name: "STATE" output_name: "NEXT" } }',
)
WIDE = replace(FIXED, name="wide", first=np.zeros((1, 2**16), np.float32))
"""256 KiB of state for each sequence."""

_GROWS = (
    "sequence_batching { max_sequence_idle_microseconds: 60000000 oldest { } "
    'state { input_name: "STATE" output_name: "NEXT" dims: -1 '
    'initial_state { name: "none" data_type: TYPE_FP32 dims: 0 zero_data: true } } }'
)
GROWING = Recurrent(
    "growing",
    ("STATE", "NEXT"),
    "OUTPUT",
    np.zeros((1, 0), np.float32),
    0,
    _numbers,
    f'{_GROWS} parameters {{ key: "paceline.pad" value {{ string_value: "STATE[1]" }} }}',
)
EXACT = replace(
    GROWING, name="exact", config=f'{_GROWS} parameters {{ key: "paceline.pad" value {{ string_value: "off" }} }}'
)


def write_fixed(folder: Path, products: int = 4, size: int = 1) -> Path:
    """Write the model of fixed cost: NEXT is STATE + INPUT, of `size` numbers, and OUTPUT is the first of them."""
    nodes = [
        helper.make_node("Add", ["STATE", "INPUT"], ["NEXT"]),
        helper.make_node("Gather", ["NEXT", "first"], ["sum"], axis=1),
    ]
    return _write(folder / "fixed.onnx", nodes, size, products)


def write_growing(folder: Path, products: int = 4) -> Path:
    """Write the model of fixed cost that remembers all: NEXT is STATE with INPUT behind it, and OUTPUT is its sum."""
    nodes = [
        helper.make_node("Concat", ["STATE", "INPUT"], ["NEXT"], axis=1),
        helper.make_node("ReduceSum", ["NEXT", "second"], ["sum"], keepdims=1),
    ]
    return _write(folder / "growing.onnx", nodes, None, products)


def _write(file: Path, nodes: Sequence[onnx.NodeProto], size: int | None, products: int) -> Path:
    """Write a model whose OUTPUT is the `sum` of its `nodes`, after products of matrices of which nothing remains,
    about 0.7 ms each on one thread. STATE and NEXT have the `size`."""
    weights = np.random.default_rng(0).standard_normal((_WIDTH, _WIDTH)).astype(np.float32) / np.float32(_WIDTH**0.5)
    made = [
        helper.make_node("ReduceSum", ["INPUT"], ["all"], keepdims=0),
        helper.make_node("Mul", ["all", "zero"], ["nothing"]),
        helper.make_node("Add", ["weights", "nothing"], ["product0"]),
        *(
            helper.make_node("MatMul", [f"product{number}", "weights"], [f"product{number + 1}"])
            for number in range(products)
        ),
        helper.make_node("ReduceSum", [f"product{products}"], ["total"], keepdims=0),
        helper.make_node("Mul", ["total", "zero"], ["cost"]),
        *nodes,
        helper.make_node("Add", ["sum", "cost"], ["OUTPUT"]),
    ]
    inputs, outputs = (
        [models.tensor(sent, "FP32", ("batch", 1)), models.tensor(kept, "FP32", ("batch", size))]
        for sent, kept in (("INPUT", "STATE"), ("OUTPUT", "NEXT"))
    )
    constants = [
        numpy_helper.from_array(weights, "weights"),
        numpy_helper.from_array(np.array(0, np.float32), "zero"),
        numpy_helper.from_array(np.array([0], np.int64), "first"),
        numpy_helper.from_array(np.array([1], np.int64), "second"),
    ]
    return models.write(models.model(made, inputs, outputs, constants), file)


def add(model: Recurrent, file: Path, repository: Path, device: str = "cpu") -> None:
    """Put the model into a repository, on a device, of a CPU one thread."""
    (repository / model.name / "1").mkdir(parents=True)
    (repository / model.name / "1" / "model.onnx").symlink_to(file.resolve())
    (repository / model.name / "config.pbtxt").write_text(
        f'backend: "onnxruntime" max_batch_size: 64 {instance_group(device)} {_ONE_THREAD} {model.config}'
    )


def plain_message(model: Recurrent) -> bytes:
    """A request for the model `PLAIN`, an identity of one tensor, as large as a step of `model`."""
    (inputs,) = model.inputs(0, 1)
    return infer_request(PLAIN, {"INPUT0": next(iter(inputs.values()))}).SerializeToString()


def add_python(repository: Path, delay_s: float, *, for_triton: bool) -> None:
    """Put the model in Python into a repository, for this server or Triton's, which gives its models requests rather
    than batches; its executions take `delay_s`."""
    (repository / PYTHON / "1").mkdir(parents=True)
    model = (_TRITONS if for_triton else _OURS).format(delay_s=delay_s)
    (repository / PYTHON / "1" / "model.py").write_text(model)
    (repository / PYTHON / "config.pbtxt").write_text(_PYTHON_CONFIG)


def messages(model: Recurrent, number: int, steps: int) -> list[bytes]:
    """The requests of a whole sequence, ready for the wire."""
    made = []
    for at, inputs in enumerate(model.inputs(number, steps)):
        flags = {"sequence_id": number + 1, "sequence_start": at == 0, "sequence_end": at == steps - 1}
        made.append(infer_request(model.name, inputs, parameters=flags).SerializeToString())
    return made


def alone(model: Recurrent, file: Path, steps: Sequence[dict[str, Array]]) -> list[Array]:
    """The output of each step of a sequence, run without a server and without others."""
    running, state, found = open_session(file), model.first, []
    for inputs in steps:
        output, state = running.run([model.output, model.state[1]], {**inputs, model.state[0]: state})
        found.append(output)
    return found
