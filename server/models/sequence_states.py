"""The states of a `sequence_batching`, joined with what the model has.

Lives here: from `state` and `initial_state` to `State`, the batch axis of each, and every check of them. Must not:
policies, or tensors that clients see. The rule: a contradiction is a ConfigError with tensor, expected and got, and
none is left for the first step to find; Triton, whose key phrases are in the texts, checks none of this against the
model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from paceline.backends.spec import Array, ModelSpec, State, TensorSpec, fits
from paceline.protos import model_config_pb2 as pb
from paceline.protos.datatypes import CONFIG_DATATYPES, by_name
from paceline.protos.tensors import TensorError, decode_raw, element_count
from paceline.server.errors import ConfigError
from paceline.server.files import read_inside
from paceline.server.limits import LARGEST_MESSAGE_BYTES
from paceline.server.models.tensor_config import datatype_of, dims_hint

InitialData = Mapping[str, bytes]
"""The contents of the files that initial states come from, by the state's input."""

_FOLDER = "initial_state"
_TEXT_BYTES = 64
"""What an element of text counts as: it is an object."""


def check_states(config: pb.ModelConfig) -> None:
    """Raise ConfigError for states that contradict themselves, whatever the model."""
    inputs, outputs = set[str](), set[str]()
    controls = {one.name for one in config.sequence_batching.control_input}
    for one in config.sequence_batching.state:
        where = _where(one)
        if not (one.input_name and one.output_name):
            got = f"input_name '{one.input_name}', output_name '{one.output_name}'"
            raise ConfigError(f"sequence_batching.state: expected an input_name and an output_name, got {got}")
        if one.input_name in inputs:
            raise ConfigError(
                f"{where}: State input name '{one.input_name}' specified more than once for {config.name}"
            )
        if one.output_name in outputs:
            raise ConfigError(f"{where}: expected an output_name of its own, got '{one.output_name}' of another state")
        if one.input_name in controls:
            raise ConfigError(f"{where}: expected an input that nothing else fills, got a control_input")
        datatype_of(where, one.data_type)
        if min(one.dims, default=0) < -1:
            raise ConfigError(f"{where}: expected dims >= -1, got {list(one.dims)}")
        if one.use_growable_memory:
            raise ConfigError(f"{where}: use_growable_memory is not supported by this build")
        _check_initial(where, one)
        inputs.add(one.input_name)
        outputs.add(one.output_name)


def _check_initial(where: str, state: pb.ModelSequenceBatching.State) -> None:
    if len(state.initial_state) > 1:
        raise ConfigError(
            f"{where}: initial_state field for state input must contain exactly one or zero element. Found "
            f"{len(state.initial_state)} elements"
        )
    for initial in state.initial_state:
        if not initial.name:
            raise ConfigError(f"{where}: Field 'name' must be set when using initial_state")
        if initial.WhichOneof("state_data") is None:
            raise ConfigError(f"{where}: initial_state setting expects state to have state_data set, got none")
        if min(initial.dims, default=0) < 0:
            raise ConfigError(
                f"{where}: 'initial_state' field contains variable dimensions, expected known ones, "
                f"got {list(initial.dims)}"
            )


def read_initial_data(config: pb.ModelConfig, folder: Path) -> InitialData:
    """The files of the initial states, from `initial_state` in the model's `folder`. Blocks; raises ConfigError."""
    files = {
        state.input_name: initial.data_file
        for state in config.sequence_batching.state
        for initial in state.initial_state
        if initial.WhichOneof("state_data") == "data_file"
    }
    where = "sequence_batching.state '{}'"
    return {name: read_inside(where.format(name), folder, file, _FOLDER) for name, file in files.items()}


def states_of(
    config: pb.ModelConfig,
    own: ModelSpec,
    batch_names: Iterable[str],
    asked_axes: Mapping[str, int],
    data: InitialData,
    *,
    batched: bool,
) -> tuple[State, ...]:
    """The states of a model whose own spec is `own` (whole dims). `batch_names`: what the batch axis is called in its
    other inputs. `asked_axes`: where the batch axis of a state is, by its input, if the configuration says so. `data`:
    what was read for initial states. Raises ConfigError."""
    names = [one.input_name for one in config.sequence_batching.state]
    for name in asked_axes:
        if name not in names:
            raise ConfigError(f"paceline.state_batch_axis: expected inputs of states, {names}, got '{name}'")
    if asked_axes and not batched:
        raise ConfigError(f"paceline.state_batch_axis: expected a max_batch_size above 0 with it, got 0: {asked_axes}")
    return tuple(
        _state(one, own, set(batch_names), asked_axes.get(one.input_name), data, batched)
        for one in config.sequence_batching.state
    )


