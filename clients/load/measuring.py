"""A load by several processes, from their start to the figures that count.

Lives here: starting processes, one beginning for all, adding up, ending. Must not: send, or know what figures mean. The
processes share the machine's monotonic clock, so a slice of time is the same for all of them.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, Final, Generic, TypeVar

from paceline.clients.errors import ClientError
from paceline.clients.load.extent import Extent, Period, is_vain
from paceline.clients.load.tally import Counts, merged
from paceline.clients.load.worker import Load, Said, Share

T = TypeVar("T")

_BEGIN_AFTER_NS: Final = 50_000_000
_END_S: Final = 10.0


class LoadError(ClientError):
    """The load couldn't be made; the message says why."""


@dataclass(frozen=True, slots=True, eq=False)
class Measured(Generic[T]):
    """All slices of the load, which are `slice_s` long, and which of them count: those of `period`, `seconds` in all.
    `before` and `after` are what `look` returned at the period's ends."""

    slices: Sequence[Counts]
    slice_s: float
    period: Period
    seconds: float
    before: T
    after: T

    @property
    def counted(self) -> Sequence[Counts]:
        return self.slices[self.period.first : self.period.end]


def measure(
    load: Load,
    extent: Extent,
    look: Callable[[], T],
    *,
    processes: int = 1,
    show: Callable[[Sequence[Counts], float], None] = lambda slices, slice_s: None,
) -> Measured[T]:
    """Make the load until `extent` has what it needs, or an endless one is seen to be in vain. `look` is called in a
    thread, before anything is sent, and at the beginning and end of whatever may become the period; `show` gets the
    slices until now. Raises LoadError."""
    slice_ns = round(extent.slice_s * 1e9)
    with ExitStack() as stack:
        pipes = [stack.enter_context(_started(Share(load, slice_ns, part, processes))) for part in range(processes)]
        for pipe in pipes:
            _received(pipe)
        # A server under load may be slow to tell what it has counted, and processes that nobody listens to stand still.
        looking = stack.enter_context(ThreadPoolExecutor(1))
        looks = {0: looking.submit(look)}
        looks[0].result()
        for pipe in pipes:  # all of them, before any process is waited for
            stack.callback(pipe.close)
        begin_ns = time.monotonic_ns() + _BEGIN_AFTER_NS
        for pipe in pipes:
            pipe.send(begin_ns)
        sums, next_mark = _Sums(processes), 0
        while (period := extent.period(sums.whole, is_over=sums.is_over)) is None:
            if load.is_endless and is_vain(sums.whole, extent.slice_s, len(load.messages)):
                period = Period(0, len(sums.whole))
                break
            left_ns = begin_ns + next_mark * slice_ns - time.monotonic_ns()
            if left_ns <= 0:
                if extent.marks(next_mark) and next_mark:
                    looks[next_mark] = looking.submit(look)
                next_mark += 1
                continue
            for ready in wait(pipes, left_ns / 1e9):
                said = _received(ready)
                sums.add(said)
                if said.ended_ns is not None:
                    pipes = [pipe for pipe in pipes if pipe is not ready]
            show(sums.whole, extent.slice_s)
        end_ns = begin_ns + period.end * slice_ns
        seconds = (min(end_ns, sums.ended_ns or end_ns) - begin_ns) / 1e9 - period.first * extent.slice_s
        if period.end not in looks:
            looks[period.end] = looking.submit(look)
        before = looks[max(mark for mark in looks if mark <= period.first)]
        return Measured(sums.whole, extent.slice_s, period, seconds, before.result(), looks[period.end].result())


class _Sums:
    """What all processes have said until now."""

    def __init__(self, processes: int) -> None:
        self._working = processes
        self._processes = processes
        self._partial: dict[int, list[Counts]] = {}
        self.whole: list[Counts] = []
        self.ended_ns = 0

    @property
    def is_over(self) -> bool:
        return not self._working

    def add(self, said: Said) -> None:
        for number, counts in said.slices:
            self._partial.setdefault(number, []).append(counts)
        if said.ended_ns is not None:
            self._working -= 1
            self.ended_ns = max(self.ended_ns, said.ended_ns)
        # A process that has ended early has nothing to say of later slices.
        while (one := self._partial.get(len(self.whole))) is not None and (len(one) == self._processes or self.is_over):
            self.whole.append(merged(self._partial.pop(len(self.whole))))


def _received(pipe: Any) -> Said:
    try:
        said = pipe.recv()
    except (EOFError, ConnectionResetError):
        raise LoadError("a process of the load has ended before its time") from None
    assert isinstance(said, Said)
    if said.failure:
        raise LoadError(said.failure)
    return said


@contextmanager
def _started(share: Share) -> Iterator[Connection]:
    """A process that has its share, with the modules that are found here, wherever it was started."""
    ours, theirs = Pipe()
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        f"from paceline.clients.load.worker import main; main({theirs.fileno()})"
    )
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code, "paceline-load"],
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        process_group=0,  # Ctrl-C is for this process, which then closes the pipe
    )
    theirs.close()
    try:
        with ours:
            ours.send(share)
            yield ours
    finally:
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
        finally:  # also if one who waits is interrupted again
            process.kill()
            process.wait()
