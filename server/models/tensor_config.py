"""The tensors of a `config.pbtxt`, joined with those that the model has.

Lives here: from `input`, `output`, `batch_input` and `batch_output` to `ModelSpec`, and every check of them. Must not:
policies, instances, files. The rule: a contradiction is a ConfigError with tensor, expected and got, and none is left
for the first request to find.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from paceline.backends.spec import BatchInput, BatchInputKind, BatchOutput, ModelSpec, TensorSpec, fits
from paceline.protos import model_config_pb2 as pb
from paceline.protos.datatypes import CONFIG_DATATYPES
from paceline.server.errors import ConfigError

_BATCH_INPUT_TYPES = ("INT32", "FP32")
EXPORT_AGAIN = (
    "if that is the batch, export the model with a free one, and its requests share batches; in PyTorch, "
    'torch.onnx.export(..., dynamo=True, dynamic_shapes=[{0: torch.export.Dim("rows")}]) with an entry for each input'
)
"""What to do about a first dimension that is fixed at 1."""
_FLAT = (-1,)
_MANY = 20

Declared = pb.ModelInput | pb.ModelOutput


def without_datatype(config: pb.ModelConfig) -> list[str]:
    """The names of the tensors whose datatype `config` leaves to the model."""
    declared: list[Declared] = [*config.input, *config.output]
    return [one.name for one in declared if not one.data_type]


def declared_spec(config: pb.ModelConfig) -> ModelSpec | None:
    """`spelled_out`; None also unless there are inputs and outputs."""
    return spelled_out(config) if config.input and config.output else None


def spelled_out(config: pb.ModelConfig) -> ModelSpec | None:
    """The tensors as `config` says the model has them, batch axis included; None if it leaves the datatype of one to
    the model. Raises ConfigError for a datatype that doesn't exist, and without a name."""
    if without_datatype(config):
        return None
    lead = (-1,) if config.max_batch_size else ()
    scattered, named = _scattered(config), {one.name for one in config.input}
    inputs = [
        replace(_whole("input", one, lead, flat=one.allow_ragged_batch), optional=one.optional) for one in config.input
    ]
    outputs = (_whole("output", one, lead, flat=one.name in scattered) for one in config.output)
    for made in config.batch_input:  # which the model must have too; what contradicts itself, `served_spec` finds
        datatype = CONFIG_DATATYPES.get(made.data_type)
        dims = (-1, -1) if _batch_input_kind(made) is BatchInputKind.ITEM_SHAPE else _FLAT
        if datatype is not None:
            inputs += [TensorSpec(name, datatype, dims) for name in sorted({*made.target_name} - named)]
            named.update(made.target_name)
    return ModelSpec(tuple(inputs), tuple(outputs))


def _whole(kind: str, one: Declared, lead: tuple[int, ...], *, flat: bool) -> TensorSpec:
    if not one.name:
        raise ConfigError(f"{kind}: expected a name for each, got none for one of {list(one.dims)}")
    dims = tuple(one.reshape.shape if one.HasField("reshape") else one.dims)
    whole = dims if one.is_shape_tensor else (*lead, *dims)
    return TensorSpec(one.name, datatype_of(f"{kind} '{one.name}'", one.data_type), _FLAT if flat else whole)


def can_batch(config: pb.ModelConfig, own: ModelSpec) -> bool:
    """Whether a model of spec `own` can have a batch axis: every tensor needs a free first dimension, except those that
    `config` has joined or split in other ways, and outputs that it leaves out, which nobody fetches; and there must be
    an input to read the number of rows from, unless they are steps of sequences. For tensors that may have any rank,
    the configuration is trusted.
    """
    return not any(against_a_batch_axis(config, own))


