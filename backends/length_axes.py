"""Which axes of a model's inputs may be lengths: those that a configuration asks for, or that a mask goes with. And
which axes of its outputs follow them: known from results of different sizes, or assumed.

Lives here: what names and sizes say, in plain values. Must not: run a model; what follows from running it is in
`length_trial`. The rules: axes of one symbolic name are one length. Axes without names are one if they are asked for,
or are a mask's and its words', and have the same number; those of states are apart from those of what clients send. An
output's axis that varies has the size of one length. Only a state's may have several: what a step was given, and behind
that what it adds; each of these parts is filled up by itself. States that share a length have equal sizes in it after
every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

from paceline.backends.errors import LoadError
from paceline.backends.lengths import filling
from paceline.backends.spec import Array, JoinedAxis, Length, ModelSpec, Tensors, TensorSpec
from paceline.backends.trials import LengthAxis
from paceline.protos.datatypes import by_name

Sizes = tuple[int, ...]
Place = tuple[int, int]
"""A tensor's index and one of its axes, of which 0 is the batch's."""


def asked_lengths(spec: ModelSpec, asked: Sequence[LengthAxis], of_clients: int) -> ModelSpec:
    """`spec`, whose first `of_clients` inputs are what clients send, with the lengths of the axes `asked` for, without
    their outputs, and with the inputs' fills. LoadError for axes that can't be filled up."""
    special = [one.name for one in spec.inputs if one.ragged or one.optional or one.shape_tensor]
    if not spec.by_rows or not spec.batched:
        got = f"input '{special[0]}'" if special else "others"
        raise LoadError(f"expected only tensors that are stacked by their batch axis and never left out, got {got}")
    inputs, places = list(spec.inputs), list[Place]()
    indices = {tensor.name: index for index, tensor in enumerate(inputs)}
    for one in asked:
        if one.input not in indices:
            raise LoadError(f"input '{one.input}': expected one of {list(indices)}")
        index = indices[one.input]
        tensor = replace(inputs[index], fill=one.fill)
        _check(tensor, one.axis)
        if any(place[0] == index for place in places) and one.fill != inputs[index].fill:
            raise LoadError(f"input '{one.input}': expected one fill, got {inputs[index].fill} and {one.fill}")
        inputs[index] = tensor
        places.append((index, one.axis))
    return replace(spec, inputs=tuple(inputs), lengths=_lengths(inputs, places, of_clients))


def _check(tensor: TensorSpec, axis: int) -> None:
    where = f"input '{tensor.name}'"
    if tensor.reshape is not None:
        raise LoadError(f"{where}: expected one without reshape, got {list(tensor.reshape)}")
    if tensor.any_rank or not 1 <= axis <= len(tensor.dims):
        raise LoadError(f"{where}: expected an axis from 1 to {len(tensor.dims)} (0 is the batch's), got {axis}")
    if tensor.dims[axis - 1] != -1:
        raise LoadError(f"{where}: expected an axis of free size, got axis {axis}, which is {tensor.dims[axis - 1]}")
    try:
        filling(tensor)
    except ValueError as error:
        raise LoadError(f"{where}: {error}") from error


def masked_lengths(spec: ModelSpec, of_clients: int) -> Iterator[tuple[ModelSpec, frozenset[int]]]:
    """What may be the lengths of a model that has masks among its first `of_clients` inputs, and which of its inputs
    are masks: the likeliest first."""
    if not spec.by_rows or not spec.batched:
        return
    families: dict[tuple[object, ...], list[int]] = {}
    for index, tensor in enumerate(spec.inputs[:of_clients]):
        if -1 in tensor.dims and tensor.reshape is None and is_of_integers(tensor):
            families.setdefault((tensor.dims, _names(tensor)[1:]), []).append(index)
    # A mask and what it masks: words are no booleans. What isn't of integers is in no family: sounds, say, are known by
    # the names of the mask's axes.
    found = [
        family
        for family in families.values()
        if (len(family) > 1 and any(spec.inputs[index].datatype != "BOOL" for index in family))
        or (named_masks(spec) >= {*family} and _shares_its_axes(spec, family, of_clients))
        if not _may_be_two_texts(spec, family)
    ]
    choices = [
        [named] if (named := named_masks(spec) & frozenset(family)) else [frozenset([index]) for index in family]
        for family in found
    ]
    places = [(index, axis) for family in found for index in family for axis in free_axes(spec.inputs[index])]
    # Each side by itself: a client's name among states says nothing of their size, which who asks for it knows.
    sent = _lengths(spec.inputs[:of_clients], places, of_clients)
    states, state_masks = _masked_states(spec, of_clients)
    kept, masks = _lengths(spec.inputs, states, of_clients), frozenset[int]()
    for number in range(max(map(len, choices), default=0)):
        masks = frozenset[int]().union(*(one[min(number, len(one) - 1)] for one in choices))
        if kept:
            yield replace(spec, lengths=sent + kept), masks | state_masks
        yield replace(spec, lengths=sent), masks
    if kept:
        yield replace(spec, lengths=kept), masks | state_masks


def _masked_states(spec: ModelSpec, of_clients: int) -> tuple[list[Place], frozenset[int]]:
    """The axes of states with names of a mask's among them, and of no axis that clients send; and these masks."""
    sent = {axis_name(tensor, axis) for tensor in spec.inputs[:of_clients] for axis in free_axes(tensor)}
    named: dict[str, list[Place]] = {}
    for index, tensor in enumerate(spec.inputs[of_clients:], of_clients):
        for axis in free_axes(tensor):
            named.setdefault(axis_name(tensor, axis), []).append((index, axis))
    masks, kept = named_masks(spec), list[Place]()
    for name, places in named.items():
        if name and name not in sent and len({index in masks for index, _ in places}) == 2:
            kept += places
    return kept, masks & {index for index, _ in kept}


