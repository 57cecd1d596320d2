"""Models that are Python functions on arrays: for tests, benchmarks and trying a deployment under load.

Lives here: `MemoryModel`, whose behaviour a test defines and changes while it serves, and the backend `identity`, whose
behaviour a `config.pbtxt` defines. Must not: a runtime, or a wait without a limit.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from paceline.backends.base import Device, Execution, GroupKind, InstanceGroup, ModelSource
from paceline.backends.errors import ExecutionError, LoadError
from paceline.backends.faults import Faults, Gate
from paceline.backends.placement import on_cpu
from paceline.backends.ragged import batch_runner, row_counter
from paceline.backends.spec import ModelSpec, Tensors

__all__ = ["IdentityBackend", "MemoryBackend", "MemoryInstance", "MemoryModel", "linear_latency"]

Compute = Callable[[Tensors], Tensors]
Latency = Callable[[int], float]


def _identity(inputs: Tensors) -> Tensors:
    return inputs


def linear_latency(base_s: float, per_row_s: float) -> Latency:
    """Seconds that `rows` rows take: `base_s + per_row_s * rows`, the usual cost of an accelerator."""
    return lambda rows: base_s + per_row_s * rows


class MemoryModel:
    """`OpenModel` that computes with `compute`, by default output i = input i.

    `compute` gets one stacked array per input and batch input and returns one per output; it must not write to its
    arguments, and must handle MISSING if inputs are optional. Each execution takes `latency(rows)` seconds longer,
    spent in `wait`, which blocks the calling thread and releases the GIL. `gate` and `faults` may be used from any
    thread while instances run.
    """

    def __init__(
        self,
        spec: ModelSpec,
        compute: Compute = _identity,
        *,
        latency: Latency | None = None,
        wait: Callable[[float], None] = time.sleep,
        platform: str = "memory",
    ) -> None:
        self.latency = latency
        self.gate = Gate()
        self.faults = Faults()
        self.spec = spec
        self._compute = compute
        self._wait = wait
        self.platform = platform
        self._batches: deque[tuple[int, ...]] = deque(maxlen=10_000)  # after days under load the most recent are enough
        self._instances: list[MemoryInstance] = []
        self.closed = False

    @property
    def batches(self) -> list[tuple[int, ...]]:
        """A copy of the record: each request's rows, per execution including failed ones, in order; the last 10,000."""
        return list(self._batches)

    @property
    def open_instances(self) -> int:
        """Instances made and not yet closed."""
        return sum(not instance.closed for instance in self._instances)

    def instance(self, spec: ModelSpec, device: Device) -> MemoryInstance:
        instance = MemoryInstance(self, spec, device)
        self._instances.append(instance)
        return instance

    def close(self) -> None:
        self.closed = True

    def record(self, rows: Sequence[int]) -> None:
        """Note that a batch began (called by instances)."""
        self._batches.append(tuple(rows))  # append is atomic: instances share the record without a lock

    def run(self, inputs: Tensors, rows: int) -> Tensors:
        """Compute one batch (called by instances): wait at the gate, fail if told to, take the time, compute."""
        self.gate.enter()
        self.faults.before(inputs)
        if self.latency is not None:
            self._wait(self.latency(rows))
        return self.faults.after(self._compute(inputs))


class MemoryInstance:
    """`ModelInstance` of a `MemoryModel`. Instances of one model may run at the same time."""

    def __init__(self, model: MemoryModel, spec: ModelSpec, device: Device) -> None:
        self._model = model
        self._rows_of = row_counter(spec)
        self._run_batch = batch_runner(spec)
        self.device = device
        self.closed = False

    def execute(self, requests: Sequence[Tensors], padded_rows: int = 0) -> Execution:
        if self.closed:
            raise ExecutionError("the instance is closed")
        rows = self._rows_of(requests)
        self._model.record(rows)
        total = max(sum(rows), padded_rows)
        return self._run_batch(requests, lambda inputs: self._model.run(inputs, total), padded_rows)

    def close(self) -> None:
        self.closed = True


class MemoryBackend:
    """`Backend` that hands out the models it was given, by name; CPU only."""

    def __init__(self, models: Mapping[str, MemoryModel]) -> None:
        self._models = models

    def devices(self, groups: Sequence[InstanceGroup]) -> tuple[Device, ...]:
        return _cpu_only("memory", groups)

    def open(self, source: ModelSource, device: Device) -> MemoryModel:
        if source.name not in self._models:
            raise LoadError(f"model '{source.name}': no such model in memory, only {sorted(self._models)}")
        return self._models[source.name]


class IdentityBackend:
    """`Backend` of models that return their inputs: `backend: "identity"` in a `config.pbtxt`, without a model file.

    The configuration must declare inputs and outputs, pairwise of the same datatype and dims. If an optional input is
    left out, so is its output. The parameters `execute_delay_ms` (as in Triton's backend of that name) and
    `paceline.execute_delay_per_row_us` say how long a batch takes; both default to 0.
    """

    def devices(self, groups: Sequence[InstanceGroup]) -> tuple[Device, ...]:
        return _cpu_only("identity", groups)

    def open(self, source: ModelSource, device: Device) -> MemoryModel:
        if source.op_libraries:
            raise LoadError(f"model '{source.name}': backend 'identity' has no use for libraries of operators")
        base_s = _delay(source, "execute_delay_ms") / 1e3
        per_row_s = _delay(source, "paceline.execute_delay_per_row_us") / 1e6
        latency = linear_latency(base_s, per_row_s) if base_s or per_row_s else None
        return MemoryModel(_paired_spec(source), latency=latency, platform="identity")


def _cpu_only(backend: str, groups: Sequence[InstanceGroup]) -> tuple[Device, ...]:
    for group in groups:
        if group.kind is GroupKind.GPU:
            raise LoadError(
                f"instance_group: expected a kind other than KIND_GPU: backend '{backend}' has no use for a GPU"
            )
    return tuple(device for group in groups or (InstanceGroup(),) for device in on_cpu(group))


def _paired_spec(source: ModelSource) -> ModelSpec:
    spec = source.declared
    if spec is None or not spec.inputs:
        raise LoadError(
            f"model '{source.name}': backend 'identity' needs the inputs and outputs in the configuration, each with "
            "its data_type"
        )
    if len(spec.inputs) != len(spec.outputs):
        raise LoadError(
            f"model '{source.name}': backend 'identity' expected {len(spec.inputs)} outputs, one per input, "
            f"got {len(spec.outputs)}"
        )
    for given, taken in zip(spec.inputs, spec.outputs, strict=True):
        if (given.datatype, given.dims) != (taken.datatype, taken.dims):
            raise LoadError(
                f"model '{source.name}': output '{taken.name}': expected {given.datatype} {list(given.dims)} "
                f"like input '{given.name}', got {taken.datatype} {list(taken.dims)}"
            )
    outputs = (replace(taken, optional=given.optional) for given, taken in zip(spec.inputs, spec.outputs, strict=True))
    return replace(spec, outputs=tuple(outputs))


def _delay(source: ModelSource, key: str) -> float:
    text = source.parameters.get(key, "0")
    try:
        delay = float(text)
    except ValueError:
        delay = math.nan
    if not 0 <= delay < math.inf:
        raise LoadError(f"model '{source.name}': parameter '{key}': expected a number not below 0, got '{text}'")
    return delay
