"""Whether a request is likely to get company if it waits a moment: learned from the batches that left."""

from __future__ import annotations

__all__ = ["Company"]

_CROWD_WEIGHT = 0.1
_CROWD_OF_ONE = 1.05
_QUIET_ITERATIONS = 6
_MOST_QUIET_ITERATIONS = 60
_MOST_ITERATIONS = 400
_STILL_THERE = 0.98
_PAUSE_WEIGHT = 0.2
_OVERLAP = 0.75
"""So much of a pause half of a batch has to execute for, that the other half comes back meanwhile."""


class Company:
    """What an idle instance is kept waiting for, in iterations of the event loop.

    gRPC hands requests that have arrived to the loop one an iteration, and taking one up and answering it costs the
    loop more than a small model's execution does. So where batches have company, it is worth waiting until the loop has
    been without new requests for some iterations, a few microseconds each: the more, the larger batches have been. It
    ends when as many wait as have lately been there at a time, and at the latest after a bound of iterations. For a
    crowd the loop's thread rests meanwhile, and that counts for many iterations (`rests`).

    Where executions take long, half of those may be enough. Callers who come again as soon as they are answered may
    all get into one batch, and then stay together, with nothing executing while they are answered and come back. As
    long as that pause is shorter than what a batch costs besides its rows, it is worth it. If not, two groups do better
    that take turns: one comes back while the other executes.
    """

    __slots__ = (
        "_batch_requests",
        "_ended_ns",
        "_ended_requests",
        "_executing",
        "_in_halves",
        "_patience",
        "_pause_ns",
        "_present",
    )

    def __init__(self) -> None:
        self._batch_requests = 1.0
        self._present = 1.0
        self._patience = _QUIET_ITERATIONS
        self._executing = self._ended_ns = 0
        self._ended_requests = 1
        self._pause_ns = 0.0
        self._in_halves = False

    def on_start(self, requests: int, waiting: int, now_ns: int) -> None:
        """A batch of so many requests starts, others still wait."""
        if not self._executing and self._ended_ns:
            # What answering a part of them has taken says what it takes to answer all.
            pause_ns = (now_ns - self._ended_ns) * max(1.0, self._present / self._ended_requests)
            self._pause_ns += _PAUSE_WEIGHT * (pause_ns - self._pause_ns)
        self._executing += requests
        self._batch_requests += _CROWD_WEIGHT * (requests - self._batch_requests)
        self._present = max(self._executing + waiting, _STILL_THERE * self._present)
        squared = self._batch_requests * self._batch_requests
        self._patience = min(_MOST_QUIET_ITERATIONS, int(_QUIET_ITERATIONS * squared))

    def on_end(self, requests: int, now_ns: int) -> None:
        """A batch of so many requests is done."""
        self._executing -= requests
        self._ended_ns = now_ns
        self._ended_requests = requests

    def half_of_all(self, requests: int, rows: int) -> int:
        """The rows of half of those who have lately been there, if they have as many each as in a batch of so many."""
        return max(1, round(rows * self._present / (2 * requests)))

    def took(self, base_ns: int, half_ns: int) -> None:
        """What a batch like the last costs besides its rows, 0 if that isn't known, and what half of all would take."""
        self._in_halves = 0 < base_ns < self._pause_ns and _OVERLAP * self._pause_ns < half_ns

    @property
    def is_crowd(self) -> bool:
        """Whether batches have been so large that it is worth waiting longest."""
        return self._patience == _MOST_QUIET_ITERATIONS

    def patience(self, waiting: int, iterations: int) -> int:
        """For how many more iterations without a new request it is worth waiting, after so many; 0 if not at all."""
        if self._batch_requests < _CROWD_OF_ONE or waiting >= self._present:
            return 0
        if self._in_halves and not self._executing and 2 * waiting >= self._present:
            return 0
        return max(0, min(self._patience, _MOST_ITERATIONS - iterations))
