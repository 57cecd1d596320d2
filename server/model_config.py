"""A model's `config.pbtxt`, joined with what the model says of itself.

Lives here: the translation from Triton's `ModelConfig`, its names and units, to ours: `ModelSpec`, `BatchPolicy`,
instance groups. Must not: open models or touch any file but the configuration's own. The rule: a setting is honoured,
or harmless to ignore and listed as ignored in docs/configuration.md, or refused here by name; never dropped in silence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from google.protobuf import text_format

from backends.base import GroupKind, InstanceGroup, ModelSource, ModelSpec, TensorSpec
from protos import model_config_pb2 as pb
from protos.datatypes import CONFIG_DATATYPES
from scheduler.policy import BatchPolicy, QueuePolicy
from server.errors import ConfigError

__all__ = [
    "DEFAULT_MAX_BATCH_ROWS",
    "ServingPlan",
    "backend_name",
    "check_supported",
    "instance_groups",
    "model_source",
    "parse_config",
    "plan",
]

DEFAULT_MAX_BATCH_ROWS = 32
"""Rows of a batch for a model that can batch and whose configuration doesn't say. Triton's default is 4."""

_GROUP_KINDS = {
    pb.ModelInstanceGroup.KIND_AUTO: GroupKind.AUTO,
    pb.ModelInstanceGroup.KIND_GPU: GroupKind.GPU,
    pb.ModelInstanceGroup.KIND_CPU: GroupKind.CPU,
    pb.ModelInstanceGroup.KIND_MODEL: GroupKind.MODEL,
}


@dataclass(frozen=True, slots=True)
class ServingPlan:
    """How a model is served: what clients see, the rows a request may carry (0: no batch axis), how it batches."""

    spec: ModelSpec
    max_batch_rows: int
    policy: BatchPolicy


def parse_config(path: Path) -> pb.ModelConfig:
    """The configuration in `path`, a `ModelConfig` in protobuf's text format. Raises ConfigError with line and
    column."""
    try:
        return text_format.Parse(path.read_text(encoding="utf-8"), pb.ModelConfig())
    except text_format.ParseError as error:
        raise ConfigError(f"{path.name}:{error}") from None
    except (OSError, ValueError) as error:  # no UTF-8; an enum's number beyond 64 bits
        raise ConfigError(f"{path.name} can't be read: {error}") from None


def backend_name(config: pb.ModelConfig) -> str:
    """The backend that the configuration names, directly or by platform; ONNX Runtime if it names none."""
    return config.backend or config.platform or "onnxruntime"


def instance_groups(config: pb.ModelConfig) -> tuple[InstanceGroup, ...]:
    """`instance_group`, in our terms. Raises ConfigError for a kind or count that means nothing."""
    for group in config.instance_group:
        if group.kind not in _GROUP_KINDS:
            raise ConfigError(f"instance_group: expected a kind, got {group.kind}")
        if group.count < 0:
            raise ConfigError(f"instance_group: expected count >= 0, got {group.count}")
    return tuple(
        InstanceGroup(_GROUP_KINDS[group.kind], group.count, tuple(group.gpus)) for group in config.instance_group
    )


def model_source(config: pb.ModelConfig, name: str, path: Path) -> ModelSource:
    """What the backend needs to open the model file `path`."""
    accelerators = config.optimization.execution_accelerators
    return ModelSource(
        name=name,
        path=path,
        declared=_declared(config),
        parameters={key: parameter.string_value for key, parameter in config.parameters.items()},
        graph_level=config.optimization.graph.level if config.optimization.HasField("graph") else None,
        accelerators=tuple(
            (one.name, dict(one.parameters))
            for one in (*accelerators.gpu_execution_accelerator, *accelerators.cpu_execution_accelerator)
        ),
    )


def plan(config: pb.ModelConfig, own: ModelSpec) -> ServingPlan:
    """Join `config` with `own`, the model's word on itself (dims whole, a batch axis included).

    What the configuration leaves out is filled in from the model. Raises ConfigError where the two contradict each
    other, naming tensor, expected and got.
    """
    max_rows = _max_batch_rows(config, own)
    inputs = _joined("input", config.input, own.inputs, batched=max_rows > 0)
    outputs = _joined("output", config.output, own.outputs, batched=max_rows > 0)
    missing = {tensor.name for tensor in own.inputs} - {tensor.name for tensor in inputs}
    if missing:
        raise ConfigError(f"input: the model needs {sorted(missing)} too, got only {[one.name for one in inputs]}")
    return ServingPlan(ModelSpec(inputs, outputs, batched=max_rows > 0), max_rows, _batch_policy(config, max_rows))


def check_supported(config: pb.ModelConfig) -> None:
    """Raise ConfigError if `config` asks for something this build can't do, saying what."""
    for asked, what in _unsupported(config):
        if asked:
            raise ConfigError(f"{what} is not supported by this build")


