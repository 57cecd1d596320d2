"""Rules for every decoder, whatever its input: it answers or refuses, soon, and takes little memory for it.

Lives here: `judged`, which wraps each run of a target, and what counts as a refusal. Must not: know a decoder.
"""

from __future__ import annotations

import logging
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from paceline.server.errors import status_of
from paceline.server.telemetry.log import debugging

__all__ = ["Finding", "Target", "awake_s", "judged", "quiet", "refused"]

REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
}
"""Statuses that bad input may be answered with."""

_LONGEST_S = 2.0
"""Inputs have a few KiB and take milliseconds."""

_SCHEDULE = Path("/proc/thread-self/schedstat")


class Finding(AssertionError):
    """A promise that an input broke."""


@dataclass(frozen=True, slots=True)
class Target:
    """A decoder. `run` takes any bytes and returns, whether they were good or refused; any exception is a finding. A
    run may take `fixed_bytes` of memory, and `times` the size of its input.
    """

    name: str
    run: Callable[[bytes], None]
    fixed_bytes: int = 500_000
    times: int = 200


def judged(target: Target, data: bytes, now_s: Callable[[], float] = time.process_time) -> None:
    """Run `target` on `data`. Raises what it raises, or Finding if it took too much time or memory, twice in a row.

    Time is CPU time where it decides whether tests pass: a loaded machine is no hang. By another clock, such as
    `awake_s`, waits are found, too.

    Time and memory are counted for the whole process: threads left over from other tests take some meanwhile, and so do
    finalizers of their garbage, which is collected at any moment. (A task whose exception was never retrieved is logged
    then, and lines of source files read for its traceback stay.) What a target takes, it takes every time.
    """
    if _excess(target, data, now_s) and (excess := _excess(target, data, now_s)):
        raise Finding(f"{target.name}: {len(data)} bytes took {excess}")


def awake_s() -> float:
    """Seconds, without those in which this thread waited for a processor, where the system counts these."""
    waited_ns = int(_SCHEDULE.read_text().split()[1]) if _SCHEDULE.exists() else 0
    return time.monotonic() - waited_ns / 1e9


def _excess(target: Target, data: bytes, now_s: Callable[[], float]) -> str:
    """What a run took beyond its limits; empty if nothing."""
    tracing = tracemalloc.is_tracing()
    if not tracing:
        tracemalloc.start()
    before_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    began_s = now_s()
    try:
        target.run(data)
    finally:
        took_s = now_s() - began_s
        _, peak_bytes = tracemalloc.get_traced_memory()
        if not tracing:
            tracemalloc.stop()
    if took_s > _LONGEST_S:
        return f"{took_s:.1f} s"
    took_bytes, allowed_bytes = peak_bytes - before_bytes, target.fixed_bytes + target.times * len(data)
    return f"{took_bytes} bytes, allowed are {allowed_bytes}" if took_bytes > allowed_bytes else ""


@contextmanager
def quiet() -> Iterator[None]:
    """Switch logging off, which would hide everything else; restored afterwards."""
    logger = logging.getLogger("paceline")
    before, was_debugging = (logger.level, logger.propagate, list(logger.handlers)), debugging.on
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before[0])
        for handler in set(logger.handlers).difference(before[2]):
            handler.close()
        logger.propagate, logger.handlers = before[1:]
        debugging.on = was_debugging  # some inputs are log settings


def refused(error: Exception) -> None:
    """Return if `error` is a proper refusal of bad input, raise it otherwise."""
    if status_of(error) not in REFUSALS:
        raise error
