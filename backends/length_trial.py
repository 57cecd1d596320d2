"""Whether requests of different sizes may be filled up to a common one, found out by trying.

Lives here: what is tried and what follows from it, in pure numpy. Must not: a runtime, a log, or know which axes may be
lengths (`length_axes`) or what is in rows (`made_up`). A model that has a mask may ignore it, or some of its layers
may: recurrences from both ends, averages over all words, convolutions. Then a text's results would depend on the
longest text beside it. The rule: rows of several sizes, filled up a little and by much, must give what they give alone.
They may differ by what floats round, and, for models that quantize at run time, not by much more than rows of equal
sizes already differ in a batch.

A step of a sequence is tried as the model sees it, with any state and with those that the model itself leaves, from the
initial one on: a count of rows among them has to be right. If that leaves the state that it leaves alone, so does each
step after it. A state that depends on who else was in the batch is refused, whoever asks for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from paceline.backends.errors import ExecutionError, InstanceError, LoadError, OutOfMemory
from paceline.backends.length_axes import (
    Sizes,
    States,
    asked_lengths,
    masked_lengths,
    named_masks,
    said,
    with_assumed_outputs,
    with_outputs,
)
from paceline.backends.lengths import Filling, Lengths, fill_up
from paceline.backends.likeness import distances, is_of_floats
from paceline.backends.made_up import ATTEMPTS, MAX_BYTES, GivenUp, Row, Rows
from paceline.backends.ragged import as_the_model_sees
from paceline.backends.spec import Array, ControlKind, ModelSpec, Tensors
from paceline.backends.trials import LengthAxis, LengthTrial

Run = Callable[[Sequence[Array]], Tensors]

_SHORT, _MANY = (1, 3), 32
"""The sizes of many short rows, if the model accepts them, and how many there are."""
_FILLED = (64, 160)
"""Larger sizes to fill up to, as long as the model accepts rows of that size."""
_AGES = (0, 1, 4)
"""How many steps sequences have behind them whose next one is tried."""
_OLD = 2_000
"""A size of states by which windows that keep the newest rows are likely to be full."""
_CLOSE, _COARSE = 1e-4, 1e-2
"""How far results may be apart, as a fraction of their usual size: in single precision, and in less. Texts in
encoders of 12 layers differ by 1e-6 to 1e-5 in single precision."""
_TIMES, _MOST = 4, 0.3
"""How many times as far as rows of equal sizes already differ in a batch, and how far at most."""
_ENOUGH_NS = 10 * 10**9
"""After which no larger sizes are tried."""
_LONGEST_NS = 30 * 10**9
"""For a trial, from its first execution on: others wait for their loads. The guesses to come share what is left."""


class _StateDiffers(InstanceError):
    """A state shows the filling, or there is none once a step is filled up."""


def try_lengths(
    spec: ModelSpec,
    asked: Sequence[LengthAxis] | None,
    run: Run,
    coarse: bool = False,
    on_gpu: bool = False,
    now_ns: Callable[[], int] = time.monotonic_ns,
) -> LengthTrial:
    """As `TriesLengths.try_lengths`. `run` returns the outputs for one array per input of `spec.executed`, all with
    their rows in front, and raises ExecutionError. `coarse`: it computes in less than single precision. `on_gpu`:
    states stay in a GPU's memory, but for those put together of parts; these are found only for who asks.

    Blocks for about ten executions of up to four rows and two of 32 short ones, and one more for each attempt that the
    model doesn't accept; for some twenty more if there are states.
    After half a minute, no more are begun; nor of rows that take more than MAX_BYTES.
    """
    executed = spec.executed.rows_in_front
    seen = as_the_model_sees(executed)
    coarse = coarse or any(one.datatype in ("FP16", "BF16") for one in (*seen.inputs, *seen.outputs))
    trial = _Trial(run, coarse, now_ns, spec, joins=asked is not None or not on_gpu)
    if asked is not None:
        wanted = asked_lengths(executed, asked, len(spec.inputs))
        tried = trial.of(
            replace(seen, inputs=as_the_model_sees(wanted).inputs, lengths=wanted.lengths), named_masks(seen)
        )
        has_states = spec.sequence is not None and spec.sequence.states
        if tried.odd or (has_states and not tried.is_known and not tried.is_given_up):
            raise LoadError(tried.odd or tried.why_not)
        if not tried.is_known:
            return _assumed(spec, wanted, tried.why_not)
        spec = replace(spec.with_fills(wanted.inputs), lengths=tried.spec.lengths, joined=tried.spec.joined)
        return LengthTrial(spec, tried.why_not)
    why_not, guesses = "", [*masked_lengths(seen, len(spec.inputs))]
    for number, (guess, masks) in enumerate(guesses):
        tried = trial.of(guess, masks, len(guesses) - number)
        if not tried.odd and not tried.why_not:
            return LengthTrial(replace(spec, lengths=tried.spec.lengths, joined=tried.spec.joined))
        why_not = why_not or tried.odd or tried.why_not
    return LengthTrial(spec, why_not)


def without_trial(spec: ModelSpec, asked: Sequence[LengthAxis] | None, why_not: str = "") -> LengthTrial:
    """As `try_lengths`, of a model that isn't run. `why_not`: what speaks against filling it up, known without that."""
    if asked is None:
        return LengthTrial(spec, why_not if any(-1 in one.dims for one in spec.inputs) else "")
    return _assumed(spec, asked_lengths(spec.executed.rows_in_front, asked, len(spec.inputs)), why_not)


