"""What this server needs to serve a model of another one: what clients see, whether and how it batches.

Lives here: the decisions, from what the upstream says of a model. Must not: call it (`upstream`). The rule: clients see
what they would see there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.backends.remote import RemoteModel, RemoteServer
from paceline.backends.spec import ModelSpec, SequenceSpec, TensorSpec
from paceline.protos import inference_pb2 as pb
from paceline.protos import model_config_pb2 as config_pb
from paceline.protos.datatypes import UnknownDatatypeError, by_name
from paceline.server.errors import ConfigError
from paceline.server.models.batch_policy import batch_policy
from paceline.server.models.defaults import BatchDefaults
from paceline.server.models.effective_config import effective_config
from paceline.server.models.loader import LoadedVersion
from paceline.server.models.model_config import ServingPlan
from paceline.server.models.sequence_config import policy_of_sequences
from paceline.server.models.tensor_config import can_batch
from paceline.server.models.upstream_settings import UpstreamSettings

_SPLITS = "paceline.split_oversized"


@dataclass(frozen=True, slots=True)
class UpstreamVersion:
    """One version of a model: its name there ("": it has none), its ModelMetadata, and its ModelConfig, None where the
    server has no such RPC. Equal ones are served alike."""

    version: str
    metadata: pb.ModelMetadataResponse
    config: config_pb.ModelConfig | None


def bring(
    name: str, listed: UpstreamVersion, server: RemoteServer, settings: UpstreamSettings, batching: BatchDefaults
) -> LoadedVersion:
    """A version of model `name`, ready to be served: clients see the tensors that they would see there. Raises
    ConfigError for what can't be."""
    metadata, config = listed.metadata, listed.config
    own = ModelSpec(_tensors("input", metadata.inputs), _tensors("output", metadata.outputs))
    if not (own.inputs and own.outputs):
        own = ModelSpec((), ())  # each request says
    if config is not None:
        _check(config, own)
        optional = {one.name for one in config.input if one.optional}
        own = replace(own, inputs=tuple(replace(one, optional=one.name in optional) for one in own.inputs))
    rows = 0 if name in settings.unbatched else _max_batch_rows(own, config, batching)
    stateful = config if config is not None and config.HasField("sequence_batching") else None
    # A limit on rows that the upstream doesn't know, or doesn't keep to, must not refuse what it would accept.
    splits = config is None or (
        _SPLITS in config.parameters and config.parameters[_SPLITS].string_value.strip().lower() in ("true", "1")
    )
    queueing = _queueing(config) if config else config_pb.ModelConfig()
    plan = _plan(own, rows, batching, queueing, stateful, splits=splits)
    served = config_pb.ModelConfig(name=name, platform=metadata.platform, backend=config.backend if config else "")
    served.MergeFrom(queueing)
    if plan.splits:  # for a server that batches in front of this one
        served.parameters[_SPLITS].string_value = "true"
    made = effective_config(served, plan, platform=metadata.platform, file="", groups=())
    if stateful is not None:
        made.sequence_batching.CopyFrom(stateful.sequence_batching)
    model = RemoteModel(server, name, listed.version, plan.spec, metadata.platform)
    calls = settings.batches if plan.policy.max_batch_requests != 1 else settings.calls
    instances = tuple(model.instance(number) for number in range(calls))
    return LoadedVersion(name, listed.version, made, plan, {}, model, instances)


def _tensors(kind: str, tensors: Sequence[pb.ModelMetadataResponse.TensorMetadata]) -> tuple[TensorSpec, ...]:
    names = set()
    for one in tensors:
        if one.name in names:
            raise ConfigError(f"{kind} '{one.name}' of the upstream: expected each name once, got it again")
        names.add(one.name)
        try:
            by_name(one.datatype)
        except UnknownDatatypeError as error:
            raise ConfigError(f"{kind} '{one.name}' of the upstream: {error}") from None
        if min(one.shape, default=0) < -1:
            raise ConfigError(f"{kind} '{one.name}' of the upstream: expected sizes >= -1, got {list(one.shape)}")
    assumed = kind == "output"
    return tuple(TensorSpec(one.name, one.datatype, tuple(one.shape), assumed=assumed) for one in tensors)


