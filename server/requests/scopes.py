"""What exists of a request to an ensemble at one level of its plan.

Lives here: which tensors there are, and what is still to come. Must not: start steps, or answer; that is `pipelines`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set

from paceline.backends.spec import Tensors
from paceline.server.errors import StepFailed
from paceline.server.memory.region_tensors import Input
from paceline.server.models.pipeline import Plan
from paceline.server.requests.open_flight import PartialAnswer


class Scope:
    """What exists at one level: for a request, or for one answer of a decoupled step, its `source`, within `parent`.
    `values` are tensors, None for one that was left out; `pending` steps that haven't started, `executing` how many
    have. `answer`: what waits for its turn; `is_answered`: none is to come any more; `is_held`: one hasn't left.

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
        self.executing = self.size_bytes = 0
        self.answer: Tensors | StepFailed | None = None
        self.is_answered = level not in plan.endings
        self.is_held = False

    def has(self, tensors: Set[str]) -> bool:
        left = tensors - self.values.keys()
        return not left or (self.parent is not None and self.parent.has(left))

    def get(self, tensor: str) -> Input | None:
        if tensor in self.values or self.parent is None:
            return self.values[tensor]
        return self.parent.get(tensor)

    def is_in(self, other: Scope) -> bool:
        return self is other or (self.parent is not None and self.parent.is_in(other))

    def drop(self) -> None:
        """Nothing more is to come of it. What has an answer that hasn't left stays until it has."""
        self.pending.clear()
        self.executing = 0
        self.answer, self.is_answered = None, True
        for child in self.children:
            child.drop()
        self.children = {child: None for child in self.children if not child.is_over}
        for turns in self.turns.values():
            turns.clear()

    def fail(self, error: StepFailed) -> None:
        """`error` takes the place of what else would come of it."""
        self.drop()
        self.answer, self.is_answered = error, False

    @property
    def has_all_answers(self) -> bool:
        if not self.is_answered or self.pending or self.executing:
            return False
        return all(child.has_all_answers for turns in self.turns.values() for child in turns)

    @property
    def is_over(self) -> bool:
        return self.is_answered and not (self.pending or self.executing or self.children or self.is_held)
