"""Ensembles: `platform: "ensemble"`, and the steps in `ensemble_scheduling`, each executed by another model.

Lives here: what can be said of a configuration without knowing these models (with them, `pipeline` goes on), and what a
batcher has in place of an instance's thread. Must not: how a request is executed; that is the payload's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from paceline.backends.base import Device, DeviceKind
from paceline.backends.spec import Tensors
from paceline.protos import model_config_pb2 as pb
from paceline.scheduler.runner import Done, Outcome
from paceline.server.errors import ConfigError

ENSEMBLE = "ensemble"

_MOST_AT_ONCE = 1_024
"""If its configuration doesn't say how many, so that intermediate results can't pile up."""

_OF_INSTANCES = ("paceline.split_oversized", "paceline.execution_timeout_ms")
_NOT_OF_TENSORS = ("reshape", "is_shape_tensor", "allow_ragged_batch", "is_non_linear_format_io")


@dataclass(frozen=True, slots=True)
class EnsembleStep:
    """A step as configured. `number` counts from 0. `version` is "" for the latest. `inputs` and `outputs` are, for
    each of the model's that is named, the ensemble's tensor."""

    number: int
    model: str
    version: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


@runtime_checkable
class Runnable(Protocol):
    """A request that executes itself."""

    def begin(self, done: Callable[[Outcome[Tensors]], None]) -> None:
        """Start; `done` is called later, once."""

    def call_off(self) -> None:
        """Nobody waits for it any more. `done` is called all the same."""


class EnsembleInstance:
    """Executes one request to an ensemble at a time, each of its steps by another model. It is its own runner, on the
    event loop, and on no device."""

    device = Device(DeviceKind.CPU)
    stages = False

    def __init__(self) -> None:
        self._going: Runnable | None = None

    def start(self) -> None:
        pass

    def run(self, payloads: Sequence[Runnable], padded_rows: int, done: Done[Tensors]) -> None:
        (going,) = payloads
        self._going = going

        def end(outcome: Outcome[Tensors]) -> None:
            self._going = None
            done(outcome)

        going.begin(end)

    def take_back(self) -> bool:
        return False

    def call_off(self) -> None:
        if self._going is not None:
            self._going.call_off()

    stop = call_off

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class EnsembleModel:
    """In place of an `OpenModel`: an ensemble's `steps`. There is nothing to open."""

    steps: tuple[EnsembleStep, ...]
    platform = ENSEMBLE

    @property
    def models(self) -> tuple[str, ...]:
        """The names of the models that it needs, each once."""
        return tuple(dict.fromkeys(step.model for step in self.steps))

    def close(self) -> None:
        pass


def is_ensemble(config: pb.ModelConfig) -> bool:
    return config.platform == ENSEMBLE or config.HasField("ensemble_scheduling")


def most_at_once(config: pb.ModelConfig) -> int:
    """How many requests execute at a time; further ones wait."""
    return config.ensemble_scheduling.max_inflight_requests or _MOST_AT_ONCE


def check_ensemble(config: pb.ModelConfig) -> None:
    """Raise ConfigError if an ensemble's configuration asks for what its steps' models have, or says too little. Key
    phrases are Triton's."""
    name = config.name
    if config.platform != ENSEMBLE:
        what = f"expected platform '{ENSEMBLE}', got '{config.platform}'"
        raise ConfigError(
            f"ensemble scheduling cannot be set for model '{name}' whose platform is not {ENSEMBLE}: {what}"
        )
    if not config.HasField("ensemble_scheduling"):
        text = f"ensemble scheduling must be set for ensemble {name} whose platform is {ENSEMBLE}"
        raise ConfigError(f"{text}: expected ensemble_scheduling with a step, got none")
    if config.backend:
        text = f"Ensemble model '{name}' must have platform type '{ENSEMBLE}' and empty backend type"
        raise ConfigError(f"{text}, got '{config.backend}'")
    for what, is_there in (
        ("instance group should", bool(config.instance_group)),
        ("optimization should", config.HasField("optimization")),
        ("model_warmup can", bool(config.model_warmup)),
        ("batch_input and batch_output should", bool(config.batch_input or config.batch_output)),
        ("default_model_filename should", bool(config.default_model_filename)),
        *((f"{key} should", True) for key in config.parameters if key in _OF_INSTANCES),
    ):
        if is_there:
            raise ConfigError(f"{what} not be specified for ensemble '{name}': its steps' models have their own")
    for kind, tensors in (("input", config.input), ("output", config.output)):
        if not tensors:
            raise ConfigError(f"expected {kind} with name, data_type and dims, as an ensemble has no file, got none")
        for tensor in tensors:
            for setting in _NOT_OF_TENSORS:
                asked = getattr(tensor, setting, False)
                if tensor.HasField("reshape") if setting == "reshape" else asked:
                    raise ConfigError(f"{kind} '{tensor.name}': {setting} has no meaning for an ensemble's tensors")


