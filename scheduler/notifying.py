"""Futures whose owner is notified of all that are done together.

Lives here: the future, and the notification. Must not: know what the futures stand for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from itertools import groupby
from operator import attrgetter
from typing import Any, TypeVar

__all__ = ["NotifyingFuture", "notify"]

_log = logging.getLogger("paceline.scheduler")

_ON_DONE = attrgetter("on_done")

R = TypeVar("R")


class NotifyingFuture(asyncio.Future[R]):
    """A future with one callback for all that are done together. `on_done`, if set, is called once with a list: the
    `subject` of this future, and of others that are done. Code that sets results or errors has to call `notify` for
    that; for a cancelled future, the event loop does. `on_done` mustn't raise.

    Done callbacks, in contrast, are called one by one when the loop comes round to them, and cost it more than most of
    what they do.
    """

    on_done: Callable[[list[Any]], None] | None = None
    subject: Any = None

    def cancel(self, msg: Any | None = None) -> bool:
        cancelled = super().cancel(msg)
        if cancelled and self.on_done is not None:
            self.get_loop().call_soon(notify, [self])
        return cancelled


# hot path
def notify(done: list[Any]) -> None:
    """Call the `on_done` of these futures, in this order."""
    for on_done, futures in groupby(done, _ON_DONE):
        subjects = []
        for future in futures:
            subjects.append(future.subject)
            # These refer back to the future, and no cycle may be left for the garbage collector to find.
            future.on_done = future.subject = None
        try:
            if on_done is not None:
                on_done(subjects)
        except Exception:  # noqa: BLE001 - logged; other callbacks must be called
            _log.exception("a callback for finished requests failed")
