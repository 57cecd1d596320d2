"""One thread per model instance, or one task for an instance that is elsewhere.

Lives here: the border between the event loop and blocking code. The rule: whatever the instance does, `done` is called
on the loop exactly once per batch handed over and not taken back, and nothing else crosses threads.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from paceline.scheduler.request import P, R

_log = logging.getLogger("paceline.scheduler")

P_contra = TypeVar("P_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)


class ThreadLost(RuntimeError):
    """Nothing was executed: the instance's thread has died, and no other can be started for now."""


class NoAnswer(Enum):
    """In place of a result: there is none for this payload now, or it was executed and is answered by other ways."""

    NOW = auto()
    ELSEWHERE = auto()


NO_ANSWER = NoAnswer.NOW
ANSWERED_ELSEWHERE = NoAnswer.ELSEWHERE


class Executed(Protocol[R_co]):
    """What an instance returns: at least the results, one per payload and in their order. An exception in place of a
    result is for that payload alone. A payload without an answer at the end of its execution needs another one: its
    request hasn't ended, and its source, which is told of it with that as its `value`, submits it again or ends it. One
    that is answered elsewhere counts as executed; whoever answers its request ends it, before the execution does or
    after. An optional `waited_ns` is how much of the execution was spent waiting for another one of the same
    instance, an optional `ran` whether anything was executed at all."""

    @property
    def results(self) -> Sequence[R_co | Exception | NoAnswer]: ...


@dataclass(frozen=True, slots=True)
class Outcome(Generic[R_co]):
    """How one execution went: either `executed` or `error` is set. Times are monotonic nanoseconds.

    `more`: it still goes on. Payloads with a result have an answer now that isn't their last."""

    started_ns: int
    finished_ns: int
    executed: Executed[R_co] | None = None
    error: BaseException | None = None
    more: bool = False


Done = Callable[[Outcome[R]], None]

_Work = list[tuple[Sequence[P], int]]
"""Payloads and rows of a batch, until popped by the thread to execute it, or by the loop to take it back."""


AnyRunner = Any  # who owns the instances knows them by classes of its own


class Runner(Protocol[P_contra, R_co]):
    """Executes one batch at a time. A runner that `stages` may be handed the next batch while it executes one."""

    @property
    def stages(self) -> bool: ...

    def start(self) -> None:
        """Get ready, on the running event loop."""

    def run(self, payloads: Sequence[P_contra], padded_rows: int, done: Done[R_co]) -> None:
        """Execute `payloads` as one batch of `padded_rows` rows; `done` is called later on the loop, with what ends the
        execution, and before that with as many outcomes of which there are `more` as it likes. Must not be called
        before the previous batch has ended or, if the runner stages, the batch before that."""

    def take_back(self) -> bool:
        """Take back the batch that was handed over while another one executes. False if it has begun to execute; then
        the other one's `done` is on its way."""

    def call_off(self) -> None:
        """End the running execution early, if possible: nobody waits for it any more. `done` is called all the same."""

    def stop(self) -> None:
        """Finish what runs, or call it off, and end. Doesn't wait."""


def _start_thread(name: str, run: Callable[[], None]) -> None:
    # A daemon: an instance that hangs must not keep the process from ending.
    threading.Thread(target=run, name=name, daemon=True).start()


