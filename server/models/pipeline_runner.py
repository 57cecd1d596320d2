"""What a batcher has in place of an instance's thread where a request is executed by other models.

Lives here: starting and calling off such an execution. Must not: how it goes; that is the payload's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from paceline.backends.spec import Tensors
from paceline.scheduler.runner import Done, Outcome

__all__ = ["PipelineRunner", "Runnable"]


@runtime_checkable
class Runnable(Protocol):
    """A request that executes itself."""

    def begin(self, done: Callable[[Outcome[Tensors]], None]) -> None:
        """Start; `done` is called later, once."""

    def call_off(self) -> None:
        """Nobody waits for it any more. `done` is called all the same."""


class PipelineRunner:
    """Executes one request at a time, on the event loop."""

    stages = False

    def __init__(self) -> None:
        self._going: Runnable | None = None

    def start(self) -> None:
        pass

    def run(self, payloads: Sequence[Runnable], padded_rows: int, done: Done[Tensors]) -> None:
        (going,) = payloads
        self._going = going

        def end(outcome: Outcome[Tensors]) -> None:
            self._going = None
            done(outcome)

        going.begin(end)

    def take_back(self) -> bool:
        return False

    def call_off(self) -> None:
        if self._going is not None:
            self._going.call_off()

    def stop(self) -> None:
        self.call_off()
