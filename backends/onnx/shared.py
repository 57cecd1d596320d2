"""What the slots of a staged instance share.

Lives here: whether a model can be staged, what its tensors are, the session, its lock and the ids of its graphs, and
whether replays of these do what the model does. Must not: buffers, or the order of copies (`staged`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, cast

import numpy as np

from paceline.backends.base import Device, Execution
from paceline.backends.batching import rows_of
from paceline.backends.cuda.accelerator import Streams
from paceline.backends.device_blocks import BlockPool
from paceline.backends.errors import DeviceError, ExecutionError
from paceline.backends.lengths import Lengths
from paceline.backends.likeness import alike
from paceline.backends.onnx.instance import BFLOAT16
from paceline.backends.onnx.options import OnnxOptions
from paceline.backends.onnx.sessions import NO_GRAPH, OpenSession, memory_names, staged_run_options
from paceline.backends.ragged import as_the_model_sees
from paceline.backends.spec import ModelSpec, Shape, Tensors, TensorSpec
from paceline.backends.staging import DType, OutputPool
from paceline.protos.datatypes import by_name


class GraphUse(Enum):
    """What an execution does with the graph of its shape: make it, use it if there is one, or neither."""

    CAPTURE = auto()
    REPLAY = auto()
    NONE = auto()


def check_replays(
    execute: Callable[..., Execution], spec: ModelSpec, requests: Sequence[Tensors], padded_rows: int
) -> None:
    """Raise ExecutionError if what was captured for `requests` does something else than the model, beyond rounding.
    `execute` is that of the slot which captured it.

    A graph repeats what was captured: copies from host memory that has meanwhile got other contents, and the seed of
    random numbers. ONNX Runtime captures such operators without an error."""
    other = [_changed(spec, requests, max(padded_rows, sum(rows_of(requests))) if spec.batched else 0)]
    computed = execute(other, padded_rows, use=GraphUse.NONE).results[0]
    # In between, so that the buffers don't have the right results already.
    execute(requests, padded_rows, use=GraphUse.NONE)
    replayed = execute(other, padded_rows).results[0]
    pairs = zip(spec.outputs, cast("Tensors", replayed), cast("Tensors", computed), strict=True)
    for tensor, one, two in pairs:
        if not alike(tensor, np.atleast_1d(one), np.atleast_1d(two)):
            raise ExecutionError(f"output '{tensor.name}' of a replayed graph is not what the model computes")


def _changed(spec: ModelSpec, requests: Sequence[Tensors], rows: int) -> Tensors:
    """A request like the last of `requests`, but with other floats, and with `rows` rows if the model is batched.
    Integers stay: they may be indices."""
    random = np.random.default_rng(0)
    made = []
    for tensor, array in zip(spec.inputs, requests[-1], strict=True):
        repeated = np.repeat(array[-1:], rows, axis=0) if spec.batched else array
        floats = random.random(repeated.shape, np.float32)
        if tensor.datatype == "BF16":
            repeated = (floats.view(np.uint32) >> 16).astype(array.dtype)
        elif array.dtype.kind == "f":
            repeated = floats.astype(array.dtype)
        made.append(repeated)
    return made


_log = logging.getLogger("paceline.backends.onnx")


def why_not_staged(opened: OpenSession, spec: ModelSpec) -> str:
    """Why batches of `spec` can't be staged; "" if they can."""
    if not spec.by_rows:
        return "it has tensors that aren't stacked by rows"
    texts = [tensor.name for tensor in (*spec.inputs, *spec.outputs) if tensor.datatype == "BYTES"]
    if texts:
        return f"'{texts[0]}' is text"
    if not spec.inputs or not spec.outputs:
        return "it has no inputs or no outputs"
    try:
        inputs, outputs = memory_names(opened.session)
        unknown = [one.name for one in spec.inputs if one.name not in inputs]
        unknown += [one.name for one in spec.outputs if one.name not in outputs]
    except Exception as error:  # noqa: BLE001 - ONNX Runtime's errors share no base class
        return f"onnxruntime doesn't say where its tensors are: {error}"
    return f"onnxruntime doesn't say where '{unknown[0]}' is" if unknown else ""


