"""What a server says of a model, as values that people and programs look at.

Lives here: from the messages about a model to frozen dataclasses. Must not: call anything, or print. The rule: what a
server doesn't say is missing here, rather than made up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.clients.errors import ResponseError
from paceline.clients.messages import ModelMetadata, TensorMetadata
from paceline.protos.datatypes import CONFIG_DATATYPES
from paceline.protos.model_config_pb2 import (
    ModelConfig,
    ModelEnsembling,
    ModelInput,
    ModelInstanceGroup,
    ModelOutput,
    ModelSequenceBatching,
)

_PAD, _CALLS = "paceline.pad", "paceline.calls"


@dataclass(frozen=True, slots=True)
class Batching:
    """How requests share batches. `max_rows` is the most rows of a request, and of a batch; unless `is_dynamic`,
    requests run one by one. A batch of a preferred size leaves at once, others wait up to `max_delay_us`. The queue
    holds `max_queue_size` requests, for `timeout_us` each; 0: no limit of its own. `lengths` are the axes, such as
    `ids[1]=0`, in which requests are filled up to the longest of their batch."""

    max_rows: int
    is_dynamic: bool
    preferred_rows: tuple[int, ...]
    max_delay_us: int
    max_queue_size: int
    timeout_us: int
    lengths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Instances:
    """A group of copies of the model: `kind` is CPU, GPU, MODEL or AUTO. There are `count` on each of `gpus`."""

    kind: str
    count: int
    gpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sequences:
    """How requests share state. `strategy` is direct or oldest. `controls` are inputs that the server fills in, with
    what they say (START, READY, END, CORRID), `states` the outputs that it keeps, with the inputs that get them in the
    next step."""

    strategy: str
    idle_us: int
    controls: Mapping[str, tuple[str, ...]]
    states: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class PipelineStep:
    """A model of a pipeline, with the version if it is a certain one. `inputs` and `outputs` are the pipeline's tensors
    by the model's own names for them."""

    model: str
    version: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A model as a server serves it. -1 in a tensor's shape is a free dimension; `optional_inputs` may be left out.

    `batching` is None for a model without a batch axis, and `sequences` for one that remembers nothing. A decoupled
    model answers a request any number of times. `steps` is empty unless it is a pipeline, and else in an order in which
    they can run. `calls` are the models that its own code may call. Unless `is_configured`, the server has no
    ModelConfig, and only names, tensors and platform are known.
    """

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]
    is_configured: bool = False
    optional_inputs: tuple[str, ...] = ()
    batching: Batching | None = None
    instances: tuple[Instances, ...] = ()
    sequences: Sequences | None = None
    is_decoupled: bool = False
    is_cached: bool = False
    steps: tuple[PipelineStep, ...] = ()
    calls: tuple[str, ...] = ()


def described(metadata: ModelMetadata, config: ModelConfig | None) -> ModelDescription:
    """The description of a model with this metadata, and this configuration unless the server doesn't tell it."""
    name, versions, platform = metadata.name, metadata.versions, metadata.platform
    if config is None:
        return ModelDescription(name, versions, platform, metadata.inputs, metadata.outputs)
    return ModelDescription(
        name,
        versions,
        platform or config.platform or config.backend,
        metadata.inputs,
        metadata.outputs,
        is_configured=True,
        optional_inputs=tuple(tensor.name for tensor in config.input if tensor.optional),
        batching=_batching(config) if config.max_batch_size > 0 else None,
        instances=tuple(map(_instances, config.instance_group)),
        sequences=_sequences(config.sequence_batching) if config.HasField("sequence_batching") else None,
        is_decoupled=config.model_transaction_policy.decoupled,
        is_cached=config.response_cache.enable,
        steps=_in_order(config.ensemble_scheduling.step),
        calls=_listed(config, _CALLS),
    )


def metadata_of(config: ModelConfig, versions: Sequence[str]) -> ModelMetadata:
    """The metadata of a model that is served with `config`, in which nothing is left open."""
    platform = config.platform or config.backend
    inputs, outputs = _tensors(config.input, config), _tensors(config.output, config)
    return ModelMetadata(config.name, tuple(versions), platform, inputs, outputs, {})


def _tensors(tensors: Iterable[ModelInput | ModelOutput], config: ModelConfig) -> tuple[TensorMetadata, ...]:
    def shape(tensor: ModelInput | ModelOutput) -> tuple[int, ...]:
        return (*([-1] if config.max_batch_size > 0 and not tensor.is_shape_tensor else []), *tensor.dims)

    return tuple(TensorMetadata(one.name, CONFIG_DATATYPES.get(one.data_type, ""), shape(one)) for one in tensors)


def _batching(config: ModelConfig) -> Batching:
    dynamic, sequences = config.dynamic_batching, config.sequence_batching
    chosen = sequences.WhichOneof("strategy_choice")
    by_age = sequences.oldest if chosen == "oldest" else dynamic
    delayed = sequences.direct if chosen == "direct" else by_age
    queue = dynamic.default_queue_policy
    return Batching(
        config.max_batch_size,
        config.HasField("dynamic_batching") or config.HasField("sequence_batching"),
        tuple(by_age.preferred_batch_size),
        delayed.max_queue_delay_microseconds,
        queue.max_queue_size,
        queue.default_timeout_microseconds,
        _listed(config, _PAD),
    )


def _listed(config: ModelConfig, parameter: str) -> tuple[str, ...]:
    """The values of a parameter that lists some."""
    text = config.parameters[parameter].string_value if parameter in config.parameters else ""
    return tuple(value.strip() for value in text.split(",") if value.strip())


def _instances(group: ModelInstanceGroup) -> Instances:
    return Instances(_name(ModelInstanceGroup.Kind, group.kind, "KIND_"), max(1, group.count), tuple(group.gpus))


def _sequences(sequences: ModelSequenceBatching) -> Sequences:
    kinds = ModelSequenceBatching.Control.Kind
    return Sequences(
        sequences.WhichOneof("strategy_choice") or "direct",
        sequences.max_sequence_idle_microseconds,
        {
            one.name: tuple(_name(kinds, each.kind, "CONTROL_SEQUENCE_") for each in one.control)
            for one in sequences.control_input
        },
        {state.output_name: state.input_name for state in sequences.state},
    )


def _name(kinds: Any, number: int, prefix: str) -> str:
    try:
        return str(kinds.Name(number)).removeprefix(prefix)
    except ValueError as error:
        raise ResponseError(f"the server answered with an unknown kind: {number}") from error


def _in_order(steps: Sequence[ModelEnsembling.Step]) -> tuple[PipelineStep, ...]:
    """The steps, each after those whose outputs it takes, and else as they are written down. Steps that wait for each
    other, which no server runs, come last."""
    waiting = [
        PipelineStep(
            step.model_name,
            str(step.model_version) if step.model_version > 0 else "",
            dict(sorted(step.input_map.items())),
            dict(sorted(step.output_map.items())),
        )
        for step in steps
    ]
    ordered: list[PipelineStep] = []
    while waiting:
        to_come = {tensor for step in waiting for tensor in step.outputs.values()}
        ready = [step for step in waiting if to_come.isdisjoint(step.inputs.values())] or waiting
        ordered += ready
        waiting = [step for step in waiting if step not in ready]
    return tuple(ordered)
