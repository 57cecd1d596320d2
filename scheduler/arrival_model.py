"""Whether a request is likely to be joined by others if it waits a moment: learned from the batches that left.

Lives here: how long an idle instance is kept waiting without a configured delay, by the sizes of batches and the times
between them. Must not: a clock, or the queue: `batcher` reports batches that start and end, and `turns` asks.
"""

from __future__ import annotations

from math import ceil

__all__ = ["ArrivalModel"]

_CROWD_WEIGHT = 0.1
_CROWD_OF_ONE = 1.05
_CROWD_OF_MANY = 3.0
"""From this many requests per batch on, it is worth waiting longest."""
_QUIET_COSTS = 8
"""The longest wait for a next request: the time in which this many requests are taken up and answered."""
_COSTS_OF_ALL = 1.5
"""The longest wait in all, as a multiple of what a batch of the usual size costs."""
_LONGEST_NS = 10_000_000
"""The longest wait in all, whatever a batch costs: callers have deadlines."""
_COST_WEIGHT = 0.1
_FIRST_COST_NS = 100_000
_MIN_COST_NS = 10_000
_MAX_COST_NS = 500_000
_FORGOTTEN_NS = 1_000_000_000
"""Callers that haven't come again for this long are gone."""
_STILL_THERE = 0.98
_BATCHES_FOR_ONE_MORE = 16
"""One in this many batches doesn't leave when all known callers are there, since there may be others. The wait for
these is shorter."""
_COSTS_FOR_ONE_MORE = 2
_PAUSE_WEIGHT = 0.2
_OVERLAP = 0.75
"""Half of a batch has to execute for more than this part of a pause, so that the other half comes back meanwhile."""


class ArrivalModel:
    """What an idle instance is kept waiting for, and how long.

    gRPC hands requests that have arrived to the loop one per iteration, and taking one up and answering it costs the
    loop more than a small model's execution does. So where batches have several requests, it is worth waiting until
    nobody has come for some time. That time is a multiple of what a request costs the loop, and the longer, the larger
    batches have been. The wait ends when as many requests wait as have lately been there at a time, and at the latest
    when a batch as large as usual would be there, if all came as fast as the loop can take them up. So callers who come
    by chance, and not because they were answered, hardly wait for each other while the loop has time to spare: fewer
    come in that time, batches get smaller, and with them the wait gets shorter.

    Where executions take long, half of the callers may be enough. Callers who come again as soon as they are answered
    may all get into one batch, and then stay together, with nothing executing while they are answered and come back.
    That is worth it as long as the pause is shorter than what a batch costs besides its rows. If it isn't, two groups
    that take turns do better: one comes back while the other executes.
    """

    __slots__ = (
        "_batch_requests",
        "_batches",
        "_busy_ns",
        "_cost_ns",
        "_ended_ns",
        "_ended_requests",
        "_executing",
        "_in_halves",
        "_pause_ns",
        "_present",
    )

    def __init__(self) -> None:
        self._batch_requests = 1.0
        self._present = 1.0
        self._batches = 0
        self._cost_ns = float(_FIRST_COST_NS)
        self._busy_ns = -1
        self._executing = self._ended_ns = 0
        self._ended_requests = 1
        self._pause_ns = 0.0
        self._in_halves = False

    def on_start(self, requests: int, waiting: int, now_ns: int, busy_ns: int) -> None:
        """A batch of `requests` requests starts, while `waiting` others still wait. `busy_ns` is the processor time
        that the event loop has used so far."""
        if self._busy_ns >= 0:
            cost_ns = max(_MIN_COST_NS, min(_MAX_COST_NS, (busy_ns - self._busy_ns) / requests))
            self._cost_ns += _COST_WEIGHT * (cost_ns - self._cost_ns)
        self._busy_ns = busy_ns
        if not self._executing and self._ended_ns:
            # The pause in which a part of the callers was answered, scaled to all of them.
            pause_ns = (now_ns - self._ended_ns) * max(1.0, self._present / self._ended_requests)
            self._pause_ns += _PAUSE_WEIGHT * (pause_ns - self._pause_ns)
        self._executing += requests
        self._batches += 1
        self._batch_requests += _CROWD_WEIGHT * (requests - self._batch_requests)
        self._present = max(self._executing + waiting, _STILL_THERE * self._present)

    def on_end(self, requests: int, now_ns: int) -> None:
        """A batch of `requests` requests is done."""
        self._executing -= requests
        self._ended_ns = now_ns
        self._ended_requests = requests

    def half_of_all(self, requests: int, rows: int) -> int:
        """The rows of half of the callers lately present, if they have as many each as in a batch of `requests` with
        `rows` rows."""
        return max(1, round(rows * self._present / (2 * requests)))

    def took(self, base_ns: int, half_ns: int) -> None:
        """Learn what a batch like the last costs besides its rows (0: unknown), and what a batch of half of the callers
        would take."""
        self._in_halves = 0 < base_ns < self._pause_ns and _OVERLAP * self._pause_ns < half_ns

    def forget(self, now_ns: int) -> None:
        """Forget the callers lately present, if that was long ago."""
        if not self._executing and now_ns - self._ended_ns > _FORGOTTEN_NS:
            self._batch_requests = self._present = 1.0

    def patience_ns(self, waiting: int, waited_ns: int) -> int:
        """For how long it is worth waiting for the next request, after a wait of `waited_ns` so far (0: not at all)."""
        missing = self.missing(waiting)
        if self._batch_requests < _CROWD_OF_ONE or not missing:
            return 0
        part = min(1.0, (self._batch_requests - 1) / (_CROWD_OF_MANY - 1))
        costs = part * part * (_QUIET_COSTS if waiting < self._present else _COSTS_FOR_ONE_MORE)
        left_ns = min(_LONGEST_NS, _COSTS_OF_ALL * self._batch_requests * self._cost_ns) - waited_ns
        return max(0, int(min(costs * self._cost_ns, left_ns)))

    def missing(self, waiting: int) -> int:
        """How many more requests have to come until nobody else is waited for."""
        if self._in_halves and not self._executing:
            return max(0, ceil(self._present / 2) - waiting)
        missing = max(0, ceil(self._present) - waiting)
        return missing if self._batches % _BATCHES_FOR_ONE_MORE else max(1, missing)
