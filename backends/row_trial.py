"""Whether the rows of a model can be stacked, found out by trying.

Lives here: what is tried and what follows from it, in pure numpy. Must not: a runtime, a configuration, a log. A free
first dimension looks like a batch axis but needn't be one: it may be time, be summed over, or depend in size on how
many things were found. Batching such a model would give callers each other's numbers. A fixed first dimension may be
one, too, of an export for batches of one size: then what is tried is such batches of rows and copies of them. The rule:
only observations count. A model that accepts no made-up inputs isn't batched; for one with random outputs, its
declaration is believed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from paceline.backends.batching import stack as stack_rows
from paceline.backends.errors import ExecutionError, InstanceError, OutOfMemory, ProcessError
from paceline.backends.likeness import alike, equal, is_finite, is_of_floats
from paceline.backends.made_up import MAX_BYTES, MadeUp, attempts, bytes_of, can_be_stacked, has_free_dims, make_rows
from paceline.backends.spec import Array, ModelSpec, Tensors, TensorSpec
from paceline.backends.trials import Trial

_MANY = 8
"""How many rows are in a longer stack. It shows what rows do to others that aren't next to them, or that are like them
in one input and not in another."""

_OF_TWO = (0, 0, 1, 0, 1, 1, 0, 1)
"""Which of two rows is at each place of a longer stack, if a model accepts no more of them: for each distance from one
to seven, in either direction, there are two different rows that far apart."""

_PAIRS = 2
"""How many of the stacks that are tried have two rows. They suffice if the longer ones can't be had."""

_LONGEST_NS = 30 * 10**9
"""For a trial, from its first execution on, for which the model is opened. Loads take as long, and others wait."""

Run = Callable[[Sequence[Array]], Tensors]
Shapes = Sequence[tuple[int, ...]]


class _TimeIsUp(InstanceError):
    """The trial has taken too long."""


class _Shown(NamedTuple):
    """What a model of some made-up inputs is, and whether any of their rows gave different results."""

    trial: Trial
    made_up: MadeUp
    varied: bool


def try_rows(spec: ModelSpec, run: Run, now_ns: Callable[[], int] = time.monotonic_ns) -> Trial:
    """Run rows of a model of `spec` (complete dims, no optional inputs), each alone and several together, in either
    order; one row if its inputs don't all have a free first dimension. If all tensors have the same fixed one above 1,
    batches of so many rows, too. `run` returns the outputs for one array per input and raises ExecutionError.

    Blocks for twenty-one executions, three of them of eight rows; for about as many again if the only input is of
    integers; for four more if other dimensions are free, too, and for some more if results differ or the model doesn't
    accept the first rows. After half a minute, no more executions are begun; nor of rows that take more than MAX_BYTES.
    What was seen by then counts, if it suffices for a verdict.
    """
    if any(tensor.any_rank for tensor in spec.inputs):
        return Trial(spec)
    run = _timed(run, now_ns)
    try:
        tried = _try_all(spec, run)
        # Where a model declares a wrong rank, the one that was seen needn't be the only one.
        outputs = [
            replace(seen, assumed=True) if len(seen.dims) != len(declared.dims) and not seen.any_rank else seen
            for declared, seen in zip(spec.outputs, tried.spec.outputs, strict=True)
        ]
        return _try_fixed(replace(tried, spec=replace(tried.spec, outputs=tuple(outputs))), run)
    except ProcessError as error:
        return Trial(spec, str(error), deadly=True)


def _try_fixed(tried: Trial, run: Run) -> Trial:
    """`tried`, and whether rows of a model that always takes as many can be stacked up to that. Raises ProcessError."""
    spec, count = tried.spec, next((tensor.dims[0] for tensor in tried.spec.inputs if tensor.dims), 0)
    inputs_agree = all(tensor.dims[:1] == (count,) for tensor in spec.inputs)
    outputs_agree = all(tensor.dims[:1] in ((count,), (-1,)) for tensor in spec.outputs)
    if tried.why_not or count < 2 or not (inputs_agree and outputs_agree):
        return tried
    if all(len(tensor.dims) == 1 for tensor in spec.inputs):
        # Rather the numbers of one row: as rows, clients would have to send [count, 1] in place of the model's [count].
        return replace(tried, why_not="its inputs have no other dimension, so a row would be one number")

    def run_padded(inputs: Sequence[Array]) -> Tensors:
        rows = len(inputs[0])
        outputs = run(stack_rows([inputs], count - rows))
        # A copy, as a row would hold on to all that its copies gave.
        return [array[:rows].copy() if array.shape[:1] == (count,) else array for array in outputs]

    inputs, outputs = (
        tuple(replace(tensor, dims=(-1, *tensor.dims[1:])) for tensor in tensors)
        for tensors in (spec.inputs, spec.outputs)
    )
    why_not = _try_all(replace(spec, inputs=inputs, outputs=outputs), run_padded, count).why_not
    return replace(tried, why_not=why_not, fixed_rows=0 if why_not else count)