def _unsupported(config: pb.ModelConfig) -> Iterable[tuple[bool, str]]:
    batching, queue = config.dynamic_batching, config.dynamic_batching.default_queue_policy
    yield config.HasField("ensemble_scheduling") or config.platform == "ensemble", "ensemble_scheduling"
    yield config.HasField("sequence_batching"), "sequence_batching"
    yield config.model_transaction_policy.decoupled, "model_transaction_policy.decoupled"
    yield bool(config.batch_input), "batch_input"
    yield bool(config.batch_output), "batch_output"
    yield batching.preserve_ordering, "dynamic_batching.preserve_ordering"
    yield batching.priority_levels > 0, "dynamic_batching.priority_levels"
    yield bool(batching.priority_queue_policy), "dynamic_batching.priority_queue_policy"
    rejects = queue.timeout_action == pb.ModelQueuePolicy.REJECT
    yield not rejects, "default_queue_policy.timeout_action other than REJECT"
    yield config.response_cache.enable, "response_cache"
    yield bool(config.model_repository_agents.agents), "model_repository_agents"
    yield bool(config.model_operations.op_library_filename), "model_operations.op_library_filename"
    for one in config.input:
        yield one.HasField("reshape"), f"input '{one.name}': reshape"
        yield one.optional, f"input '{one.name}': optional"
        yield one.allow_ragged_batch, f"input '{one.name}': allow_ragged_batch"
        yield one.is_shape_tensor, f"input '{one.name}': is_shape_tensor"
        yield one.is_non_linear_format_io, f"input '{one.name}': is_non_linear_format_io"
    for out in config.output:
        yield out.HasField("reshape"), f"output '{out.name}': reshape"
        yield out.is_shape_tensor, f"output '{out.name}': is_shape_tensor"
        yield out.is_non_linear_format_io, f"output '{out.name}': is_non_linear_format_io"
    for group in config.instance_group:
        yield group.passive, "instance_group.passive"
        yield bool(group.secondary_devices), "instance_group.secondary_devices"


def _declared(config: pb.ModelConfig) -> ModelSpec | None:
    """The tensors that `config` spells out, batch axis included; None unless it does so for inputs and outputs."""
    if not (config.input and config.output):
        return None
    lead = (-1,) if config.max_batch_size else ()
    return ModelSpec(
        tuple(TensorSpec(one.name, _datatype("input", one), (*lead, *one.dims)) for one in config.input),
        tuple(TensorSpec(one.name, _datatype("output", one), (*lead, *one.dims)) for one in config.output),
    )


def _max_batch_rows(config: pb.ModelConfig, own: ModelSpec) -> int:
    """`max_batch_size`, or what the model allows if neither it nor the tensors are given. Source: Triton's
    auto-complete, which leaves a configuration alone that spells out inputs and outputs."""
    rows: int = config.max_batch_size
    if rows < 0:
        raise ConfigError(f"max_batch_size: expected >= 0, got {rows}")
    if not _can_batch(own):
        if rows:
            dims = {tensor.name: list(tensor.dims) for tensor in (*own.inputs, *own.outputs)}
            raise ConfigError(
                "max_batch_size: expected 0, as the first dimension of some tensor of the model isn't free, "
                f"got {rows}; the model's shapes are {dims}"
            )
        return 0
    return rows if rows or _is_complete(config) else DEFAULT_MAX_BATCH_ROWS


