"""A process that sends: in a closed loop, where each client waits for the answer to its last request, or in an open
one, where requests are sent when they are due.

Lives here: the two loops, and telling whoever started the process what happened. Must not: decide how long, add up
processes. In an open loop, latencies and deadlines count from when a request was due: if server or generator stall, the
requests that were due meanwhile have waited, too. How late sending was is part of the figures.
"""

from __future__ import annotations

import asyncio
import gc
import os
import selectors
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from itertools import count, cycle, islice
from multiprocessing.connection import Connection as Pipe
from random import Random
from typing import Any, Final

from paceline.clients.connection import Tls
from paceline.clients.load.arrivals import Arrival, Arrivals, share
from paceline.clients.load.sending import EMPTY, Asking, Connection, FailedRequest, sequence_step
from paceline.clients.load.tally import Counts, Slices

NOT_SENT: Final = "NOT_SENT"
"""Counted for a request that the generator had no time to send before its deadline, or that would have been one of too
many under way."""

_TOO_LATE: Final = "the generator was too late, or too many were under way: more --processes, or a lower rate"
_CONNECT_S: Final = 30.0
_FINISH_S: Final = 5.0
_PAUSE_AFTER_ERROR_S: Final = 0.01
_MOST_UNDER_WAY: Final = 20_000
_MAY_HAVE_BEGUN: Final = {EMPTY, "CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL", "RESOURCE_EXHAUSTED", "UNKNOWN"}
"""If a sequence's first step fails with another status, the server has refused it, and has nothing to end."""
_FULL: Final = "Exceeds maximum queue size"
"""So it has, if it says this, but not if the step left too large a state, or had too little memory. Where it is said of
a later step of an ensemble, a sequence of an earlier one may have begun."""
_SENT_AT_ONCE: Final = 16
"""When late, answers are looked at after so many."""


@dataclass(frozen=True, slots=True)
class Load:
    """What to send, where and how: `clients` in a closed loop, or else `arrivals` in an open one; at most `count`
    requests. With `steps`, each is a sequence of so many requests, the least and the most, drawn by `seed`. The ids of
    sequences begin with `first_sequence_id`.

    Requests go round in the messages. Sequence i begins with message i, and goes round from there.
    """

    target: str
    messages: tuple[bytes, ...] = field(repr=False)
    timeout_s: float
    clients: int = 0
    arrivals: Arrivals | None = None
    count: int | None = None
    is_stream: bool = False
    steps: tuple[int, int] | None = None
    connections: int = 1
    seed: int = 0
    first_sequence_id: int = 1
    tls: Tls | None = None
    token: str | None = field(default=None, repr=False)

    @property
    def is_endless(self) -> bool:
        """Whether it goes round until it is ended: without a count, and not as recorded."""
        return self.count is None and (self.arrivals is None or self.arrivals.seconds is None)


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a load that process `part` of `parts` sends, and how long its slices are."""

    load: Load
    slice_ns: int
    part: int = 0
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Said:
    """What a process says: first that it is connected, then slices by number, then when it ended; or why it can't."""

    slices: tuple[tuple[int, Counts], ...] = ()
    ended_ns: int | None = None
    failure: str = ""


