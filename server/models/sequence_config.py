"""The sequences of a `config.pbtxt`, joined with what the model has.

Lives here: from `sequence_batching` to `SequenceSpec` and `SequencePolicy`, and which tensors are left for clients
(states: `sequence_states`). Must not: what any model has, such as `input` and `output`.
The rule: a contradiction is a ConfigError with tensor, expected and got, which contains the words that Triton has for
it.
"""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from typing import NamedTuple

from paceline.backends.spec import Control, ControlKind, ModelSpec, SequenceSpec, TensorSpec, fits
from paceline.protos import model_config_pb2 as pb
from paceline.protos.datatypes import CONFIG_DATATYPES
from paceline.scheduler.policy import NEVER, BatchPolicy, PolicyError, SequencePolicy
from paceline.server.codec.codec import memory_bytes
from paceline.server.errors import ConfigError
from paceline.server.models.batch_policy import backend_name, no_cache, own_settings, refuse
from paceline.server.models.sequence_states import InitialData, check_states, states_of
from paceline.server.models.tensor_config import datatype_of

NOT_ITERATIVE = (
    "sequence_batching.iterative_sequence is not supported by this build, except of Python models written for Triton"
)
_DEFAULT_IDLE_NS = 1_000_000_000
_LONGEST_IDLE_NS = NEVER // 2
_MAX_SEQUENCES = _MAX_BACKLOG = 10_000
_MAX_STATE_BYTES = 2**30
_MOST_PREFERRED = 65_536
"""Sizes of a batch that `minimum_slot_utilization` may allow: all are listed."""
_TYPE_OF_VALUES = {"int32_false_true": "INT32", "fp32_false_true": "FP32", "bool_false_true": "BOOL"}
_VALUES = "'int32_false_true', 'fp32_false_true' {} 'bool_false_true'"
_CORRID_TYPES = ("UINT64", "INT64", "UINT32", "INT32", "BYTES")


class _AskedControl(NamedTuple):
    """A control as the configuration has it. `datatype`: "" if that is left to the model."""

    name: str
    kind: ControlKind
    datatype: str
    values: tuple[int | float | bool, ...] = ()


def check_sequences(config: pb.ModelConfig) -> None:
    """Raise ConfigError for a `sequence_batching` that contradicts itself, or asks for what this build can't do."""
    own = own_settings(config)
    if not config.HasField("sequence_batching"):
        refuse(
            "it only means something with sequence_batching",
            _given(config, "paceline.state_batch_axis"),
            _given(config, "paceline.max_sequences"),
            _given(config, "paceline.sequence_backlog"),
            _given(config, "paceline.max_state_bytes"),
        )
        return
    if config.sequence_batching.iterative_sequence and backend_name(config) != "python":
        raise ConfigError(NOT_ITERATIVE)
    if config.response_cache.enable:
        raise no_cache(config.name, "sequence batching scheduler")
    _asked_controls(config)
    check_states(config)
    _check_strategy(config)
    refuse("each request of a sequence is one row", ("paceline.split_oversized", "none", own.split_oversized))
    if not config.sequence_batching.state:
        refuse("it only means something with a state", _given(config, "paceline.max_state_bytes"))


def _given(config: pb.ModelConfig, key: str) -> tuple[str, str, str]:
    """One of our settings, which isn't expected, as it was given; even if that is 0."""
    return key, "none", config.parameters[key].string_value.strip() if key in config.parameters else ""


def _check_strategy(config: pb.ModelConfig) -> None:
    sequences = config.sequence_batching
    share = sequences.direct.minimum_slot_utilization
    if not 0 <= share <= 1:
        raise ConfigError(
            f"sequence_batching.direct: sequence batching minimum slot utilization must be in range (0.0, 1.0] for "
            f"{config.name}, got {share}"
        )
    if (candidates := sequences.oldest.max_candidate_sequences) < 0:
        raise ConfigError(f"sequence_batching.oldest.max_candidate_sequences: expected >= 0, got {candidates}")
    for size in sequences.oldest.preferred_batch_size:
        if size <= 0:
            raise ConfigError(
                f"sequence_batching.oldest: sequence batching preferred batch size must be positive for {config.name}, "
                f"got {size}"
            )


