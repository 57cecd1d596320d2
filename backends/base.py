"""The contract between the server and whatever runs a model.

Lives here: the protocols of models that serve, and the values that cross them besides tensors (`backends.spec`). Must
not: anything specific to one runtime, or what is asked of a model before it serves (`backends.trials`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from paceline.backends.errors import LoadError, StepHangs
from paceline.backends.model_call import OnCall
from paceline.backends.spec import Array, ModelSpec, Tensors
from paceline.backends.trials import Supervise, unsupervised


class GroupKind(Enum):
    """Where `instance_group` wants its instances (`ModelInstanceGroup.Kind`)."""

    AUTO = "KIND_AUTO"
    GPU = "KIND_GPU"
    CPU = "KIND_CPU"
    MODEL = "KIND_MODEL"


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """`count` instances on the CPU, or on each of `gpus` (empty: all GPUs there are). A count of 0 means "default"."""

    kind: GroupKind = GroupKind.AUTO
    count: int = 0
    gpus: tuple[int, ...] = ()


class DeviceKind(Enum):
    CPU = "cpu"
    GPU = "gpu"


@dataclass(frozen=True, slots=True)
class Device:
    """One place where an instance can run; `index` counts devices of its kind."""

    kind: DeviceKind = DeviceKind.CPU
    index: int = 0


@dataclass(frozen=True, slots=True)
class DeviceTensor:
    """A contiguous tensor in a device's memory, starting at `address`; valid for as long as `owner` is held."""

    owner: object
    address: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def reshape(self, shape: Sequence[int]) -> DeviceTensor:
        """The same elements in another `shape`, which must have as many."""
        return replace(self, shape=tuple(shape))


