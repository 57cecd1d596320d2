"""The contract between the server and whatever runs a model.

Lives here: the value types that cross it and the protocols. Must not: anything about one runtime.
A *request* on this side is a sequence of arrays, one per input of the served spec and in its order, in the shapes that
the model sees (`TensorSpec.model_dims`); a *result* is the same for outputs. What an optional tensor leaves out is
`MISSING` in its place, for all requests of a batch or for none. BYTES tensors are object arrays of `bytes`, BF16 rides
as `uint16` bit patterns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "MISSING",
    "Abandonable",
    "Array",
    "Backend",
    "BatchInput",
    "BatchInputKind",
    "BatchOutput",
    "Device",
    "DeviceKind",
    "DeviceTensor",
    "Execution",
    "Files",
    "GroupKind",
    "InstanceGroup",
    "ModelInstance",
    "ModelSource",
    "ModelSpec",
    "Mortal",
    "OpenModel",
    "Room",
    "Roomy",
    "Rounding",
    "Slot",
    "Slotted",
    "Supervise",
    "Targets",
    "TensorSpec",
    "Tensors",
    "Triable",
    "Trial",
    "directly",
    "fits",
]

T = TypeVar("T")

Array = NDArray[Any]
Tensors = Sequence[Array]

MISSING: Final[Array] = np.empty(0, np.bool_)
"""Stands where an optional tensor was left out. Known by identity (`is`), never by what it holds."""


def fits(shape: Sequence[int], dims: Sequence[int]) -> bool:
    """Whether `shape` is one of those that `dims` allow, in which -1 is any size."""
    return len(shape) == len(dims) and all(dim in (-1, size) for size, dim in zip(shape, dims, strict=True))


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output.

    `datatype` is the v2 name (`FP32`, `BYTES`, …). `dims` are the sizes of the axes as clients see them, -1 where any
    size goes; in the spec of a batched model the batch axis is not among them. `utf8` says that BYTES elements must be
    valid UTF-8. `reshape`: the dims that the model sees instead, of as many elements.

    `optional`: requests (of an output: results) may do without it. `ragged`: requests of any dims share a batch, and
    the model sees all their elements one after the other, as a vector. `shape_tensor`: has no batch axis even if the
    model is batched; the requests of a batch all have the same one, which the model sees once. `any_rank`: behind the
    batch axis, if there is one, there may be any number of axes, of any size; `dims` say nothing then.
    """

    name: str
    datatype: str
    dims: tuple[int, ...]
    utf8: bool = False
    reshape: tuple[int, ...] | None = None
    optional: bool = False
    ragged: bool = False
    shape_tensor: bool = False
    any_rank: bool = False

    @property
    def model_dims(self) -> tuple[int, ...]:
        """`dims` as the model sees them."""
        return self.dims if self.reshape is None else self.reshape

    def dims_of(self, rank: int) -> tuple[int, ...]:
        """`dims`; of a tensor that may have any rank, what they are for one of `rank` axes."""
        return (-1,) * rank if self.any_rank else self.dims


class BatchInputKind(Enum):
    """What an input made per batch tells of an input of the requests (`BatchInput.Kind`)."""

    ELEMENT_COUNT = "BATCH_ELEMENT_COUNT"
    ACCUMULATED_ELEMENT_COUNT = "BATCH_ACCUMULATED_ELEMENT_COUNT"
    ACCUMULATED_ELEMENT_COUNT_WITH_ZERO = "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO"
    MAX_ELEMENT_COUNT_AS_SHAPE = "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE"
    ITEM_SHAPE = "BATCH_ITEM_SHAPE"
    ITEM_SHAPE_FLATTEN = "BATCH_ITEM_SHAPE_FLATTEN"


@dataclass(frozen=True, slots=True)
class BatchInput:
    """Inputs of the model, `targets`, that no request brings: made of the shapes that input `source` has in a batch."""

    kind: BatchInputKind
    targets: tuple[str, ...]
    datatype: str
    source: str