def of_clients(config: pb.ModelConfig, own: ModelSpec, *, batched: bool) -> ModelSpec:
    """What is left for clients of a model whose own spec is `own`: all but what sequences fill, and outputs of states
    unless `config` lists them. If the model is `batched`, an input without any dimensions can't have a batch axis: it
    is a shape tensor, so that steps of equal values share batches. Raises ConfigError if `config` lists an input that
    sequences fill."""
    if not config.HasField("sequence_batching"):
        return own
    sequences = config.sequence_batching
    filled = {one.name for one in sequences.control_input} | {one.input_name for one in sequences.state}
    for declared in config.input:
        if declared.name in filled:
            raise ConfigError(
                f"input '{declared.name}': expected only what clients send, got what sequence_batching fills; leave it "
                "out of input"
            )
    kept = {one.output_name for one in sequences.state} - {one.name for one in config.output}
    inputs = (
        replace(one, shape_tensor=True) if batched and not (one.dims or one.any_rank) else one
        for one in own.inputs
        if one.name not in filled
    )
    outputs = tuple(one for one in own.outputs if one.name not in kept)
    if own.outputs and not outputs:
        raise ConfigError(
            f"output: expected one besides those of states, got only {sorted(kept)}; list in output which of these "
            "clients are to get"
        )
    return replace(own, inputs=tuple(inputs), outputs=outputs)


def spec_of_sequences(config: pb.ModelConfig, own: ModelSpec, max_rows: int, data: InitialData) -> SequenceSpec:
    """How steps of sequences are executed by a model whose own spec is `own` (whole dims), in batches of up to
    `max_rows` rows (0: it has no batch axis). `data`: what was read for initial states. Raises ConfigError."""
    sequences, batched = config.sequence_batching, max_rows > 0
    is_python = backend_name(config) == "python"
    if is_python:
        own = _with_undeclared(config, own, batched)
    controls = tuple(_control(config.name, asked, own, batched) for asked in _asked_controls(config))
    batch_names = {
        one.axis_names[0]
        for one in of_clients(config, own, batched=batched).inputs
        if one.axis_names and one.axis_names[0] and not one.shape_tensor
    }
    axes = own_settings(config).state_batch_axis
    states = states_of(config, own, batch_names, axes, data, batched=batched)
    listed = {one.name for one in config.output}
    for state in states:
        if state.output.name in listed and state.output.batch_axis:
            raise ConfigError(
                f"output '{state.output.name}': expected only outputs whose batch axis is the first, got that of the "
                f"state '{state.input.name}', whose batch axis is {state.output.batch_axis}; leave it out of output"
            )
    direct = not sequences.HasField("oldest")
    told = {control.kind for control in controls} & {ControlKind.READY, ControlKind.CORRID}
    # What else may be executed by any instance in any row, without that anybody could tell.
    stays = is_python or (direct and bool(told))
    places = _candidates(config, max_rows) if stays else 0
    rows = direct and batched and places > 0
    return SequenceSpec(controls, states, places, rows, iterative=sequences.iterative_sequence)


def _candidates(config: pb.ModelConfig, max_rows: int) -> int:
    """How many sequences an instance of Triton's holds at a time."""
    return config.sequence_batching.oldest.max_candidate_sequences or max(1, max_rows)


def _with_undeclared(config: pb.ModelConfig, own: ModelSpec, batched: bool) -> ModelSpec:
    """`own` of a Python model, which sees what sequences bring whether it declares that or not, as a tensor that isn't
    declared has any shape."""
    asked = [(one.name, one.datatype) for one in _asked_controls(config)]
    inputs, outputs = {one.name for one in own.inputs}, {one.name for one in own.outputs}
    more_inputs = [TensorSpec(name, datatype, (), any_rank=True) for name, datatype in asked if name not in inputs]
    more_outputs = []
    for one in config.sequence_batching.state:
        if (datatype := CONFIG_DATATYPES.get(one.data_type, "")) and one.dims:
            if one.input_name not in inputs:
                more_inputs.append(TensorSpec(one.input_name, datatype, (), any_rank=True))
            if one.output_name not in outputs:
                more_outputs.append(TensorSpec(one.output_name, datatype, (), any_rank=True))
    return replace(own, inputs=(*own.inputs, *more_inputs), outputs=(*own.outputs, *more_outputs))


