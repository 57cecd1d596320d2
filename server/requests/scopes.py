"""What exists of a request to an ensemble at one level of its plan.

Lives here: which tensors there are, and what is still to come. Must not: start steps, or answer; that is `pipelines`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Set

from paceline.backends.spec import Tensors
from paceline.server.errors import StepFailed
from paceline.server.memory.region_tensors import Input
from paceline.server.models.pipeline import Plan, PlannedStep
from paceline.server.requests.inner_request import InnerRequest
from paceline.server.requests.open_flight import PartialAnswer


class Scope:
    """What exists at one level: for a request, or for one answer of a decoupled step, its `source`, within `parent`.
    `values` are tensors, None for one that was left out; `pending` are steps that haven't started, `executing` those
    that have, by their requests. `answer`: what waits for its turn; `is_answered`: none is to come any more; `is_held`:
    one hasn't left.

    `children` are there until nothing more can come of them and their answers have left. `turns` are those of each
    level whose turn hasn't passed, in order; the others have all their answers, as no level with answers has a further
    decoupled step."""

    __slots__ = (
        "answer", "children", "executing", "is_answered", "is_held", "level", "parent", "pending", "size_bytes",
        "source", "turns", "values",
    )  # fmt: skip

    def __init__(
        self,
        plan: Plan,
        level: int,
        values: dict[str, Input | None],
        parent: Scope | None = None,
        source: PartialAnswer | None = None,
    ) -> None:
        self.level = level
        self.values = values
        self.pending = [*plan.steps.get(level, ())]
        self.parent = parent
        self.source = source
        self.children: dict[Scope, None] = {}
        self.turns: dict[int, OrderedDict[Scope, None]] = {}
        self.executing: dict[InnerRequest, PlannedStep] = {}
        self.size_bytes = 0
        self.answer: Tensors | StepFailed | None = None
        self.is_answered = level not in plan.endings
        self.is_held = False
        if parent is not None:
            parent.children[self] = None
            parent.turns.setdefault(level, OrderedDict())[self] = None

    def has(self, tensors: Set[str]) -> bool:
        left = tensors - self.values.keys()
        return not left or (self.parent is not None and self.parent.has(left))

    def get(self, tensor: str) -> Input | None:
        if tensor in self.values or self.parent is None:
            return self.values[tensor]
        return self.parent.get(tensor)

    def due(self) -> Iterator[Scope]:
        """Those whose answers may leave now that something has come of this one; whoever takes one answers with it.

        What is made of a decoupled step's answers, and errors among them, leave in that step's order. Where a further
        decoupled step follows, only errors wait for what is made of the answers before them: if all did, answers that
        are held could keep its model from executing what they wait for."""
        at = self
        while at.parent is not None:
            # Whose turn has passed is looked at no more: they may be thousands, whose answers are on their way.
            turns = at.parent.turns[at.level]
            while turns and ((one := next(iter(turns))).answer is not None or one.has_all_answers):
                del turns[one]
                if one.answer is not None:
                    yield one
            # What waits behind its parent may have waited for this.
            at = at.parent
        if at.answer is not None:
            yield at

    def drop(self) -> list[InnerRequest]:
        """Nothing more is to come of it. What has an answer that hasn't left stays until it has. Returns what was
        executed in it."""
        executed = [*self.executing]
        self.pending.clear()
        self.executing.clear()
        self.answer, self.is_answered = None, True
        for child in self.children:
            executed += child.drop()
        self.children = {child: None for child in self.children if not child.is_over}
        for turns in self.turns.values():
            turns.clear()
        return executed

    def fail(self, error: StepFailed) -> list[InnerRequest]:
        """`error` takes the place of what else would come of it. Returns as `drop`."""
        executed = self.drop()
        self.answer, self.is_answered = error, False
        return executed

    @property
    def has_all_answers(self) -> bool:
        if not self.is_answered or self.pending or self.executing:
            return False
        return all(child.has_all_answers for turns in self.turns.values() for child in turns)

    @property
    def is_over(self) -> bool:
        return self.is_answered and not (self.pending or self.executing or self.children or self.is_held)