def _check(config: config_pb.ModelConfig, own: ModelSpec) -> None:
    """Raise ConfigError for models whose requests get several answers, or are steps of sequences that can't be kept
    track of."""
    if config.HasField("sequence_batching"):
        if config.sequence_batching.iterative_sequence:
            raise ConfigError("sequence_batching.iterative_sequence of the upstream's model is not supported")
        if not own.inputs:
            raise ConfigError("sequence_batching of the upstream's model: expected metadata with its tensors, got none")
    if config.model_transaction_policy.decoupled:
        raise ConfigError("model_transaction_policy.decoupled of the upstream's model: expected one answer per request")


def _max_batch_rows(own: ModelSpec, config: config_pb.ModelConfig | None, batching: BatchDefaults) -> int:
    """The rows of a batch: what ModelConfig says, else the flag; 0 for models that can't batch."""
    if config is not None:
        # With ragged or batch inputs, the upstream tells requests apart: joined here, they would be one request to it.
        ragged = config.batch_input or config.batch_output or any(one.allow_ragged_batch for one in config.input)
        whole = any(one.is_shape_tensor for tensors in (config.input, config.output) for one in tensors)
        if config.max_batch_size <= 0 or ragged or whole:
            return 0
    if not own.inputs:
        return config.max_batch_size if config else batching.max_batch_rows
    if config is not None:
        if all(one.optional for one in own.inputs):
            return 0  # what a request brings need not show how many rows it has
        leads_with_free = all(one.dims[:1] == (-1,) for one in (*own.inputs, *own.outputs))
        return config.max_batch_size if leads_with_free else 0
    return batching.max_batch_rows if can_batch(config_pb.ModelConfig(), own) else 0


def _queueing(config: config_pb.ModelConfig) -> config_pb.ModelConfig:
    """The upstream's priorities and timeouts, which hold for the queue here: there, only batches arrive, without the
    priorities and timeouts of their requests. Not how many may wait."""
    held = config_pb.ModelConfig()
    if not config.HasField("dynamic_batching"):
        return held
    given, batching = config.dynamic_batching, held.dynamic_batching
    batching.CopyFrom(given)
    for setting in ("preferred_batch_size", "max_queue_delay_microseconds", "preserve_ordering"):
        batching.ClearField(setting)
    if not batching.priority_levels:  # without levels, these mean nothing there, and are refused here
        batching.ClearField("default_priority_level")
        batching.ClearField("priority_queue_policy")
    for policy in (batching.default_queue_policy, *batching.priority_queue_policy.values()):
        policy.ClearField("max_queue_size")
    return held


def _plan(
    own: ModelSpec,
    rows: int,
    batching: BatchDefaults,
    queueing: config_pb.ModelConfig,
    stateful: config_pb.ModelConfig | None,
    *,
    splits: bool,
) -> ServingPlan:
    """`stateful` is the upstream's configuration of a model whose requests are steps of sequences. A step goes there
    by itself, as a request there has one row."""

    def served(tensor: TensorSpec) -> TensorSpec:
        """In metadata, no dims may also mean that the rank isn't known; checking it is left to the upstream."""
        dims = tensor.dims[1 if rows else 0 :]
        return replace(tensor, dims=dims, any_rank=not dims, assumed=tensor.assumed and bool(dims))

    sequence = SequenceSpec() if stateful is not None else None
    spec = ModelSpec(
        tuple(map(served, own.inputs)), tuple(map(served, own.outputs)), batched=rows > 0, sequence=sequence
    )
    merges = rows > 0 and sequence is None
    # What rows cost there isn't for this server to try out.
    policy = replace(batch_policy(queueing, rows, merges=merges, defaults=batching), grows_always=True)
    if stateful is not None and sequence is not None:
        policy = policy_of_sequences(stateful, sequence, policy, rows)
    return ServingPlan(spec, rows, policy, splits=merges and splits and spec.by_rows)