def steps_of(config: pb.ModelConfig) -> tuple[EnsembleStep, ...]:
    """The steps, each of which gets all its inputs from the ensemble's or from steps before it. Raises ConfigError."""
    name, found = config.name, config.ensemble_scheduling.step
    if not found:
        raise ConfigError(f"must specify 'step' for ensemble '{name}'")
    steps, written = list[EnsembleStep](), {tensor.name for tensor in config.input}
    for number, step in enumerate(found):
        for field in ("model_name", "input_map", "output_map"):
            if not getattr(step, field):
                raise ConfigError(f"must specify '{field}' in step {number} of ensemble '{name}'")
        if step.model_namespace:
            raise ConfigError(f"model_namespace is not supported by this build: step {number} of ensemble '{name}'")
        if step.model_version < -1:
            raise ConfigError(f"step {number}: expected model_version -1 or a version, got {step.model_version}")
        version = str(step.model_version) if step.model_version > 0 else ""
        for tensor in step.output_map.values():
            if tensor in written:
                raise ConfigError(
                    f"ensemble tensor '{tensor}' can appear in an output map only once for ensemble '{name}' step "
                    f"{number}, and not as an input of the ensemble"
                )
            written.add(tensor)
        steps.append(EnsembleStep(number, step.model_name, version, dict(step.input_map), dict(step.output_map)))
    return tuple(_connected(config, steps))


def _connected(config: pb.ModelConfig, steps: list[EnsembleStep]) -> list[EnsembleStep]:
    """The steps in an order in which they can go. Raises ConfigError unless every tensor is made by somebody and used
    by somebody, and no step waits for itself."""
    name = config.name
    inputs = {tensor.name for tensor in config.input}
    outputs = {tensor.name for tensor in config.output}
    read = {tensor for step in steps for tensor in step.inputs.values()}
    maker = {tensor: step for step in steps for tensor in step.outputs.values()}
    made, left, order = set(inputs), list(steps), list[EnsembleStep]()
    while ready := [step for step in left if made.issuperset(step.inputs.values())]:
        for step in ready:
            made.update(step.outputs.values())
            left.remove(step)
            order.append(step)
    lacks = ""
    for step in left[:1]:
        lacking = next(tensor for tensor in step.inputs.values() if tensor not in made)
        why = "is made by nobody"
        if lacking in maker:
            why = "is made only by a step that needs it, maybe by way of others"
        lacks = f"step {step.number} ('{step.model}') needs '{lacking}', which {why}"
    # What is said of an input or output may have the same cause, such as a misspelt name.
    for tensor in sorted(inputs - read):
        what = f"ensemble input '{tensor}' for ensemble '{name}' is not used: no step needs it"
        raise ConfigError(f"{what}; {lacks}" if lacks else what)
    for tensor in sorted(outputs - maker.keys()):
        what = f"ensemble output '{tensor}' for ensemble '{name}' is not used: no step makes it"
        raise ConfigError(f"{what}; {lacks}" if lacks else what)
    for step in left[:1]:
        written = sorted(outputs.intersection(step.outputs.values()) or step.outputs.values())[0]
        raise ConfigError(
            f"output '{written}' for ensemble '{name}' is not written: at least one of its depending tensors, "
            f"'{lacking}', is not connected: {lacks}"
        )
    for tensor in maker:
        if tensor not in read and tensor not in outputs:
            what = f"step {maker[tensor].number} makes it, and no step and no output uses it; leave it out"
            raise ConfigError(f"ensemble tensor '{tensor}' is unused in ensemble '{name}': {what}")
    return order
