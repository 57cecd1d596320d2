"""Models that return their inputs: for trying a deployment, and what is around it, under load.

Lives here: the backend `identity`, whose behaviour a `config.pbtxt` defines. Must not: a runtime.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paceline.backends.base import Device, Execution, GroupKind, InstanceGroup, ModelSource, on_cpu
from paceline.backends.errors import LoadError
from paceline.backends.ragged import batch_runner, row_counter
from paceline.backends.spec import ModelSpec, Tensors


@dataclass(frozen=True, slots=True)
class IdentityModel:
    """`OpenModel` that returns its inputs. `latency(rows)`: how many seconds an execution sleeps."""

    spec: ModelSpec
    latency: Callable[[int], float] | None
    platform: str = "identity"

    def instance(self, spec: ModelSpec, device: Device) -> IdentityInstance:
        return IdentityInstance(self, spec, device)

    def close(self) -> None:
        """Nothing to release."""


class IdentityInstance:
    """`ModelInstance` of an `IdentityModel`."""

    def __init__(self, model: IdentityModel, spec: ModelSpec, device: Device) -> None:
        self._model = model
        self._rows_of = row_counter(spec)
        self._run_batch = batch_runner(spec)
        self.device = device

    def execute(self, requests: Sequence[Tensors], padded_rows: int = 0) -> Execution:
        def run(inputs: Tensors) -> Tensors:
            if (latency := self._model.latency) is not None:
                time.sleep(latency(max(sum(self._rows_of(requests)), padded_rows)))
            return inputs

        return self._run_batch(requests, run, padded_rows)

    def close(self) -> None:
        """Nothing to release."""


class IdentityBackend:
    """`Backend` of models that return their inputs: `backend: "identity"` in a `config.pbtxt`, without a model file.

    The configuration must declare inputs and outputs, pairwise of the same datatype and dims. If an optional input is
    left out, so is its output. The parameters `execute_delay_ms` (as in Triton's backend of that name) and
    `paceline.execute_delay_per_row_us` say how long a batch takes; both default to 0.
    """

    def devices(self, groups: Sequence[InstanceGroup]) -> tuple[Device, ...]:
        for group in groups:
            if group.kind is GroupKind.GPU:
                raise LoadError(
                    "instance_group: expected a kind other than KIND_GPU: backend 'identity' has no use for a GPU"
                )
        return tuple(device for group in groups or (InstanceGroup(),) for device in on_cpu(group))

    def open(self, source: ModelSource, device: Device) -> IdentityModel:
        if source.op_libraries:
            raise LoadError(f"model '{source.name}': backend 'identity' has no use for libraries of operators")
        base_s = _delay(source, "execute_delay_ms") / 1e3
        per_row_s = _delay(source, "paceline.execute_delay_per_row_us") / 1e6
        latency = (lambda rows: base_s + per_row_s * rows) if base_s or per_row_s else None
        return IdentityModel(_paired_spec(source), latency)


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