class ThreadRunner(Generic[P, R]):
    """Runs `execute(payloads, padded_rows)`, which may block, on a thread of its own.

    If the thread dies, which no error of `execute` makes it do, another takes its place, and the batch that it had
    taken fails. While no thread can be started, batches fail with ThreadLost. `start_thread(name, run)` runs `run` on a
    new thread of that name. `call_off` asks the instance to end an execution early, which native code can't.
    """

    def __init__(
        self,
        name: str,
        execute: Callable[[Sequence[P], int], Executed[R]],
        start_thread: Callable[[str, Callable[[], None]], None] = _start_thread,
        *,
        stages: bool = True,
        call_off: Callable[[], None] = lambda: None,
    ) -> None:
        self.stages = stages
        self.call_off = call_off
        self._name = name
        self._execute = execute
        self._start = start_thread
        self._work: SimpleQueue[_Work[P] | None] = SimpleQueue()
        self._loop: asyncio.AbstractEventLoop
        # Only touched on the loop, which can therefore tell, without a lock, what a dead thread owes.
        self._owed: deque[tuple[_Work[P], Done[R]]] = deque()
        self._is_dead = False

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._start(self._name, self._live)

    # hot path
    def run(self, payloads: Sequence[P], padded_rows: int, done: Done[R]) -> None:
        work = [(payloads, padded_rows)]
        self._owed.append((work, done))
        self._work.put(work)
        if self._is_dead:
            self._loop.call_soon(self._revive)

    def take_back(self) -> bool:
        work, _ = self._owed[-1]
        try:
            work.pop()
        except IndexError:
            return False
        self._owed.pop()
        return True

    def stop(self) -> None:
        self._work.put(None)

    def _tell(self, outcome: Outcome[R]) -> None:
        _, done = self._owed.popleft()
        done(outcome)

    def _live(self) -> None:
        try:
            self._loop_forever()
        except BaseException as error:  # noqa: BLE001 - any error; the event loop must learn of it
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._on_death, error)

    def _on_death(self, error: BaseException) -> None:
        """Start another thread to go on, if only to end. Only what the dead one took is lost."""
        _log.error("an instance's thread died and is replaced: %s", self._name, exc_info=error)
        waiting = [self._work.get() for _ in range(self._work.qsize())]
        lost = bool(self._owed) and not any(work is self._owed[0][0] for work in waiting)
        for work in waiting:
            self._work.put(work)
        self._is_dead = True
        self._revive()
        if lost and not self._is_dead:
            self._fail(RuntimeError(f"the instance's thread died: {error!r}"))

    def _revive(self) -> None:
        """Start a thread, unless there is one by now. If none can be started, all that is owed has failed."""
        if not self._is_dead:
            return
        try:
            self._start(self._name, self._live)
            self._is_dead = False
        except RuntimeError as error:
            _log.error("an instance's thread died and no other can be started: %s: %s", self._name, error)
            text = f"the instance's thread died, and no other can be started: {error}"
            # The dead thread may have executed what it had taken.
            errors = [ThreadLost(text) if work else RuntimeError(text) for work, _ in self._owed]
            for work, _ in self._owed:
                work.clear()  # nobody takes it any more
            for one in errors:
                self._fail(one)

    def _fail(self, error: Exception) -> None:
        now_ns = time.monotonic_ns()
        self._tell(Outcome(now_ns, now_ns, error=error))

    def _loop_forever(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                payloads, padded_rows = work.pop()
            except IndexError:
                continue  # taken back
            outcome = self._run_one(payloads, padded_rows)
            # Before they are answered: then nothing of theirs is in use any more, such as their callers' shared memory.
            del work, payloads
            if self._loop.is_closed():
                return
            self._loop.call_soon_threadsafe(self._tell, outcome)
            del outcome  # the next batch may be long in coming

    def _run_one(self, payloads: Sequence[P], padded_rows: int) -> Outcome[R]:
        started_ns = time.monotonic_ns()
        try:
            return _succeeded(started_ns, self._execute(payloads, padded_rows), payloads)
        except BaseException as error:  # noqa: BLE001 - any error; the batch's requests must get an answer
            return Outcome(started_ns, time.monotonic_ns(), error=error)


class TaskRunner(Generic[P, R]):
    """Awaits `execute(payloads, padded_rows)`, which must not block, on the event loop."""

    stages = False  # it runs on the loop that hands over batches, so it never waits for that

    def __init__(self, execute: Callable[[Sequence[P], int], Awaitable[Executed[R]]]) -> None:
        self._execute = execute
        self._loop: asyncio.AbstractEventLoop
        self._task: asyncio.Task[Outcome[R]] | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()

    def run(self, payloads: Sequence[P], padded_rows: int, done: Done[R]) -> None:
        self._task = self._loop.create_task(self._run_one(payloads, padded_rows))
        # Not from inside the task: `done` may hand over the next batch, and what it raises is for the loop to report.
        self._task.add_done_callback(lambda task: self._end(task, done))

    def take_back(self) -> bool:
        return False

    def call_off(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def stop(self) -> None:
        """Call off what runs, which, unlike native code, can be interrupted; nobody waits for it any more."""
        self.call_off()

    def _end(self, task: asyncio.Task[Outcome[R]], done: Done[R]) -> None:
        self._task = None  # the next one may be long in coming, and answers are large
        now_ns = time.monotonic_ns()
        # One that is cancelled was called off before it began.
        done(Outcome(now_ns, now_ns, error=asyncio.CancelledError()) if task.cancelled() else task.result())

    async def _run_one(self, payloads: Sequence[P], padded_rows: int) -> Outcome[R]:
        started_ns = time.monotonic_ns()
        try:
            return _succeeded(started_ns, await self._execute(payloads, padded_rows), payloads)
        except BaseException as error:  # noqa: BLE001 - any error; the batch's requests must get an answer
            return Outcome(started_ns, time.monotonic_ns(), error=error)


def _succeeded(started_ns: int, executed: Executed[R], payloads: Sequence[P]) -> Outcome[R]:
    if len(executed.results) != len(payloads):
        raise RuntimeError(f"instance returned {len(executed.results)} results for {len(payloads)} requests")
    return Outcome(started_ns, time.monotonic_ns(), executed=executed)
