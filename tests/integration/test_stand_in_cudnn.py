"""Convolutional models of ONNX Runtime's CUDA provider on the stand-in (`tests/cuda/stand_in.py`), compared with the
CPU's answers."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import onnx
import onnxruntime as ort  # type: ignore[import-untyped,unused-ignore]
import pytest
from onnx import helper, numpy_helper

from paceline.protos import inference_pb2 as pb
from tests import models
from tests.harness import REPO
from tests.integration.stand_in_server import GPUS, Served, libraries
from tests.wire import infer

__all__ = ["libraries"]

ROWS = (1, 8, 3, 5, 2, 8, 7, 1, 4, 6, 8, 8, 2)
SIZES = 'parameters { key: "paceline.batch_sizes" value { string_value: "%s" } }'
EXACT = (
    "optimization { execution_accelerators { gpu_execution_accelerator { "
    'name: "cuda" parameters { key: "use_tf32" value: "0" } %s } } }'
)
OWN_PROCESS = 'parameters { key: "paceline.own_process" value { string_value: "true" } }'
GRAPHED = f"""{EXACT % 'parameters { key: "enable_cuda_graph" value: "1" }'} {SIZES % "1,2,4,8,16"}"""


class Net:
    """A model under construction: its nodes and weights; `x` is the name of the last node's output."""

    def __init__(self, seed: int = 1) -> None:
        self._chance = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.x = "INPUT0"

    def weight(self, *shape: int, least: float | None = None) -> str:
        array = self._chance.standard_normal(shape, np.float32) * np.float32(math.prod(shape[1:]) ** -0.5)
        array = array if least is None else np.abs(array) + np.float32(least)
        self.weights.append(numpy_helper.from_array(array, f"w{len(self.weights)}"))
        return self.weights[-1].name

    def add(self, operator: str, *inputs: str, **attributes: object) -> str:
        self.x = f"x{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [self.x], self.x, **attributes))
        return self.x

    def conv(self, x: str, shape: Sequence[int], *, bias: bool = True, **attributes: object) -> str:
        given = [self.weight(*shape), *([self.weight(shape[0])] if bias else [])]
        return self.add("Conv", x, *given, **attributes)

    def model(self, shape: Sequence[int | str], result: Sequence[int | str]) -> onnx.ModelProto:
        self.nodes[-1].output[0] = "OUTPUT0"
        inputs, outputs = [["batch", *shape]], [["batch", *result]]
        return models.model(
            self.nodes,
            [models.tensor("INPUT0", "FP32", one) for one in inputs],
            [models.tensor("OUTPUT0", "FP32", one) for one in outputs],
            self.weights,
            opset=18,
        )


