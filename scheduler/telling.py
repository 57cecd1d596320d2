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

__all__ = ["Telling", "tell"]

_log = logging.getLogger("paceline.scheduler")

_TOLD = attrgetter("told")

R = TypeVar("R")


class Telling(asyncio.Future[R]):
    """A future with one callback for all that are done together. `told`, if set, is called once with a list: the
    `about` of this future, and of others that are done. Code that sets results or errors has to call `tell` for that;
    for a cancelled future, the event loop does. `told` mustn't raise.

    Done callbacks, in contrast, are called one by one when the loop comes round to them, and cost it more than most of
    what they do.
    """

    told: Callable[[list[Any]], None] | None = None
    about: Any = None

    def cancel(self, msg: Any | None = None) -> bool:
        cancelled = super().cancel(msg)
        if cancelled and self.told is not None:
            self.get_loop().call_soon(tell, [self])
        return cancelled


# hot path
def tell(done: list[Any]) -> None:
    """Call the `told` of these `Telling` futures, in this order."""
    for told, futures in groupby(done, _TOLD):
        about = []
        for future in futures:
            about.append(future.about)
            # These refer back to the future, and no cycle may be left for the garbage collector to find.
            future.told = future.about = None
        try:
            if told is not None:
                told(about)
        except Exception:  # noqa: BLE001 - it is logged, and others are owed theirs
            _log.exception("who waits for requests can't be told that they are done")
