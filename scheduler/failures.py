"""What becomes of requests whose execution failed, ended with its instance or was called back: they wait on, run again
or fail for good.

Lives here: what may be at fault, which requests run again together, and what the end of an instance means for its
batches. Must not: pass batches to runners or answer them; that is `batcher`.

If some request may be at fault, halves run again: one bad row among n costs 2·log2(n) further executions, and the
budget of twice that finds two. Requests not told apart by then run one by one: none fails because of others, and a
model that always fails has hardly more to do than without batching. If the batch was too large for the memory, no
request is at fault and none has to fail: all run again, in batches as small as necessary, since whatever failed once is
only tried with fewer rows. Only a request that is too large alone fails for good. If the batch ended the instance, each
request runs again by itself, on another instance: a new instance costs more than a few executions, and one batch may
end only a few. Where instances hold sequences, they fail instead: an instance that they ended, too, would take all of
its sequences with it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Generic

from paceline.scheduler.answering import Answers
from paceline.scheduler.batch_queue import BatchQueue
from paceline.scheduler.clock import Clock
from paceline.scheduler.instances import Instances
from paceline.scheduler.policy import NEVER, BatchPolicy
from paceline.scheduler.request import Batch, P, R, Request, RequestT
from paceline.scheduler.runner import Runner, ThreadLost
from paceline.scheduler.sizing import Allowed
from paceline.scheduler.turns import ArrivalModel

_log = logging.getLogger("paceline.scheduler")


_MAX_ENDS = 4
"""When this many instances have ended because of one batch's requests, the rest of these fail, as everything else waits
meanwhile. With two culprits, all other requests are still answered."""
_MAX_UNBEGUN = 3
"""A request fails for good once this many instances ended before they began on its batch."""


class Blame(Enum):
    """Whose fault a failed execution may be."""

    REQUESTS = auto()
    """Some of the requests: without these, the others may succeed."""
    SIZE = auto()
    """No request's: there wasn't enough memory for so many rows."""
    INSTANCE = auto()
    """The instance's: nothing will succeed on it any more."""
    INSTANCE_BEFORE = auto()
    """The instance's, before it began on the batch, which another instance may execute."""
    FATAL = auto()
    """Some of the requests ended the instance, which may be replaced: the others may succeed on another one, if it held
    no sequences."""
    NOBODY = auto()
    """None of these: running anything again would gain nothing."""


_LOSING = (Blame.INSTANCE, Blame.INSTANCE_BEFORE, Blame.FATAL)


def budget_for(requests: int) -> int:
    """How many executions the search for culprits among so many requests takes before it goes on one by one."""
    return 4 * max(1, (requests - 1).bit_length())


@dataclass(slots=True)
class Search:
    """State that all parts of one failed batch share: `budget` is how many executions of halves may still be run,
    `most_rows` how many rows a part may have if memory wasn't enough for more (else 0), `before` what batches were
    allowed to have when that began, and `ends` how many instances have ended because of these requests."""

    budget: int
    most_rows: int = 0
    before: Allowed | None = None
    ends: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Suspects(Generic[RequestT]):
    """Requests of one batch that failed together and might not fail alone."""

    requests: Sequence[RequestT]
    search: Search

    @classmethod
    def of_batch(cls, requests: Sequence[RequestT]) -> Suspects[RequestT]:
        return cls(requests, Search(budget_for(len(requests))))

    def narrowed(self, requests: Sequence[RequestT]) -> Suspects[RequestT]:
        """These suspects, narrowed to `requests`: those that still wait for an answer."""
        return replace(self, requests=requests)

    def again(self, blame: Blame, rows: int) -> list[Suspects[RequestT]]:
        """The groups to run again after these failed together, as `rows` rows; none if they fail for good. If some are
        to blame, two halves or, without the budget for these, each by itself. A group that is larger than it may be
        runs in parts."""
        search, middle = self.search, len(self.requests) // 2
        if not middle:
            return []
        if blame is Blame.REQUESTS and search.budget >= 2:
            search.budget -= 2
            return [self.narrowed(half) for half in (self.requests[:middle], self.requests[middle:])]
        if blame in (Blame.REQUESTS, Blame.FATAL):
            return [self.narrowed([request]) for request in self.requests]
        # Whatever failed for want of memory is tried only if it gets smaller, or it would be tried for ever.
        return [self] if blame is Blame.SIZE and search.most_rows < rows else []