def _sides(state: pb.ModelSequenceBatching.State, own: ModelSpec) -> tuple[TensorSpec, TensorSpec]:
    """The two tensors of the model. Raises ConfigError if it has none of that name, or of other datatypes."""
    where, found = _where(state), list[TensorSpec]()
    for kind, name, tensors in (("input", state.input_name, own.inputs), ("output", state.output_name, own.outputs)):
        mine = {one.name: one for one in tensors}
        if name not in mine:
            raise ConfigError(f"{where}: the model has no {kind} '{name}', only {list(mine)}")
        datatype = CONFIG_DATATYPES.get(state.data_type, mine[name].datatype)
        if mine[name].datatype != datatype:
            raise ConfigError(
                f"{where}: expected data_type of the model's {kind} '{name}', {mine[name].datatype}, got {datatype}"
            )
        found.append(mine[name])
    if found[0].datatype != found[1].datatype:
        raise ConfigError(
            f"{where}: expected an input and an output of the same datatype, got {found[0].datatype} and "
            f"{found[1].datatype} in the model"
        )
    return found[0], found[1]


def _state(
    state: pb.ModelSequenceBatching.State,
    own: ModelSpec,
    batch_names: set[str],
    asked_axis: int | None,
    data: InitialData,
    batched: bool,
) -> State:
    where, (mine, theirs) = _where(state), _sides(state, own)
    given = tuple(state.dims) or None
    if mine.any_rank and given is None:
        raise ConfigError(f"{where}: expected dims, as the model's input '{mine.name}' may have any number of axes")
    axis = _batch_axis(where, mine, given, batch_names, asked_axis) if batched else 0
    rest = _without(mine.dims, axis) if batched else mine.dims
    if mine.any_rank:
        rest = given or ()
    elif given is not None and set(given) == {1} and not rest:
        given = ()  # as elsewhere: `dims` can't be empty
    elif given is not None and not fits(given, rest):
        hint = dims_hint(batched, len(given) - len(rest))
        raise ConfigError(
            f"{where}: expected dims of the model's input '{mine.name}', {list(rest)}, got {list(given)}{hint}"
        )
    dims = rest if given is None else given
    if not theirs.any_rank:
        _check_output(where, mine, theirs, (*dims[:axis], -1, *dims[axis:]) if batched else dims, axis, batched)
    into = replace(mine, dims=dims, batch_axis=axis, optional=False, any_rank=False)
    # Checked at each step: what the next one can't take is an error of the step that gave it.
    out = replace(theirs, dims=dims, batch_axis=axis, any_rank=False, assumed=False)
    initial = _initial(state, into, tuple(state.dims) or dims, data)
    return State(into, out, np.expand_dims(initial, 0) if batched else initial)


def _batch_axis(
    where: str, mine: TensorSpec, dims: Sequence[int] | None, batch_names: set[str], asked: int | None
) -> int:
    """Which axis of the state's input is the batch's: the one that was asked for; else of the free ones without which
    `dims` remain, the one that is called like the batch of other inputs; else the first, as always in Triton; else the
    only one."""
    shape = f"the model's input '{mine.name}', which has shape {'any' if mine.any_rank else list(mine.dims)}"
    free = [axis for axis, dim in enumerate(mine.dims) if dim == -1]
    if mine.any_rank:
        free = [*range(len(dims or ()) + 1)]
    if asked is not None:
        if asked not in free:
            raise ConfigError(
                f"paceline.state_batch_axis: {mine.name}: expected one of the free axes {free} of {shape}, got {asked}"
            )
        return asked
    if not free:
        raise ConfigError(
            f"{where}: expected a free axis for the batch in {shape}; export the model with a free one, or set "
            "max_batch_size 0 and leave no batch axis out of dims"
        )
    is_number = len(mine.dims) == 1 and set(dims or ()) == {1}  # a row is one: `dims` can't be empty
    anything = dims is None or mine.any_rank or is_number
    fitting = [axis for axis in free if anything or fits(dims or (), _without(mine.dims, axis))]
    if not fitting:
        raise ConfigError(
            f"{where}: expected dims of {shape}, with one of its free axes {free}, the batch's, left out, "
            f"got {list(dims or ())}"
        )
    named = [axis for axis in fitting if mine.axis_names and mine.axis_names[axis] in batch_names]
    likely = named or fitting
    if len(likely) > 1 and 0 not in likely:
        raise ConfigError(
            f"{where}: expected one free axis that can be the batch's in {shape}, got {likely}; say which it is in "
            f"paceline.state_batch_axis, as in {mine.name}={likely[-1]}"
        )
    return min(likely)


