"""The batches that execute, and when an instance is likely to be free.

Lives here: which batches have left and aren't done, and when they are likely to end, by measured execution times. Must
not: know which instance has which; `Instances.running` does.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, NamedTuple

from paceline.scheduler.latency import LatencyModel
from paceline.scheduler.request import RequestT

__all__ = ["Batch", "Executing"]


class Batch(NamedTuple, Generic[RequestT]):
    """Requests that execute together; all of one `key`, in the order of service. `padded_rows` is what the model sees:
    `rows`, or more where only some sizes are allowed. `number` counts the batches of the queue, from 1."""

    number: int
    key: Hashable
    rows: int
    padded_rows: int
    requests: tuple[RequestT, ...]


class Executing(Generic[RequestT]):
    """Batches of up to `max_rows` rows, on `instances` instances."""

    def __init__(self, latency: LatencyModel, instances: int, max_rows: int) -> None:
        self._latency = latency
        self._instances = instances
        self._max_rows = max_rows
        self._begun = 0
        self._batches: dict[int, tuple[Batch[RequestT], int]] = {}

    # hot path
    def begin(
        self, key: Hashable, requests: Sequence[RequestT], rows: int, padded_rows: int, now_ns: int
    ) -> Batch[RequestT]:
        """Begin a batch of `requests`, which starts at `now_ns`."""
        self._begun += 1
        batch = Batch(self._begun, key, rows, padded_rows, tuple(requests))
        self._batches[self._begun] = (batch, now_ns)
        return batch

    def end(self, batch: Batch[RequestT]) -> None:
        """Forget a batch that is done, or won't execute."""
        self._batches.pop(batch.number, None)

    def first_end_ns(self, now_ns: int) -> int:
        """When the first batch is likely to end; `now_ns` if there is none."""
        return min((self._end_ns(*one, now_ns) for one in self._batches.values()), default=now_ns)

    def least_wait_ns(self, key: Hashable, rows_ahead: int, now_ns: int) -> int:
        """The least time that a request of `key` that arrives now will wait: until an instance is free, and for the
        full batches among the `rows_ahead` of it in its own lane. Other lanes don't count, as lanes may take turns."""
        full_batches = rows_ahead // self._max_rows
        wait_ns = full_batches * self._latency.proven_ns(key, self._max_rows, now_ns) // self._instances
        if len(self._batches) >= self._instances:
            wait_ns += max(0, self.first_end_ns(now_ns) - now_ns)
        return wait_ns

    def _end_ns(self, batch: Batch[RequestT], started_ns: int, now_ns: int) -> int:
        return started_ns + self._latency.proven_ns(batch.key, batch.padded_rows, now_ns)
