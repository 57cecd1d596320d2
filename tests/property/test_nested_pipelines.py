"""Ensembles in which decoupled steps follow each other, or which are steps of others: each answer and each error leaves
once, in the order that is promised, and an answer's model is told when nothing more can come of it.

Tensors are numbers: each answer of a decoupled step has one of its own, and other steps pass them on.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.backends.errors import ExecutionError
from paceline.server.requests.inner_request import InnerRequest
from tests.ensembles import Step
from tests.lengths import LONG
from tests.property.pipeline_graphs import Graph, Opened, Run, StepModel

Row = Sequence[Any]
"""Steps one behind the other: D is decoupled, S isn't, and an ensemble is a row of its own."""
ROWS = st.lists(st.sampled_from(["D", "D", "S", "DS", "SD", "DD", ["D", "DS"]]), min_size=1, max_size=3).filter(
    lambda row: any(kind != "S" for kind in row)
)
MOST = 20


@dataclass(eq=False)
class Answer:
    """The `place`th answer to a request, made of the answer `before`. `sent`: how often its model was told that it has
    left; None: it wants to know of no last one."""

    request: InnerRequest
    place: int
    before: Answer | None
    sent: int | None = None

    @property
    def path(self) -> list[Answer]:
        return [*(self.before.path if self.before is not None else ()), self]


class Ensemble(Opened):
    """A request to the ensemble `row`, asked by the step `asked_by` of the ensemble `outer`, or by a client. `expected`
    are the answers that something is to be told of, `said` those of which it was; `left` how many of these have left.
    None is the request's own error."""

    def __init__(
        self, world: World, row: Row, outer: Ensemble | None = None, asked_by: InnerRequest | None = None
    ) -> None:
        super().__init__()
        self.world, self.row, self.outer, self.asked_by = world, row, outer, asked_by
        self.answers: dict[int, Answer] = {}
        self.counts: dict[InnerRequest, int] = {}
        self.inner: dict[InnerRequest, Ensemble] = {}
        self.expected: list[Answer | None] = []
        self.said: list[Answer | None] = []
        self.left = 0
        steps: list[Step] = [(f"m{n}", {"a": f"x{n - 1}" if n else "in0"}, {"x": f"x{n}"}) for n in range(len(row))]
        models = [StepModel(n, "", decoupled=kind != "S") for n, kind in enumerate(row)]
        self.calls = Run(Graph(steps, models, {"in0": np.zeros((2, 1), np.float32)}), [f"x{len(row) - 1}"], self)
        world.ensembles.append(self)
        self.begin_inner()

    def begin_inner(self) -> None:
        for model, request in [*self.calls.under_way]:
            if self.row[model.number] not in ("D", "S"):
                self.calls.under_way.remove((model, request))
                self.inner[request] = Ensemble(self.world, self.row[model.number], self, request)

    def on_answer(self, answer: Any, *, last: bool) -> None:
        super().on_answer(answer, last=last)
        (said, _) = self.told[-1]
        if said is not None:
            self.said.append(self.answers.get(int(float(str(said).rsplit("number ", 1)[-1]))))
        if self.outer is not None:
            self.world.heard.append((self, isinstance(answer, Exception), answer is None, last))

    def leave(self, answers: int) -> None:
        self.left += answers
        self.run.sent(1, answers)

    # What its steps do.

    def more(self, request: InnerRequest, inner: Ensemble | None, *, is_error: bool, last: bool) -> None:
        """A decoupled step has an answer, which it got from the ensemble `inner`, if it is one."""
        number = self.world.numbers = self.world.numbers + 1
        place = self.counts[request] = self.counts.get(request, 0) + 1
        made = self.answers[number] = Answer(request, place, self.answers.get(number_of(request)))
        error = ExecutionError(f"number {number}") if is_error else None
        outputs: Any = {"x": np.full((2, 1), number, np.float32)}
        if is_error or self.is_end(request):
            self.expected.append(made)
        if not last:
            made.sent = 0

            def sent(size_bytes: int) -> None:
                assert made.sent is not None
                made.sent += 1
                if inner is not None:
                    inner.leave(1)

            answer: Any = SimpleNamespace(outputs=outputs, sent=sent)
            request.on_more(answer, error)
            return
        if error is not None:
            request.on_failure(error)
        else:
            request.outputs = outputs
        request.on_done()

    def pass_on(self, request: InnerRequest, *, is_error: bool) -> None:
        """A step that isn't decoupled ends."""
        number = number_of(request)
        if is_error:
            request.on_failure(ExecutionError(f"number {number}"))
            self.expected.append(self.answers.get(number))
        else:
            request.outputs = {"x": np.full((2, 1), number, np.float32)}  # type: ignore[assignment]
            if self.is_end(request):
                self.expected.append(self.answers[number])
        request.on_done()

    def is_end(self, request: InnerRequest) -> bool:
        """Whether no step follows this one."""
        return request.message.model_name == f"m{len(self.row) - 1}"

    # What must hold.

    @property
    def is_over(self) -> bool:
        return bool(self.told) and self.told[-1][1]

    def check(self) -> None:
        if self.is_over:
            return
        asked = [number_of(one) for one in (*self.inner, *(request for _, request in self.calls.under_way))]
        made_of = [self.answers[number] for number in asked if number] + [
            one for one in self.expected if one is not None and one not in self.said[: self.left]
        ]
        under_way = {one for answer in made_of for one in answer.path}
        for answer in self.answers.values():
            assert answer.sent is None or answer.sent == (answer not in under_way)

    def check_end(self) -> None:
        assert [last for _, last in self.told] == [False] * (len(self.told) - 1) + [True]
        self.run.let_go()
        assert len(self.calls.ends) == 1
        assert (self.calls.given_up, self.calls.under_way, self.inner) == ([], [], {})
        assert Counter(self.said) == Counter(self.expected)
        for number, one in enumerate(self.said):
            for later in self.said[number + 1 :]:
                assert one is not None
                assert later is not None
                pairs = enumerate(zip(one.path, later.path, strict=False))
                depth, (mine, other) = next((depth, pair) for depth, pair in pairs if pair[0] is not pair[1])
                # What is made of further decoupled steps' answers may be overtaken, and nothing else.
                assert mine.request is other.request
                assert mine.place < other.place or len(one.path) > depth + 1


