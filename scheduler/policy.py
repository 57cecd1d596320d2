"""What the batcher may do: frozen, validated values in rows, requests and integer nanoseconds.

Lives here: the policy types and the arithmetic on them. Must not: the user's units or names of configuration files,
which `server/models/batch_policy.py` translates. Vocabulary and defaults are Triton's (`ModelDynamicBatching`,
`ModelQueuePolicy`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

NEVER = (1 << 63) - 1
"""A point in time, in monotonic nanoseconds, that is never reached."""


class PolicyError(ValueError):
    """A policy contradicts itself; the message names the field, what was expected and what was given."""

    def __init__(self, field: str, expected: str, got: object) -> None:
        super().__init__(f"{field}: expected {expected}, got {got}")
        self.field = field


class TimeoutAction(Enum):
    """What happens to a request whose queue timeout passes: refused, or served after all others of its level."""

    REJECT = "REJECT"
    DELAY = "DELAY"


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """How long a request of one priority level may wait, and how many may.

    `max_queue_size` bounds the requests of the level that wait (0: no bound); those that execute don't count.
    `default_timeout_ns` is the longest wait (0: no limit). A request may shorten it, or set it where there is none, if
    `allow_timeout_override`.
    """

    max_queue_size: int = 0
    default_timeout_ns: int = 0
    allow_timeout_override: bool = False
    timeout_action: TimeoutAction = TimeoutAction.REJECT

    def __post_init__(self) -> None:
        _at_least(0, max_queue_size=self.max_queue_size, default_timeout_ns=self.default_timeout_ns)

    @property
    def delays(self) -> bool:
        """Whether requests may be served after others that arrived later."""
        may_pass = self.default_timeout_ns > 0 or self.allow_timeout_override
        return may_pass and self.timeout_action is TimeoutAction.DELAY

    def timeout_at_ns(self, now_ns: int, timeout_ns: int = 0) -> int:
        """When the queue timeout of a request that arrives now passes; `timeout_ns` is its own timeout (0: none)."""
        at_ns = now_ns + self.default_timeout_ns if self.default_timeout_ns else NEVER
        if timeout_ns and self.allow_timeout_override:
            at_ns = min(at_ns, now_ns + timeout_ns)
        return at_ns


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Bounds on all that waits for one model, whatever its priority; 0: no bound."""

    max_rows: int = 0
    max_bytes: int = 0

    def __post_init__(self) -> None:
        _at_least(0, max_rows=self.max_rows, max_bytes=self.max_bytes)


