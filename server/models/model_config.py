"""A model's `config.pbtxt`, joined with what the model says about itself.

Lives here: the translation from Triton's `ModelConfig`, its names and units, to ours: `ModelSpec`, `BatchPolicy`,
instance groups (its text: `config_text`, tensors: `tensor_config`, the batcher's policy: `batch_policy`; the way back:
`effective_config`). Must not: open models or files. The rule: a setting is honoured, or harmless to ignore and listed
as ignored in docs/configuration.md, or refused here by name; never dropped in silence.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from paceline.backends.base import GroupKind, InstanceGroup, ModelSource
from paceline.backends.generation import TEXT_SPEC as PROMPTS
from paceline.backends.spec import ModelSpec
from paceline.protos import model_config_pb2 as pb
from paceline.scheduler.policy import BatchPolicy
from paceline.server.errors import ConfigError
from paceline.server.models.batch_policy import (
    backend_name,
    batch_policy,
    called_models,
    no_cache,
    own_settings,
    refuse,
)
from paceline.server.models.config_json import config_json
from paceline.server.models.defaults import BatchDefaults
from paceline.server.models.ensemble_config import check_ensemble, is_ensemble
from paceline.server.models.sequence_config import (
    NOT_ITERATIVE,
    check_sequences,
    of_clients,
    policy_of_sequences,
    queueing,
    spec_of_sequences,
)
from paceline.server.models.sequence_states import InitialData
from paceline.server.models.tensor_config import (
    EXPORT_AGAIN,
    can_batch,
    declared_spec,
    fixed_rows,
    freed,
    served_spec,
)

_GROUP_KINDS = {pb.ModelInstanceGroup.Kind.Value(kind.value): kind for kind in GroupKind}

_MAX_INSTANCES = 1024
"""Per version of a model: each is a thread, if not a session and a GPU's memory, and made before anything serves."""

_ISOLATE = "paceline.isolate_failures"
_MANY: Final = sys.maxsize
"""How many requests may be open where each is answered once: as many as its queue takes."""

_TAG = re.compile("[a-zA-Z0-9][a-zA-Z0-9_]*")
"""With `_` in front, a valid label name, and none of those that Prometheus reserves, which begin with `__`."""


@dataclass(frozen=True, slots=True)
class ServingPlan:
    """How a model is served: what clients see, the largest batch in rows (0: no batch axis), how it is batched, whether
    a request with more rows than that is executed in parts, and the tags of its metrics. `most_open`: it gets requests
    one by one, and may have so many that haven't ended; 0: it gets batches. `decoupled`: it answers a request as often
    as it likes. `for_triton`: it is written for Triton's Python backend.
    `keeps_responses`: equal requests are answered without another execution, if the server has a response cache.
    `step_limit_ns`: of one that generates, how long a step may take; 0: any time."""

    spec: ModelSpec
    max_batch_rows: int
    policy: BatchPolicy
    splits: bool = False
    metric_tags: Mapping[str, str] = field(default_factory=dict)
    most_open: int = 0
    decoupled: bool = False
    for_triton: bool = False
    keeps_responses: bool = False
    step_limit_ns: int = 0


def instance_groups(config: pb.ModelConfig) -> tuple[InstanceGroup, ...]:
    """`instance_group`, in our terms. Raises ConfigError for an invalid kind or count, and for too many."""
    total = 0
    for group in config.instance_group:
        if group.kind not in _GROUP_KINDS:
            raise ConfigError(f"instance_group: expected a kind, got {group.kind}")
        if group.count < 0:
            raise ConfigError(f"instance_group: expected count >= 0, got {group.count}")
        total += max(1, group.count) * max(1, len(group.gpus))
        if total > _MAX_INSTANCES:
            raise ConfigError(f"instance_group: expected up to {_MAX_INSTANCES} instances in all, got {total} or more")
    return tuple(
        InstanceGroup(_GROUP_KINDS[group.kind], group.count, tuple(group.gpus)) for group in config.instance_group
    )