def queueing(config: pb.ModelConfig, max_rows: int) -> pb.ModelConfig:
    """`config` with the `dynamic_batching` that forms batches as the strategy of its `sequence_batching` wants them; as
    it is if it has none. Raises ConfigError."""
    if not config.HasField("sequence_batching"):
        return config
    made, strategy = deepcopy(config), config.sequence_batching
    made.dynamic_batching.SetInParent()  # which clears the other, as a model has only one of them
    if not strategy.HasField("oldest"):
        share = strategy.direct.minimum_slot_utilization
        if share and max_rows:
            if max_rows > _MOST_PREFERRED:
                raise ConfigError(
                    f"max_batch_size: expected up to {_MOST_PREFERRED} with minimum_slot_utilization, got {max_rows}"
                )
            # The share has single precision: 0.1 of 10 slots is 1, not 1.00000001.
            enough = max(1, math.ceil((share - 1e-6) * max_rows))
            made.dynamic_batching.preferred_batch_size.extend(range(enough, max_rows + 1))
            made.dynamic_batching.max_queue_delay_microseconds = strategy.direct.max_queue_delay_microseconds
        return made
    oldest = strategy.oldest
    for size in oldest.preferred_batch_size:
        if size > max_rows:
            raise ConfigError(
                f"sequence_batching.oldest: sequence batching preferred batch size must be <= max batch size for "
                f"{config.name}, expected up to {max_rows}, got {size}"
            )
    made.dynamic_batching.preferred_batch_size.extend(oldest.preferred_batch_size)
    made.dynamic_batching.max_queue_delay_microseconds = oldest.max_queue_delay_microseconds
    made.dynamic_batching.preserve_ordering = oldest.preserve_ordering
    return made


def policy_of_sequences(config: pb.ModelConfig, spec: SequenceSpec, policy: BatchPolicy, max_rows: int) -> BatchPolicy:
    """`policy` with how many sequences may be under way, and for how long. Raises ConfigError."""
    own = own_settings(config)
    if spec.rows:
        either = "a control of kind READY or CORRID, or a Python model"
        refuse(
            f"sequences have rows of their own with sequence_batching.direct and {either}",
            ("paceline.batch_sizes", "none", list(policy.batch_sizes)),
            ("paceline.max_batch_elements", "0", policy.max_batch_elements),
        )
    if spec.places and own.max_sequences is not None:
        raise ConfigError(
            f"paceline.max_sequences: expected none, as each instance holds {spec.places} sequences, which the model "
            f"can tell apart: max_candidate_sequences of oldest, else max_batch_size; got {own.max_sequences}"
        )
    most_bytes = _MAX_STATE_BYTES if own.max_state_bytes is None else own.max_state_bytes
    first_bytes = sum(memory_bytes(state.initial) for state in spec.states)
    if own.max_state_bytes and first_bytes > most_bytes:
        raise ConfigError(
            f"paceline.max_state_bytes: expected 0, or at least the {first_bytes} bytes of the states that a sequence "
            f"begins with, got {most_bytes}"
        )
    idle_ns = config.sequence_batching.max_sequence_idle_microseconds * 1_000 or _DEFAULT_IDLE_NS
    instances = sum(max(1, group.count) * max(1, len(group.gpus)) for group in config.instance_group) or 1
    most = max(_MAX_SEQUENCES, instances * _candidates(config, max_rows))
    try:
        sequences = SequencePolicy(
            idle_ns=min(idle_ns, _LONGEST_IDLE_NS),
            places=spec.places,
            max_sequences=most if own.max_sequences is None else own.max_sequences,
            backlog=_MAX_BACKLOG if own.sequence_backlog is None else own.sequence_backlog,
            max_state_bytes=max(most_bytes, first_bytes) if spec.states and most_bytes else 0,
        )
    except PolicyError as error:
        raise ConfigError(f"paceline.{error}") from None
    # What a model has kept of a step that failed in a batch isn't undone, so that step mustn't be executed again.
    may_keep = spec.places > 0 and not spec.states
    return replace(policy, sequences=sequences, isolate_failures=policy.isolate_failures and not may_keep)


