"""What the batcher may do: frozen, validated values in rows, requests and integer nanoseconds.

Lives here: the policy types and the arithmetic on them. Must not: the user's units or names of configuration files,
which `server/model_config.py` translates. Vocabulary and defaults are Triton's (`ModelDynamicBatching`,
`ModelQueuePolicy`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["NEVER", "BatchPolicy", "PolicyError", "QueuePolicy"]

NEVER = (1 << 63) - 1
"""A point in time, in monotonic nanoseconds, that is never reached."""


class PolicyError(ValueError):
    """A policy contradicts itself; the message names the field, what was expected and what was given."""


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """How long a request may wait, and how many may.

    `max_queue_size` bounds the requests that wait (0: no bound); those that execute don't count. `default_timeout_ns`
    is the longest wait (0: no limit). A request may shorten it, or set it where there is none, if
    `allow_timeout_override`.
    """

    max_queue_size: int = 0
    default_timeout_ns: int = 0
    allow_timeout_override: bool = False

    def __post_init__(self) -> None:
        _require(self.max_queue_size >= 0, "max_queue_size", ">= 0", self.max_queue_size)
        _require(self.default_timeout_ns >= 0, "default_timeout_ns", ">= 0", self.default_timeout_ns)

    def deadline_ns(self, now_ns: int, timeout_ns: int = 0, rpc_deadline_ns: int = NEVER) -> int:
        """When a request that arrives now must have left the queue: the earliest of the policy's timeout, the
        request's own `timeout_ns` (0: none; ignored unless overriding is allowed) and the deadline of its RPC."""
        deadline_ns = rpc_deadline_ns
        if self.default_timeout_ns:
            deadline_ns = min(deadline_ns, now_ns + self.default_timeout_ns)
        if timeout_ns and self.allow_timeout_override:
            deadline_ns = min(deadline_ns, now_ns + timeout_ns)
        return deadline_ns


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """When waiting requests become a batch, and which.

    A batch has at most `max_batch_rows` rows and, unless 0, at most `max_batch_requests` requests (1 switches merging
    off). A prefix of the queue whose rows are one of `preferred_batch_rows` leaves as soon as an instance is idle;
    anything else once its oldest request has waited `max_queue_delay_ns`. None preferred means: `max_batch_rows` is.
    """

    max_batch_rows: int = 1
    preferred_batch_rows: tuple[int, ...] = ()
    max_queue_delay_ns: int = 0
    max_batch_requests: int = 0
    queue: QueuePolicy = field(default_factory=QueuePolicy)

    def __post_init__(self) -> None:
        _require(self.max_batch_rows >= 1, "max_batch_rows", ">= 1", self.max_batch_rows)
        _require(self.max_queue_delay_ns >= 0, "max_queue_delay_ns", ">= 0", self.max_queue_delay_ns)
        _require(self.max_batch_requests >= 0, "max_batch_requests", ">= 0", self.max_batch_requests)
        for rows in self.preferred_batch_rows:
            _require(0 < rows <= self.max_batch_rows, "preferred_batch_rows", f"1 to {self.max_batch_rows}", rows)

    @property
    def preferred(self) -> frozenset[int]:
        """The preferred sizes in force."""
        return frozenset(self.preferred_batch_rows) or frozenset((self.max_batch_rows,))


def _require(holds: bool, name: str, expected: str, got: int) -> None:
    if not holds:
        raise PolicyError(f"{name}: expected {expected}, got {got}")