def _timed(run: Run, now_ns: Callable[[], int]) -> Run:
    """`run`, until _LONGEST_NS after its first end. After that it raises _TimeIsUp."""
    ends_ns: list[int] = []

    def run_in_time(inputs: Sequence[Array]) -> Tensors:
        if ends_ns and now_ns() > ends_ns[0]:
            raise _TimeIsUp(f"it took longer than {_LONGEST_NS // 10**9} s")
        try:
            return run(inputs)
        finally:
            ends_ns.append(now_ns() + _LONGEST_NS)

    return run_in_time


def _try_all(spec: ModelSpec, run: Run, fixed_rows: int = 0) -> Trial:
    """`fixed_rows`: to how many rows `run` adds copies of the last one, 0 if it doesn't. Raises ProcessError."""
    stackable = can_be_stacked(spec)
    shown, failed = list[_Shown](), "it accepts no made-up inputs (they would be too large)"
    for made_up in attempts(spec, fixed_rows):
        if shown and not made_up.adds_to(shown[-1].made_up):
            continue
        try:
            many = not shown or made_up.short_words
            known = shown[-1].trial.spec if shown else spec
            shown.append(_try(known, run, made_up, many=many, fixed_rows=fixed_rows))
        except ProcessError:
            raise
        except (InstanceError, MemoryError) as error:
            failed = f"its trial was given up: {str(error) or type(error).__name__}"
            break
        except ExecutionError as error:
            failed = f"it accepts no made-up inputs ({error})"
        else:
            # Other rows may show what rows of both signs don't: in attention, a row attends to itself alone if the one
            # beside it is nearly its opposite. And what short rows do to each other may be too little to see.
            if shown[-1].trial.why_not or not stackable or not (made_up.signed or has_free_dims(spec)):
                break
    if not shown:
        return _unknown(spec, failed)
    trial = shown[-1].trial
    if stackable and not trial.why_not and any(map(is_of_floats, trial.spec.inputs)):
        made_up = shown[-1].made_up._replace(signed=False, contrast=True)
        try:
            shown.append(_try(trial.spec, run, made_up, many=False, fixed_rows=fixed_rows))
        except ProcessError:
            raise
        except (ExecutionError, MemoryError):
            pass  # such large numbers aren't accepted, or memory is too small
    trial = shown[-1].trial
    # Text that no vocabulary has gives the same results in most models, which says nothing against them.
    is_of_text = any(tensor.datatype == "BYTES" for tensor in trial.spec.inputs)
    if trial.why_not or is_of_text or any(one.varied for one in shown):
        return trial
    return _unknown(trial.spec, "all made-up rows give the same results")


def _unknown(spec: ModelSpec, why: str) -> Trial:
    return Trial(spec, f"it isn't known whether its rows depend on each other, as {why}")


def _try(spec: ModelSpec, run: Run, made_up: MadeUp, *, many: bool, fixed_rows: int) -> _Shown:
    """`many`: also try more than two rows at a time. Raises ExecutionError if the model doesn't accept single rows, and
    InstanceError."""
    stackable, row_bytes = can_be_stacked(spec), made_up.row_bytes(spec)
    few_rows, many_rows = fixed_rows or 2, fixed_rows or _MANY
    many = many and stackable and made_up.rows == 1 and many_rows * row_bytes <= MAX_BYTES
    rows = make_rows(spec, made_up, _MANY if many else 2)
    alone = [run(rows[0])]
    if stackable:
        row_bytes += sum(array.size * bytes_of(one.datatype) for one, array in zip(spec.outputs, alone[0], strict=True))
        if few_rows * row_bytes > MAX_BYTES:
            count, took, most = few_rows * made_up.rows, few_rows * row_bytes >> 20, MAX_BYTES >> 20
            raise InstanceError(f"{count} rows with their results take {took} MiB, and may take {most} MiB")
        alone.append(run(rows[1]))
    if made_up.signed and not all(map(is_finite, spec.outputs * len(alone), chain(*alone))):
        raise ExecutionError("it computes infinities from negative numbers")
    if not stackable:
        return _Shown(Trial(_as_seen(spec, map(_shapes, alone))), made_up, True)
    many = many and many_rows * row_bytes <= MAX_BYTES
    alone += _more_alone(rows[2:], run) if many else []
    shapes, found = [*map(_shapes, alone)], dict[int, str]()
    seen = _as_seen(spec, shapes)
    for number, order in enumerate(_orders(len(alone), many, fixed_rows)):
        try:
            together = run(
                [np.concatenate([rows[number][index] for number in order]) for index in range(len(spec.inputs))]
            )
        except (OutOfMemory, _TimeIsUp):
            if number >= _PAIRS:
                break
            raise
        except InstanceError:
            raise
        except ExecutionError as error:
            few, more = _count(made_up.rows), _count(len(order) * made_up.rows)
            return _Shown(Trial(seen, f"it runs with {few} and fails with {more}: {error}"), made_up, True)
        shapes.append(_shapes(together))
        seen = _as_seen(spec, shapes)
        found = _differences(seen, alone, together, order, made_up) | found  # the first of each output
        del together  # before the next one takes as much memory
    steady = _steady(alone[0], lambda: run(rows[0])) if found else ()
    why_not = next((why for index, why in found.items() if index in steady), "")
    return _Shown(Trial(seen, why_not), made_up, _vary(spec, alone))


