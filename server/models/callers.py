"""A model's instance as the one that calls other models.

Lives here: which requests it executes when its code makes a call. Must not: calls; those are requests
(`server.requests.model_calls`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from paceline.scheduler.request import AnyRequest
from paceline.scheduler.runner import AnyRunner

__all__ = ["Caller"]


class _Executes(Protocol):
    """The batcher of its model."""

    def executing(self, runner: AnyRunner, /) -> Sequence[AnyRequest]: ...


class Caller:
    """The instance of a model whose executions are those of `runner`."""

    __slots__ = ("_batcher", "runner")

    def __init__(self, batcher: _Executes, runner: AnyRunner) -> None:
        self._batcher = batcher
        self.runner = runner

    def executing(self) -> Sequence[AnyRequest]:
        """The requests that it executes now, none if it is idle. On the event loop."""
        return self._batcher.executing(self.runner)