@dataclass(frozen=True, slots=True)
class StagedTensor:
    """One input or output. `element` is its type in ONNX Runtime's terms, `dims` what the model sees after the batch
    axis, None if that has any rank. `on_device`: the model reads or writes it in device memory instead of host
    memory."""

    name: str
    dtype: DType
    element: Any
    dims: Shape | None
    on_device: bool

    def size_bytes(self, shape: Shape) -> int:
        return math.prod(shape, start=self.dtype.itemsize)


@dataclass(eq=False, slots=True)
class Bound:
    """Where the tensors of batches of one shape lie, as bound in ONNX Runtime. `shapes` are those of the outputs, None
    if only the execution determines them. `graph` is the graph captured for it, `plan` its key in `Plans`."""

    binding: Any
    plan: Hashable
    shapes: list[Shape | None]
    addresses: list[int]
    graph: int = NO_GRAPH


class Shared:
    """What the slots of an instance share. `reopen` opens another session for the same model, without graphs. `blocks`
    is memory that outlives executions, and the instance."""

    def __init__(
        self,
        name: str,
        opened: OpenSession,
        spec: ModelSpec,
        device: Device,
        options: OnnxOptions,
        reopen: Callable[[], OpenSession],
        blocks: BlockPool,
    ) -> None:
        assert opened.streams is not None
        self.spec = as_the_model_sees(spec)
        self.lengths = Lengths(self.spec) if spec.lengths else None
        self.streams: Streams = opened.streams
        self.lock = threading.Lock()
        self.accelerator = opened.streams.accelerator
        self.graphs = opened.graphs
        inputs, outputs = memory_names(opened.session)
        memory = self.accelerator.memory_name
        self.inputs = [_tensor(one, inputs[one.name] == memory) for one in spec.inputs]
        self.outputs = [_tensor(one, outputs[one.name] == memory) for one in spec.outputs]
        beside = {one.name: (inputs | outputs)[one.name] for one in (*self.inputs, *self.outputs) if not one.on_device}
        if beside:
            _log.info("model '%s': tensors outside the device's memory, and where they are: %s", name, beside)
        self.pools = [OutputPool(self.accelerator.host_memory) for _ in self.outputs]
        self.blocks = blocks
        self._name = name
        self._opened: OpenSession | None = opened
        self.device = device
        self._options = options
        self._reopen = reopen
        self._run_options: dict[int, Any] = {}
        # Computations queued so far (guarded by the lock), and the number and end of the last one that is done.
        self.queued = 0
        self._done = (0, 0)

    @property
    def opened(self) -> OpenSession:
        opened = self._opened
        if opened is None:
            raise ExecutionError("the instance is closed")
        return opened

    def run_options(self, graph: int) -> Any:
        made = self._run_options.get(graph)
        if made is None:
            made = staged_run_options(self._options, self.device, graph if self.graphs else None)
            self._run_options[graph] = made
        return made

    def next_graph(self) -> int:
        """An id that no graph has. Called with the lock held."""
        return max((0, *self._run_options)) + 1

    def waited_ns(self, number: int, staged_ns: int, ended_ns: int) -> int:
        """How long the computation of that `number`, which ended at `ended_ns`, waited for the previous one. 0 if that
        isn't known: the other slot may learn of its end after this slot learns of its own."""
        done, before_ns = self._done
        self._done = (number, ended_ns)
        return max(0, min(before_ns, ended_ns) - staged_ns) if done == number - 1 else 0

    def give_up_graphs(self, failed: OpenSession, error: Exception) -> None:
        """Replace `failed` with a session that captures nothing: a session that failed to capture can't be used any
        more.

        Raises LoadError.
        """
        with self.lock:
            if self._opened is not failed:
                return
            # Only the text: a kept log record would otherwise keep the session, through the error's traceback.
            _log.warning("model '%s' runs without CUDA graphs: %s", self._name, str(error))
            opened = self._reopen()
            assert opened.streams is not None
            self._opened, self.streams, self.graphs = opened, opened.streams, False
            self._run_options.clear()

    def close(self) -> None:
        # Freeing memory is among the calls that a capture on another thread would forbid.
        with contextlib.suppress(DeviceError):
            self.accelerator.enter()
        self._opened = None


def _tensor(tensor: TensorSpec, on_device: bool) -> StagedTensor:
    dtype = by_name(tensor.datatype).dtype
    element = BFLOAT16 if tensor.datatype == "BF16" else dtype.type
    return StagedTensor(tensor.name, dtype, element, None if tensor.any_rank else tensor.model_dims, on_device)
