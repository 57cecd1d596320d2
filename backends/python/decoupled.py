"""The server's side of a model that gets requests: its instances and their processes.

Lives here: handing requests over, and handing on what the model says of each. Must not: what a request is to the
server. The rules: nobody but the instance's thread waits for the process; whatever becomes of the process, each request
that it had hears of its end.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, count, islice, pairwise, repeat
from time import monotonic_ns
from typing import Any, cast

from paceline.backends.base import Device, Execution, ModelSource
from paceline.backends.batching import check_outputs, rows_of, shares, stack
from paceline.backends.errors import ExecutionError, ProcessError
from paceline.backends.open_request import AGAIN, ELSEWHERE, Answer, OpenRequest, Told
from paceline.backends.python import messages
from paceline.backends.python.duplex_process import DuplexProcess
from paceline.backends.python.instance import PythonInstance
from paceline.backends.python.messages import Ended
from paceline.backends.python.process import ModelProcess, error_of
from paceline.backends.ragged import as_the_model_sees
from paceline.backends.spec import MISSING, Array, ModelSpec, Tensors
from paceline.backends.transport.parcel import Message, Parcel


class DecoupledProcess(DuplexProcess):
    """A process whose model gets requests. It is the `Channel` of those that the model has."""

    _mode = messages.REQUESTS
    outputs_of: Callable[[Sequence[int], Sequence[Array]], Tensors]
    """Makes outputs of their places and arrays; raises ExecutionError. Set before anything is handed over."""
    stacks = False
    """Whether requests of a batch have equal shapes but for their rows, so that their inputs can be joined."""

    def __init__(self, source: ModelSource, device: Device) -> None:
        self._numbers = count(1)
        # Those that haven't ended. Those of the execution that goes on get its error if the process ends.
        self._open: dict[int, OpenRequest] = {}
        self._executing: Sequence[int] = ()
        self._changing = threading.Lock()
        super().__init__(source, device)

    def cancel(self, number: int) -> None:
        with self._changing:
            request = self._open.pop(number, None)
        if request is not None and not self._open_requests(request.execution):
            self._cancel_calls(request.execution)
        self._unsaid.put(lambda: self._link.send(messages.CANCEL, number))

    def _open_requests(self, execution: int) -> Sequence[OpenRequest]:
        with self._changing:
            return [one for one in self._open.values() if one.execution == execution]

    def sent(self, number: int, answers: int) -> None:
        self._unsaid.put(lambda: self._link.send(messages.SENT, number, answers))

    def hand_over(
        self,
        requests: Sequence[OpenRequest],
        inputs: Sequence[str],
        outputs: Sequence[str],
        kind: int,
        *,
        stacks: bool = False,
    ) -> list[Tensors | Exception]:
        """Hand `requests` to the model, together; if it `stacks`, with their inputs joined by rows on the way, which
        costs less. Returns when its `execute` has, as `AnswersOpenly`.

        Blocks; for one thread at a time. Raises as `execute`; then those that haven't ended get nothing more.
        """
        given = {next(self._numbers): request for request in requests}
        for request in requests:
            request.execution = self._executions + 1
        with self._handing(given):
            parcels: list[Parcel] = []
            try:
                whole, bounds = [one.inputs for one in requests], None
                if stacks and len(requests) > 1:
                    whole, bounds = [stack(whole)], [*accumulate(rows_of(whole), initial=0)]
                parcels.extend(map(self._link.pack, whole))  # those before one that raises are in it
                handed = [
                    (number, one.id, dict(one.parameters), tuple(one.outputs), parcel, one.step, one.timeout_us)
                    for (number, one), parcel in zip(given.items(), repeat(None) if bounds else parcels, strict=False)
                ]
                self._tell_over()
                stacked = (parcels[0], bounds) if bounds else None
                is_sent = not self.ended and self._link.send(kind, inputs, outputs, handed, stacked)
            except (TypeError, ValueError) as error:
                for parcel in parcels:
                    self._link.unsent(parcel)
                raise ExecutionError(f"inputs can't be handed to the model's process: {error}") from error
            for number, request in given.items():
                if request.cancelled:
                    self.cancel(number)  # now that the process knows it
            outcome = self._answered(is_sent)
            if outcome[0] == messages.FAILED:
                raise error_of(*outcome[1:])
            return self._results([*given.values()], *outcome[1:])

    def _results(
        self, requests: Sequence[OpenRequest], ended: Sequence[Ended], parcel: Parcel | None
    ) -> list[Tensors | Exception]:
        """A result for each request, of which `ended` says what became of them; nothing: all are answered elsewhere."""
        if not ended or parcel is None:
            return [ELSEWHERE] * len(requests)
        arrays = self._link.unpack(parcel)
        answered = iter(self._answered_with(arrays, [one for one in ended if isinstance(one, tuple)]))
        results: list[Tensors | Exception] = []
        for request, became in zip(requests, ended, strict=True):
            if became is None:
                results.append(ELSEWHERE)
                continue
            request.close()
            if became is True:
                results.append(AGAIN)
            else:
                results.append(error_of(*became) if isinstance(became, list) else next(answered))
        return results

    def _answered_with(
        self, arrays: Sequence[Array], answered: Sequence[tuple[tuple[int, ...], str, int]]
    ) -> Sequence[Tensors | Exception]:
        """The results of requests that were answered, whose outputs are `arrays`."""
        if not answered:
            return ()
        if answered[0][2] < 0:
            each = iter(arrays)
            return [self._result(places, [*islice(each, len(places))], said) for places, said, _ in answered]
        places, bounds = answered[0][0], [*accumulate([rows for _, _, rows in answered], initial=0)]
        whole = self._result(places, arrays, "")
        if not isinstance(whole, Exception):
            return shares(whole, bounds)
        # Each gets an error of its own.
        return [self._result(places, [one[start:stop] for one in arrays], "") for start, stop in pairwise(bounds)]

    def _result(self, places: Sequence[int], arrays: Sequence[Array], parameters: str) -> Tensors | Exception:
        try:
            outputs = self.outputs_of(places, arrays)
        except ExecutionError as error:
            return error.with_traceback(None)
        return Told(outputs, json.loads(parameters)) if parameters else outputs

    @contextmanager
    def _handing(self, given: dict[int, OpenRequest]) -> Iterator[None]:
        self._is_taken = False
        with self._changing:
            self._open.update(given)
            self._executing = [*given]
        for number, request in given.items():
            request.open(self, number)
        try:
            yield
        except BaseException:
            with self._changing:
                for number in given:
                    self._open.pop(number, None)
            raise

    def _on_gone(self) -> None:
        error = ProcessError(f"the model's process {self.end}")
        with self._changing:
            lost = [self._open.pop(number) for number in [*self._open] if number not in self._executing]
        for request in lost:
            request.on_answer(error, last=True)
        # Those that it executed get theirs from whoever waits for the execution.

    def _on_answer(self, message: Message) -> None:
        if message[0] == messages.DONE:
            with self._changing:
                # Whatever happens next, whoever waits for this has the answers of those that have ended.
                for number, became in zip(self._executing, message[1], strict=False):
                    if became is not None:
                        self._open.pop(number, None)
                self._executing = ()
        super()._on_answer(message)

    def _hear(self, message: Message) -> None:
        if message[0] not in (messages.ANSWER, messages.ERROR):
            super()._hear(message)
        else:
            kind, number, last, *content = message
            answer: Answer = None
            if kind == messages.ERROR:
                answer = error_of(*content)
            elif content[1] is not None:
                arrays = self._link.unpack(content[1])  # even if nobody waits: that gives its place back
                result = self._result(content[0], arrays, content[2])
                if isinstance(result, Exception) and not last:
                    # The model is at fault, and what follows makes no sense without it.
                    last = True
                    self._unsaid.put(lambda: self._link.send(messages.CANCEL, number))
                answer = cast("Answer", result)
            with self._changing:
                request = self._open.pop(number, None) if last else self._open.get(number)
            if request is not None:
                request.on_answer(answer, last=last)


class DecoupledInstance(PythonInstance):
    """`AnswersOpenly`. `as_given`: outputs are sent as the model gives them, whatever datatype and axes `spec` says,
    unless it reshapes them or they have no axes."""

    def __init__(self, spec: ModelSpec, process: DecoupledProcess, *, as_given: bool = False) -> None:
        super().__init__(spec, process)
        seen = as_the_model_sees(spec)
        lead = (-1,) if spec.batched else ()
        # By output; answers may have as many rows as the model likes.
        self._specs = [ModelSpec((), (replace(tensor, dims=(*lead, *tensor.dims)),)) for tensor in seen.outputs]
        self._as_given = [as_given and tensor.reshape is None for tensor in seen.outputs]
        process.outputs_of = self._outputs_of
        self._stacks = process.stacks and spec.batched and spec.by_rows

    def execute_open(self, requests: Sequence[OpenRequest]) -> Execution:
        return self._hand_over(requests, messages.HAND)

    def execute(self, requests: Sequence[Tensors], padded_rows: int = 0) -> Execution:
        return self._made_up(requests, messages.HAND)

    def execute_made_up(self, requests: Sequence[Tensors], padded_rows: int = 0) -> Execution:
        return self._made_up(requests, messages.HAND_MADE_UP)

    def _made_up(self, requests: Sequence[Tensors], kind: int) -> Execution:
        made = [_MadeUp(inputs, range(len(self._outputs))) for inputs in requests]
        done = self._hand_over(made, kind)
        results: list[Tensors] = []
        for one, result in zip(made, done.results, strict=True):
            one.cancel()
            answer = one.answer if result is ELSEWHERE else result
            if isinstance(answer, Exception):
                raise answer
            results.append(answer or ())
        return replace(done, results=results)

    def _hand_over(self, requests: Sequence[OpenRequest], kind: int) -> Execution:
        began_ns = monotonic_ns()

        def hand_over(process: ModelProcess) -> list[Tensors | Exception]:
            assert isinstance(process, DecoupledProcess)
            return process.hand_over(requests, self._inputs, self._outputs, kind, stacks=self._stacks)

        return Execution(self._call(hand_over), 0, monotonic_ns() - began_ns, 0)

    def _outputs_of(self, places: Sequence[int], arrays: Sequence[Array]) -> Tensors:
        """All outputs, MISSING where there are none at `places`. Raises ExecutionError for what aren't the model's."""
        outputs: list[Array] = [MISSING] * len(self._outputs)
        for place, array in zip(places, arrays, strict=True):
            if not (self._as_given[place] and array.ndim):
                check_outputs((array,), self._specs[place], 0)
            outputs[place] = array
        return outputs


class _MadeUp(OpenRequest):
    """A request of nobody, who is content with its first answer: there may be no last one."""

    __slots__ = ("answer",)

    def __init__(self, inputs: Tensors, outputs: Sequence[int]) -> None:
        super().__init__(inputs, outputs)
        self.answer: Any = None

    def on_answer(self, answer: Answer, *, last: bool) -> None:
        if not self.cancelled:
            self.answer = answer
            self.cancel()