def _shapes(results: Tensors) -> Shapes:
    return [array.shape for array in results]


def _more_alone(rows: Sequence[Sequence[Array]], run: Run) -> list[Tensors]:
    """The results of `rows`, or none if the model doesn't accept one of them. Raises InstanceError."""
    try:
        return [run(row) for row in rows]
    except InstanceError:
        raise
    except ExecutionError:
        return []


def _orders(count: int, many: bool, fixed_rows: int) -> Iterator[Sequence[int]]:
    """Which of `count` rows to stack. In either order, to see what rows do to those before them and to those after
    them; and many that are the same, as there may be room for only a few of one kind. If `fixed_rows`, each stack has
    so many: in the first ones, one row is beside copies of another, in all places but one."""
    others = (fixed_rows or 2) - 1
    yield from ((0, *[1] * others), (1, *[0] * others))
    if many:
        of_many, length = range(_MANY) if count == _MANY else _OF_TWO, fixed_rows or _MANY
        stack = [of_many[place * _MANY // length] for place in range(length)]
        yield from (stack, stack[::-1], [0] * length)


def _vary(spec: ModelSpec, alone: Sequence[Tensors]) -> bool:
    """Whether rows gave different results. If not, nothing has been shown, as those of a stack would be the same, too;
    unless there is nothing that could differ."""
    return all(0 in tensor.dims for tensor in spec.outputs) or any(
        not equal(one, two) for other in alone[1:] for one, two in zip(alone[0], other, strict=True)
    )


def _differences(
    spec: ModelSpec, alone: Sequence[Tensors], both: Tensors, order: Sequence[int], made_up: MadeUp
) -> dict[int, str]:
    """How outputs of `both` (or more) rows together differ from those `alone`, for the outputs that do, by index."""
    columns = enumerate(zip(spec.outputs, zip(*(alone[number] for number in order), strict=True), both, strict=True))
    # With contrast only small rows are judged: they may vanish beside large ones, but their effect on large ones is too
    # small to tell.
    first = order.index(0) * made_up.rows
    judged = slice(first, first + made_up.rows) if made_up.contrast else slice(None)
    found = {index: _compare(*column, made_up.rows, judged) for index, column in columns}
    return {index: why for index, why in found.items() if why}


def _compare(tensor: TensorSpec, alone: Sequence[Array], both: Array, rows: int, judged: slice) -> str:
    shapes, count = [one.shape for one in alone], rows * len(alone)
    if both.shape[:1] != (count,) or any(shape != (rows, *both.shape[1:]) for shape in shapes):
        few, many = _count(rows), _count(count)
        return f"output '{tensor.name}' has shape {list(shapes[0])} for {few} and {list(both.shape)} for {many}"
    if not alike(tensor, np.concatenate(alone)[judged], both[judged]):
        return f"output '{tensor.name}' of a row depends on {'the row' if len(alone) == 2 else 'rows'} beside it"
    return ""


def _count(rows: int) -> str:
    return {1: "one row", 2: "two"}.get(rows, f"{rows} rows")


def _steady(first: Tensors, again: Callable[[], Tensors]) -> frozenset[int]:
    """The outputs that are equal when the same row is run again; others are random, or count executions. If the second
    run fails, nothing suggests that, and all are returned. Raises ProcessError."""
    try:
        pairs = enumerate(zip(first, again(), strict=True))
    except ProcessError:
        raise
    except ExecutionError:
        return frozenset(range(len(first)))
    return frozenset(index for index, (one, two) in pairs if equal(one, two))


def _as_seen(spec: ModelSpec, results: Iterable[Shapes]) -> ModelSpec:
    outputs = map(_seen, spec.outputs, zip(*results, strict=True))
    return replace(spec, outputs=tuple(outputs))


def _seen(tensor: TensorSpec, shapes: Shapes) -> TensorSpec:
    """`tensor` with its dims as seen: sizes of outputs, even ranks, that a model declares wrongly become free."""
    tensor = replace(tensor, assumed=False)
    ranks = {len(shape) for shape in shapes}
    if len(ranks) != 1:
        return replace(tensor, dims=(), any_rank=True)
    declared = tensor.dims if ranks == {len(tensor.dims)} else (-1,) * ranks.pop()
    dims = (dim if all(size == dim for size in sizes) else -1 for dim, *sizes in zip(declared, *shapes, strict=True))
    return replace(tensor, dims=tuple(dims))
