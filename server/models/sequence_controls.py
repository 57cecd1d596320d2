"""The controls of a `sequence_batching`, joined with what the model has.

Lives here: from `control_input` to `Control`, and every check of them. Must not: states, policies. The rule: a
contradiction is a ConfigError with tensor, expected and got, which contains the words that Triton has for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from paceline.backends.spec import Control, ControlKind, ModelSpec, fits
from paceline.protos import model_config_pb2 as pb
from paceline.protos.datatypes import CONFIG_DATATYPES
from paceline.server.errors import ConfigError

__all__ = ["AskedControl", "asked_controls", "controls_of"]

_TYPE_OF_VALUES = {"int32_false_true": "INT32", "fp32_false_true": "FP32", "bool_false_true": "BOOL"}
_VALUES = "'int32_false_true', 'fp32_false_true' {} 'bool_false_true'"
_CORRID_TYPES = ("UINT64", "INT64", "UINT32", "INT32", "BYTES")


class AskedControl(NamedTuple):
    """A control as the configuration has it. `datatype`: "" if that is left to the model."""

    name: str
    kind: ControlKind
    datatype: str
    values: tuple[int | float | bool, ...] = ()


def asked_controls(config: pb.ModelConfig) -> list[AskedControl]:
    """The controls of `config`. Raises ConfigError for those that contradict themselves, whatever the model."""
    model, found = config.name, list[AskedControl]()
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


def _asked(where: str, model: str, name: str, control: pb.ModelSequenceBatching.Control) -> AskedControl:
    if control.kind not in pb.ModelSequenceBatching.Control.Kind.values():
        raise ConfigError(f"{where}: expected a kind, got {control.kind}")
    kind = ControlKind(pb.ModelSequenceBatching.Control.Kind.Name(control.kind))
    given = [field for field in _TYPE_OF_VALUES if getattr(control, field)]
    datatype = CONFIG_DATATYPES.get(control.data_type, "")
    if control.data_type and not datatype:
        raise ConfigError(f"{where}: expected a data_type, got {control.data_type}")
    if kind is ControlKind.CORRID:
        if given:
            either = _VALUES.format("or")
            raise ConfigError(
                f"{where}: sequence batching must not specify either {either} for {kind.value} for {model}, got "
                f"{', '.join(given)}"
            )
        if datatype:
            _check_corrid_type(where, model, datatype)
        return AskedControl(name, kind, datatype)
    if not given:
        either = _VALUES.format("or")
        raise ConfigError(
            f"{where}: sequence batching must specify either {either} for {kind.value} for {model}, got none"
        )
    if len(given) > 1:
        either = _VALUES.format("and")
        raise ConfigError(
            f"{where}: sequence batching specifies more than one from {either} for {kind.value} for {model}, got "
            f"{', '.join(given)}"
        )
    values = tuple(getattr(control, given[0]))
    if len(values) != 2:
        raise ConfigError(
            f"{where}: sequence batching control '{given[0]}' must have exactly 2 entries for {kind.value} for "
            f"{model}, got {list(values)}"
        )
    of_values = _TYPE_OF_VALUES[given[0]]
    if datatype and datatype != of_values:
        raise ConfigError(f"{where}: expected data_type {of_values}, which {given[0]} says, or none, got {datatype}")
    return AskedControl(name, kind, of_values, values)


def _check_corrid_type(where: str, model: str, datatype: str) -> None:
    if datatype not in _CORRID_TYPES:
        raise ConfigError(
            f"{where}: unexpected data type for control {ControlKind.CORRID.value} for {model}. Allowed data types are "
            f"TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING, got {datatype}"
        )


def controls_of(config: pb.ModelConfig, own: ModelSpec, *, batched: bool) -> tuple[Control, ...]:
    """The controls of a model whose own spec is `own` (whole dims). Raises ConfigError."""
    return tuple(_control(config.name, asked, own, batched) for asked in asked_controls(config))


def _control(model: str, asked: AskedControl, own: ModelSpec, batched: bool) -> Control:
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
