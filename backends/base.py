"""The contract between the server and whatever runs a model.

Lives here: the value types that cross it and the three protocols. Must not: anything about one runtime.
A *request* on this side is a sequence of arrays, one per input of the served spec and in its order;
a *result* is the same for outputs. BYTES tensors are object arrays of `bytes`, BF16 rides as `uint16` bit patterns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

__all__ = [
    "Array",
    "Backend",
    "Device",
    "DeviceKind",
    "Execution",
    "GroupKind",
    "InstanceGroup",
    "ModelInstance",
    "ModelSource",
    "ModelSpec",
    "OpenModel",
    "TensorSpec",
    "Tensors",
]

Array = NDArray[Any]
Tensors = Sequence[Array]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output.

    `datatype` is the v2 name (`FP32`, `BYTES`, …). `dims` are the sizes of the axes, -1 where any size goes; in the
    spec of a batched model the batch axis is not among them. `utf8` says that BYTES elements must be valid UTF-8.
    """

    name: str
    datatype: str
    dims: tuple[int, ...]
    utf8: bool = False


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Inputs and outputs, in the model's own order. `batched`: every tensor has a batch axis in front of its `dims`."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batched: bool = False


class GroupKind(Enum):
    """Where `instance_group` wants its instances (`ModelInstanceGroup.Kind`)."""

    AUTO = "KIND_AUTO"
    GPU = "KIND_GPU"
    CPU = "KIND_CPU"
    MODEL = "KIND_MODEL"


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """`count` instances on the CPU, or on each of `gpus` (none named: each GPU there is). A count of 0 is "default"."""

    kind: GroupKind = GroupKind.AUTO
    count: int = 0
    gpus: tuple[int, ...] = ()


class DeviceKind(Enum):
    CPU = "cpu"
    GPU = "gpu"


@dataclass(frozen=True, slots=True)
class Device:
    """One place an instance can run on; `index` counts devices of its kind."""

    kind: DeviceKind = DeviceKind.CPU
    index: int = 0


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What a backend needs to open one version of a model.

    `path` is the model file (a backend without files ignores it). `declared` is the spec that the configuration
    spells out, dims whole, batch axis included; None where it leaves that to the model. `parameters` are the
    configuration's own `parameters`, `graph_level` its `optimization.graph.level` (None: not given), `accelerators`
    the GPU and CPU execution accelerators by name with their parameters, in order.
    """

    name: str
    path: Path
    declared: ModelSpec | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)
    graph_level: int | None = None
    accelerators: tuple[tuple[str, Mapping[str, str]], ...] = ()


@dataclass(frozen=True, slots=True)
class Execution:
    """One batch done: a result per request, in order, and where the time went (monotonic nanoseconds)."""

    results: Sequence[Tensors]
    input_ns: int
    infer_ns: int
    output_ns: int


class ModelInstance(Protocol):
    """Runs one batch at a time, on whichever thread calls it; never on two at once."""

    @property
    def device(self) -> Device: ...

    def execute(self, requests: Sequence[Tensors]) -> Execution:
        """Run `requests` as one batch. Blocks. Arrays are only read; results may be views of one shared output.

        Raises ExecutionError when the model fails or its outputs don't fit.
        """

    def close(self) -> None:
        """Give the instance's resources back; it isn't used afterwards."""


class OpenModel(Protocol):
    """One version of a model, opened."""

    @property
    def spec(self) -> ModelSpec:
        """What the model says of itself: dims whole, a batch axis included, `batched` false."""

    @property
    def platform(self) -> str:
        """Triton's name of the framework, such as `onnxruntime_onnx`."""

    def instance(self, spec: ModelSpec, device: Device) -> ModelInstance:
        """Make an instance that serves `spec` on `device`. Blocks; raises LoadError."""

    def close(self) -> None:
        """Give the model's own resources back; called after the last instance's close."""


class Backend(Protocol):
    """A runtime that opens models."""

    def devices(self, groups: Sequence[InstanceGroup]) -> tuple[Device, ...]:
        """One device per instance that `groups` ask for, by default what suits. LoadError for what isn't there."""

    def open(self, source: ModelSource, device: Device) -> OpenModel:
        """Open a model, its first instance being meant for `device`. Blocks; raises LoadError naming what is wrong."""
