"""What callers know of their sequences: which steps were sent, and which of them mustn't be executed any more."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paceline.scheduler.request import Request, SequenceStep


@dataclass(eq=False)
class Known:
    """A sequence, as far as its caller can know. `done` are the steps that made its state. `takes_more`: its id leads
    to it. Of its steps that wait, those from number `broken_from` on mustn't be executed, nor those `lost`, behind
    which it starts anew. `placed_on`: which instance has a place for it, -1: none; `instance`: the same, once a step of
    it was executed there."""

    id: int | str
    steps: list[Step] = field(default_factory=list)
    done: tuple[int, ...] = ()
    takes_more: bool = True
    broken_from: float = float("inf")
    lost: set[int] = field(default_factory=set)
    placed_on: int = -1
    instance: int = -1
    is_lost: bool = False

    def break_from(self, number: float) -> None:
        self.takes_more = False
        self.broken_from = min(self.broken_from, number)

    def is_broken(self, number: int) -> bool:
        return number >= self.broken_from or number in self.lost

    def lose(self, number: int) -> None:
        """A step is lost, and those behind it, up to one that waits to start anew."""
        if self.is_broken(number):
            return
        behind = [one for one in self.steps if one.number > number and one.asked.start and not one.request.ended]
        if behind:
            self.lost.update(one.number for one in self.steps if number <= one.number < behind[0].number)
        else:
            self.break_from(number)

    def lose_instance(self) -> None:
        """All steps are lost, up to one that hasn't begun and is to start anew: any instance may have that."""
        ahead = [one for one in self.steps if not (one.request.ended or one.was_executed or self.is_broken(one.number))]
        anew = next((one for one in ahead if one.asked.start), None)
        if anew is None:
            self.is_lost = True
            self.break_from(0)
        else:
            self.lost.update(one.number for one in self.steps if one.number < anew.number)
            self.placed_on = self.instance = -1
            anew.sent = False


@dataclass(eq=False)
class Step:
    number: int
    asked: SequenceStep
    sequence: Known
    request: Request[Any, Any]
    executing: bool = False
    was_executed: bool = False
    sent: bool = False
    told: int = 0
    over_ns: int = 0
