"""Which axes of a model's inputs may be lengths: those that a configuration asks for, or that a mask goes with.

Lives here: lengths by the names and sizes that a model declares, in plain values. Must not: run a model; what follows
from running it is in `length_trial`. The rule: axes of one symbolic name are one length. Axes without names are one if
they are asked for, or are a mask's and its words', and have the same number; those of states are apart from those of
what clients send.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from paceline.backends.errors import LoadError
from paceline.backends.lengths import filling
from paceline.backends.spec import Length, ModelSpec, TensorSpec
from paceline.backends.trials import LengthAxis
from paceline.protos.datatypes import by_name

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
    # A mask and what it masks: words are no booleans.
    found = [
        family
        for family in families.values()
        if len(family) > 1
        and any(_are_words(spec.inputs[index]) for index in family)
        and not _may_be_two_texts(spec, family)
    ]
    choices = [_masks(spec, family) for family in found]
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
    """The axes of states whose names are those of a mask's among them, and no axis of what clients send; and these
    masks."""
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


def _may_be_two_texts(spec: ModelSpec, family: Sequence[int]) -> bool:
    """Whether inputs may belong to texts of different sizes, as no names say otherwise: a question and an answer, say.
    One text has words, a mask, and types at most."""
    is_named = any(_names(spec.inputs[family[0]])[1:])
    return not is_named and (len(family) > 3 or len(named_masks(spec) & frozenset(family)) > 1)


def named_masks(spec: ModelSpec) -> frozenset[int]:
    """The inputs that look like masks."""
    named = [index for index, one in enumerate(spec.inputs) if "mask" in one.name.lower() and _is_of_numbers(one)]
    return frozenset(named or (index for index, one in enumerate(spec.inputs) if one.datatype == "BOOL"))


def _masks(spec: ModelSpec, family: Sequence[int]) -> list[frozenset[int]]:
    named = named_masks(spec) & frozenset(family)
    if named:
        return [named]
    return [frozenset([index]) for index in family]


def is_of_integers(tensor: TensorSpec) -> bool:
    """Also if they are booleans. BF16 has arrays of integers."""
    return tensor.datatype != "BF16" and by_name(tensor.datatype).dtype.kind in "iub"


def _is_of_numbers(tensor: TensorSpec) -> bool:
    return tensor.datatype not in ("BF16", "BYTES")


def _are_words(tensor: TensorSpec) -> bool:
    return tensor.datatype != "BOOL"


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
