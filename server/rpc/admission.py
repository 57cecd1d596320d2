"""How many calls may be in progress, and whose have to give way.

Lives here: counting calls, and finding those without a message that give up their place. Must not: gRPC's handlers, or
who may call (`server.rpc.gate`).

A call whose message hasn't arrived has cost its client a few bytes, and costs the server a place. So such calls never
keep those of another connection out, however many there are: a connection behind which thousands of callers stand may
have all places, until another one needs some.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from enum import Enum
from typing import NamedTuple

__all__ = ["Admission", "Calls", "Ended", "Probes", "Refused", "Usage"]

_MAX_PROBES = 1_024

Task = asyncio.Task[object]
"""gRPC handles each call in its own task: it picks the handler, has the request read, and ends once the answer has been
sent or nobody wants it any more. A handler sees less than that, and callers may be slow to send a request and to take
an answer, and both have to be kept meanwhile."""


class Refused(Enum):
    """Why a call didn't get through."""

    UNAUTHENTICATED = "unauthenticated"
    RESTRICTED = "restricted"
    RPCS = "rpcs"
    STREAMS = "streams"
    NO_MESSAGE = "no_message"


class Ended(Enum):
    """Why a call without a message was ended; what its task is cancelled with."""

    TOO_LATE = "too late"
    GAVE_WAY = "gave way"


class Usage(NamedTuple):
    """Calls and streams in progress, how many were refused, in the order of `Refused`, and how many connections there
    may be."""

    rpcs: int = 0
    streams: int = 0
    refused: tuple[int, ...] = (0,) * len(Refused)
    max_connections: int = 0

    @property
    def refused_by_reason(self) -> dict[str, int]:
        return {reason.value: count for reason, count in zip(Refused, self.refused, strict=True)}

    def plus(self, other: Usage) -> Usage:
        """The sum of both."""
        refused = tuple(map(sum, zip(self.refused, other.refused, strict=True)))
        connections = self.max_connections + other.max_connections
        return Usage(self.rpcs + other.rpcs, self.streams + other.streams, refused, connections)


class Calls:
    """At most `most` calls at a time. Those that `enter` with their connection haven't brought a message until
    `arrived`; one whose task is cancelled with `Ended` gets no other notice."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.count = 0
        # By connection, each with when it entered; the earliest first.
        self._without_message: dict[str, dict[Task, int]] = defaultdict(dict)

    def hold(self, task: Task) -> bool:
        """Give a call that needn't bring a message a place until it ends; False if there is none."""
        if self.count >= self.most:
            return False
        self.count += 1
        task.add_done_callback(self._leave)
        return True

    # hot path
    def enter(self, task: Task, connection: str, now_ns: int) -> bool:
        """Give a call that has just begun a place until it ends; False if there is none."""
        if self.count >= self.most and not self._make_room(connection):
            return False
        self.count += 1
        task.add_done_callback(self._leave)
        self._without_message[connection][task] = now_ns
        return True

    # hot path
    def arrived(self, task: Task, connection: str) -> None:
        """The call's message is there, or won't come."""
        calls = self._without_message[connection]
        calls.pop(task, None)
        if not calls:
            del self._without_message[connection]

    def end_overdue(self, before_ns: int) -> None:
        """End the calls that entered before then, and haven't brought a message."""
        for calls in list(self._without_message.values()):
            overdue = [task for task, entered_ns in calls.items() if entered_ns < before_ns]
            for task in overdue:
                del calls[task]
                task.cancel(Ended.TOO_LATE)

    def _make_room(self, connection: str) -> bool:
        """Have the connection with the most calls without a message give up the latest of them, unless it is this one
        or would have fewer than this one then."""
        largest = max(self._without_message.values(), key=len, default={})
        if len(largest) < len(self._without_message.get(connection, ())) + 2:
            return False
        task, _ = largest.popitem()
        task.remove_done_callback(self._leave)
        self._leave(task)
        task.cancel(Ended.GAVE_WAY)
        return True

    def _leave(self, task: Task) -> None:
        self.count -= 1


class Probes(Calls):
    """Calls that are never refused for those that wait for an answer: they leave once their message is there."""

    def arrived(self, task: Task, connection: str) -> None:
        super().arrived(task, connection)
        if task.remove_done_callback(self._leave):
            self._leave(task)


class Admission:
    """Calls in progress, and those refused, to be used on the event loop only. `max_rpcs` bounds calls with one request
    and one answer, `max_streams` the calls of each RPC with more."""

    def __init__(self, max_rpcs: int, max_streams: int) -> None:
        self.rpcs = Calls(max_rpcs)
        self.probes = Probes(_MAX_PROBES)
        self.streams: dict[str, Calls] = defaultdict(lambda: Calls(max_streams))
        self.refused = dict.fromkeys(Refused, 0)

    def end_overdue(self, before_ns: int) -> None:
        """End all calls that began before then, and haven't brought the message that they have to bring."""
        for calls in (self.rpcs, self.probes, *self.streams.values()):
            calls.end_overdue(before_ns)

    def usage(self) -> Usage:
        """The totals, as a front reports them to the engine."""
        streams = sum(calls.count for calls in self.streams.values())
        return Usage(self.rpcs.count, streams, tuple(self.refused[reason] for reason in Refused))