class Sender:
    """Sends a share of a load."""

    def __init__(self, own: Share) -> None:
        self.slice_s = own.slice_ns / 1e9
        self._share = own
        self._load = own.load
        self._left = len(range(own.part, own.load.count, own.parts)) if own.load.count is not None else None
        self._random = Random(f"{own.load.seed} {own.part}")
        self._sequence_ids = count(own.load.first_sequence_id + own.part, own.parts)
        self._idle: list[Asking] = []
        self._under_way = 0
        self._is_over = False
        # Until when all requests that were due have begun.
        self._reached_ns: float = 0

    async def connect(self, stack: AsyncExitStack) -> None:
        """Raises TimeoutError if the server isn't there."""
        connections = [
            Connection(self._load.target, self._load.tls, self._load.token) for _ in range(self._load.connections)
        ]
        for connection in connections:
            await stack.enter_async_context(connection)
            await connection.connect(_CONNECT_S)
        self._connections = cycle(connections)

    async def run(self, begin_ns: int) -> None:
        """Send from `begin_ns` on, until cancelled, or all are sent and have ended."""
        self.slices = Slices(begin_ns, self._share.slice_ns)
        self._reached_ns = begin_ns
        self._used_ns = time.process_time_ns()
        async with asyncio.TaskGroup() as group:
            if self._load.arrivals is not None:
                arrivals = share(self._load.arrivals, self._share.part, self._share.parts)
                self._arriving = group.create_task(self._send_when_due(group, islice(arrivals, self._left), begin_ns))
            else:
                await asyncio.sleep((begin_ns - time.monotonic_ns()) / 1e9)
                self._reached_ns = float("inf")
                # All clients of all processes together go round in the messages.
                turns = count(self._share.part, self._share.parts)
                for _ in range(self._share.part, self._load.clients, self._share.parts):
                    group.create_task(self._client(turns))

    def finish(self) -> None:
        """Begin nothing more. Sequences end with their next step, which isn't counted; `run` returns when all have."""
        self._is_over = True
        if self._load.arrivals is not None:
            self._arriving.cancel()

    def settled(self) -> tuple[tuple[int, Counts], ...]:
        """The slices that can be told now."""
        now_ns, cpu_ns = time.monotonic_ns(), time.process_time_ns()
        self.slices.use(cpu_ns - self._used_ns, now_ns - self._share.slice_ns // 2)
        self._used_ns = cpu_ns
        return tuple(self.slices.settled(int(min(self._reached_ns, now_ns))))

    async def _client(self, turns: Iterator[int]) -> None:
        """One client of a closed loop."""
        asking = self._asking()
        for turn in turns:
            if self._is_over or self._left == 0:
                return
            if self._left is not None:
                self._left -= 1
            due_ns = time.monotonic_ns()
            if not await self._request(asking, turn, due_ns, self.slices.begin(due_ns)):
                await asyncio.sleep(_PAUSE_AFTER_ERROR_S)

    async def _send_when_due(self, group: asyncio.TaskGroup, arrivals: Iterator[Arrival], begin_ns: int) -> None:
        sent_at_once = 0
        for at_ns, contents in arrivals:
            self._reached_ns = due_ns = begin_ns + at_ns
            wait_ns = due_ns - time.monotonic_ns()
            if wait_ns > 0 or sent_at_once >= _SENT_AT_ONCE:
                await asyncio.sleep(max(0, wait_ns) / 1e9)
                sent_at_once = 0
            sent_at_once += 1
            entry = self.slices.begin(due_ns)
            now_ns = time.monotonic_ns()
            if now_ns - due_ns >= self._load.timeout_s * 1e9 or self._under_way >= _MOST_UNDER_WAY:
                self.slices.fail(entry, due_ns, now_ns, NOT_SENT, _TOO_LATE)
            else:
                self._under_way += 1
                group.create_task(self._arrived(contents, due_ns, entry))
        self._reached_ns = float("inf")

    async def _arrived(self, contents: int, due_ns: int, entry: object) -> None:
        """What an open loop sends at `due_ns`."""
        self.slices.sent(entry, time.monotonic_ns() - due_ns)
        asking = self._asking()
        await self._request(asking, contents, due_ns, entry)
        self._idle.append(asking)
        self._under_way -= 1

    def _asking(self) -> Asking:
        """One that takes no other request meanwhile."""
        if self._idle:
            return self._idle.pop()
        connection = next(self._connections)
        return connection.stream() if self._load.is_stream else connection.calls()

    async def _request(self, asking: Asking, contents: int, due_ns: int, entry: object) -> bool:
        """Send a request, or the steps of a sequence, each when the one before is answered. Returns whether all went
        well; a sequence ends with a step that didn't."""
        messages = self._load.messages
        if self._load.steps is None:
            return await self._ask(asking, messages[contents % len(messages)], due_ns, entry) is None
        sequence_id, steps = next(self._sequence_ids), self._random.randint(*self._load.steps)
        failed: FailedRequest | None = None
        for step in range(steps):
            if step and self._is_over:
                break
            message = messages[(contents + step) % len(messages)]
            is_last = step == steps - 1 or self._is_over
            if step:
                due_ns = time.monotonic_ns()
                entry = self.slices.begin(due_ns)
            own = sequence_step(sequence_id, is_first=not step, is_last=is_last)
            failed = await self._ask(asking, message + own, due_ns, entry)
            if not failed and is_last:
                return True
            if failed and not step:
                is_full = _FULL in failed.reason and not failed.reason.startswith("in ensemble")
                if is_full or failed.status not in _MAY_HAVE_BEGUN:
                    return False
            if not failed or not step:
                ending = message  # a step that fails for what it contains may end nothing
            if failed:
                break
        # It would take a place in the server until that finds it idle for too long.
        with suppress(FailedRequest):
            own = sequence_step(sequence_id, is_first=False, is_last=True)
            await asking.ask(ending + own, min(self._load.timeout_s, _FINISH_S))
        return not failed

    async def _ask(self, asking: Asking, message: bytes, due_ns: int, entry: object) -> FailedRequest | None:
        """Send a request. Returns why it has failed, if it has."""
        left_s = self._load.timeout_s - (time.monotonic_ns() - due_ns) / 1e9
        try:
            reply = await asking.ask(message, max(0.0, left_s))
        except FailedRequest as failed:
            self.slices.fail(entry, due_ns, time.monotonic_ns(), failed.status, failed.reason)
            return failed
        self.slices.succeed(entry, due_ns, time.monotonic_ns(), reply)
        return None


async def _work(own: Share, pipe: Pipe) -> None:
    """Send the share from the time that comes through `pipe` on, until that ends, or is closed."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    sender = Sender(own)
    async with AsyncExitStack() as stack:
        try:
            await sender.connect(stack)
        except TimeoutError:
            pipe.send(Said(failure=f"no connection within {_CONNECT_S:g} s"))
            return
        pipe.send(Said())
        running = asyncio.create_task(sender.run(pipe.recv()))
        telling, ending = asyncio.create_task(_tell(sender, pipe)), asyncio.create_task(over.wait())
        # Nothing more comes through the pipe: it can only be closed.
        loop.add_reader(pipe.fileno(), over.set)
        # uvloop has made it one whose `send` fails while nobody reads what was sent before.
        os.set_blocking(pipe.fileno(), True)
        tasks: tuple[asyncio.Task[Any], ...] = (running, telling, ending)
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        loop.remove_reader(pipe.fileno())
        if own.load.steps is not None and running not in ended:
            # Those that have begun would take places in the server until it finds them idle for too long.
            sender.finish()
            await asyncio.wait([running], timeout=_FINISH_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if ending not in ended:
            for task in ended:
                task.result()
            pipe.send(Said((*sender.settled(), *sender.slices.rest()), time.monotonic_ns()))


async def _tell(sender: Sender, pipe: Pipe) -> None:
    """Tell slices, soon after each could be told."""
    while True:
        await asyncio.sleep(sender.slice_s)
        pipe.send(Said(sender.settled()))


def main(descriptor: int) -> None:
    """Work for whoever has the other end of this socket, as long as it is open."""
    with suppress(EOFError, BrokenPipeError, ConnectionResetError), Pipe(descriptor) as pipe:
        own = pipe.recv()
        new_loop = _quick_loop if own.load.arrivals is None else _precise_loop
        # The garbage collector would look through all that was imported, and requests would be late meanwhile.
        gc.freeze()
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(_work(own, pipe))


def _quick_loop() -> asyncio.AbstractEventLoop:
    """For closed loops: it takes an eighth less processor time, but waits for whole milliseconds."""
    try:
        import uvloop
    except ImportError:  # it isn't there for every platform
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _precise_loop() -> asyncio.AbstractEventLoop:
    """For open loops: select(2) waits for microseconds, epoll(2) for whole milliseconds."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())