def _assumed(spec: ModelSpec, wanted: ModelSpec, why_not: str) -> LengthTrial:
    """`spec` with the lengths of `wanted`, and the outputs that are likely to follow them. Raises LoadError for states
    of free sizes, of which that has to be known."""
    unknown = why_not or "models with an execution accelerator aren't tried"
    for index in States.of(spec).inputs:
        if -1 in wanted.outputs[index].dims:
            raise LoadError(
                f"state '{wanted.outputs[index].name}': its size may follow that of what is filled up, and {unknown}"
            )
    return LengthTrial(replace(spec.with_fills(wanted.inputs), lengths=with_assumed_outputs(wanted).lengths), why_not)


class _Tried(NamedTuple):
    """`spec` with the lengths' outputs, if they are known. `odd`: which output varies with a length in another way than
    it may, or which state shows the filling. `why_not` as in `LengthTrial`. `is_given_up`: for lack of time or memory,
    which is no fault of the model."""

    spec: ModelSpec
    is_known: bool = False
    odd: str = ""
    why_not: str = ""
    is_given_up: bool = False


class _Trial:
    """Tries specs that have lengths, all within one time limit, of a model that serves `served`. `joins`: states may be
    put together of parts."""

    def __init__(self, run: Run, coarse: bool, now_ns: Callable[[], int], served: ModelSpec, joins: bool) -> None:
        self._model, self._now_ns, self._ends_ns = run, now_ns, 0
        self._began_ns, self._longest_ns, self._guesses = 0, 0, 1
        self._coarse, self._joins = coarse, joins
        self._states = States.of(served)
        # Most steps are in the middle of a sequence, as first ones may ignore their state.
        controls = served.sequence.controls if served.sequence is not None else ()
        valued = [(index, one) for index, one in enumerate(controls, len(served.inputs)) if one.values]
        self._controls = {index: one.values[one.kind is ControlKind.READY] for index, one in valued}
        self._first = {index: one.values[True] for index, one in valued if one.kind is ControlKind.START}

    def of(self, spec: ModelSpec, masks: frozenset[int], guesses: int = 1) -> _Tried:
        """`guesses`: how many there are from this one on."""
        failed, self._guesses, is_given_up = "", guesses, False
        if self._ends_ns:
            self._begin()
        for attempt in ATTEMPTS:
            try:
                fixed = {**dict.fromkeys(masks, 1), **self._controls}
                return self._try(spec, Rows(spec, fixed, attempt, masks & self._states.initial.keys()))
            except _StateDiffers as error:
                return _Tried(spec, True, odd=str(error))
            except (InstanceError, MemoryError) as error:
                failed = f"its trial was given up: {str(error) or type(error).__name__}"
                is_given_up = isinstance(error, (GivenUp, OutOfMemory, MemoryError))
                break
            except ExecutionError as error:
                failed = failed or f"it accepts no made-up inputs ({error})"
        why_not = f"it isn't known whether the filling shows in its results, as {failed}"
        return _Tried(spec, why_not=why_not, is_given_up=is_given_up)

    def _begin(self) -> None:
        self._began_ns = now_ns = self._now_ns()
        self._ends_ns = self._ends_ns or now_ns + _LONGEST_NS
        self._longest_ns = max(0, self._ends_ns - now_ns) // self._guesses

    def _run(self, inputs: Sequence[Array]) -> Tensors:
        if self._ends_ns and self._now_ns() > self._began_ns + self._longest_ns:
            raise GivenUp(f"it took longer than {self._longest_ns / 1e9:.3g} s")
        try:
            return self._model(inputs)
        finally:
            if not self._ends_ns:
                self._begin()

    def _try(self, spec: ModelSpec, rows: Rows) -> _Tried:
        """Raises ExecutionError if the model doesn't accept rows alone, and InstanceError."""
        few = [rows.one(number, rows.sizes(number)) for number in range(3)]
        alone = [self._run(row.inputs) for row in few]
        spec, odd = with_outputs(spec, [row.sizes for row in few], alone, self._states)
        if spec.joined and not self._joins:
            odd = odd or _JOINED.format(spec.outputs[spec.joined[0].output].name)
        if odd:
            return _Tried(spec, odd=odd)
        limits, varied = self._limits(spec, rows, few, alone)
        has_states = len(self._states.inputs) > 0
        if not any(varied):
            return _Tried(spec, True, odd=_SAME if has_states else "", why_not=_SAME)
        for index in self._states.inputs:
            if limits[index] == np.inf:
                name = spec.outputs[index].name
                return _Tried(spec, odd=f"it isn't known whether state '{name}' shows the filling: it differs from run "
                                        "to run")  # fmt: skip
        played = self._played(spec, rows) if has_states else []
        largest = [(few[-1], alone[-1]), *played]
        row_bytes = max(sum(one.nbytes for one in (*row.inputs, *result)) for row, result in largest)
        if 4 * row_bytes > MAX_BYTES:
            raise GivenUp(f"four rows with their results take more than {MAX_BYTES >> 20} MiB")
        why_not = ""
        for number, size in enumerate((0, *_FILLED)):
            larger = size + rows.longer
            is_late = self._now_ns() > self._began_ns + _ENOUGH_NS
            grown = (larger // few[-1].sizes[0] + 1) ** len(spec.lengths)
            if size and (is_late or 4 * row_bytes * grown > MAX_BYTES):
                break
            more = [rows.one(1, (larger,) * len(spec.lengths))] if size else []
            try:
                others = [self._run(row.inputs) for row in more]
            except ExecutionError:
                break  # it is longer than the model accepts
            try:
                why_not = self._compare(spec, [*few, *more], [*alone, *others], limits) or why_not
                for row, result in played:  # one by one: what isn't filled up may differ in size, too
                    common = tuple(max(*sizes, size) for sizes in zip(few[-1].sizes, row.sizes, strict=True))
                    why_not = self._compare(spec, [row], [result], limits, common) or why_not
                if not number and (has_states or not why_not):
                    count = min(_MANY, MAX_BYTES // row_bytes)
                    why_not = self._compare_short(spec, rows, few[-1].sizes, count, limits, varied) or why_not
            except GivenUp:
                if number:
                    break
                raise
            # What an output shows is a warning to who has asked for it. States are looked at to the end.
            if why_not and not has_states:
                break
        odd = self._dropped(spec, rows, few, alone) if spec.joined else ""
        return _Tried(spec, True, odd=odd, why_not=why_not)

    def _played(self, spec: ModelSpec, rows: Rows) -> list[tuple[Row, Tensors]]:
        """Steps as sequences come to them, and their results: the latest ones that the model accepts, as it may have so
        many places. Raises as `_try`."""
        played = []
        for age in _AGES:
            states = dict(self._states.initial)
            for step in range(age + 1):
                sizes = [*rows.sizes((age + step) % 3)]
                for number, length in enumerate(spec.lengths):
                    for index, axis in length.inputs:
                        sizes[number] = states[index].shape[axis] if index in states else sizes[number]
                row = rows.one(age + step, tuple(sizes))
                for index, value in {} if step else self._first.items():
                    row.inputs[index][...] = value
                for index, array in states.items():
                    row.inputs[index] = array
                try:
                    result = self._run(row.inputs)
                except ExecutionError as error:
                    if isinstance(error, InstanceError) or not step:
                        raise
                    break
                last = (row, result)
                states = {index: np.array(result[output]) for output, index in self._states.inputs.items()}
            played.append(last)
        return played

    def _dropped(self, spec: ModelSpec, rows: Rows, few: Sequence[Row], alone: Sequence[Tensors]) -> str:
        """Whether states that have grown for long lose rows, so that which ones are left depends on what was filled up,
        in words; "" also if the model doesn't accept such states, or they would take too much."""
        given = [any(index in self._states.initial for index, _ in length.inputs) for length in spec.lengths]
        sizes = tuple(_OLD if is_given else size for is_given, size in zip(given, few[0].sizes, strict=True))
        try:
            result = self._run(rows.one(1, sizes).inputs)
        except (GivenUp, OutOfMemory):
            return ""
        except InstanceError:
            raise
        except ExecutionError:
            return ""
        return with_outputs(spec, [*(row.sizes for row in few), sizes], [*alone, result], self._states)[1]

    def _limits(
        self, spec: ModelSpec, rows: Rows, few: Sequence[Row], alone: Sequence[Tensors]
    ) -> tuple[list[float], list[bool]]:
        """How far results of each output may be apart, and whether they vary with what is in a row. Outputs that
        differ when the same row runs again are random, or count executions: nothing is expected of them."""
        again = distances(spec, alone[0], self._run(few[0].inputs))
        limits = [_MOST if one <= _COARSE else np.inf for one in again]
        if min(limits, default=0) == np.inf:
            raise InstanceError("its results differ from run to run")
        bases, varied = [0.0] * len(limits), [False] * len(limits)
        for (sizes, row), result in ((few[0], alone[0]), (few[-1], alone[-1])):
            other = rows.one(3, sizes).inputs
            both = self._run([np.concatenate(pair) for pair in zip(row, other, strict=True)])
            if any(len(one) != 2 for one in both):
                raise ExecutionError("its outputs don't have the rows of its inputs")
            bases = list(map(max, bases, distances(spec, result, [one[:1] for one in both])))
            varied = [seen or not np.array_equal(one[:1], one[1:]) for seen, one in zip(varied, both, strict=True)]
        least = [(_COARSE if self._coarse else _CLOSE) if is_of_floats(one) else 0.0 for one in spec.outputs]
        return [
            limit if limit == np.inf else max(close, min(_TIMES * base, limit))
            for limit, close, base in zip(limits, least, bases, strict=True)
        ], varied

    def _compare_short(
        self,
        spec: ModelSpec,
        rows: Rows,
        common: Sizes,
        count: int,
        limits: Sequence[float],
        varied: Sequence[bool],
    ) -> str:
        """How results of `count` rows as short as the model accepts change once these are filled up to `common`, in
        words; or which output gives these the same results, and hasn't `varied` before. The largest of all words'
        numbers, or its place, shows the filling only where that exceeds all words: the fewer these are, the likelier.
        """
        for size in (*_SHORT, 0):
            sizes = (size,) * len(spec.lengths) if size else rows.sizes(0)
            many = [rows.one(4 + number, sizes).inputs for number in range(count)]
            together = [np.concatenate(column) for column in zip(*many, strict=True)]
            try:
                expected = self._run(together)
            except InstanceError:
                raise
            except ExecutionError:
                continue
            if why_not := self._compare(spec, [Row(sizes, together)], [expected], limits, common):
                return why_not
            # An output that never varies says nothing, whatever the others say.
            for tensor, limit, array, has_varied in zip(spec.outputs, limits, expected, varied, strict=True):
                if limit < np.inf and not has_varied and all(np.array_equal(one, array[0]) for one in array[1:]):
                    return _SAME_IN.format(tensor.name)
            return ""
        return ""  # it doesn't accept so many

    def _compare(
        self,
        spec: ModelSpec,
        rows: Sequence[Row],
        alone: Sequence[Tensors],
        limits: Sequence[float],
        common: Sizes | None = None,
    ) -> str:
        """How results of `rows` filled up together differ from those `alone`, in words. They are filled up to the
        longest of them, unless `common` is given. Raises InstanceError, also for a state that differs."""
        axes = Lengths(spec)
        sizes = [one for one, _ in rows]
        ends = [*accumulate((len(row[0]) for _, row in rows), initial=0)]
        filling = Filling(axes, sizes, common or tuple(map(max, zip(*sizes, strict=True))))
        inputs = []
        for index, column in enumerate(zip(*(row for _, row in rows), strict=True)):
            target = np.empty((ends[-1], *filling.shape(index, column)), column[0].dtype)
            fill_up(target, column, axes.fills[index])
            inputs.append(target)
        try:
            outputs = self._run(inputs)
            filling.check([one.shape for one in outputs])
        except InstanceError:
            raise
        except ExecutionError as error:
            why_not = f"it runs with requests of sizes {said(sizes)} alone, and fails once they are filled up: {error}"
            if self._states.inputs:
                raise _StateDiffers(why_not) from error
            return why_not
        if any(len(one) != ends[-1] for one in outputs):
            return "its outputs don't have the rows of its inputs once they are filled up"
        cut = filling.cut([[one[begin:end] for one in outputs] for begin, end in pairwise(ends)])
        found = [
            (index, size, apart)
            for size, mine, other in zip(sizes, alone, cut, strict=True)
            for index, apart in enumerate(distances(spec, mine, other))
            if apart > limits[index]
        ]
        if not found:
            return ""
        # A state first: nothing may be filled up then.
        index, size, apart = min(found, key=lambda one: one[0] not in self._states.inputs)
        why_not = (
            f"output '{spec.outputs[index].name}' of a request of size {said([size])} differs from alone by "
            f"{apart:.1%} once it is filled up to {said([filling.common])}"
        )
        if index in self._states.inputs:
            raise _StateDiffers(f"{why_not}, and is the state of the step after it")
        return why_not


_SAME = "it isn't known whether the filling shows in its results, as all made-up rows give the same results"
_JOINED = (
    "state '{}' would be put together of parts, for which it would leave the GPU's memory; that is done for who asks"
)
_SAME_IN = "it isn't known whether the filling shows in output '{}', which is the same for all made-up rows"