def model_source(
    config: pb.ModelConfig,
    path: Path,
    parameters: Mapping[str, str] | None = None,
    op_libraries: tuple[Path, ...] = (),
    default_rows: int = 0,
) -> ModelSource:
    """What the backend needs to open the model file `path`. `parameters` are defaults for the configuration's own,
    `op_libraries` are where its libraries of operators were found, `default_rows` are the rows of a batch if neither
    `max_batch_size` nor tensors are given."""
    accelerators = config.optimization.execution_accelerators
    own_parameters = {key: parameter.string_value for key, parameter in config.parameters.items()}
    return ModelSource(
        name=config.name,
        path=path,
        declared=declared_spec(config),
        parameters={**(parameters or {}), **own_parameters},
        graph_level=config.optimization.graph.level if config.optimization.HasField("graph") else None,
        accelerators=tuple((one.name, dict(one.parameters)) for one in accelerators.gpu_execution_accelerator),
        cpu_accelerators=tuple((one.name, dict(one.parameters)) for one in accelerators.cpu_execution_accelerator),
        op_libraries=op_libraries,
        largest_rows=max(0, config.max_batch_size) or (0 if is_complete(config) else default_rows),
        cuda_graphs=config.optimization.cuda.graphs,
        decoupled=config.model_transaction_policy.decoupled,
        calls=called_models(config),
        config=config_json(config) if backend_name(config) == "python" else "",
        why_raw=_why_raw(config),
    )


def plan(
    config: pb.ModelConfig,
    own: ModelSpec,
    defaults: BatchDefaults | None = None,
    max_batch_rows: int = BatchDefaults().max_batch_rows,
    execution_limit_ns: int = 0,
    confirmed_rows: int = 0,
    initial_data: InitialData | None = None,
    *,
    for_triton: bool = False,
    prompts: int = 0,
) -> ServingPlan:
    """Join `config` with `own`, what the model says about itself (whole dims, batch axis included).

    What the configuration leaves out is filled in from the model. `defaults` are given if there is no configuration at
    all, `max_batch_rows` holds if there is one without `max_batch_size`, and `execution_limit_ns` if it sets no limit.
    A model that always takes the same number of rows above 1 is served by rows if `max_batch_size` is that number, or
    left open and `confirmed_rows`, what a trial has confirmed, is; but not with steps of sequences. `initial_data` is
    what was read for their initial states. `for_triton`: its code is written for Triton's Python backend. `prompts`:
    how many requests it takes at a time, if these are prompts. Raises ConfigError if the two contradict each other,
    naming tensor, expected and got.
    """
    default_rows = 0 if prompts else defaults.max_batch_rows if defaults else max_batch_rows
    sequenced = config.HasField("sequence_batching")
    rows = 0 if sequenced else _fixed_rows(config, own, confirmed_rows if default_rows else 0)
    if rows:
        own, default_rows = freed(config, own), rows
    max_rows = _max_batch_rows(config, own, default_rows)
    sequence = spec_of_sequences(config, own, max_rows, initial_data or {}) if sequenced else None
    _check_batch_axis(config, own)
    clients = of_clients(config, own, batched=max_rows > 0)
    spec = replace(served_spec(config, clients, batched=max_rows > 0), fixed_rows=rows, sequence=sequence)
    if prompts:
        spec = clients  # whatever of it the configuration names: the model knows its tensors by their places
    merges = max_rows > 0 and (sequenced or config.HasField("dynamic_batching") or not is_complete(config))
    queue = queueing(config, max_rows)
    policy = batch_policy(queue, max_rows, merges=merges, defaults=defaults, execution_limit_ns=execution_limit_ns)
    if sequence is not None:
        policy = policy_of_sequences(config, sequence, policy, max_rows)
    if rows and not policy.batch_sizes:
        policy = replace(policy, batch_sizes=(rows,))
    own_set = own_settings(config)
    splits = own_set.split_oversized
    _check_rows(spec, policy, splits)
    if sequence is not None and sequence.iterative and not for_triton:
        raise ConfigError(NOT_ITERATIVE)
    decoupled = config.model_transaction_policy.decoupled
    most_open = step_limit_ns = 0
    if decoupled or for_triton:
        _check_requests(config, spec, policy, for_triton=for_triton)
        most_open = own_set.max_open_requests if decoupled else _MANY
    if decoupled:
        # What was answered can't be taken back, so nothing runs again.
        policy = replace(policy, isolate_failures=False)
    if prompts:
        refuse(
            "the model generates (paceline.generate), and its answers come token by token",
            ("dynamic_batching.preserve_ordering", "false", policy.preserve_ordering and "true"),
            ("response_cache.enable", "false", config.response_cache.enable and "true"),
        )
        most_open = _MANY
        step_limit_ns = policy.execution_limit_ns
        by_level = policy.priority_queue.items()
        policy = replace(
            policy,
            max_batch_rows=prompts,
            max_batch_requests=1 if prompts == 1 else 0,
            isolate_failures=False,
            # A request's execution only waits for a place, as long as others take, so that its time says nothing.
            deadline_aware=False,
            execution_limit_ns=0,
            # A request's timeout is for its generation, of which that wait is a part.
            queue=replace(policy.queue, allow_timeout_override=True),
            priority_queue={level: replace(one, allow_timeout_override=True) for level, one in by_level},
        )
    tags, keeps = _metric_tags(config), config.response_cache.enable
    return ServingPlan(spec, max_rows, policy, splits, tags, most_open, decoupled, for_triton, keeps, step_limit_ns)