class DeviceBlock(Protocol):
    """Memory of GPU `gpu` that belongs to whoever holds the object: `size_bytes` bytes from `address` on. `is_lost`:
    the GPU is, and what was in this memory must not be used."""

    @property
    def gpu(self) -> int: ...

    @property
    def is_lost(self) -> bool: ...

    @property
    def address(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...

    def read(self, tensor: DeviceTensor) -> Array:
        """A copy of `tensor`, which lies here, in the host's memory. Blocks; on any thread. Raises InstanceErrors."""


Targets = Mapping[int, DeviceTensor]
"""Where to leave outputs, by index. Each value is memory to write to; its dtype and shape only tell its size."""


class Files(Protocol):
    """Owner of a model's files, which may be deleted once the model is loaded."""

    def keep(self) -> None:
        """Keep the files: they will be read again. Callable on any thread."""

    def release(self) -> None:
        """Undo one `keep`: the files won't be read again for it. Callable on any thread; blocks."""


class _Lasting:
    """Files of a repository, which stay without being asked to."""

    def keep(self) -> None:
        pass

    def release(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What a backend needs to open one version of a model.

    `path` is the model file (a backend without files ignores it). `declared` is the spec that the configuration gives,
    with complete dims including the batch axis; None if it leaves that to the model. `parameters` are the
    configuration's own `parameters`, `graph_level` its `optimization.graph.level` (None: not given), `accelerators` the
    GPU execution accelerators by name with their parameters, in order, `cpu_accelerators` those for the CPU.
    `op_libraries` are shared libraries with custom operators, which run in this process. `largest_rows`: the largest
    batch to expect, 0 if not known yet. `cuda_graphs`: capture what a GPU does for a batch once, and replay it.
    `decoupled`: it answers a request as often as it likes (`backends.open_request`). `files` is told if they will be
    read again. `calls` are the models that its code calls, by `on_call` (`backends.model_call`). `config`: the whole
    configuration as JSON, with the names of `model_config.proto`, for models that look at it. `why_raw`: why a decoder
    isn't to generate (`backends.generation`) but to be executed as it is, as its configuration wants; "" if it may.
    `supervise` runs what is executed while it is opened. `close_s`: how long a process of its own may take to end.
    """

    name: str
    path: Path
    declared: ModelSpec | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)
    graph_level: int | None = None
    accelerators: tuple[tuple[str, Mapping[str, str]], ...] = ()
    op_libraries: tuple[Path, ...] = ()
    cpu_accelerators: tuple[tuple[str, Mapping[str, str]], ...] = ()
    largest_rows: int = 0
    cuda_graphs: bool = False
    decoupled: bool = False
    files: Files = field(default_factory=_Lasting)
    calls: tuple[str, ...] = ()
    on_call: OnCall | None = None
    config: str = ""
    why_raw: str = ""
    supervise: Supervise = field(default_factory=lambda: unsupervised)
    close_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Execution:
    """An executed batch: a result per request, in order, and where the time went (monotonic nanoseconds). `waited_ns`
    is time spent waiting for another batch to be computed first; the other times don't include it. `ran`: whether there
    was anything to execute; all requests may have been left out, as each has something wrong with it.

    An exception in place of a result concerns that request alone.
    """

    results: Sequence[Tensors | Exception]
    input_ns: int
    infer_ns: int
    output_ns: int
    waited_ns: int = 0
    ran: bool = field(default=True, kw_only=True)


class ModelInstance(Protocol):
    """Runs one batch at a time, on whichever thread calls it; never two at once."""

    @property
    def device(self) -> Device: ...

    def execute(self, requests: Sequence[Tensors], padded_rows: int = 0) -> Execution:
        """Run `requests` as one batch. Blocks. Arrays are only read; results may be views of one shared output.

        `padded_rows` is the number of rows that the model is to see: missing rows are added as padding and cut off the
        outputs again. Nothing is padded if it is less than the requests' own rows, or if the spec isn't `paddable`.
        It is at least the spec's `fixed_rows`, whatever the caller gives.

        Raises ExecutionError if the model fails or its outputs don't fit the spec, InstanceError whatever the requests.
        """

    def close(self) -> None:
        """Release the instance's resources; it isn't used afterwards."""


@runtime_checkable
class ExecutesMadeUp(Protocol):
    """An instance that logs what a model says of its errors."""

    def execute_made_up(self, requests: Sequence[Tensors], padded_rows: int = 0) -> Execution:
        """As `execute`, without a log line: nobody has sent these requests, and they needn't be good ones."""


@runtime_checkable
class Abandonable(Protocol):
    """An instance whose executions, or a model whose loading instances can be ended, whatever they do."""

    def abandon(self) -> None:
        """Make what is executing or loading fail soon; nothing executes or loads afterwards. Callable on any thread;
        doesn't block. `close` is called once nothing executes or loads any more."""


@runtime_checkable
class CanEnd(Protocol):
    """An instance that may end by itself, even while it executes nothing."""

    @property
    def has_executed(self) -> bool:
        """Whether it has executed anything without an error since `when_lost` was called."""

    @property
    def has_ended(self) -> bool:
        """Whether it has ended by itself, or was closed or abandoned."""

    def when_lost(self, call: Callable[[BaseException], None]) -> None:
        """Call `call` with an InstanceLost, on whichever thread, once the instance ends; before this returns if it
        already has; never if it was closed or abandoned. `close` is called in any case."""


@runtime_checkable
class StepsAlone(Protocol):
    """An instance that executes on a thread of its own, whatever it is handed over meanwhile."""

    @property
    def began_ns(self) -> int:
        """When the execution began that goes on now; 0 if there is none."""

    def give_up(self, limit_ns: int) -> StepHangs:
        """End everything with the error returned: an execution takes longer than `limit_ns`. On any thread."""


@runtime_checkable
class HoldsSequences(Protocol):
    """An instance that keeps something of the sequences whose steps it executes."""

    def sequence_over(self, sequence: int | str | bytes, why: str) -> None:
        """A sequence that it holds is over, for the reason `why`, a word. It learns of that before it executes anything
        handed over later. Doesn't block; on the event loop, or before it serves on the thread that warms it up."""


Allocate = Callable[[int, tuple[int, ...]], Array | None]
"""`allocate(index, shape)`: memory for that input, instead of the caller's own; None if there is none."""


@runtime_checkable
class ProvidesBuffers(Protocol):
    """An instance with memory of its own for joined inputs, which needs no further copy of what is written there.
    `pads`: also not if padding is left to it, as elsewhere what follows the rows is a copy of all of them."""

    @property
    def pads(self) -> bool: ...

    def buffer(self, index: int, shape: tuple[int, ...]) -> Array | None:
        """As `Allocate`, for the batch that is executed next: an input passed as exactly this one array isn't copied.
        The array may be written and passed only until that execution. What an earlier call gave for the same input is
        no longer valid. On the thread that executes; raises as `execute`."""

    def release_buffers(self) -> None:
        """The arrays that `buffer` gave won't be executed, or have been. On the thread that executes."""


@runtime_checkable
class Slot(ModelInstance, ProvidesBuffers, Protocol):
    """One of the places of a `Slotted` instance, where a batch is prepared while another one computes."""

    @property
    def gpu(self) -> int | None:
        """The GPU whose memory may hold inputs and receive outputs."""

    def execute(
        self,
        requests: Sequence[Sequence[Array | DeviceTensor]],
        padded_rows: int = 0,
        targets: Sequence[Targets] = (),
    ) -> Execution:
        """As `ModelInstance.execute`. The GPU itself copies what lies in memory of `gpu`, there and back.

        `targets` has, for each request, the outputs to leave in device memory and where; empty if no request wants
        that. An output left there is a `DeviceTensor` among the results. If one of a request's targets is too small, or
        one of those outputs can't be left in device memory, all outputs of that request are arrays.
        """

    def lease(self, size_bytes: int) -> DeviceBlock:
        """At least `size_bytes` of memory of `gpu`, with arbitrary contents, to leave outputs in that are inputs again
        later, of whichever instance. On the thread that executes; raises OutOfMemory, or as `execute`."""

    def prepare(self, requests: Sequence[Tensors], padded_rows: int = 0) -> None:
        """Before `start`, on the thread that it uses: execute, and keep what makes later batches of that shape fast."""

    def start(self, name: str, function: Callable[[], None]) -> None:
        """Run `function`, which is to call `execute`, on the slot's own thread, from then on named `name`."""


@runtime_checkable
class Slotted(Protocol):
    """An instance that can take a batch while it computes another, through several slots. Each slot executes one batch
    at a time. They share one device, so a hang in one slot makes all of them suspect."""

    @property
    def slots(self) -> Sequence[Slot]: ...


class OpenModel(Protocol):
    """One version of a model, opened."""

    @property
    def spec(self) -> ModelSpec:
        """What the model declares: complete dims including a batch axis, `batched` false. Inputs marked `optional` here
        may be left out; clients see them only if a configuration names them."""

    @property
    def platform(self) -> str:
        """Triton's name for the framework, such as `onnxruntime_onnx`."""

    def instance(self, spec: ModelSpec, device: Device) -> ModelInstance:
        """Create an instance that serves `spec` on `device`. Blocks; raises LoadError."""

    def close(self) -> None:
        """Release the model's own resources; called after the last instance's close."""


@runtime_checkable
class CompletesConfig(Protocol):
    """A model that was shown its configuration, and has filled in what that left open."""

    @property
    def completed_config(self) -> str:
        """As `ModelSource.config`."""

    def declare(self, spec: ModelSpec | None) -> None:
        """What the completed configuration says of its tensors; None if it leaves a datatype open. Before anything
        else."""

    def configure(self, config: str) -> None:
        """With this configuration it will serve. Before any instance is made."""


@runtime_checkable
class Rounding(Protocol):
    """A model that may round a row's numbers differently depending on the other rows of its batch."""

    @property
    def rounds_by(self) -> str:
        """What causes it, to be named in a message; "" if nothing is known to."""


class Backend(Protocol):
    """A runtime that opens models."""

    def devices(self, groups: Sequence[InstanceGroup]) -> tuple[Device, ...]:
        """One device per instance that `groups` ask for, or what suits the backend. LoadError if one is missing."""

    def open(self, source: ModelSource, device: Device) -> OpenModel:
        """Open a model whose first instance is meant for `device`. Blocks; raises LoadError naming what is wrong."""


def on_cpu(group: InstanceGroup) -> list[Device]:
    """The CPU, once per instance; one instance if the group gives no count."""
    return [Device(DeviceKind.CPU)] * max(group.count, 1)


def on_gpus(group: InstanceGroup, gpus: int) -> list[Device]:
    """Each GPU of the group (all `gpus` if it names none), once per instance; one instance each if it gives no count.

    LoadError for a GPU that isn't among the `gpus` there are.
    """
    for index in group.gpus:
        if not 0 <= index < gpus:
            raise LoadError(f"instance_group: expected GPUs below {gpus}, the number there are, got GPU {index}")
    indices = group.gpus or range(gpus)
    return [Device(DeviceKind.GPU, index) for index in indices for _ in range(max(group.count, 1))]
