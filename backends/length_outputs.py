"""Which axes of a model's outputs follow its lengths: known from results of different sizes, or assumed.

Lives here: what sizes and names say, in plain values. Must not: run a model. The rule: an axis that varies has the size
of one length. Only a state's may have several: what a step was given, and behind that what it adds; each of these parts
is filled up by itself. States that share a length have equal sizes in it after every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

from paceline.backends.length_axes import axis_name, free_axes
from paceline.backends.spec import Array, JoinedAxis, Length, ModelSpec, Tensors

Sizes = tuple[int, ...]


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