def _shares_its_axes(spec: ModelSpec, family: Sequence[int], of_clients: int) -> bool:
    """Whether there is something else that clients send with the names of all free axes of `family`."""
    axes = {axis_name(spec.inputs[family[0]], axis) for axis in free_axes(spec.inputs[family[0]])}
    others = [spec.inputs[index] for index in range(of_clients) if index not in family]
    return "" not in axes and any(axes <= {axis_name(one, axis) for axis in free_axes(one)} for one in others)


def _may_be_two_texts(spec: ModelSpec, family: Sequence[int]) -> bool:
    """Whether inputs may belong to texts of different sizes, as no names say otherwise: a question and an answer, say.
    One text has words, a mask, and types at most."""
    is_named = any(_names(spec.inputs[family[0]])[1:])
    return not is_named and (len(family) > 3 or len(named_masks(spec) & frozenset(family)) > 1)


def named_masks(spec: ModelSpec) -> frozenset[int]:
    """The inputs that look like masks."""
    numbers = [index for index, one in enumerate(spec.inputs) if one.datatype not in ("BF16", "BYTES")]
    named = [index for index in numbers if "mask" in spec.inputs[index].name.lower()]
    return frozenset(named or (index for index, one in enumerate(spec.inputs) if one.datatype == "BOOL"))


def is_of_integers(tensor: TensorSpec) -> bool:
    """Also if they are booleans. BF16 has arrays of integers."""
    return tensor.datatype != "BF16" and by_name(tensor.datatype).dtype.kind in "iub"


def free_axes(tensor: TensorSpec) -> list[int]:
    return [axis for axis, dim in enumerate(tensor.dims, 1) if dim == -1]


def axis_name(tensor: TensorSpec, axis: int) -> str:
    """The model's name of the axis; "" if it has none."""
    return _names(tensor)[axis]


def _names(tensor: TensorSpec) -> tuple[str, ...]:
    rank = len(tensor.model_dims) + 1
    return tensor.axis_names if len(tensor.axis_names) == rank else ("",) * rank


def _lengths(inputs: Sequence[TensorSpec], places: Iterable[Place], of_clients: int) -> tuple[Length, ...]:
    """One length per name among those of `places`, with all axes that have it, and per number of an axis without; two
    if states have some of these."""
    found: dict[str, set[Place]] = {}
    for index, axis in places:
        name = axis_name(inputs[index], axis)
        number = f"axis {axis}" if index < of_clients else f"axis {axis} of states"
        found.setdefault(name or number, set()).add((index, axis))
        for other, tensor in enumerate(inputs):
            if name and tensor.reshape is None and not tensor.any_rank:
                found[name] |= {(other, free) for free in free_axes(tensor) if axis_name(tensor, free) == name}
    return tuple(Length(name, tuple(sorted(axes))) for name, axes in found.items())


def said(sizes: Sequence[Sizes]) -> str:
    """Sizes in words."""
    return ", ".join("x".join(map(str, one)) for one in sizes)


class States(NamedTuple):
    """The outputs that are states of steps, with the inputs that they become, by their indices in `ModelSpec.executed`;
    and by those inputs, what a sequence begins with, its rows in front."""

    inputs: Mapping[int, int] = {}
    initial: Mapping[int, Array] = {}

    @classmethod
    def of(cls, spec: ModelSpec) -> States:
        if spec.sequence is None:
            return cls()
        executed, states = spec.executed, spec.sequence.states
        indices = {tensor.name: index for index, tensor in enumerate(executed.outputs)}
        numbered = [*enumerate(states, len(executed.inputs) - len(states))]
        inputs = {indices[state.output.name]: index for index, state in numbered}
        return cls(inputs, {index: state.initial for index, state in numbered})


