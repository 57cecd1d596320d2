"""The same call many times over a few threads, and what came of it.

Lives here: a quick look at a server from the command line. Must not live here: a benchmark's care (arrival processes,
warm-up, percentiles over windows), which is the load generator's work.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import chain, takewhile

import numpy as np

from paceline.clients.errors import InferenceError

__all__ = ["Outcome", "Report", "run_repeated"]

Report = Callable[[int, int], None]
"""Told how many calls have ended, and how many nanoseconds that took."""

_REPORT_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Latencies of the calls that succeeded, in nanoseconds; failures counted by the name of their status."""

    latencies_ns: tuple[int, ...]
    errors: Mapping[str, int]
    elapsed_ns: int

    @property
    def ok(self) -> int:
        return len(self.latencies_ns)

    def per_second(self) -> float:
        """Calls that succeeded per second."""
        return self.ok / (self.elapsed_ns / 1e9)

    def percentile_ms(self, percent: float) -> float:
        """That percentile (0 to 100) of the latencies, in milliseconds; at least one call must have succeeded."""
        return float(np.percentile(self.latencies_ns, percent)) / 1e6


def run_repeated(call: Callable[[], object], report: Report, *, repeat: int, concurrency: int) -> Outcome:
    """Makes the call `repeat` times, at most `concurrency` at once: as one ends, the next begins. Calls `report` every
    second, and at the end.

    InferenceError is counted by status; anything else is raised.
    """

    turns, is_over = iter(range(repeat)), threading.Event()

    def timed() -> int | str:
        started_ns = time.perf_counter_ns()
        try:
            call()
        except InferenceError as error:
            return error.status.name
        return time.perf_counter_ns() - started_ns

    def work(own: list[int | str]) -> None:
        # Turns are taken one by one: a future for each of many millions would fill the memory before the first ends.
        own.extend(timed() for _ in takewhile(lambda _: not is_over.is_set(), turns))

    started_ns = time.perf_counter_ns()
    of_threads: list[list[int | str]] = [[] for _ in range(min(concurrency, repeat))]
    with ThreadPoolExecutor(len(of_threads)) as pool:
        try:
            working = {pool.submit(work, own) for own in of_threads}
            while working:
                ended, working = wait(working, _REPORT_EVERY_S, FIRST_EXCEPTION)
                for thread in ended:
                    thread.result()
                report(sum(map(len, of_threads)), time.perf_counter_ns() - started_ns)
        finally:
            is_over.set()
    outcomes = list(chain.from_iterable(of_threads))
    return Outcome(
        latencies_ns=tuple(outcome for outcome in outcomes if isinstance(outcome, int)),
        errors=Counter(outcome for outcome in outcomes if isinstance(outcome, str)),
        elapsed_ns=time.perf_counter_ns() - started_ns,
    )