_OF_ENCODERS = {"decoder_input_ids", "input_features", "input_values", "pixel_values"}
"""What else models may have whose prompts have an encoder."""


def _why_raw(config: pb.ModelConfig) -> str:
    """Why a decoder is to be executed as it is."""
    if config.HasField("sequence_batching"):
        return "its configuration has sequence_batching"
    named = {one.name for one in config.input} | {one.name for one in config.output}
    if others := named - {one.name for one in (*PROMPTS.inputs, *PROMPTS.outputs)} - _OF_ENCODERS:
        return f"its configuration names '{min(others)}'"
    return "its configuration has max_batch_size" if config.max_batch_size > 0 else ""


def _metric_tags(config: pb.ModelConfig) -> Mapping[str, str]:
    """`metric_tags`, each of which becomes a label of its name with `_` in front. An entry without name and value is
    the text format's `metric_tags { }`, which means none."""
    tags = {tag: value for tag, value in config.metric_tags.items() if tag or value}
    for tag in sorted(tags):
        if not _TAG.fullmatch(tag):
            raise ConfigError(
                f"metric_tags: expected names of ASCII letters, digits and _, which is not the first, got '{tag}'"
            )
    return tags


def _check_rows(spec: ModelSpec, policy: BatchPolicy, splits: bool) -> None:
    """Settings that add rows to a batch or split a request by rows need tensors that are made of rows."""
    merging = "allow_ragged_batch, batch_input or batch_output"
    if spec.fixed_rows and not spec.paddable:
        raise ConfigError(
            f"max_batch_size: expected 0, as the model always takes {spec.fixed_rows} rows, to which batches can't be "
            f"padded with {merging}, got {policy.max_batch_rows}"
        )
    if spec.fixed_rows and policy.batch_sizes != (spec.fixed_rows,):
        raise ConfigError(
            f"paceline.batch_sizes: expected {spec.fixed_rows}, the number of rows that the model always takes, "
            f"got {list(policy.batch_sizes)}"
        )
    if not spec.paddable:
        sizes = list(policy.batch_sizes)
        refuse(f"batches can't be padded with {merging}", ("paceline.batch_sizes", "none", sizes))
    if splits and not spec.by_rows:
        why = "requests can't be split with allow_ragged_batch, batch_input, batch_output, optional or is_shape_tensor"
        refuse(why, ("paceline.split_oversized", "false", "true"))


def _check_requests(config: pb.ModelConfig, spec: ModelSpec, policy: BatchPolicy, *, for_triton: bool) -> None:
    """Raise ConfigError for what can't be had, naming the setting."""
    own = own_settings(config)
    decoupled = config.model_transaction_policy.decoupled
    isolates = own.isolate_failures and _ISOLATE in config.parameters
    states = spec.sequence.states if spec.sequence is not None else ()
    why = "is decoupled (model_transaction_policy)" if decoupled else "is written for Triton's Python backend"
    refuse(
        f"the model {why}: its requests are handed over one by one, and answered whenever it likes",
        ("dynamic_batching.preserve_ordering", "false", decoupled and policy.preserve_ordering and "true"),
        ("sequence_batching", "none", not for_triton and config.HasField("sequence_batching") and "it"),
        ("sequence_batching.state", "none", [one.input.name for one in states]),
        ("batch_input", "none", [name for one in spec.batch_inputs for name in one.targets]),
        ("batch_output", "none", [name for one in spec.batch_outputs for name in one.targets]),
        ("paceline.batch_sizes", "none", list(policy.batch_sizes)),
        ("paceline.pad", "none", [length.name for length in spec.lengths]),
        ("paceline.split_oversized", "false", own.split_oversized and "true"),
        (_ISOLATE, "false", decoupled and isolates and "true"),
    )
    if not own.max_open_requests:
        raise ConfigError("paceline.max_open_requests: expected 1 or more, got 0")