def _asked_controls(config: pb.ModelConfig) -> list[_AskedControl]:
    """The controls of `config`. Raises ConfigError for those that contradict themselves, whatever the model."""
    model, found = config.name, list[_AskedControl]()
    for one in config.sequence_batching.control_input:
        where = f"sequence_batching.control_input '{one.name}'"
        if not one.name:
            raise ConfigError(f"{where}: sequence batching control tensor must have a name for {model}")
        if not one.control:
            raise ConfigError(f"{where}: expected a control, got none")
        if any(one.name == other.name for other in found) or len(one.control) > 1:
            raise ConfigError(
                f"{where}: sequence batching control tensor '{one.name}' is specified for multiple control kinds for "
                f"{model}, expected one"
            )
        asked = _asked(where, model, one.name, one.control[0])
        if any(asked.kind is other.kind for other in found):
            raise ConfigError(
                f"{where}: sequence batching specifies multiple {asked.kind.value} tensors for {model}, expected one"
            )
        found.append(asked)
    return found


def _asked(where: str, model: str, name: str, control: pb.ModelSequenceBatching.Control) -> _AskedControl:
    if control.kind not in pb.ModelSequenceBatching.Control.Kind.values():
        raise ConfigError(f"{where}: expected a kind, got {control.kind}")
    kind = ControlKind(pb.ModelSequenceBatching.Control.Kind.Name(control.kind))
    given = [field for field in _TYPE_OF_VALUES if getattr(control, field)]
    datatype, got = datatype_of(where, control.data_type), ", ".join(given) or "none"
    either, both, of = _VALUES.format("or"), _VALUES.format("and"), f"for {kind.value} for {model}"
    if kind is ControlKind.CORRID:
        if given:
            raise ConfigError(f"{where}: sequence batching must not specify either {either} {of}, got {got}")
        if datatype:
            _check_corrid_type(where, model, datatype)
        return _AskedControl(name, kind, datatype)
    if not given:
        raise ConfigError(f"{where}: sequence batching must specify either {either} {of}, got {got}")
    if len(given) > 1:
        raise ConfigError(f"{where}: sequence batching specifies more than one from {both} {of}, got {got}")
    values, of_values = tuple(getattr(control, given[0])), _TYPE_OF_VALUES[given[0]]
    if len(values) != 2:
        what = f"sequence batching control '{given[0]}' must have exactly 2 entries {of}"
        raise ConfigError(f"{where}: {what}, got {list(values)}")
    if datatype and datatype != of_values:
        raise ConfigError(f"{where}: expected data_type {of_values}, which {given[0]} says, or none, got {datatype}")
    return _AskedControl(name, kind, of_values, values)


def _check_corrid_type(where: str, model: str, datatype: str) -> None:
    if datatype not in _CORRID_TYPES:
        raise ConfigError(
            f"{where}: unexpected data type for control {ControlKind.CORRID.value} for {model}. Allowed data types are "
            f"TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING, got {datatype}"
        )


def _control(model: str, asked: _AskedControl, own: ModelSpec, batched: bool) -> Control:
    where = f"sequence_batching.control_input '{asked.name}'"
    mine = next((one for one in own.inputs if one.name == asked.name), None)
    if mine is None:
        raise ConfigError(
            f"{where}: configuration specified sequence control '{asked.name}', but model {model} does not provide "
            f"that input, only {[one.name for one in own.inputs]}"
        )
    datatype = asked.datatype or mine.datatype
    if asked.kind is ControlKind.CORRID:
        _check_corrid_type(where, model, datatype)
    if mine.datatype and mine.datatype != datatype:
        raise ConfigError(
            f"{where}: the model expects data-type {mine.datatype} but the model configuration specifies data-type "
            f"{datatype}"
        )
    lead = (-1,) if batched else ()
    is_scalar = mine.dims == lead and not mine.any_rank
    if not (is_scalar or mine.any_rank or (mine.dims[: len(lead)] == lead and fits((1,), mine.dims[len(lead) :]))):
        raise ConfigError(
            f"{where}: sequence control '{asked.name}' in model {model} has dims {list(mine.dims)} but dims "
            f"{[*lead, 1]} is expected"
        )
    reshape = () if is_scalar else None
    tensor = replace(mine, datatype=datatype, dims=(1,), reshape=reshape, optional=False, any_rank=False)
    return Control(asked.kind, tensor, asked.values)