@dataclass(slots=True, eq=False)
class Recovery(Generic[P, R]):
    """Recovers the requests of `queue` from what goes wrong on `instances`. `suspects` wait to run again, before
    anything that is queued; if `policy` doesn't isolate failures, none do. `ended` are the errors of runners whose
    instances have ended by themselves, but whose executions haven't. `blames(error)` classifies an error: who may be at
    fault. Requests whose callers have gone are reported to `answers`; `arrivals` learns which requests don't execute
    after all. `due_ns`: when `drop_unwanted` has to be called, if there are suspects; 0: somebody has gone."""

    queue: BatchQueue[Request[P, R]]
    instances: Instances[P, R]
    answers: Answers
    arrivals: ArrivalModel
    clock: Clock
    blames: Callable[[BaseException], Blame]
    policy: BatchPolicy
    suspects: deque[Suspects[Request[P, R]]] = field(default_factory=deque)
    due_ns: int = NEVER
    ended: dict[Runner[P, R], BaseException] = field(default_factory=dict)

    @property
    def requests(self) -> list[Request[P, R]]:
        """Those that wait here."""
        return [request for group in self.suspects for request in group.requests]

    def waiting(self, level: int | None = None) -> int:
        """How many requests wait here, of priority `level` or (None) of all levels."""
        return sum(level in (None, request.level) for request in self.requests)

    def failed(
        self,
        runner: Runner[P, R],
        batch: Batch[Request[P, R]],
        error: BaseException,
        suspects: Suspects[Request[P, R]] | None,
    ) -> Sequence[Request[P, R]]:
        """Learn from `error`, which ended a batch, and plan to run again what may succeed. `suspects` are the batch's
        requests if they ran again already. Returns the requests that fail for good."""
        # What an error says of memory and of the instance is learned whatever becomes of the requests. After that, an
        # instance that may be lost is lost, so that nothing of what runs again runs there.
        blame, group = self._blame_for(error), suspects or Suspects.of_batch(batch.requests)
        if blame is Blame.SIZE:
            self._learn_shortage(runner, batch, group.search)
        if blame in _LOSING and self.instances.may_be_lost(runner):
            self._lose(runner, error)
        if blame is Blame.INSTANCE_BEFORE and self.instances.given_up(runner):
            return self._wait_for_another(batch, suspects)
        holds_sequences = self.policy.sequences is not None and self.policy.sequences.places
        if not self.policy.isolate_failures or (blame is Blame.FATAL and holds_sequences):
            return batch.requests
        if blame is Blame.FATAL:
            group.search.ends += 1
            if group.search.ends >= _MAX_ENDS:
                others = [one for one in self.suspects if one.search is group.search]
                self.suspects = deque(one for one in self.suspects if one.search is not group.search)
                return [*batch.requests, *(request for one in others for request in one.requests)]
        groups = group.again(blame, batch.padded_rows)
        self._wait(groups)
        return () if groups else batch.requests

    def next_suspects(self, now_ns: int) -> tuple[Runner[P, R], Batch[Request[P, R]], Suspects[Request[P, R]]] | None:
        """Take the next suspects, as a batch, and a free runner for it; None if there are none."""
        while self.suspects and self.instances.slots.free:
            group = self.suspects.popleft()
            if wanted := self.answers.still_wanted(group.requests):
                batch, rest = self.queue.again(wanted, now_ns, group.search.most_rows)
                if rest:
                    self.suspects.appendleft(group.narrowed(rest))
                return self.instances.take(batch), batch, group.narrowed(batch.requests)
        return None

    def take_all(self) -> Sequence[Request[P, R]]:
        """Remove all suspects. Returns their requests."""
        requests = self.requests
        self.suspects.clear()
        return requests

    def drop_unwanted(self, now_ns: int) -> None:
        """Drop suspects whose callers have gone or whose deadline has passed: it may take long until there is an
        instance for them. Until one of these has come about (`due_ns`), there are none."""
        if now_ns < self.due_ns:
            return
        groups, self.suspects, self.due_ns = self.suspects, deque(), NEVER
        for group in groups:
            left = []
            for request in self.answers.still_wanted(group.requests):
                if request.deadline_ns <= now_ns:
                    self.answers.expire(request, now_ns)
                else:
                    left.append(request)
            if left:
                self._wait([group.narrowed(left)])

    def _wait(self, groups: Sequence[Suspects[Request[P, R]]]) -> None:
        self.suspects += groups
        requests = [request for group in groups for request in group.requests]
        self.due_ns = min([self.due_ns, *(0 if one.ended else one.deadline_ns for one in requests)])

    def recall(self, now_ns: int) -> None:
        """Take back batches that were to follow executions that take longer than expected: their requests wait on."""
        ahead = self.instances.ahead
        for runner in ahead.overdue(now_ns):
            if self.take_back(runner, ahead.next[runner]):
                ahead.end(runner)

    def take_back(self, runner: Runner[P, R], batch: Batch[Request[P, R]]) -> bool:
        """Take back a batch that `runner` hasn't begun; its requests wait on. False if the runner has begun it."""
        if not runner.take_back():
            return False
        if self.instances.ahead.next.get(runner) is batch:
            # Before it waits again: other threads read how much waits, and it mustn't be counted twice.
            self.queue.release(batch)
        self.arrivals.on_end(len(batch.requests), self.clock.now_ns())
        self.queue.put_back(batch, self.answers.still_wanted(batch.requests))
        return True

    def instance_ended(self, runner: Runner[P, R], error: BaseException) -> None:
        """As `Batcher.lose`."""
        if not self.instances.may_be_lost(runner):
            return
        if runner in self.instances.running:
            self.ended[runner] = error
        else:
            self.instances.lose(runner, error)

    def execution_ended(self, runner: Runner[P, R]) -> None:
        """Give up the runner's instance if it ended by itself during the execution, which is over now."""
        error = self.ended.pop(runner, None)
        if error is not None and self.instances.may_be_lost(runner):
            self._lose(runner, error)

    def hang(self, runner: Runner[P, R]) -> None:
        """Give up the runner, whose execution takes longer than it may, and its instance."""
        self.ended.pop(runner, None)
        self.instances.hang(runner)

    def _blame_for(self, error: BaseException) -> Blame:
        if isinstance(error, ThreadLost):
            return Blame.INSTANCE_BEFORE
        try:
            return self.blames(error)
        except Exception:  # noqa: BLE001 - the requests must get an answer
            _log.exception("can't tell which requests made a batch fail, so all of it fails")
            return Blame.NOBODY

    def _lose(self, runner: Runner[P, R], error: BaseException) -> None:
        following = self.instances.running.get(runner)
        if following is not None and self.take_back(runner, following):
            self.instances.forget(runner)
        self.instances.lose(runner, error)

    def _wait_for_another(
        self, batch: Batch[Request[P, R]], suspects: Suspects[Request[P, R]] | None
    ) -> Sequence[Request[P, R]]:
        """Have a batch wait for another instance, as its own ended before beginning it. `suspects` wait among the
        suspects; if None, the batch's requests go back to the queue. Returns the requests to which this has happened
        too often: reading them may be what ends instances."""
        for request in batch.requests:
            request.unbegun += 1
        failed = [request for request in batch.requests if request.unbegun >= _MAX_UNBEGUN]
        left = [request for request in batch.requests if request.unbegun < _MAX_UNBEGUN]
        if suspects is None:
            self.queue.put_back(batch, self.answers.still_wanted(left))
        elif left:
            self._wait([suspects.narrowed(left)])
        return failed

    def _learn_shortage(self, runner: Runner[P, R], batch: Batch[Request[P, R]], search: Search) -> None:
        """Allow fewer rows, unless the batch was a single request: what that needs alone says nothing about others, and
        neither do the batches that it was in before, so what was allowed before the search's shortage is again. But
        its instance has no memory for it, so the others come first from now on: an instance that fails is the first to
        be free again, and would attract requests and refuse them while others do their work."""
        if len(batch.requests) > 1:
            before = self.queue.exhausted(batch.padded_rows, self.clock.now_ns())
            search.before = search.before or before
            search.most_rows = self.queue.allowed_rows
            return
        if not self.instances.given_up(runner):
            self.instances.slots.put_last(runner)
        if search.before is not None:
            self.queue.forgive(search.before)
            search.before = None