def _is_complete(config: pb.ModelConfig) -> bool:
    return bool(config.input and config.output)


def _can_batch(own: ModelSpec) -> bool:
    """Every tensor needs a free first dimension, and there must be an input to read the number of rows off."""
    return bool(own.inputs) and all(tensor.dims[:1] == (-1,) for tensor in (*own.inputs, *own.outputs))


def _joined(
    kind: str,
    declared: Sequence[pb.ModelInput] | Sequence[pb.ModelOutput],
    own: Sequence[TensorSpec],
    *,
    batched: bool,
) -> tuple[TensorSpec, ...]:
    """The tensors as clients see them: those declared, checked against the model's, or else all of the model's."""
    mine = {one.name: replace(one, dims=one.dims[1:] if batched else one.dims) for one in own}
    if not declared:
        return tuple(mine.values())
    joined: dict[str, TensorSpec] = {}
    for one in declared:
        if one.name not in mine:
            raise ConfigError(f"{kind} '{one.name}': the model has none of that name, only {list(mine)}")
        if one.name in joined:
            raise ConfigError(f"{kind} '{one.name}' is declared twice")
        joined[one.name] = _join(kind, one, mine[one.name])
    return tuple(joined.values())


def _join(kind: str, declared: pb.ModelInput | pb.ModelOutput, own: TensorSpec) -> TensorSpec:
    datatype = _datatype(kind, declared)
    if datatype != own.datatype:
        raise ConfigError(f"{kind} '{own.name}': expected data_type of the model, {own.datatype}, got {datatype}")
    dims = tuple(declared.dims)
    compatible = len(dims) == len(own.dims) and all(
        mine in (-1, given) for given, mine in zip(dims, own.dims, strict=True)
    )
    if not compatible or any(given < -1 for given in dims):
        raise ConfigError(f"{kind} '{own.name}': expected dims of the model, {list(own.dims)}, got {list(dims)}")
    return replace(own, dims=dims)


def _datatype(kind: str, declared: pb.ModelInput | pb.ModelOutput) -> str:
    if declared.data_type not in CONFIG_DATATYPES:
        raise ConfigError(f"{kind} '{declared.name}': expected a data_type, got TYPE_INVALID or none")
    return CONFIG_DATATYPES[declared.data_type]


def _batch_policy(config: pb.ModelConfig, max_rows: int) -> BatchPolicy:
    """As Triton: a configuration that spells the tensors out and has no `dynamic_batching` runs requests one by one."""
    batching = config.dynamic_batching
    queue = QueuePolicy(
        max_queue_size=batching.default_queue_policy.max_queue_size,
        default_timeout_ns=batching.default_queue_policy.default_timeout_microseconds * 1_000,
        allow_timeout_override=batching.default_queue_policy.allow_timeout_override,
    )
    if not max_rows:
        if batching.preferred_batch_size:
            raise ConfigError(
                f"dynamic_batching.preferred_batch_size: expected none, as the model has no batch axis "
                f"(max_batch_size 0), got {list(batching.preferred_batch_size)}"
            )
        return BatchPolicy(queue=queue)
    for size in batching.preferred_batch_size:
        if not 0 < size <= max_rows:
            raise ConfigError(
                f"dynamic_batching.preferred_batch_size: expected 1 to max_batch_size, {max_rows}, got {size}"
            )
    merges = config.HasField("dynamic_batching") or not _is_complete(config)
    return BatchPolicy(
        max_batch_rows=max_rows,
        preferred_batch_rows=tuple(batching.preferred_batch_size),
        max_queue_delay_ns=batching.max_queue_delay_microseconds * 1_000,
        max_batch_requests=0 if merges else 1,
        queue=queue,
    )