@dataclass(frozen=True, slots=True)
class BatchOutput:
    """Outputs, `targets`, cut not by rows but by the shapes of input `source`: a free dim of theirs (the batch axis is
    one) has the size that the same axis of a request's `source` has."""

    targets: tuple[str, ...]
    source: str


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Inputs and outputs, in the model's own order. `batched`: every tensor has a batch axis in front of its `dims`,
    but for shape tensors. `batch_inputs` are not among `inputs`: clients neither see nor send them."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batched: bool = False
    batch_inputs: tuple[BatchInput, ...] = ()
    batch_outputs: tuple[BatchOutput, ...] = ()

    @property
    def by_rows(self) -> bool:
        """Whether rows are all there is to it: each tensor of a batch is stacked and cut along its first axis."""
        special = (tensor.optional or tensor.shape_tensor for tensor in (*self.inputs, *self.outputs))
        return self.paddable and not any(special)

    @property
    def paddable(self) -> bool:
        """Whether a batch may be filled up with rows: not where something else than rows joins or cuts tensors."""
        return not (self.batch_inputs or self.batch_outputs or any(tensor.ragged for tensor in self.inputs))


@dataclass(frozen=True, slots=True)
class Trial:
    """What a model shows when it runs. `spec`: what it says of itself, with the outputs' dims as they were seen;
    `why_not`: what speaks against stacking rows, "" if nothing, or why that couldn't be found out. `deadly`: it ended
    the process in which it was tried."""

    spec: ModelSpec
    why_not: str = ""
    deadly: bool = False


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
class DeviceTensor:
    """Elements one after the other in a device's memory, from `address` on, which stays as long as `owner` is held."""

    owner: object
    address: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def reshape(self, shape: Sequence[int]) -> DeviceTensor:
        """The same elements in another shape, of as many elements."""
        return replace(self, shape=tuple(shape))


Targets = Mapping[int, DeviceTensor]
"""Where outputs, by index, are to be left; what has that room. Dtypes and shapes say no more than how much it is."""


class Files(Protocol):
    """Whoever has a model's files, which may go once it is loaded."""

    def keep(self) -> None:
        """Let them stay: they will be read again. On any thread."""

    def let_go(self) -> None:
        """They won't any more, as often as they were kept. On any thread; blocks."""


