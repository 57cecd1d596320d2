"""Slices for tests, made the way a process makes them."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.clients.load.tally import Counts, Slices

__all__ = ["MS", "S", "counts"]

MS, S = 1_000_000, 1_000_000_000


def counts(
    latencies_ms: Sequence[float] = (),
    *,
    refused: int = 0,
    status: str = "RESOURCE_EXHAUSTED",
    cpu_ms: int = 0,
    lag_ms: int = 0,
) -> Counts:
    """A slice of a second with these answers, and requests that were refused at once, with `status`."""
    slices = Slices(0, S)
    for latency_ms in latencies_ms:
        entry = slices.begin(0)
        slices.sent(entry, lag_ms * MS)
        slices.succeed(entry, 0, round(latency_ms * MS), None)
    for _ in range(refused):
        slices.fail(slices.begin(0), 0, 2 * MS, status, "the queue is full")
    slices.use(cpu_ms * MS, 0)
    ((_, one),) = slices.settled(S)
    return one