def convnet() -> onnx.ModelProto:
    """A bit of everything that image models consist of, for images of 3 x 19 x 14."""
    net = Net()
    x = net.add("Relu", net.conv("INPUT0", (8, 3, 5, 3), strides=[2, 1], pads=[2, 1, 2, 1]))
    x = net.add("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    short = net.conv(x, (12, 8, 1, 1))
    deep = net.add("Relu", net.conv(x, (8, 2, 3, 3), group=4, pads=[2, 2, 2, 2], dilations=[2, 2]))
    deep = net.conv(deep, (12, 8, 3, 3), bias=False, pads=[1, 1, 1, 1])
    x = net.add("Relu", net.add("Add", deep, short))
    learned = [net.weight(12), net.weight(12), net.weight(12), net.weight(12, least=0.5)]
    x = net.add("BatchNormalization", x, *learned)
    x = net.add("AveragePool", x, kernel_shape=[3, 2], pads=[1, 0, 1, 0])
    x = net.add("Relu", net.conv(x, (12, 1, 3, 3), group=12, pads=[1, 0, 1, 2]))
    x = net.add("Flatten", net.add("GlobalAveragePool", x))
    net.add("Gemm", x, net.weight(12, 10), net.weight(10))
    return net.model((3, 19, 14), (10,))


def signals() -> onnx.ModelProto:
    """Convolutions along one axis, of signals of 2 x 40."""
    net = Net(2)
    x = net.add("Relu", net.conv("INPUT0", (6, 2, 7), strides=[2], pads=[3, 3]))
    x = net.conv(x, (4, 3, 3), group=2, dilations=[3])
    net.add("MaxPool", x, kernel_shape=[2], strides=[2])
    return net.model((2, 40), (4, 7))


class ServedNet(Served):
    """`Served` with `model` instead of the perceptron."""

    def __init__(self, folder: Path, libraries: Path, model: onnx.ModelProto, config: str, seed: str = "") -> None:
        super().__init__(folder, libraries, config, STAND_IN_SEED=seed)
        path = models.write(model, folder / "m" / "1" / "model.onnx")
        self.cpu = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        self.shape = tuple(self.cpu.get_inputs()[0].shape[1:])


@pytest.mark.parametrize(("config", "seed"), [(EXACT % "", "3"), (GRAPHED, "")], ids=["plain-random", "graphs-late"])
def test_convolutions_match_the_cpus_in_batches_of_any_size(
    config: str, seed: str, libraries: Path, tmp_path: Path
) -> None:
    with ServedNet(tmp_path, libraries, convnet(), f"{GPUS % ''} {config}", seed) as served:
        for number, rows in enumerate(ROWS):
            served.check(rows, number)
        served.check_concurrently(clients=8, requests=15)
        assert served.metric("nv_inference_exec_count", model="m", version="1") < len(ROWS) + 8 * 15
        assert not [one for one in served.server.log if one["level"] in ("WARNING", "ERROR")]


def test_convolutions_of_signals_match_the_cpus(libraries: Path, tmp_path: Path) -> None:
    with ServedNet(tmp_path, libraries, signals(), f"{GPUS % ''} {EXACT % ''}") as served:
        for number, rows in enumerate(ROWS):
            served.check(rows, number)


@pytest.mark.parametrize("apart", ["", OWN_PROCESS], ids=["here", "own-process"])
def test_too_small_images_are_refused_without_affecting_other_requests(
    apart: str, libraries: Path, tmp_path: Path
) -> None:
    """ONNX Runtime itself would answer the second such image with what is stored behind it in the GPU's memory."""
    net = Net()
    net.conv(net.add("Relu", net.conv("INPUT0", (4, 3, 3, 3))), (2, 4, 5, 5))
    model = net.model((3, "h", "w"), (2, "i", "j"))
    with ServedNet(tmp_path, libraries, model, f"{GPUS % ''} {EXACT % ''} {apart}") as served:

        def client(number: int) -> None:
            for turn in range(6):
                given = np.full((1 + turn % 2, 3, 4, 6), number, np.float32)
                with pytest.raises(grpc.RpcError) as refusal:
                    served.stub.ModelInfer(infer("m", {"INPUT0": given}), timeout=60)
                assert "Invalid input shape" in refusal.value.details(), refusal.value
                served.check(1 + (number + turn) % 3, number)

        served.shape = (3, 12, 9)
        with ThreadPoolExecutor(6) as threads:
            list(threads.map(client, range(6)))
        assert served.metric("paceline_lost_instances", model="m", version="1") == 0


def in_a_process(source: str, *arguments: object, libraries: Path) -> list[str]:
    """The output of `source`, by line. There, `session` opens a model on the GPU, and `plans` counts the plans made."""
    head = """
import ctypes, sys
import numpy as np, onnxruntime as ort
plans = ctypes.CDLL("libcudnn.so.9").stand_in_plans
def session(path, **options):
    quiet = ort.SessionOptions()
    quiet.log_severity_level = 4
    given = {"use_tf32": "0", "cudnn_conv_algo_search": "HEURISTIC", **options}
    made = ort.InferenceSession(path, quiet, [("CUDAExecutionProvider", given), "CPUExecutionProvider"])
    made.disable_fallback()
    return made
def ask(of, *shape):
    return of.run(None, {"INPUT0": np.ones(shape, np.float32)})[0]
"""
    command = [sys.executable, "-c", head + source, *map(str, arguments)]
    env = {**os.environ, "LD_LIBRARY_PATH": str(libraries)}
    run = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return [*run.stdout.splitlines(), *run.stderr.splitlines()]


def test_onnxruntime_keeps_only_the_plan_for_each_convolutions_last_shape(libraries: Path, tmp_path: Path) -> None:
    """This is why `bench/gpu_models.py` has ResNets in batches of one size."""
    path = models.write(convnet(), tmp_path / "m.onnx")
    source = """
opened, before = session(sys.argv[1]), 0
for rows in (4, 4, 8, 8, 4, 8, 1, 1, 4):
    ask(opened, rows, 3, 19, 14)
    print(plans() - before)
    before = plans()
"""
    convolutions = sum(node.op_type == "Conv" for node in convnet().graph.node)
    expected = [convolutions if changed else 0 for changed in (1, 0, 1, 0, 1, 1, 1, 0, 1)]
    assert in_a_process(source, path, libraries=libraries) == [str(one) for one in expected]


def test_onnxruntime_answers_wrongly_with_fused_biases(libraries: Path, tmp_path: Path) -> None:
    """Why `fuse_conv_bias` is refused. If this test fails, there is a version that may be allowed it."""
    path = models.write(convnet(), tmp_path / "m.onnx")
    source = """
for fused in "01":
    opened = session(sys.argv[1], fuse_conv_bias=fused)
    right = ort.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
    print(all(np.allclose(ask(opened, n, 3, 19, 14), ask(right, n, 3, 19, 14), atol=1e-4) for n in (2, 5)))
"""
    assert in_a_process(source, path, libraries=libraries) == ["True", "False"]


@pytest.mark.parametrize(
    ("options", "shape", "said"),
    [
        ({}, (2, 3, 4, 5, 6), "stand-in: no cuDNN list so long as that of attribute 902"),
        ({"prefer_nhwc": "1"}, (2, 3, 9, 9), "stand-in: no cuDNN tensor with a step of"),
    ],
    ids=["three axes", "channels last"],
)
def test_convolutions_unsupported_by_the_stand_in_fail_with_its_message(
    options: dict[str, str], shape: tuple[int, ...], said: str, libraries: Path, tmp_path: Path
) -> None:
    net = Net()
    net.conv("INPUT0", (4, 3, *[1] * (len(shape) - 2)))
    path = models.write(net.model(shape[1:], (4, *shape[2:])), tmp_path / "m.onnx")
    source = f"""
try:
    ask(session(sys.argv[1], **{options!r}), *{shape!r})
except Exception as error:
    print(type(error).__name__)
"""
    lines = in_a_process(source, path, libraries=libraries)
    assert lines[0] == "EPFail" or lines[0] == "Fail", lines
    assert any(line.startswith(said) for line in lines), lines


@pytest.mark.parametrize("config", [GRAPHED, OWN_PROCESS], ids=["graphs", "own process"])
def test_convolutional_model_is_refused_if_cudnn_is_missing(config: str, libraries: Path, tmp_path: Path) -> None:
    """Its session opens all the same, but each request would fail."""
    without = tmp_path / "libraries"
    shutil.copytree(libraries, without, ignore=shutil.ignore_patterns("libcudnn*"))
    net = Net()
    net.conv("INPUT0", (4, 3, 1, 1))
    models.write(net.model((3, 9, 9), (4, 9, 9)), tmp_path / "models" / "conv" / "1" / "model.onnx")
    (tmp_path / "models" / "conv" / "config.pbtxt").write_text(f"{GPUS % ''} {config}")
    with Served(tmp_path / "models", without, GPUS % "") as served:
        served.check(3)
        assert not served.stub.ModelReady(pb.ModelReadyRequest(name="conv")).ready
        why = next(one for one in served.said if "failed to load" in one)
        assert "its warm-up" in why
        assert "cuDNN is unavailable" in why


def test_convolutional_model_that_cudnn_refuses_is_not_ready_and_stderr_has_cudnns_reason(
    libraries: Path, tmp_path: Path
) -> None:
    net = Net()
    net.conv("INPUT0", (4, 3, 1, 1, 1))
    models.write(net.model((3, 4, 5, 6), (4, 4, 5, 6)), tmp_path / "conv" / "1" / "model.onnx")
    (tmp_path / "conv" / "config.pbtxt").write_text(GPUS % "")
    with Served(tmp_path, libraries, GPUS % "") as served:
        served.check(3)
        assert not served.stub.ModelReady(pb.ModelReadyRequest(name="conv")).ready
        why = next(one for one in served.said if "failed to load" in one)
        assert "its warm-up failed" in why
        assert "Failed to initialize CUDNN Frontend" in why
        assert any("SetAttribute CUDNN_ATTR_TENSOR_DIMENSIONS" in one for one in served.server.stderr)