def _check_output(
    where: str, mine: TensorSpec, theirs: TensorSpec, expected: tuple[int, ...], axis: int, batched: bool
) -> None:
    """Raise ConfigError if the model's output can't be the input, of the `expected` shape, of the next step."""
    is_same = len(theirs.dims) == len(expected) and all(
        -1 in pair or pair[0] == pair[1] for pair in zip(theirs.dims, expected, strict=True)
    )
    if not is_same or (batched and theirs.dims[axis] != -1):
        of_batch = f", whose free axis {axis} is the batch's" if batched else ""
        raise ConfigError(
            f"{where}: expected the model's output '{theirs.name}' to have the shape of its input '{mine.name}', "
            f"{list(expected)}{of_batch}, got {list(theirs.dims)}"
        )


def _initial(
    state: pb.ModelSequenceBatching.State, tensor: TensorSpec, described: Sequence[int], data: InitialData
) -> Array:
    """A sequence's first state without a batch axis, read-only: what is configured, or else zeros, or empty text, with
    a size of 1 for each free dim. `described`: its dims as the configuration has them."""
    where = _where(state)
    shape = tuple(1 if dim == -1 else dim for dim in tensor.dims)
    for initial in state.initial_state:
        if initial.data_type and CONFIG_DATATYPES.get(initial.data_type) != tensor.datatype:
            raise ConfigError(
                f"{where}: The data type used for 'initial_state' field does not match the state data type, expected "
                f"{tensor.datatype}, got {CONFIG_DATATYPES.get(initial.data_type, str(initial.data_type))}"
            )
        dims = tuple(initial.dims)
        if len(dims) != len(described):
            raise ConfigError(
                f"{where}: Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions, "
                f"expected {list(described)}, got {list(dims)}"
            )
        if not fits(dims, described):
            raise ConfigError(
                f"{where}: 'initial_state' dim doesn't match 'state' dim description, expected {list(described)}, "
                f"got {list(dims)}"
            )
        shape = dims if tensor.dims or set(dims) != {1} else ()
    try:
        made = _filled(where, tensor, shape, data.get(state.input_name))
    except (TensorError, MemoryError) as error:
        raise ConfigError(f"{where}: initial_state: {error or type(error).__name__}") from None
    made.flags.writeable = False
    return made


def _filled(where: str, tensor: TensorSpec, shape: tuple[int, ...], content: bytes | None) -> Array:
    datatype, count = by_name(tensor.datatype), element_count(shape)
    if (size := count * (datatype.item_bytes or _TEXT_BYTES)) > LARGEST_MESSAGE_BYTES:
        raise ConfigError(f"{where}: expected an initial state of at most {LARGEST_MESSAGE_BYTES} bytes, got {size}")
    if content is None:
        return np.full(shape, b"", object) if datatype.dtype.hasobject else np.zeros(shape, datatype.dtype)
    if datatype.item_bytes:
        expected = count * datatype.item_bytes
        if len(content) < expected:
            raise ConfigError(
                f"{where}: initial_state setting expects {expected} bytes, but the data provided from its data_file "
                f"only has {len(content)} bytes"
            )
        content = content[:expected]
    return decode_raw(content, datatype, shape).copy()


def _where(state: pb.ModelSequenceBatching.State) -> str:
    return f"sequence_batching.state '{state.input_name}'"


def _without(dims: Sequence[int], axis: int) -> tuple[int, ...]:
    return (*dims[:axis], *dims[axis + 1 :])
