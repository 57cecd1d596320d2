"""What one load of a model keeps of its answers.

Lives here: how answers are kept, copied and counted in bytes, and that they end with the load. Must not: requests; that
is `server.requests.response_cache`. The rule: what is kept owns its bytes. Results are views of a whole batch's arrays,
or of memory that another process writes to again.
"""

from __future__ import annotations

from collections.abc import Collection

from paceline.backends.batching import Outputs, Share
from paceline.backends.spec import MISSING, Array, Tensors
from paceline.scheduler.answering import Answers, OrderedAnswers
from paceline.scheduler.errors import QueueFull
from paceline.scheduler.request import AnyRequest
from paceline.scheduler.waiting import SharedQueueLimits
from paceline.server.bounded_pool import BoundedPool
from paceline.server.codec.codec import memory_bytes
from paceline.server.telemetry.model_statistics import VersionStatistics

_ENTRY_BYTES, _ARRAY_BYTES = 512, 192
"""What an entry takes besides its tensors' elements, and what each of these adds: measured, and rounded up."""


class KeptResponses:
    """The share of one load in `pool`. `by_rows`: each output has a row for each of the request. `answers` delivers
    those of all of its requests, whether they are executed or not: in order of arrival, if the model
    `preserves_ordering`. `limits` are those of all queues."""

    def __init__(
        self,
        pool: BoundedPool[Tensors],
        statistics: VersionStatistics,
        limits: SharedQueueLimits,
        *,
        by_rows: bool = False,
        preserves_ordering: bool = False,
    ) -> None:
        self._pool = pool
        self._by_rows = by_rows
        self._closed = False
        self.statistics = statistics
        self.limits = limits
        self.answers = (OrderedAnswers if preserves_ordering else Answers)(statistics)

    def enter(self, request: AnyRequest) -> QueueFull | None:
        """A request waits without being queued: it takes room there, and has to `leave`. Returns why it mayn't."""
        full = self.limits.full(1, request.size_bytes)
        if full is None:
            self.limits.requests += 1
            self.limits.size_bytes += request.size_bytes
        return full

    def leave(self, request: AnyRequest) -> None:
        self.limits.requests -= 1
        self.limits.size_bytes -= request.size_bytes

    # hot path
    def find(self, key: bytes) -> Tensors | None:
        """The outputs kept for `key`; nobody may write to them."""
        kept = self._pool.find(self, key)
        if kept is None or not self._by_rows or any(array is MISSING for array in kept):
            return kept
        # Answers made of shares are made together.
        return Share(Outputs(kept), 0, len(kept[0]))

    def keep(self, key: bytes, results: Tensors, wanted: Collection[int]) -> None:
        """Keep a copy of the outputs with the indices `wanted`, for `find`. Costs the copy, on the event loop, as
        making an answer of them does. Nothing is kept of what no answer can be made of."""
        arrays = [array if index in wanted else MISSING for index, array in enumerate(results)]
        texts = (one for array in arrays if array.dtype.hasobject for one in array.flat)
        if self._closed or not all(isinstance(one, (bytes, str)) for one in texts):
            return
        size_bytes = _ENTRY_BYTES + sum(_ARRAY_BYTES + memory_bytes(array) for array in arrays)
        if size_bytes <= self._pool.max_bytes:
            self._pool.keep(self, key, tuple(map(_copied, arrays)), size_bytes)

    def close(self) -> None:
        """The load has ended: forget its answers. It may still answer what it accepted; none of that is kept."""
        self._closed = True
        self._pool.forget(self)


def _copied(array: Array) -> Array:
    if array is MISSING:
        return array
    copied = array.copy(order="C")
    copied.flags.writeable = False
    return copied