def with_assumed_outputs(spec: ModelSpec) -> ModelSpec:
    """`spec` whose lengths have the outputs that are likely to follow them, going by names, and without these by the
    numbers of free axes. Where that is wrong, an execution says so."""
    tensors = enumerate(spec.outputs)
    outputs = [(index, axis, tensor) for index, tensor in tensors for axis in free_axes(tensor)]
    lengths, taken = list[Length](), set[tuple[int, int]]()
    for one in spec.lengths:
        numbers = {axis for _, axis in one.inputs}
        follow = [
            (index, axis)
            for index, axis, tensor in outputs
            if (index, axis) not in taken and (axis_name(tensor, axis) or one.name) == one.name
            if axis_name(tensor, axis) or axis in numbers
        ]
        taken |= {*follow}
        lengths.append(replace(one, outputs=tuple(follow)))
    return replace(spec, lengths=tuple(lengths))


def with_outputs(
    spec: ModelSpec, sizes: Sequence[Sizes], results: Sequence[Tensors], states: States
) -> tuple[ModelSpec, str]:
    """`spec` with the outputs' axes that follow its lengths, of which `results` come from inputs of `sizes`; and what
    varies otherwise, in words, "" if nothing does."""
    outputs: list[list[tuple[int, int]]] = [[] for _ in spec.lengths]
    joined = list[JoinedAxis]()
    columns = [*zip(*sizes, strict=True)]
    for index, arrays in enumerate(zip(*results, strict=True)):
        name, shapes = spec.outputs[index].name, [one.shape for one in arrays]
        shown = ", ".join(f"{list(shape)} for {said([size])}" for shape, size in zip(shapes, sizes, strict=True))
        if len({len(shape) for shape in shapes}) > 1:
            return spec, f"output '{name}' has another number of axes for other sizes: {shown}"
        for axis, found in enumerate(zip(*shapes, strict=True)):
            if len({*found}) == 1:
                continue
            if axis and found in columns:
                outputs[columns.index(found)].append((index, axis))
                continue
            given = [(states.inputs.get(index), axis) in one.inputs for one in spec.lengths]
            parts = _parts(found, columns, given) if axis and index in states.inputs else ()
            if not parts:
                return spec, f"axis {axis} of output '{name}' varies, and not as the inputs' sizes do: {shown}"
            joined.append(JoinedAxis(index, axis, parts))
    lengths = (replace(one, outputs=tuple(places)) for one, places in zip(spec.lengths, outputs, strict=True))
    spec = replace(spec, lengths=tuple(lengths), joined=tuple(joined))
    return spec, _unequal(spec, states)


def _parts(found: Sizes, columns: Sequence[Sizes], given: Sequence[bool]) -> tuple[int | None, ...]:
    """The lengths, with sizes in `columns`, of which an axis with the sizes `found` is joined, and None for the rest;
    none if it isn't. Those that are `given` by the state itself come first, and new ones last."""
    for count in range(1, len(columns) + 1):
        for chosen in combinations(range(len(columns)), count):
            rest = {size - sum(columns[number][row] for number in chosen) for row, size in enumerate(found)}
            if len(rest) == 1 and (left := rest.pop()) >= 0:
                before, behind = ([one for one in chosen if given[one] is is_given] for is_given in (True, False))
                return (*before, *([None] if left else ()), *behind)
    return ()


def _unequal(spec: ModelSpec, states: States) -> str:
    """Which states share a length, but not their size in it at first or after a step, in words; "" if none do."""
    sizes: dict[tuple[int, int], object] = {(one.output, one.axis): one.parts for one in spec.joined}
    sizes |= {place: number for number, one in enumerate(spec.lengths) for place in one.outputs}
    left = {index: output for output, index in states.inputs.items()}
    for length in spec.lengths:
        places = [(index, axis) for index, axis in length.inputs if index in left]
        first = {states.initial[index].shape[axis]: index for index, axis in places}
        after = {sizes.get((left[index], axis)): index for index, axis in places}  # None: it is always the same
        for found, where in (
            (first, "a sequence begins with different sizes"),
            (after, "a step leaves different sizes"),
        ):
            if len(found) > 1:
                names = " and ".join(f"'{spec.inputs[index].name}'" for index in found.values())
                return f"the states {names} share the length '{length.name}', but {where}"
    return ""