@dataclass(frozen=True, slots=True)
class SequencePolicy:
    """How many sequences may be under way, and for how long.

    A sequence of which nothing waits or executes for `idle_ns` ends. `places` is how many an instance holds at a time,
    each of which stays on that instance; 0: any instance may execute any step, and all together hold `max_sequences`.
    A new sequence waits until there is room. `backlog` is how many requests may wait for that, or for an earlier step
    of their sequence. `max_state_bytes` bounds what is kept of a sequence between its steps, 0: nothing does; whoever
    executes steps sees to it.
    """

    idle_ns: int = 1_000_000_000
    places: int = 0
    max_sequences: int = 10_000
    backlog: int = 10_000
    max_state_bytes: int = 0

    def __post_init__(self) -> None:
        _at_least(1, max_sequence_idle_microseconds=self.idle_ns, max_sequences=self.max_sequences)
        _at_least(0, places=self.places, sequence_backlog=self.backlog, max_state_bytes=self.max_state_bytes)


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """When waiting requests become a batch, and which.

    A batch has at most `max_batch_rows` rows and, unless 0, at most `max_batch_requests` requests (1 switches merging
    off). A prefix of the queue whose rows are one of `preferred_batch_rows` leaves as soon as an instance is idle;
    anything else once its oldest request has waited `max_queue_delay_ns`. If no sizes are given, `max_batch_rows` is
    preferred. While requests keep arriving together, an idle instance is kept waiting for all of them (`turns`),
    however short the delay.

    Priorities are levels from 1, served first, to `priority_levels`; 0 levels: all requests are equal. Each level has
    the queue policy of that number in `priority_queue`, or else `queue`. `preserve_ordering`: answers leave in order of
    arrival.

    `batch_sizes`: the only numbers of rows that the model may see (empty: any); batches are padded up to one or cut
    down to one, whichever costs less. `isolate_failures`: a failed batch is run again in halves, so that only the
    requests at fault fail. `deadline_aware`: a request that can't be answered before its RPC's deadline, going by
    measured execution times, is not executed. `await_returns`: if no delay, preferred size or limit of requests is
    configured, an idle instance is held back for callers who have just been answered, if they tend to come again at
    once. `lengths`: one function for each size in which requests of a key may differ (`Request.sizes`), which says
    the common size of a batch whose longest request has a given one. `max_batch_elements`: the most that rows times
    these common sizes may be (0: no bound). `grows_always`: a batch is as large as it can be, even if fewer rows were
    measured to cost less each. `execution_limit_ns`: an execution that takes longer is given up, and its instance with
    it (0: no limit). `hands_ahead`: an instance gets its next batch as soon as it executes one, not only shortly
    before that ends: for requests that are batches by themselves, of which none is urgent. `sequences`: requests are
    steps of sequences; None: they have nothing to do with each other.
    """

    max_batch_rows: int = 1
    preferred_batch_rows: tuple[int, ...] = ()
    max_queue_delay_ns: int = 0
    max_batch_requests: int = 0
    priority_levels: int = 0
    default_priority_level: int = 0
    queue: QueuePolicy = field(default_factory=QueuePolicy)
    priority_queue: Mapping[int, QueuePolicy] = field(default_factory=dict)
    limits: QueueLimits = field(default_factory=QueueLimits)
    preserve_ordering: bool = False
    batch_sizes: tuple[int, ...] = ()
    isolate_failures: bool = True
    deadline_aware: bool = True
    await_returns: bool = False
    lengths: tuple[Callable[[int], int], ...] = ()
    max_batch_elements: int = 0
    grows_always: bool = True
    execution_limit_ns: int = 0
    hands_ahead: bool = False
    sequences: SequencePolicy | None = None

    def __post_init__(self) -> None:
        _at_least(1, max_batch_rows=self.max_batch_rows)
        _at_least(0, max_queue_delay_ns=self.max_queue_delay_ns, max_batch_requests=self.max_batch_requests)
        _at_least(0, max_batch_elements=self.max_batch_elements, execution_limit_ns=self.execution_limit_ns)
        for rows in self.preferred_batch_rows:
            _require(0 < rows <= self.max_batch_rows, "preferred_batch_rows", f"1 to {self.max_batch_rows}", rows)
        self._check_priorities()
        if self.batch_sizes:
            sizes = list(self.batch_sizes)
            holds = sizes == sorted(set(sizes)) and sizes[0] > 0 and sizes[-1] == self.max_batch_rows
            expected = f"ascending sizes from 1 up, the last {self.max_batch_rows}, the largest batch"
            _require(holds, "batch_sizes", expected, sizes)

    @property
    def preferred(self) -> frozenset[int]:
        """The preferred sizes in force."""
        return frozenset(self.preferred_batch_rows) or frozenset((self.max_batch_rows,))

    def level_of(self, priority: int) -> int:
        """The level of a request that asks for `priority`: that, or the default where there is no such level."""
        return priority if 0 < priority <= self.priority_levels else self.default_priority_level

    def queue_policy(self, level: int) -> QueuePolicy:
        """The queue policy of a level."""
        return self.priority_queue.get(level, self.queue)

    def _check_priorities(self) -> None:
        levels, default = self.priority_levels, self.default_priority_level
        _at_least(0, priority_levels=levels)
        expected = f"1 to {levels}, the number of priority levels" if levels else "0, as there are no priority levels"
        _require(min(levels, 1) <= default <= levels, "default_priority_level", expected, default)
        for level in self.priority_queue:
            _require(1 <= level <= levels, "priority_queue_policy", expected, level)
        if self.preserve_ordering:
            _require(levels <= 1, "preserve_ordering", "at most one priority level with it", levels)
            delays = any(q.delays for q in (self.queue, *self.priority_queue.values()))
            _require(not delays, "preserve_ordering", "no timeout_action DELAY of queue timeouts with it", "DELAY")


def _at_least(least: int, **values: int) -> None:
    for name, value in values.items():
        _require(value >= least, name, f">= {least}", value)


def _require(holds: bool, name: str, expected: str, got: object) -> None:
    if not holds:
        raise PolicyError(name, expected, got)