def fixed_rows(config: pb.ModelConfig, own: ModelSpec) -> int:
    """The size of the first dimension of all tensors that a batch axis would need in a model of spec `own`, as exports
    for batches of one size have it. 0 if it isn't the same for all, or if `config` gives tensors as they are, without a
    batch axis. Outputs may have a free one."""
    if (config.input or config.output) and config.max_batch_size <= 0:
        return 0
    axes: dict[str, set[tuple[int, ...]]] = {"input": set(), "output": set()}
    for kind, tensor in _by_rows(config, own):
        if not tensor.any_rank:
            axes[kind].add(tensor.dims[:1])
    if len(axes["input"]) != 1 or not axes["output"] <= axes["input"] | {(-1,)}:
        return 0
    return max(0, *axes["input"].pop(), 0)


def freed(config: pb.ModelConfig, own: ModelSpec) -> ModelSpec:
    """`own` with a free first dimension where `fixed_rows` found a fixed one."""
    names = {(kind, tensor.name) for kind, tensor in _by_rows(config, own) if tensor.dims}
    inputs, outputs = (
        tuple(replace(one, dims=(-1, *one.dims[1:])) if (kind, one.name) in names else one for one in tensors)
        for kind, tensors in (("input", own.inputs), ("output", own.outputs))
    )
    return replace(own, inputs=inputs, outputs=outputs)


def doubts_outputs(config: pb.ModelConfig, own: ModelSpec) -> bool:
    """Whether `config` gives dims to an output that a model of spec `own` declares as one number, or one number a row.
    Which of the two is wrong, only a trial can tell."""
    lead = 0 if config.max_batch_size == 0 and config.input and config.output else 1
    declared = {one.name: one for one in own.outputs if not one.any_rank}
    for one in config.output:
        given, reshaped = (one.reshape.shape, True) if one.HasField("reshape") else (one.dims, False)
        is_number = one.name in declared and len(declared[one.name].dims) <= lead
        if is_number and given and (reshaped or set(given) != {1}) and one.name not in _scattered(config):
            return True
    return False


def _by_rows(config: pb.ModelConfig, own: ModelSpec) -> Iterator[tuple[str, TensorSpec]]:
    """The inputs and outputs of which a batch axis needs the first dimension, and which of the two they are."""
    made = _made(config)
    joined = {one.name: not (one.allow_ragged_batch or one.is_shape_tensor) for one in config.input}
    cut = {one.name: not one.is_shape_tensor for one in config.output} | dict.fromkeys(_scattered(config), False)
    for one in own.inputs:
        if one.name not in made and not one.shape_tensor and joined.get(one.name, not one.optional):
            yield "input", one
    for one in own.outputs:
        if cut.get(one.name, not config.output):
            yield "output", one


def against_a_batch_axis(config: pb.ModelConfig, own: ModelSpec) -> Iterator[str]:
    """Each reason why `can_batch` is false."""
    named = {one.name for one in config.input}
    if not _steps_have_rows(config) and all(one.optional and one.name not in named for one in own.inputs):
        yield "no request has to bring an input"
    for kind, tensor in _by_rows(config, own):
        if tensor.dims[:1] == (-1,) or (tensor.any_rank and config.max_batch_size > 0):
            continue
        verb = "is declared with" if tensor.assumed else "has"
        axes = f"{verb} a first dimension of {tensor.dims[0]}" if tensor.dims else f"{verb} no dimensions"
        yield f"{kind} '{tensor.name}' {'may have any number of axes' if tensor.any_rank else axes}"


def _steps_have_rows(config: pb.ModelConfig) -> bool:
    """Whether requests have rows though they bring no inputs: a step is one row, of its state and its controls."""
    return bool(config.sequence_batching.state or config.sequence_batching.control_input)


