"""Futures whose owner is told of those that are done together.

Lives here: the future, and the telling. Must not: know what they are the futures of.
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
    """`told`, if there is one, is called once with a list of what this future, and others that are done, are `about`.
    Whoever has set results or errors calls `tell` for that; of one that is cancelled it is told by the event loop. It
    mustn't raise.

    Unlike callbacks, which the loop calls one by one when it comes round to it, and which cost it more than most of
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
    """Tell who is to be told of these `Telling` futures, in this order."""
    for told, futures in groupby(done, _TOLD):
        about = []
        for future in futures:
            about.append(future.about)
            # They lead back here, and no cycle may be left for the garbage collector to find.
            future.told = future.about = None
        try:
            if told is not None:
                told(about)
        except Exception:  # noqa: BLE001 - it is logged, and others are owed theirs
            _log.exception("who waits for requests can't be told that they are done")
