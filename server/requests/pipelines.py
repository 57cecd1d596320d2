"""Requests to ensembles: each of their steps is a request to another model.

Lives here: which step goes when, what it gets, and the answer. Must not: what is known before a request comes
(`server.models.pipeline`). The rules: a step starts as soon as all its tensors are there; the first error ends the
request, and nobody waits for its other steps any more; tensors pass from step to step as they are.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic_ns
from typing import cast

from paceline.backends.base import Execution
from paceline.backends.batching import check_outputs
from paceline.backends.errors import ExecutionError
from paceline.backends.spec import MISSING, Array, ModelSpec, Tensors
from paceline.protos.datatypes import by_name, datatype_of
from paceline.scheduler.runner import ANSWERED_ELSEWHERE, NoAnswer, Outcome
from paceline.server.codec.array_request import ArrayRequest, NamedArray
from paceline.server.codec.parameters import of_those_there, passed_within
from paceline.server.codec.wire_request import step_in
from paceline.server.errors import StepFailed, error_text, status_of
from paceline.server.memory.region_tensors import Input
from paceline.server.models.pipeline import ROOT, Plan, PlannedStep
from paceline.server.models.served_model import ServedModel
from paceline.server.requests.in_flight import InFlight
from paceline.server.requests.inner_request import InnerRequest
from paceline.server.requests.open_flight import OpenFlight, PartialAnswer
from paceline.server.requests.scopes import Scope

AnnounceTo = Callable[[ServedModel, InFlight], None]
Done = Callable[[Outcome[Tensors]], None]


class Pipelines:
    """Executes requests to ensembles. `announce_to` hands a step over to its model, `give_up` withdraws one."""

    def __init__(self, announce_to: AnnounceTo, give_up: Callable[[InFlight], None]) -> None:
        self.announce_to = announce_to
        self.give_up = give_up
        self.on_step: Callable[[], object] | None = None
        """Called after each step that was handed over, if somebody wants to know."""
        # By ensemble, version and sequence: its requests, of which the first has started. Each other waits until that
        # before it has ended: steps of both may be executed side by side, and models with sequences must see them in
        # order, also where one load of the ensemble takes the place of another.
        self._sequences: dict[tuple[str, str, int | str], OrderedDict[PipelineRun, None]] = {}

    def enter(self, run: PipelineRun) -> None:
        """Start `run` when no other of its sequence is under way."""
        if run.sequence is not None:
            runs = self._sequences.setdefault(run.sequence, OrderedDict())
            runs[run] = None
            if len(runs) > 1:
                return
        run.start()

    def leave(self, run: PipelineRun) -> None:
        """`run` has ended."""
        if run.sequence is None:
            return
        runs = self._sequences[run.sequence]
        had_started = next(iter(runs)) is run
        del runs[run]
        if not runs:
            del self._sequences[run.sequence]
        elif had_started:
            next(iter(runs)).start()


class PipelineRun:
    """A request to an ensemble while it executes: `Runnable`, and the `Channel` of one that may be answered more than
    once. Steps of a scope that can't be executed any more, because an answer in it was an error, are dropped."""

    def __init__(
        self, pipelines: Pipelines, flight: InFlight, inputs: Sequence[Input], opened: OpenFlight | None = None
    ) -> None:
        self._pipelines = pipelines
        self.flight = flight
        self.opened = opened
        self.inputs = inputs
        message, model = flight.message, flight.model
        assert flight.options is not None
        self._outputs = flight.options.outputs
        self._parameters = passed_within(message.parameters)
        self._step = step_in(message)
        self.sequence: tuple[str, str, int | str] | None = None
        if self._step is not None and self._step.id and model.pipeline.has_sequences:
            self.sequence = model.name, model.version, self._step.id
        # By each of its steps that is executed now, in which scope.
        self._executing: dict[InnerRequest, Scope] = {}
        self._leaving: deque[Scope] = deque()
        self._spent_ns = [0, 0, 0]
        self._began_ns = 0
        self._last_error: StepFailed | None = None
        self._done: Done | None = None
        self._end_later: Callable[[], None] | None = None
        self._plan: Plan
        self._root: Scope

    @property
    def under_way(self) -> tuple[InnerRequest, ...]:
        """The steps that are executed now."""
        return (*self._executing,)

    @property
    def _is_last(self) -> bool:
        """Whether no further answer can come. Answers may still be on their way."""
        return self._root.has_all_answers

    def begin(self, done: Done) -> None:
        self._began_ns = monotonic_ns()
        self._done = done
        if self.opened is not None:
            self.opened.open(self, 1)
        self._pipelines.enter(self)

    def start(self) -> None:
        """Nothing is in its way any more."""
        flight = self.flight
        self._plan = flight.model.pipeline.plan(self._outputs)
        names = [tensor.name for tensor in flight.model.spec.inputs]
        given = {name: None if one is MISSING else one for name, one in zip(names, self.inputs, strict=True)}
        self._root = Scope(self._plan, ROOT, given)
        self._advance(self._root)

    def call_off(self) -> None:
        if (done := self._stop()) is not None:
            # Not at once: whoever calls this off is in the middle of something.
            outcome: Outcome[Tensors] = Outcome(self._began_ns, monotonic_ns(), error=asyncio.CancelledError())
            asyncio.get_running_loop().call_soon(done, outcome)

    def cancel(self, number: int) -> None:
        self.call_off()

    def let_go(self) -> None:
        """The request has ended."""
        if self.opened is not None:
            self.opened.let_go()
        self.inputs = ()
        end, self._end_later = self._end_later, None
        if end is not None:
            end()

    def sent(self, number: int, answers: int) -> None:
        """The oldest answers have left, and what they were made of may follow."""
        for _ in range(min(answers, len(self._leaving))):
            scope = self._leaving.popleft()
            scope.is_held = False
            self._close(scope)

    def _advance(self, scope: Scope) -> None:
        """Go on after tensors have come: start what can be started, and answer if that can be done."""
        if self._done is None:
            return
        for step in [*scope.pending]:
            if scope.has(step.needs):
                scope.pending.remove(step)
                self._execute(step, scope)
        if not scope.is_answered and scope.answer is None:
            ending = self._plan.endings[scope.level]
            if scope.has(ending.needs):
                self._answer(scope, ending.outputs)
        for child in [*scope.children]:
            self._advance(child)

    def _execute(self, step: PlannedStep, scope: Scope) -> None:
        given = [
            # Of another datatype than declared, if its model gives that: then the step is refused.
            (name, datatype_of(array.dtype, by_name(declared)).name, _with_rank(array, rank, leads=leads))
            for tensor, name, declared, rank, leads in step.inputs
            if (array := scope.get(tensor)) is not None
        ]
        flight, model = self.flight, step.model
        message = ArrayRequest(
            model.name,
            model.version,
            cast("Sequence[NamedArray]", given),
            step.wanted,
            id=flight.message.id,
            parameters=self._parameters,
            step=self._step,
        )
        more = self._on_next if model.decoupled else None
        request = InnerRequest(message, self._on_end, deadline_ns=flight.deadline_ns, made_for=flight, on_next=more)
        self._executing[request] = scope
        scope.executing[request] = step
        self._pipelines.announce_to(cast("ServedModel", model), request)
        if self._pipelines.on_step is not None:
            self._pipelines.on_step()

    def _on_end(self, request: InnerRequest) -> None:
        if self._done is None:
            return
        scope = self._executing.pop(request)
        step = scope.executing.pop(request)
        for place, spent_ns in enumerate(request.spent_ns):
            self._spent_ns[place] += spent_ns
        if request.error is not None:
            self._fail_step(step, scope, request.error)
        elif not step.model.decoupled:
            self._settle(scope, step, request.outputs)
        elif request.outputs:
            self._begin_scope(step, scope, request.outputs, None)
        self._hand_on(scope)
        self._close(scope)
        if self._done is not None and self._is_last:
            if self._last_error is not None:
                self._fail(self._last_error)
            else:
                assert self.opened is not None
                self.opened.on_answer(None, last=True)
                self._end(ANSWERED_ELSEWHERE)

    def _on_next(self, request: InnerRequest, answer: PartialAnswer, error: Exception | None) -> None:
        """A decoupled step has an answer that isn't its last."""
        if self._done is None:
            return
        scope = self._executing[request]
        step = scope.executing[request]
        self._begin_scope(step, scope, answer.outputs if error is None else self._failure(step, error), answer)

    def _begin_scope(
        self,
        step: PlannedStep,
        scope: Scope,
        answer: Mapping[str, Array] | StepFailed,
        source: PartialAnswer | None,
    ) -> None:
        begun = Scope(self._plan, step.number, {}, scope, source)
        if isinstance(answer, StepFailed):
            begun.size_bytes = len(str(answer))
            begun.fail(answer)
            self._hand_on(begun)
        else:
            begun.size_bytes = sum(array.nbytes for array in answer.values())
            self._settle(begun, step, answer)
        self._close(begun)

    def _settle(self, scope: Scope, step: PlannedStep, outputs: Mapping[str, Array]) -> None:
        for name, tensor in step.outputs:
            scope.values[tensor] = outputs.get(name)
        self._advance(scope)

    def _answer(self, scope: Scope, outputs: Sequence[tuple[int, str]]) -> None:
        """All outputs that there will be in `scope` are there."""
        model: ServedModel = self.flight.model
        assert model.pipeline is not None
        results: list[Array] = [MISSING] * len(model.spec.outputs)
        for index, name in outputs:
            array = scope.get(name)
            if array is None:
                continue
            tensor = model.spec.outputs[index]
            results[index] = cast("Array", _with_rank(array, *model.pipeline.rank_of_output(name)))
            try:
                check_outputs((results[index],), ModelSpec((), (tensor,), model.spec.batched), self.flight.rows)
            except ExecutionError as error:
                failed = StepFailed(f"in ensemble '{model.name}', {error}", status_of(error))
                if scope.level == ROOT:
                    self._fail(failed)
                else:
                    scope.answer = failed
                    self._hand_on(scope)
                return
        if self.opened is None:
            flight = self.flight
            if flight.options is not None:
                flight.options = of_those_there(flight.options, results)
            self._end(tuple(results))
        else:
            scope.answer = tuple(results)
            self._hand_on(scope)

    def _hand_on(self, scope: Scope) -> None:
        """Answer with what waits in `scope`, or for it."""
        if self._done is None:
            return
        for one in scope.due():
            answer, one.answer, one.is_answered = one.answer, None, True
            assert self.opened is not None
            last = self._is_last and self._last_error is None and not isinstance(answer, StepFailed)
            self.opened.on_answer(answer, last=last)
            if last:
                self._end(ANSWERED_ELSEWHERE)
                return
            one.is_held = True
            self._leaving.append(one)

    def _fail_step(self, step: PlannedStep, scope: Scope, error: BaseException) -> None:
        """A step has failed, and with it the request, or the answer that it was executed for. What a decoupled step has
        answered before goes on to the steps behind it, and the error comes last."""
        failed = self._failure(step, error)
        if scope.level == ROOT and step.model.decoupled:
            self._last_error = failed
        elif scope.level == ROOT:
            self._fail(failed)
        elif step.model.decoupled:
            self._begin_scope(step, scope, failed, None)
        else:
            for request in scope.fail(failed):
                del self._executing[request]
                self._pipelines.give_up(request)

    def _failure(self, step: PlannedStep, error: BaseException) -> StepFailed:
        where = f"in ensemble '{self.flight.model.name}', step {step.number} ('{step.model.name}')"
        return StepFailed(f"{where}: {error_text(error)}", status_of(error))

    def _fail(self, failed: StepFailed) -> None:
        if (done := self._stop()) is None:
            return
        end = partial(done, Outcome(self._began_ns, monotonic_ns(), error=failed))
        if self.opened is None:
            end()
        else:
            # Its execution fails once its caller has been told: earlier, that would overtake the answers before it.
            self._end_later = end
            self.opened.on_answer(failed, last=True)

    def _close(self, scope: Scope) -> None:
        """Forget `scope` if nothing more can come of it, and have the step go on that it was an answer of."""
        while scope.is_over and scope.parent is not None and self._done is not None:
            if scope.source is not None:
                scope.source.sent(scope.size_bytes)
            del scope.parent.children[scope]
            scope.parent.turns[scope.level].pop(scope, None)
            scope = scope.parent

    def _end(self, result: Tensors | NoAnswer) -> None:
        if (done := self._stop()) is not None:
            executed = Execution([cast("Tensors", result)], *self._spent_ns)
            done(Outcome(self._began_ns, monotonic_ns(), executed=executed))

    def _stop(self) -> Done | None:
        """Nothing follows. Returns whom to tell, unless that was done."""
        done, self._done = self._done, None
        if done is not None:
            executing, self._executing = self._executing, {}
            for request in executing:
                self._pipelines.give_up(request)
            self._root = _NOTHING
            self._leaving.clear()
            self._pipelines.leave(self)
        return done


_NOTHING = Scope(Plan({}, {}), ROOT, {})


def _with_rank(array: Input, rank: int, leads: bool) -> Input:
    """`array` as a model with `rank` axes takes it (0: any), where it differs by a batch axis of one row; `leads`: the
    model has one."""
    shape = array.shape
    if rank and leads and len(shape) == rank - 1:
        return array.reshape((1, *shape))
    if rank and not leads and len(shape) == rank + 1 and shape[0] == 1:
        return array.reshape(shape[1:])
    return array