def served_spec(config: pb.ModelConfig, own: ModelSpec, *, batched: bool) -> ModelSpec:
    """What clients see of a model whose own spec is `own`: the tensors declared, checked against the model's, or else
    all of the model's. Raises ConfigError."""
    made, named = _made(config), {one.name for one in config.input}
    theirs = [one for one in own.inputs if one.name in named or one.name not in made]
    inputs = _joined("input", config.input, theirs, batched, ())
    outputs = _joined("output", config.output, own.outputs, batched, _scattered(config))
    batch_inputs = tuple(_batch_inputs(config, own, inputs, batched))
    given = {tensor.name for tensor in inputs}
    missing = {tensor.name for tensor in theirs if not tensor.optional} - given
    if missing:
        raise ConfigError(f"input: the model needs {sorted(missing)} too, got only {[one.name for one in inputs]}")
    if batched and not _steps_have_rows(config) and all(tensor.shape_tensor for tensor in inputs):
        raise ConfigError(f"input: expected one with a batch axis, got only shape tensors: {sorted(given)}")
    batch_outputs = tuple(_batch_outputs(config, inputs, outputs, batched))
    return ModelSpec(inputs, outputs, batched=batched, batch_inputs=batch_inputs, batch_outputs=batch_outputs)


def _some(names: Collection[str]) -> str:
    """At most 20 of them: graphs may list all their weights among their inputs."""
    return str(list(names)) if len(names) <= _MANY else f"{list(names)[:_MANY]} and {len(names) - _MANY} more"


def _made(config: pb.ModelConfig) -> set[str]:
    return {name for one in config.batch_input for name in one.target_name}


def _scattered(config: pb.ModelConfig) -> set[str]:
    return {name for one in config.batch_output for name in one.target_name}


def _joined(
    kind: str, declared: Sequence[Declared], own: Sequence[TensorSpec], batched: bool, scattered: Collection[str]
) -> tuple[TensorSpec, ...]:
    mine = {one.name: one for one in own}
    if not declared:
        return tuple(_filled_in(one, batched) for one in own if kind == "output" or not one.optional)
    joined: dict[str, TensorSpec] = {}
    for one in declared:
        if one.name not in mine:
            raise ConfigError(f"{kind} '{one.name}': the model has none of that name, only {_some(mine)}")
        if one.name in joined:
            raise ConfigError(f"{kind} '{one.name}' is declared twice")
        joined[one.name] = _join(kind, one, mine[one.name], batched, one.name in scattered)
    return tuple(joined.values())


def _filled_in(own: TensorSpec, batched: bool) -> TensorSpec:
    """A tensor that the configuration leaves to the model. One that has only a batch axis looks to clients as if each
    row were a vector of one, as with Triton's auto-complete. If a tensor may have any rank, the shape that a trial saw
    isn't promised."""
    if own.any_rank:
        return replace(own, dims=())
    if not batched or own.shape_tensor:
        return own
    if own.dims == (-1,):
        return replace(own, dims=(1,), reshape=(), assumed=False)  # converted for clients, which needs a known shape
    return replace(own, dims=own.dims[1:])


def _join(kind: str, declared: Declared, own: TensorSpec, batched: bool, scattered: bool) -> TensorSpec:
    where = f"{kind} '{own.name}'"
    datatype = datatype_of(where, declared.data_type) or own.datatype
    if datatype != own.datatype:
        raise ConfigError(f"{where}: expected data_type of the model, {own.datatype}, got {datatype}")
    dims = tuple(declared.dims)
    reshape = tuple(declared.reshape.shape) if declared.HasField("reshape") else None
    ragged = isinstance(declared, pb.ModelInput) and declared.allow_ragged_batch
    shape_tensor = declared.is_shape_tensor or own.shape_tensor
    if reshape is not None:
        _check_reshape(where, dims, reshape)
    if ragged:
        _check_ragged(where, declared, own, batched)
    if not (ragged or scattered):
        lead = 1 if batched and not shape_tensor else 0
        dims, reshape = _completed(where, kind, dims, reshape, own, lead)
    elif min(dims, default=0) < -1:
        raise ConfigError(f"{where}: expected dims >= -1, got {list(dims)}")
    return replace(
        own,
        dims=dims,
        reshape=reshape,
        optional=declared.optional if isinstance(declared, pb.ModelInput) else own.optional,
        ragged=ragged,
        shape_tensor=shape_tensor,
        any_rank=own.any_rank and not (dims or ragged or scattered) and reshape is None,
        assumed=own.assumed and not (declared.dims or scattered) and reshape is None,
    )