def number_of(request: InnerRequest) -> int:
    message: Any = request.message
    ((_, _, array),) = message.inputs
    return int(array[0, 0])


class World:
    """A request to the ensemble `row`, and what its steps, theirs and the event loop do in any order."""

    def __init__(self, row: Row, data: st.DataObject) -> None:
        self.draw = data.draw
        self.numbers = 0
        # What inner ensembles have said that the outer ones haven't heard.
        self.heard: deque[tuple[Ensemble, bool, bool, bool]] = deque()
        self.ensembles: list[Ensemble] = []
        Ensemble(self, row)

    def play(self) -> None:
        while True:
            asked = [(one, call) for one in self.ensembles for call in one.calls.under_way]
            which = self.draw(st.integers(0, len(asked) - 1 + bool(self.heard))) if asked or self.heard else -1
            if which < 0:
                break
            if which == len(asked):
                self.hear()
            else:
                ensemble, (model, request) = asked[which]
                self.do(ensemble, model, request)
            top = self.ensembles[0]
            if not top.is_over:
                top.leave(self.draw(st.integers(0, len(top.said) - top.left)))
            for one in self.ensembles:
                one.check()
        for one in self.ensembles:
            one.check_end()

    def hear(self) -> None:
        inner, is_error, is_empty, last = self.heard.popleft()
        outer, request = inner.outer, inner.asked_by
        assert outer is not None
        assert request is not None
        if last:
            del outer.inner[request]
        if is_empty:
            request.on_done()
        else:
            outer.more(request, inner, is_error=is_error, last=last)
        outer.begin_inner()

    def do(self, ensemble: Ensemble, model: StepModel, request: InnerRequest) -> None:
        ways = ["ends", "is the last", "fails"]
        if not model.decoupled:
            ways = ["passes", "passes", "passes", "fails"]
        elif self.numbers < MOST:
            ways += ["answers", "answers", "answers", "answers", "says an error"]
        how = self.draw(st.sampled_from(ways))
        if how not in ("answers", "says an error"):
            ensemble.calls.under_way.remove((model, request))
        if not model.decoupled:
            ensemble.pass_on(request, is_error=how == "fails")
        elif how == "ends":
            request.on_done()
        else:
            is_last = how in ("is the last", "fails")
            ensemble.more(request, None, is_error=how in ("fails", "says an error"), last=is_last)
        ensemble.begin_inner()


@settings(max_examples=1000 if LONG else 100)
@given(ROWS, st.data())
def test_nested_answers_leave_once_in_their_order(row: Row, data: st.DataObject) -> None:
    World(row, data).play()
