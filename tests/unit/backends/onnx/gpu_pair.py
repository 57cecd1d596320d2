"""A model on the GPU beside the same on the CPU, for tests that compare them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
import onnx
from onnx import helper

from paceline.backends.base import Device, DeviceKind, ModelSource, Slot
from paceline.backends.cuda.accelerator import CudaAccelerator
from paceline.backends.onnx.backend import OnnxBackend
from paceline.backends.onnx.staged import StagedInstance
from paceline.backends.spec import Array, ModelSpec, TensorSpec
from tests import models

T = TypeVar("T")
CPU, GPU = Device(), Device(DeviceKind.GPU)
GRAPHS = (("cuda", {"enable_cuda_graph": "1", "use_tf32": "0"}),)
EXACT = (("cuda", {"use_tf32": "0"}),)
MLP = ModelSpec((TensorSpec("INPUT0", "FP32", (64,)),), (TensorSpec("OUTPUT0", "FP32", (16,)),), batched=True)
IMAGES = ModelSpec(
    (TensorSpec("INPUT0", "FP32", (3, 16, 16)),), (TensorSpec("OUTPUT0", "FP32", (1, 16, 16)),), batched=True
)


class Pair:
    """A model on the GPU, with `accelerators` as its options, and on the CPU."""

    def __init__(
        self,
        folder: Path,
        model: onnx.ModelProto,
        spec: ModelSpec,
        accelerator: CudaAccelerator,
        accelerators: Any = EXACT,
    ) -> None:
        path = models.write(model, folder / "model.onnx")
        backend = OnnxBackend(accelerators=lambda device: accelerator if device == GPU else None)
        source = ModelSource("m", path, accelerators=accelerators)
        self.opened = backend.open(source, GPU)
        instance = self.opened.instance(spec, GPU)
        assert isinstance(instance, StagedInstance)
        self.gpu = instance
        self.cpu = backend.open(ModelSource("m", path), CPU).instance(spec, CPU)

    def check(self, slot: Slot, requests: Sequence[Sequence[Array]], padded_rows: int = 0) -> None:
        ours = slot.execute(requests, padded_rows).results
        reference = self.cpu.execute(requests, padded_rows).results
        for one, other in zip(ours, reference, strict=True):
            assert not isinstance(one, Exception)
            assert not isinstance(other, Exception)
            for got, expected in zip(one, other, strict=True):
                assert got.dtype == expected.dtype
                np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def floats(rng: np.random.Generator, *shape: int) -> tuple[Array]:
    return (rng.standard_normal(shape).astype(np.float32),)


def on_thread_of(slot: Slot, function: Callable[[], T]) -> T:
    answers: SimpleQueue[Any] = SimpleQueue()

    def run() -> None:
        try:
            answers.put((function(), None))
        except BaseException as error:  # noqa: BLE001 - raised below
            answers.put((None, error))

    slot.start("slot", run)
    result, error = answers.get(timeout=60)
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def convolved(channels: int, *dims: Any) -> onnx.ModelProto:
    """Two convolutions of images of 3 planes, with `channels` in between."""
    rng = np.random.default_rng(1)
    weights = [
        onnx.numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32) / 9, name)
        for name, shape in (("A", (channels, 3, 3, 3)), ("B", (1, channels, 3, 3)))
    ]
    nodes = [
        helper.make_node("Conv", ["INPUT0", "A"], ["X"]),
        helper.make_node("Conv", ["X", "B"], ["OUTPUT0"], pads=[2, 2, 2, 2]),
    ]
    tensors = [
        models.tensor(name, "FP32", ["batch", planes, *dims]) for name, planes in (("INPUT0", 3), ("OUTPUT0", 1))
    ]
    return models.model(nodes, tensors[:1], tensors[1:], weights)


@contextmanager
def beside(step: Callable[[], object]) -> Iterator[None]:
    """Meanwhile, another thread takes `step` again and again."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.is_set():
            step()

    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(repeat)
        try:
            yield
        finally:
            ended.set()
        running.result(60)
