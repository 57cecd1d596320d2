"""Running batches on a device through buffers of our own, so that one batch is prepared while another computes.

Lives here: `StagedInstance` and its slots: what is copied when, on which stream, and what waits for what. Must not: how
long buffers live (`staging`), how sessions are opened (`sessions`).

The way of a batch in one slot: its rows are written into page-locked memory, the only copy by the CPU; each input is
copied to the device on the copy-in stream; the session's stream waits for these copies and computes; the copy-out
stream waits for the computation and copies each output to page-locked memory. Only queueing the computation holds the
session's lock: slots take turns there, and wait for the device outside of it. All buffers except those of outputs in
host memory belong to the slot alone, and everything that it queued is done when `execute` returns.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from time import monotonic_ns
from typing import Any, cast

import numpy as np

from paceline.backends.base import DeviceBlock, DeviceTensor, Execution, Slot, Targets
from paceline.backends.batching import check_count, join_into, rows_of, split
from paceline.backends.cuda.accelerator import DeviceMemory, HostMemory
from paceline.backends.cuda.long_calls import captures
from paceline.backends.errors import (
    DeviceError,
    DeviceLost,
    ExecutionError,
    InstanceError,
    LoadError,
    OutOfMemory,
    StalePlan,
)
from paceline.backends.lengths import Filling, fill_up
from paceline.backends.onnx.failures import device_failure, failure, may_lack_memory
from paceline.backends.onnx.instance import from_ortvalue
from paceline.backends.onnx.sessions import NO_GRAPH, OpenSession
from paceline.backends.onnx.shared import Bound, GraphUse, Shared, StagedTensor, check_replays
from paceline.backends.spec import Array, Shape, Tensors
from paceline.backends.staging import Growing, Made, array_in, copy_to_targets, gather, repeat, with_targets
from paceline.backends.worker_thread import WorkerThread

Inputs = Sequence[Array | DeviceTensor]

_SLOTS = 2
"""One computes, one is prepared. A third would only hold requests that others could still join."""
_RESERVED = _SLOTS + 2
"""Memory blocks per output before the first request: one per slot, and some for answers that are being sent."""
_MAX_BINDINGS = 64
"""Bindings per slot, one per shape. At this many, those without a captured graph are dropped."""
_LITTLE_BYTES = 2**28
"""Free memory of a device that may be too little for what libraries need beside tensors: handles, code, workspaces."""


class StagedInstance:
    """`ModelInstance` on a device, with slots, over a session of its own. Raises DeviceError if there is too little
    memory."""

    def __init__(self, shared: Shared) -> None:
        self.device = shared.device
        self._shared = shared
        self.slots: Sequence[Slot] = tuple(StagedSlot(shared) for _ in range(_SLOTS))

    def execute(self, requests: Sequence[Tensors], padded_rows: int = 0) -> Execution:
        """Execute in the first slot."""
        return self.slots[0].execute(requests, padded_rows)

    def close(self) -> None:
        for slot in self.slots:
            slot.close()
        self._shared.close()


class StagedSlot:
    """`Slot` of a `StagedInstance`."""

    pads = True

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self.device = shared.device
        self._home = WorkerThread()
        accelerator = shared.accelerator
        self.gpu = accelerator.gpu
        self._copied_in, self._computed, self._copied_out = (accelerator.event() for _ in range(3))
        # By the shapes of the inputs; valid for one session.
        self._bindings: dict[tuple[Shape, ...], Bound] = {}
        self._bound_to: OpenSession | None = None
        # All bindings have to be dropped when a bound buffer moves, even if its new allocation fails.
        forget = self._bindings.clear
        self._pinned: list[Growing[HostMemory]] = [
            Growing(accelerator.host_memory) if tensor.on_device else Growing(accelerator.host_memory, forget)
            for tensor in shared.inputs
        ]
        self._given: list[Growing[DeviceMemory]] = [Growing(accelerator.device_memory, forget) for _ in shared.inputs]
        self._taken: list[Growing[DeviceMemory]] = [Growing(accelerator.device_memory, forget) for _ in shared.outputs]
        self._capturing_thread = 0

    def execute(
        self,
        requests: Sequence[Inputs],
        padded_rows: int = 0,
        targets: Sequence[Targets] = (),
        use: GraphUse = GraphUse.REPLAY,
    ) -> Execution:
        shared, spec = self._shared, self._shared.spec
        check_count(spec, requests)
        rows = rows_of(cast("Sequence[Tensors]", requests)) if spec.batched else [1]
        padding = max(0, padded_rows - sum(rows), spec.fixed_rows - sum(rows)) if spec.batched else 0
        filling = None if shared.lengths is None else shared.lengths.filling(requests)
        opened = shared.opened
        try:
            with opened.executing(sum(rows) + padding):  # which may wait for captures
                began_ns = monotonic_ns()
                bound = self._stage(opened, requests, sum(rows), padding, filling)
                staged_ns = monotonic_ns()
                number = self._compute(opened, bound, use)
            outputs, left = self._collect(bound, rows, targets, filling)
            ran_ns = monotonic_ns()
            self._let_go(bound)
            waited_ns = shared.waited_ns(number, staged_ns, ran_ns)
        except DeviceError as error:
            failed = device_failure(error)
            self._settle(failed)
            raise failed from error
        except StalePlan as error:
            self._settle(error)
            if not (spec.batched and spec.paddable) or spec.fixed_rows:
                raise
            with shared.lock:
                more = opened.plans.next_rows(sum(rows) + padding)
            # Inputs that were read directly into the slot's buffers would be lost when these grow.
            requests = [[one.copy() if isinstance(one, np.ndarray) else one for one in each] for each in requests]
            return self.execute(requests, more, targets, use)
        except BaseException as error:
            self._settle(error)
            raise
        results: Sequence[Tensors] = split(outputs, [*rows, padding] if padding else rows, spec)[: len(rows)]
        if filling is not None:
            results = filling.cut(results)
        if left:
            results = with_targets(results, left)
        infer_ns, output_ns = ran_ns - staged_ns - waited_ns, monotonic_ns() - ran_ns
        return Execution(results, staged_ns - began_ns, infer_ns, output_ns, waited_ns)

    def lease(self, size_bytes: int) -> DeviceBlock:
        return self._shared.blocks.lease(size_bytes)

    def buffer(self, index: int, shape: Shape) -> Array:
        tensor = self._shared.inputs[index]
        try:
            self._shared.accelerator.enter()
            return array_in(self._pinned[index].fit(tensor.size_bytes(shape)), tensor.dtype, shape)
        except DeviceError as error:
            raise device_failure(error) from error

    def release_buffers(self) -> None:
        """The buffers stay for the next batch."""

    def prepare(self, requests: Sequence[Tensors], padded_rows: int = 0) -> None:
        self._home.call(lambda: self._prepare(requests, padded_rows))

    def start(self, name: str, function: Callable[[], None]) -> None:
        self._home.start(name, function)

    def close(self) -> None:
        self._home.close()
        self._forget()

    def _prepare(self, requests: Sequence[Tensors], padded_rows: int) -> None:
        opened, graphs = self._shared.opened, self._shared.graphs
        try:
            # A thread's first execution creates handles of libraries, which may wait for the device, too.
            with captures.capturing() if graphs else captures.synchronizing():
                self.execute(requests, padded_rows, use=GraphUse.CAPTURE if graphs else GraphUse.REPLAY)
            if any(bound.graph != NO_GRAPH for bound in self._bindings.values()):
                check_replays(self.execute, self._shared.spec, requests, padded_rows)
            for pool in self._shared.pools:
                pool.reserve(_RESERVED)
        except (DeviceLost, OutOfMemory):
            raise  # not due to graphs: before it is captured the model runs as always
        except ExecutionError as error:
            if not graphs:
                raise
            self._forget()
            try:
                self._shared.give_up_graphs(opened, error)
            except LoadError as problem:
                raise InstanceError(str(problem)) from problem
            self.execute(requests, padded_rows)

    def _stage(
        self, opened: OpenSession, requests: Sequence[Inputs], rows: int, padding: int, filling: Filling | None
    ) -> Bound:
        """Write the inputs to the buffers that the device reads, and queue their copies."""
        shared, batched = self._shared, self._shared.spec.batched
        shared.accelerator.enter()
        if opened is not self._bound_to:
            self._forget()
            self._bound_to = opened
        shapes, given = [], []
        for index, tensor in enumerate(shared.inputs):
            column = [request[index] for request in requests]
            dims = column[0].shape[1:] if filling is None else filling.shape(index, column)
            shape = (rows + padding, *dims) if batched else column[0].shape
            fill = None if filling is None else filling.lengths.fills[index]
            size_bytes = tensor.size_bytes(shape)
            host = self._pinned[index].fit(size_bytes)
            place = self._given[index].fit(size_bytes).address if tensor.on_device else None
            if any(type(one) is DeviceTensor for one in column):
                gather(shared.streams.copy_in, column, array_in(host, tensor.dtype, shape), place, padding, fill)
            else:
                arrays = cast("Tensors", column)
                own = (rows, *shape[1:]) if batched else shape
                if filling is not None:
                    fill_up(array_in(host, tensor.dtype, own), arrays, fill)
                elif not _is_there(arrays, host, tensor, own):
                    join_into(array_in(host, tensor.dtype, own), arrays)
                if place is not None:
                    # Padding is made there: writing it here and copying it took a millisecond for a few images.
                    if own_bytes := tensor.size_bytes(own):
                        shared.streams.copy_in.copy_in(place, host.address, own_bytes)
                        repeat(shared.streams.copy_in, place + own_bytes, own_bytes // rows, padding)
                elif padding:
                    whole = array_in(host, tensor.dtype, shape)
                    whole[rows:] = whole[rows - 1 : rows]
            shapes.append(shape)
            given.append(host.address if place is None else place)
        shared.streams.copy_in.record(self._copied_in)
        key = tuple(shapes)
        return self._bindings.get(key) or self._bind(opened.session, key, given, rows + padding)

    def _bind(self, session: Any, shapes: tuple[Shape, ...], given: list[int], rows: int) -> Bound:
        shared = self._shared
        fitted = [self._fit_output(index, rows) for index in range(len(shared.outputs))]
        binding = session.io_binding()
        # Binding an input may make ONNX Runtime set the stream of handles that a computation is using.
        with shared.lock:
            for tensor, shape, address in zip(shared.inputs, shapes, given, strict=True):
                device = shared.accelerator.ort_device if tensor.on_device else ("cpu", 0)
                binding.bind_input(tensor.name, *device, tensor.element, shape, address)
        plan = rows if shared.spec.batched else shapes
        bound = Bound(binding, plan, [shape for shape, _ in fitted], [address for _, address in fitted])
        for index, tensor in enumerate(shared.outputs):
            if bound.shapes[index] is None:
                continue
            binding.bind_output(
                tensor.name, *shared.accelerator.ort_device, tensor.element, bound.shapes[index], bound.addresses[index]
            )
        self._let_go(bound)
        if len(self._bindings) >= _MAX_BINDINGS:
            for key in [key for key, one in self._bindings.items() if one.graph == NO_GRAPH]:
                del self._bindings[key]
        self._bindings[shapes] = bound
        return bound

    def _fit_output(self, index: int, rows: int) -> tuple[Shape | None, int]:
        """Shape and address of an output on the device whose shape is known beforehand; otherwise None and 0."""
        tensor = self._shared.outputs[index]
        if not tensor.on_device or tensor.dims is None or min(tensor.dims, default=0) < 0:
            return None, 0
        shape = (rows, *tensor.dims) if self._shared.spec.batched else tensor.dims
        return shape, self._taken[index].fit(tensor.size_bytes(shape)).address

    def _compute(self, opened: OpenSession, bound: Bound, use: GraphUse) -> int:
        """Queue the computation after the copies of its inputs. Returns its number among those of the instance."""
        shared = self._shared
        with shared.lock:
            graph = self._graph(bound, use)
            replays = graph != NO_GRAPH and graph == bound.graph  # which uses the plans of its capture
            if not replays:
                opened.plans.check(bound.plan)
            shared.streams.compute.wait(self._copied_in)
            try:
                opened.session.run_with_iobinding(bound.binding, shared.run_options(graph))
            except Exception as error:  # its exceptions share no base class below this one
                # Not stored in a variable: the error's traceback has this frame, and would keep the session.
                raise opened.plans.failed(failure(error), bound.plan) from error
            if not replays:
                opened.plans.executed()
            shared.streams.compute.record(self._computed)
            if use is GraphUse.CAPTURE:
                bound.graph = graph
            shared.queued += 1
            return shared.queued

    def _graph(self, bound: Bound, use: GraphUse) -> int:
        """The id of the graph to replay or capture, else NO_GRAPH. A graph only reads and writes fixed addresses on the
        device, and belongs to the thread that captured it."""
        thread = threading.get_ident()
        is_fixed = None not in bound.shapes and all(tensor.on_device for tensor in self._shared.inputs)
        if use is GraphUse.CAPTURE and bound.graph == NO_GRAPH and is_fixed:
            self._capturing_thread = thread
            return self._shared.next_graph()
        return bound.graph if thread == self._capturing_thread and use is not GraphUse.NONE else NO_GRAPH

    def _let_go(self, bound: Bound) -> None:
        """Have ONNX Runtime allocate outputs of unknown size in each run, and not keep those of the last run: there are
        many shapes, and each would keep the memory of its outputs."""
        if None not in bound.shapes:
            return
        for tensor, shape in zip(self._shared.outputs, bound.shapes, strict=True):
            if shape is None:
                device = self._shared.accelerator.ort_device if tensor.on_device else ("cpu", 0)
                bound.binding.bind_output(tensor.name, *device)

    def _collect(
        self, bound: Bound, rows: Sequence[int], targets: Sequence[Targets], filling: Filling | None
    ) -> tuple[list[Array], list[Targets]]:
        """The outputs, in memory that is returned when their last view is gone, and for each request which of them were
        left where it wanted them. Blocks until they are there."""
        shared = self._shared
        copy_out = shared.streams.copy_out
        values = self._values(bound)
        made = [self._made(bound, index, values) for index in range(len(shared.outputs))]
        outputs: list[Array] = []
        copy_out.wait(self._computed)
        left = copy_to_targets(copy_out, targets, rows if shared.spec.batched else None, made, filling)
        for index, (dtype, shape, address) in enumerate(made):
            if address is None:
                continue
            if left and all(index in there for there in left):
                # Nobody reads it; it only has the right shape.
                outputs.append(np.broadcast_to(np.empty((), dtype), shape))
                continue
            array, target = shared.pools[index].lease(dtype, shape)
            if array.nbytes:
                copy_out.copy_out(target, address, array.nbytes)
            outputs.append(array)
        copy_out.record(self._copied_out)
        self._copied_out.synchronize()
        for index, tensor in enumerate(shared.outputs):
            if not tensor.on_device:
                outputs.insert(index, from_ortvalue(values[tensor.name]))
        return outputs, left

    def _made(self, bound: Bound, index: int, values: Mapping[str, Any]) -> Made:
        tensor, shape = self._shared.outputs[index], bound.shapes[index]
        if shape is not None:
            return Made(tensor.dtype, shape, bound.addresses[index])
        value = values[tensor.name]
        return Made(tensor.dtype, tuple(value.shape()), value.data_ptr() if tensor.on_device else None)

    def _values(self, bound: Bound) -> dict[str, Any]:
        """The outputs that ONNX Runtime allocated, by name; valid while the result is held."""
        if None not in bound.shapes:
            return {}
        # In the order of binding: outputs of known shape first.
        order = sorted(zip(self._shared.outputs, bound.shapes, strict=True), key=lambda one: one[1] is None)
        return {tensor.name: value for (tensor, _), value in zip(order, bound.binding.get_outputs(), strict=True)}

    def _forget(self) -> None:
        """Drop the bindings: they are useless for another session, and so are graphs."""
        self._bindings.clear()
        self._bound_to = None

    def _settle(self, error: BaseException) -> None:
        """Wait for what was queued before `error`: the next batch writes to the same buffers. Raises what is behind
        `error`, if it is known: libraries such as cuBLAS only say that they failed."""
        lost = ""
        for stream in self._shared.streams.all:
            try:
                stream.synchronize()
            except DeviceError as problem:
                if isinstance(device_failure(problem), DeviceLost):
                    lost = str(problem)
        for bound in self._bindings.values():
            # The failure is already being raised, and this may fail for the same reason.
            with contextlib.suppress(Exception):
                self._let_go(bound)
        is_known = isinstance(error, DeviceLost)
        if lost or is_known:
            self._shared.blocks.is_lost = True
        if lost and not is_known:
            raise DeviceLost(lost) from error
        if not may_lack_memory(error):
            return
        try:
            free_bytes = self._shared.accelerator.free_bytes()
        except DeviceError:
            return  # not known
        if free_bytes < _LITTLE_BYTES:
            raise OutOfMemory(f"{error} (of the device's memory, {free_bytes >> 20} MiB are free)") from error


def _is_there(column: Sequence[Array], host: HostMemory, tensor: StagedTensor, shape: Shape) -> bool:
    """Whether `column` is an array in the slot's own buffer already."""
    array = column[0]
    same = len(column) == 1 and array.shape == shape and array.dtype == tensor.dtype and array.flags.c_contiguous
    return same and array.ctypes.data == host.address