class _Lasting:
    """Those of a repository stay without being asked to."""

    def keep(self) -> None:
        pass

    def let_go(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What a backend needs to open one version of a model.

    `path` is the model file (a backend without files ignores it). `declared` is the spec that the configuration
    spells out, dims whole, batch axis included; None where it leaves that to the model. `parameters` are the
    configuration's own `parameters`, `graph_level` its `optimization.graph.level` (None: not given), `accelerators`
    the GPU execution accelerators by name with their parameters, in order, `cpu_accelerators` those for the CPU,
    `op_libraries` shared libraries with operators of the model's own, which run in this process. `largest_rows`: the
    largest batch that it will see, as far as that is known yet; else 0. `cuda_graphs`: what a GPU does for a batch is
    to be captured once and replayed. `files` is whom to tell that they will be read again.
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
    files: Files = field(default_factory=_Lasting)


@dataclass(frozen=True, slots=True)
class Execution:
    """One batch done: a result per request, in order, and where the time went (monotonic nanoseconds). `waited_ns`, for
    another batch to be computed first, is in none of the others.

    An exception in the place of a result is what one request meets and the others don't.
    """

    results: Sequence[Tensors | Exception]
    input_ns: int
    infer_ns: int
    output_ns: int
    waited_ns: int = 0


class ModelInstance(Protocol):
    """Runs one batch at a time, on whichever thread calls it; never on two at once."""

    @property
    def device(self) -> Device: ...

    def execute(self, requests: Sequence[Tensors], padded_rows: int = 0) -> Execution:
        """Run `requests` as one batch. Blocks. Arrays are only read; results may be views of one shared output.

        `padded_rows` is how many rows the model is to see; what is missing to that is filled up, and cut off the
        outputs again. Less than the requests' own rows, or a spec that isn't `paddable`: nothing is filled up.

        Raises ExecutionError when the model fails or its outputs don't fit, SessionError when the instance as a whole
        is at fault, whatever the requests.
        """

    def close(self) -> None:
        """Give the instance's resources back; it isn't used afterwards."""


@runtime_checkable
class Abandonable(Protocol):
    """An instance whose executions can be ended, whatever they do; or a model, with what is becoming an instance."""

    def abandon(self) -> None:
        """Have what executes, or loads, fail soon, and nothing do so any more. On any thread, and without blocking;
        `close` follows once nothing does."""


@runtime_checkable
class Mortal(Protocol):
    """An instance that may end by itself, also while it executes nothing."""

    @property
    def has_executed(self) -> bool:
        """Whether it has executed anything, without an error, since `when_lost` was called."""

    @property
    def has_ended(self) -> bool:
        """Whether it has, or was closed or abandoned."""

    def when_lost(self, call: Callable[[BaseException], None]) -> None:
        """Have `call` called, on whichever thread, with an InstanceLost once it has ended, if it has before this
        returns; not if it was closed or abandoned. `close` follows all the same."""


Room = Callable[[int, tuple[int, ...]], Array | None]
"""Where input number so and so of that shape may be written, rather than to memory of one's own; None: nowhere."""


@runtime_checkable
class Roomy(Protocol):
    """An instance that has memory of its own for what is joined, from which it needn't be copied again."""

    def room(self, index: int, shape: tuple[int, ...]) -> Array | None:
        """`Room`, for the batch that is executed next: if all of that input is one array, this one, nothing is copied.
        It is written to and given before that, and not afterwards. What was there before is gone. On the thread that
        executes; raises as `execute`."""

    def forget_rooms(self) -> None:
        """There is no batch of what was asked for, or it is executed. On that thread."""


@runtime_checkable
class Slot(ModelInstance, Roomy, Protocol):
    """One of the places of a `Slotted` instance, where a batch is got ready while another's computes."""

    @property
    def gpu(self) -> int | None:
        """The GPU in whose memory inputs may lie and outputs be left."""

    def execute(
        self,
        requests: Sequence[Sequence[Array | DeviceTensor]],
        padded_rows: int = 0,
        targets: Sequence[Targets] = (),
    ) -> Execution:
        """As `ModelInstance.execute`. What lies in memory of `gpu` is copied there and back by the GPU itself.

        `targets` says of each request which outputs are to be left where; none: no request wants that. An output that
        was left there is a `DeviceTensor` among the results. If one of a request's has too little room, or can't be
        left anywhere, all of them are arrays.
        """

    def prepare(self, requests: Sequence[Tensors], padded_rows: int = 0) -> None:
        """Execute, on the thread that `start` has run things, and remember what makes that shape quick. Before `start`.
        Blocks; raises as `execute`."""

    def start(self, name: str, function: Callable[[], None]) -> None:
        """Have the slot's own thread, called `name` from then on, run `function`. It is to call `execute` there."""


@runtime_checkable
class Slotted(Protocol):
    """An instance that can be given a batch while it computes another, by several slots. Each slot executes one batch
    at a time; the device is one, so what hangs in one slot makes all of them suspect."""

    @property
    def slots(self) -> Sequence[Slot]: ...


class OpenModel(Protocol):
    """One version of a model, opened."""

    @property
    def spec(self) -> ModelSpec:
        """What the model says of itself: dims whole, a batch axis included, `batched` false. It does without the
        inputs that are `optional` here; a configuration has to name them for clients to see them."""

    @property
    def platform(self) -> str:
        """Triton's name of the framework, such as `onnxruntime_onnx`."""

    def instance(self, spec: ModelSpec, device: Device) -> ModelInstance:
        """Make an instance that serves `spec` on `device`. Blocks; raises LoadError."""

    def close(self) -> None:
        """Give the model's own resources back; called after the last instance's close."""


class Supervise(Protocol):
    """Runs one execution of a model that is being loaded. May raise what is none of a backend's errors."""

    def __call__(self, function: Callable[[], T], /) -> T: ...


def directly(function: Callable[[], T], /) -> T:
    """The `Supervise` that leaves it alone."""
    return function()


@runtime_checkable
class Triable(Protocol):
    """A model whose word on itself can be checked before anybody relies on it."""

    def try_rows(self, supervise: Supervise = directly) -> Trial:
        """Run it with made-up inputs. Blocks for a few executions, each of which `supervise` runs; before any instance
        is made."""


@runtime_checkable
class Rounding(Protocol):
    """A model that may round each row's numbers by what other rows of its batch are."""

    @property
    def rounds_by(self) -> str:
        """What does so, for a sentence about it; "" if nothing is known to."""


class Backend(Protocol):
    """A runtime that opens models."""

    def devices(self, groups: Sequence[InstanceGroup]) -> tuple[Device, ...]:
        """One device per instance that `groups` ask for, by default what suits. LoadError for what isn't there."""

    def open(self, source: ModelSource, device: Device) -> OpenModel:
        """Open a model, its first instance being meant for `device`. Blocks; raises LoadError naming what is wrong."""
