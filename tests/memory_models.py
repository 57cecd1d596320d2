"""Models that are Python functions on arrays, whose behaviour a test defines and changes while they serve.

Lives here: `MemoryModel`, with switches that make it fail and a gate that holds it. Must not: a wait without a limit,
so that a test that goes wrong fails instead of hanging.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from paceline.backends.base import Device, Execution, InstanceGroup, ModelSource, on_cpu
from paceline.backends.errors import ExecutionError, LoadError
from paceline.backends.ragged import batch_runner, row_counter
from paceline.backends.spec import ModelSpec, Tensors

__all__ = [
    "Faults",
    "Gate",
    "MemoryBackend",
    "MemoryInstance",
    "MemoryModel",
    "change_datatype",
    "linear_latency",
    "lose_output",
    "lose_row",
]

Distortion = Callable[[Tensors], Tensors]


def lose_row(outputs: Tensors) -> Tensors:
    """Every output without its last row."""
    return [output[:-1] for output in outputs]


def lose_output(outputs: Tensors) -> Tensors:
    """All outputs but the last."""
    return outputs[:-1]


def change_datatype(outputs: Tensors) -> Tensors:
    """Every output as complex numbers, which no datatype of the protocol is."""
    return [np.zeros(output.shape, np.complex64) for output in outputs]


class Faults:
    """What goes wrong, and in which executions. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._errors: deque[Exception] = deque()
        self._distortions: deque[Distortion] = deque()
        self._conditions: list[tuple[Callable[[Tensors], bool], Exception]] = []

    def raise_next(self, error: Exception, times: int = 1) -> None:
        """The next `times` executions raise `error` instead of computing."""
        with self._lock:
            self._errors.extend([error] * times)

    def raise_when(self, condition: Callable[[Tensors], bool], error: Exception) -> None:
        """From now on executions raise `error` if `condition` holds for their stacked inputs."""
        with self._lock:
            self._conditions.append((condition, error))

    def distort_next(self, distortion: Distortion, times: int = 1) -> None:
        """The next `times` executions that compute return `distortion(outputs)`."""
        with self._lock:
            self._distortions.extend([distortion] * times)

    def clear(self) -> None:
        """Remove all faults."""
        with self._lock:
            self._errors.clear()
            self._distortions.clear()
            self._conditions.clear()

    def before(self, inputs: Tensors) -> None:
        """Raise what this execution is to raise (called by the model)."""
        with self._lock:
            error = self._errors.popleft() if self._errors else None
            conditions = list(self._conditions)
        if error is not None:
            raise error
        for condition, consequence in conditions:
            if condition(inputs):
                raise consequence

    def after(self, outputs: Tensors) -> Tensors:
        """`outputs`, distorted if this execution is due for it (called by the model)."""
        with self._lock:
            distortion = self._distortions.popleft() if self._distortions else None
        return outputs if distortion is None else distortion(outputs)


class Gate:
    """Holds executions at their beginning. Open at first; thread-safe.

    `hold_limit_s` is how long an execution waits before it gives up with an ExecutionError.
    """

    def __init__(self, hold_limit_s: float = 60.0) -> None:
        self._hold_limit_s = hold_limit_s
        self._changed = threading.Condition()
        self._open = True
        self._passes = 0
        self._entered = 0

    @property
    def entered(self) -> int:
        """How many executions have reached the gate so far, whether it held them or not."""
        return self._entered

    def close(self) -> None:
        """Hold executions that arrive from now on."""
        with self._changed:
            self._open = False
            self._passes = 0

    def open(self) -> None:
        """Let all held executions go, and all that arrive."""
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def release(self, count: int = 1) -> None:
        """Let `count` executions through a closed gate: those held first, then those that arrive."""
        with self._changed:
            self._passes += count
            self._changed.notify_all()

    def wait_entered(self, count: int, timeout_s: float = 60.0) -> None:
        """Block until `count` executions have reached the gate since it was made; TimeoutError if they don't.

        Not for an event loop's thread, which would keep what it waits for from being sent: use `asyncio.to_thread`.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._entered >= count, timeout_s):
                raise TimeoutError(f"expected {count} executions within {timeout_s} s, got {self._entered}")

    def enter(self) -> None:
        """Wait until let through (called by the model)."""
        with self._changed:
            self._entered += 1
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._open or self._passes > 0, self._hold_limit_s):
                raise ExecutionError(f"held at a closed gate for {self._hold_limit_s} s")
            if not self._open:
                self._passes -= 1


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
        return tuple(device for group in groups or (InstanceGroup(),) for device in on_cpu(group))

    def open(self, source: ModelSource, device: Device) -> MemoryModel:
        if source.name not in self._models:
            raise LoadError(f"model '{source.name}': no such model in memory, only {sorted(self._models)}")
        return self._models[source.name]