def check_supported(config: pb.ModelConfig) -> None:
    """Raise ConfigError if `config` asks for something this build can't do, saying what."""
    asked = {
        "model_repository_agents": bool(config.model_repository_agents.agents),
        **{
            f"{kind} '{one.name}': is_non_linear_format_io": one.is_non_linear_format_io
            for kind, tensors in (("input", config.input), ("output", config.output))
            for one in tensors
        },
        "instance_group.passive": any(group.passive for group in config.instance_group),
        "instance_group.secondary_devices": any(group.secondary_devices for group in config.instance_group),
    }
    for what, is_asked_for in asked.items():
        if is_asked_for:
            raise ConfigError(f"{what} is not supported by this build")
    if is_ensemble(config):
        check_ensemble(config)
        return
    check_sequences(config)
    if config.model_transaction_policy.decoupled and backend_name(config) != "python":
        raise ConfigError(
            "model_transaction_policy.decoupled: expected backend 'python', whose models can answer a request more "
            f"than once, got '{backend_name(config)}'"
        )
    if called_models(config) and (got := backend_name(config)) != "python":
        raise ConfigError(f"paceline.calls: expected backend 'python', whose code can call models, got '{got}'")
    if config.model_transaction_policy.decoupled and config.response_cache.enable:
        raise no_cache(config.name, "'decoupled' transaction policy")


def ignored_settings(config: pb.ModelConfig) -> list[str]:
    """What `config` asks for that has no effect here and isn't a mere hint."""
    asked = {
        "instance_group.rate_limiter": any(group.HasField("rate_limiter") for group in config.instance_group),
        "model_metrics": config.HasField("model_metrics"),
        "cc_model_filenames": bool(config.cc_model_filenames),
    }
    return [name for name, is_asked_for in asked.items() if is_asked_for]


def is_complete(config: pb.ModelConfig) -> bool:
    """Whether `config` names all its tensors, and so leaves nothing to the model. Source: Triton's auto-complete."""
    return bool(config.input and config.output)


def _fixed_rows(config: pb.ModelConfig, own: ModelSpec, confirmed_rows: int) -> int:
    """How many rows the model always takes, if it is to be served by rows all the same; else 0."""
    rows = fixed_rows(config, own)
    if rows < 2 or not can_batch(config, freed(config, own)):
        return 0
    if config.max_batch_size not in (0, rows):
        raise ConfigError(
            f"max_batch_size: expected {rows}, the fixed first dimension of all tensors of the model, or 0 with whole "
            f"shapes in input and output, got {config.max_batch_size}"
        )
    return rows if config.max_batch_size or rows == confirmed_rows else 0


def _max_batch_rows(config: pb.ModelConfig, own: ModelSpec, default: int) -> int:
    """`max_batch_size`, or what the model allows if neither it nor the tensors are given."""
    rows: int = config.max_batch_size
    if rows < 0:
        raise ConfigError(f"max_batch_size: expected >= 0, got {rows}")
    return rows or (default if not is_complete(config) and can_batch(config, own) else 0)


def _check_batch_axis(config: pb.ModelConfig, own: ModelSpec) -> None:
    """Raise ConfigError if `config` asks for a batch axis where clients' tensors have none."""
    if config.max_batch_size and not can_batch(config, of_clients(config, own, batched=True)):
        dims = {tensor.name: list(tensor.dims) for tensor in (*own.inputs, *own.outputs) if not tensor.optional}
        why = "not all tensors of the model have a free first dimension" if own.inputs else "requests bring no inputs"
        raise ConfigError(
            f"max_batch_size: expected 0, as {why}, got {config.max_batch_size}; the model's shapes are {dims}"
            + (f"; {EXPORT_AGAIN}" if fixed_rows(config, own) == 1 else "")
        )
