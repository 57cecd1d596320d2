"""What there is of a request to an ensemble while it executes.

Lives here: tensors, steps and answers, level by level. Must not: execute anything; that is `pipelines`.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from paceline.server.memory.region_tensors import Input
from paceline.server.models.pipeline import PlannedStep
from paceline.server.requests.in_flight import NextAnswer

__all__ = ["Scope"]


class Scope:
    """What exists at one level: for a request, or for one answer of a decoupled step, its `source`, within `parent`.
    `values` are tensors, None for one that was left out; `pending` steps that haven't started, `executing` how many
    have. `is_answered`: no answer is to be made of it any more; `is_held`: one hasn't left."""

    __slots__ = (
        "children",
        "executing",
        "is_answered",
        "is_held",
        "level",
        "parent",
        "pending",
        "size_bytes",
        "source",
        "values",
    )

    def __init__(
        self,
        level: int,
        values: dict[str, Input | None],
        pending: Sequence[PlannedStep],
        parent: Scope | None = None,
        source: NextAnswer | None = None,
        *,
        is_answered: bool = True,
    ) -> None:
        self.level = level
        self.values = values
        self.pending = list(pending)
        self.parent = parent
        self.source = source
        self.children: list[Scope] = []
        self.executing = self.size_bytes = 0
        self.is_answered = is_answered
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
        self.is_answered = True
        for child in self.children:
            child.drop()
        self.children = [child for child in self.children if not child.is_over]

    @property
    def has_all_answers(self) -> bool:
        return self.is_answered and all(child.has_all_answers for child in self.children)

    @property
    def is_over(self) -> bool:
        return self.is_answered and not (self.pending or self.executing or self.children or self.is_held)
