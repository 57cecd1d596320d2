"""Requests from within the server: the steps of an ensemble, and what a model asks of another.

Lives here: how their ends are told. Must not: their way, which is that of any request (`Inference.announce_to`): they
share batches with everybody's, are refused like them, obey their deadlines, and are counted with their model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

from paceline.backends.base import Execution
from paceline.backends.spec import Array
from paceline.server.call_facts import NO_PASSED_HEADERS, TraceParent
from paceline.server.codec.array_request import ArrayRequest
from paceline.server.requests.in_flight import AnswerInMaking, InFlight, NextAnswer

__all__ = ["InnerRequest"]


class InnerRequest(InFlight):
    """`on_end` is called once it has ended, unless it was given up: with its `outputs`, by name, or with `error` set as
    long as that call lasts. Outputs are shares of what their batch has left, which stays in memory as long as they do.
    `deadline_ns` is when its answer has to be there.

    `on_next`, if given: it may be answered more than once, and this is called for each answer before the last, with an
    error in place of its outputs, if it is one. Then the last one may be empty. Whoever holds answers back has to call
    `sent` of each when it is used: until then its model may have to wait.
    """

    __slots__ = ("error", "on_end", "on_next", "outputs", "spent_ns", "takes_more")

    takes_arrays = True

    def __init__(
        self,
        message: ArrayRequest,
        on_end: Callable[[InnerRequest], None],
        *,
        deadline_ns: int,
        parent: TraceParent | None = None,
        on_next: Callable[[InnerRequest, AnswerInMaking, Exception | None], None] | None = None,
    ) -> None:
        super().__init__(message, deadline_ns, parent, NO_PASSED_HEADERS)
        self.on_end = on_end
        self.on_next = on_next
        self.takes_more = on_next is not None
        self.outputs: Mapping[str, Array] = {}
        self.error: BaseException | None = None
        self.spent_ns = (0, 0, 0)
        """How long its batch took before, in and after the model, once it has ended."""

    def let_go(self) -> None:
        if self.batch_facts is not None and isinstance(executed := self.batch_facts.executed, Execution):
            self.spent_ns = executed.input_ns, executed.infer_ns, executed.output_ns
        super().let_go()

    def on_failure(self, error: BaseException) -> None:
        self.error = error

    def on_done(self) -> None:
        try:
            self.on_end(self)
        finally:
            self.error = None  # its traceback has frames that lead back to this request
            self.on_end, self.on_next = _nothing, None

    def on_open(self) -> None:
        pass

    def on_more(self, answer: NextAnswer, error: Exception | None) -> None:
        assert self.on_next is not None
        self.on_next(self, cast("AnswerInMaking", answer), error)  # they are made in this process

    def end_of_answers(self) -> bytes:
        return b""


def _nothing(request: InnerRequest) -> None:
    pass