def _completed(
    where: str, kind: str, dims: tuple[int, ...], reshape: tuple[int, ...] | None, own: TensorSpec, lead: int
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """The `dims` and `reshape` of a configuration, checked against the model's own and completed by these. `lead` is 1
    if the model's first dim is the batch axis, else 0."""
    if reshape is None and not own.any_rank:
        dims = dims or own.dims[lead:]
        if set(dims) == {1} and len(own.dims) == lead:
            reshape = ()  # Triton silently takes a scalar for a vector of one, as its `dims` can't be empty
    given, field = (dims, "dims") if reshape is None else (reshape, "reshape.shape")
    mine = (-1,) * len(given) if own.any_rank else own.dims[lead:]
    if kind == "output":
        # What a model says about its outputs isn't binding: ONNX Runtime accepts wrong sizes, and scalars that aren't,
        # as is possible if the model says so and no trial has shown it. So free dims are always accepted.
        if own.assumed and not own.dims:
            mine = (-1,) * len(given)
        mine = tuple(-1 if one == -1 else dim for dim, one in zip(mine, given, strict=False)) + mine[len(given) :]
    if not fits(given, mine) or min(given, default=0) < -1:
        hint = dims_hint(lead > 0, len(given) - len(mine))
        raise ConfigError(f"{where}: expected {field} of the model, {list(mine)}, got {list(given)}{hint}")
    return dims, reshape


def _check_reshape(where: str, dims: tuple[int, ...], reshape: tuple[int, ...]) -> None:
    """Free dims pair up in order, so the dims between them must have as many elements on both sides."""
    if min((*dims, *reshape), default=0) < -1:
        raise ConfigError(f"{where}: expected dims and reshape.shape >= -1, got {[*dims, *reshape]}")
    if _runs(dims) != _runs(reshape):
        raise ConfigError(
            f"{where}: expected a reshape.shape with as many elements as dims {list(dims)}, before, between and after "
            f"dims of -1, got {list(reshape)}"
        )


def _runs(dims: Sequence[int]) -> list[int]:
    """The products of the dims between those of -1."""
    cuts = [-1, *(axis for axis, dim in enumerate(dims) if dim == -1), len(dims)]
    return [math.prod(dims[before + 1 : cut]) for before, cut in pairwise(cuts)]


def _check_ragged(where: str, declared: Declared, own: TensorSpec, batched: bool) -> None:
    if not batched:
        raise ConfigError(f"{where}: allow_ragged_batch: expected a max_batch_size above 0, got 0")
    if declared.is_shape_tensor:
        raise ConfigError(f"{where}: expected one of allow_ragged_batch and is_shape_tensor, got both")
    if own.dims != _FLAT and not own.any_rank:
        raise ConfigError(
            f"{where}: allow_ragged_batch: expected a model whose input has shape [-1], to take the elements of all "
            f"requests one after the other, got {list(own.dims)}"
        )


def datatype_of(where: str, number: int) -> str:
    """What a configuration declares; "" if it leaves that to the model. Raises ConfigError, beginning with `where`."""
    if number and number not in CONFIG_DATATYPES:
        raise ConfigError(f"{where}: expected a data_type, got {number}")
    return CONFIG_DATATYPES.get(number, "")


def dims_hint(batched: bool, too_many: int) -> str:
    """What is likely to be wrong with dims of which there are `too_many`; "" if that is unknown."""
    return {
        (True, 1): "; dims don't include the batch axis",
        (False, -1): "; without a batch axis, dims are the whole shape",
    }.get((batched, too_many), "")


def _batch_inputs(
    config: pb.ModelConfig, own: ModelSpec, inputs: Sequence[TensorSpec], batched: bool
) -> Iterable[BatchInput]:
    mine = {one.name: one for one in own.inputs}
    seen = {one.name for one in config.input}
    for one in config.batch_input:
        source = _source("batch_input", one, inputs, batched)
        kind = _batch_input_kind(one)
        datatype = CONFIG_DATATYPES.get(one.data_type, "TYPE_INVALID")
        if datatype not in _BATCH_INPUT_TYPES:
            raise ConfigError(f"batch_input {kind.value}: expected data_type TYPE_INT32 or TYPE_FP32, got {datatype}")
        for name in one.target_name:
            where = f"batch_input {kind.value}: target_name '{name}'"
            if name in seen:
                raise ConfigError(f"{where}: expected an input that nothing else fills, got one that is named twice")
            if name not in mine:
                raise ConfigError(f"{where}: the model has no input of that name, only {_some(mine)}")
            if datatype != mine[name].datatype:
                raise ConfigError(f"{where}: expected data_type of the model, {mine[name].datatype}, got {datatype}")
            made = (-1, len(source.model_dims)) if kind is BatchInputKind.ITEM_SHAPE else _FLAT
            if not fits(made, dims := mine[name].dims_of(len(made))):
                raise ConfigError(f"{where}: expected a model whose input takes shape {list(made)}, got {list(dims)}")
            seen.add(name)
        yield BatchInput(kind, tuple(one.target_name), datatype, source.name)


def _batch_input_kind(one: pb.BatchInput) -> BatchInputKind:
    if one.kind not in pb.BatchInput.Kind.values():
        raise ConfigError(f"batch_input: expected a kind, got {one.kind}")
    return BatchInputKind(pb.BatchInput.Kind.Name(one.kind))


def _batch_outputs(
    config: pb.ModelConfig, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], batched: bool
) -> Iterable[BatchOutput]:
    declared = {tensor.name: tensor for tensor in outputs if tensor.name in {one.name for one in config.output}}
    seen: set[str] = set()
    for one in config.batch_output:
        if one.kind != pb.BatchOutput.BATCH_SCATTER_WITH_INPUT_SHAPE:
            raise ConfigError(f"batch_output: expected kind BATCH_SCATTER_WITH_INPUT_SHAPE, got {one.kind}")
        source = _source("batch_output", one, inputs, batched)
        for name in one.target_name:
            where = f"batch_output: target_name '{name}'"
            if name not in declared:
                raise ConfigError(f"{where}: expected one of the outputs in the configuration, {list(declared)}")
            if name in seen:
                raise ConfigError(f"{where}: expected each output once, got it twice")
            # A free dim takes its size from the same axis of the source, which must have one.
            dims, axes = declared[name].model_dims, len(source.model_dims)
            if declared[name].shape_tensor or -1 in dims[axes:]:
                raise ConfigError(
                    f"{where}: expected an output with a batch axis and with dims of -1 only among the first {axes} as "
                    f"in source_input '{source.name}', got {list(dims)}"
                )
            seen.add(name)
        yield BatchOutput(tuple(one.target_name), source.name)


def _source(field: str, one: pb.BatchInput | pb.BatchOutput, inputs: Sequence[TensorSpec], batched: bool) -> TensorSpec:
    if not batched:
        raise ConfigError(f"{field}: expected a max_batch_size above 0, got 0")
    if not one.target_name:
        raise ConfigError(f"{field}: expected a target_name, got none")
    if len(one.source_input) != 1:
        raise ConfigError(f"{field}: expected 1 source_input, got {len(one.source_input)}: {list(one.source_input)}")
    known = {tensor.name: tensor for tensor in inputs if not (tensor.optional or tensor.shape_tensor)}
    if one.source_input[0] not in known:
        raise ConfigError(
            f"{field}: expected a source_input among the inputs that each request brings with a batch axis, "
            f"{list(known)}, got '{one.source_input[0]}'"
        )
    return known[one.source_input[0]]
