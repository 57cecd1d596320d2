"""Which step of which sequence may go to the batcher, and when a sequence ends.

Lives here: the table of sequences, and every decision about them. Must not: a clock, an await or a callback, tensors,
batches; states are kept here, and nobody looks into them. The rules: at most one step of a sequence is at the batcher;
steps go in order of arrival; a state changes only by a step that was executed and succeeded; and where a waiting step
is lost, so are those behind it, since a hole in the state would be worse, up to one that starts anew.

A sequence has a *place* while it is live. There are so many of them in all or, where instances keep something of their
sequences, so many on each instance. Without a place it waits.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from itertools import count, islice, takewhile
from typing import Generic

from paceline.scheduler.errors import BacklogFull, NoSequence, NotStarted, QueueFull, SequenceError
from paceline.scheduler.idle import Idle
from paceline.scheduler.policy import NEVER, SequencePolicy
from paceline.scheduler.request import RequestT
from paceline.scheduler.sequence import ANYWHERE, LOST, NOWHERE, Over, Place, Sequence, SequenceEnd
from paceline.scheduler.waiting import Timers, Waiting, earliest

_MAX_GONE = 4_096
"""Of so many sequences that ended before their last step, or with one that failed, it is remembered why."""


class Sequences(Generic[RequestT]):
    """The sequences of `model`. After each call, the steps of those in `ready` go to the batcher, and the requests in
    `dropped` fail; whoever calls empties both.

    `live` sequences have a place, `waiting` is how many have none, `backlog` are the requests that wait here, and
    `ended` counts the sequences that are over; those of them that instances held are also in `over`, until it is
    emptied. All calls take constant time, whatever the number of sequences, except for a heap of those waiting requests
    that have a deadline, and for what follows the loss of an instance or the end of the model.
    """

    def __init__(self, policy: SequencePolicy, model: str, backlog: Waiting) -> None:
        self._policy = policy
        self._model = model
        self.ready: list[Sequence[RequestT]] = []
        self.dropped: list[tuple[RequestT, NotStarted]] = []
        self.over: list[Over] = []
        self.backlog = backlog
        self.live = 0
        self.ended = Counter(dict.fromkeys(SequenceEnd, 0))
        self._by_id: dict[int | str, Sequence[RequestT]] = {}
        # Where instances hold sequences, which they tell apart by their ids: those that take no more steps and aren't
        # over, the last one of each id.
        self._ending: dict[int | str, Sequence[RequestT]] = {}
        # By each of their requests that hasn't left.
        self._of: dict[RequestT, Sequence[RequestT]] = {}
        # Those without a place, and those of which nothing waits or executes; either in the order in which they came.
        self._placeless: OrderedDict[Sequence[RequestT], None] = OrderedDict()
        # How many more wait for the end of one with the same id.
        self._following = 0
        self._idle: Idle[Sequence[RequestT]] = Idle(policy.idle_ns)
        self._gone: OrderedDict[int | str, SequenceEnd] = OrderedDict()
        self._timers: Timers[RequestT] = Timers()
        self._orders = count(1)
        # Of instances that hold sequences: the free places, and who has the others.
        self._free: list[Place] = []
        self._held: dict[Place, Sequence[RequestT]] = {}

    @property
    def waiting(self) -> int:
        return len(self._placeless) + self._following

    @property
    def is_quiet(self) -> bool:
        """Whether no step waits or is at the batcher."""
        return not self._of

    def wake_ns(self) -> int | None:
        """When `expire` has to be called: it may have something to do then, and has nothing to do before."""
        due_ns = self._idle.due_ns()
        return earliest(self._timers.first_rank(), due_ns) if self._timers.items else due_ns

    @property
    def ids(self) -> list[int | str]:
        """The sequences that take further steps."""
        return list(self._by_id)

    # hot path: 2 us a step with `left`; see bench/sequences.py
    def arrive(self, request: RequestT) -> SequenceError | QueueFull | None:
        """Take a step; the reason if it is refused, and then its sequence is as it was, or ends if earlier steps of it
        are under way: those behind it may be, too."""
        step = request.step
        if step is None or not step.id:
            return NoSequence(self._model)
        sequence = self._by_id.get(step.id)
        if sequence is None:
            if not step.start:
                gone = self._gone.get(step.id)
                return NotStarted(self._model, step.id, gone.text if gone else "")
            sequence = Sequence(step.id)
            before = self._ending.get(step.id)
            if before is not None or not self._give_place(sequence):  # there is no free one while others wait
                if (full := self._full(request)) is not None:
                    return full
                if before is not None:
                    before.follower = sequence
                    self._following += 1
                else:
                    self._placeless[sequence] = None
            self._by_id[step.id] = sequence
            self._gone.pop(step.id, None)
        elif sequence.place is not None and sequence.executing is None:
            del self._idle[sequence]
        elif (full := self._full(request)) is not None:
            self._cut(sequence, SequenceEnd.REFUSED, len(sequence.steps or ()))
            return full
        self._of[request] = sequence
        if sequence.place is not None and sequence.executing is None:
            sequence.executing = request
            self.ready.append(sequence)
        else:
            self._wait(sequence, request)
        if step.end:
            # From now on, the id is free for another sequence.
            self._forget(sequence)
            sequence.ends = SequenceEnd.END
        return None

    # hot path
    def left(self, request: RequestT, now_ns: int, lost: SequenceEnd | None, *, succeeds: bool = True) -> None:
        """The batcher has done with a step. `lost`: it wasn't executed, and so are those behind it. Unless it
        `succeeds`, its caller was told that it has failed, whatever it leaves."""
        sequence = self._of.pop(request)
        payload, sequence.payload = sequence.payload, None
        sequence.executing = None
        sequence.has_begun = True
        if request.step is not None and request.step.start:
            sequence.state = None
        if succeeds and payload is not None and payload.after is not None:
            sequence.state = payload.after
        if sequence.state is LOST or sequence.place is NOWHERE:
            sequence.state, lost = None, SequenceEnd.INSTANCE_LOST
        if lost is not None:
            self._lose(sequence, lost)
        elif (step := request.step) and step.end and request.ended and not (request.answered or request.cancelled()):
            self._note_gone(sequence.id, SequenceEnd.END)
        self._go_on(sequence, now_ns)

    def take_back(self, request: RequestT, now_ns: int) -> None:
        """The batcher of an instance that is lost had a step that hasn't begun. It waits here again if it is to start
        anew, and is dropped if not."""
        sequence = self._of[request]
        sequence.executing = sequence.payload = None
        self._wait(sequence, request)
        assert sequence.steps is not None
        sequence.steps.rotate(1)
        self._lose(sequence, SequenceEnd.INSTANCE_LOST)
        self._go_on(sequence, now_ns)

    def refuse(self, request: RequestT, now_ns: int) -> None:
        """The batcher has refused a step that had just arrived. Its sequence is as before, but steps that follow are
        lost."""
        sequence = self._of.pop(request)
        sequence.executing = sequence.payload = None
        if sequence.steps:
            self._lose(sequence, SequenceEnd.REFUSED)
        elif not sequence.has_begun:
            self._forget(sequence)
            self._give_up_place(sequence, now_ns)
            return
        elif sequence.ends is SequenceEnd.END and sequence.id not in self._by_id:
            sequence.ends = None
            self._by_id[sequence.id] = sequence
        self._go_on(sequence, now_ns)

    def withdraw(self, request: RequestT, now_ns: int) -> bool:
        """The caller of a request has gone; False if that doesn't wait here. If it does, the steps behind it are
        lost."""
        sequence = self._of.get(request)
        if sequence is None or request is sequence.executing:
            return False
        self._lose_waiting(sequence, request, SequenceEnd.CANCELLED, now_ns)
        return True

    def expire(self, now_ns: int) -> list[RequestT]:
        """The requests that have waited here for too long. Sequences that were idle for too long end."""
        for sequence in self._idle.due(now_ns):
            self._end(sequence, SequenceEnd.IDLE, now_ns)
        expired: list[RequestT] = []
        while (rank := self._timers.first_rank()) is not None and rank <= now_ns:
            request = self._timers.pop().request
            assert request is not None
            expired.append(request)
            self._lose_waiting(self._of[request], request, SequenceEnd.EXPIRED, now_ns)
        return expired

    def add_instance(self, instance: int, now_ns: int) -> None:
        """There is another instance that holds sequences."""
        for row in range(self._policy.places):
            heappush(self._free, Place(row, instance))
        self._fill_places(now_ns)

    def lose_instance(self, instance: int, now_ns: int) -> None:
        """An instance is lost, and with it what it held of its sequences: they end or start anew."""
        self._free = sorted(place for place in self._free if place.instance != instance)
        for place in [one for one in self._held if one.instance == instance]:
            sequence = self._held.pop(place)
            sequence.place = NOWHERE
            if sequence.executing is None:
                self._end(sequence, SequenceEnd.INSTANCE_LOST, now_ns)

    def lose_states(self, are_lost: Callable[[object], bool], now_ns: int) -> None:
        """Sequences with states that `are_lost` end or start anew; another step at the batcher finds out for itself."""
        live = dict.fromkeys((*self._by_id.values(), *self._of.values()))
        for sequence in [one for one in live if one.state is not None and are_lost(one.state)]:
            sequence.state = None
            if sequence.executing is None:
                self._end(sequence, SequenceEnd.INSTANCE_LOST, now_ns)
            elif not (sequence.executing.step and sequence.executing.step.start):
                self._lose(sequence, SequenceEnd.INSTANCE_LOST)

    def remember(self, ids: Iterable[int | str]) -> None:
        """These sequences were live in a model that this one replaces."""
        for id_ in ids:
            self._note_gone(id_, SequenceEnd.REPLACED)

    def retire(self, now_ns: int) -> None:
        """No more steps will arrive. Those that have are executed, and their sequences end then."""
        for sequence in list(self._by_id.values()):
            self._end(sequence, SequenceEnd.REPLACED, now_ns)

    def end(self, id_: int | str, now_ns: int) -> None:
        """A sequence takes no more steps, and ends when those that have arrived are executed, if it hasn't."""
        if (sequence := self._by_id.get(id_)) is not None:
            self._end(sequence, SequenceEnd.END, now_ns)

    def take_waiting(self, why: SequenceEnd, now_ns: int) -> list[RequestT]:
        """Remove and return all requests that wait here. Their sequences end when their steps at the batcher have."""
        dropped, self.dropped = self.dropped, []
        for sequence in [one for one in dict.fromkeys(self._of.values()) if one.steps]:
            self._cut(sequence, why)
            if sequence.place is None:
                self._leave_unplaced(sequence, now_ns)
        taken, self.dropped = [request for request, _ in self.dropped], dropped
        return taken

    def _full(self, request: RequestT) -> QueueFull | None:
        if self.backlog.requests >= self._policy.backlog:
            return BacklogFull(self._policy.backlog)
        return self.backlog.full(1, request.rows, request.size_bytes, 0, 0)

    def _wait(self, sequence: Sequence[RequestT], request: RequestT) -> None:
        self.backlog.add(request)
        request.order = next(self._orders)
        timeout_ns = request.arrived_ns + request.timeout_ns if request.timeout_ns else NEVER
        request.act_at_ns = min(request.deadline_ns, timeout_ns)
        self._timers.start(request)
        if sequence.steps is None:
            sequence.steps = deque()
        sequence.steps.append(request)

    def _stop_waiting(self, request: RequestT) -> None:
        self.backlog.remove((request,))
        self._timers.stop((request,))

    # hot path
    def _go_on(self, sequence: Sequence[RequestT], now_ns: int) -> None:
        """Nothing of a sequence with a place is at the batcher: its next step goes there, or it is idle, or over."""
        if sequence.steps and sequence.place is NOWHERE:
            self._give_up_place(sequence, now_ns)  # its next step needs nothing of what was lost
        elif sequence.steps:
            sequence.executing = request = sequence.steps.popleft()
            self._stop_waiting(request)
            self.ready.append(sequence)
        elif sequence.ends is not None:
            self._leave(sequence, now_ns)
        else:
            self._idle[sequence] = now_ns

    def _lose_waiting(self, sequence: Sequence[RequestT], request: RequestT, why: SequenceEnd, now_ns: int) -> None:
        """A waiting step is lost, and with it those behind it."""
        steps = sequence.steps
        assert steps is not None
        place = steps.index(request)
        self._stop_waiting(request)
        del steps[place], self._of[request]
        self._lose(sequence, why, place)
        if not steps and sequence.place is None:
            self._leave_unplaced(sequence, now_ns)

    def _end(self, sequence: Sequence[RequestT], why: SequenceEnd, now_ns: int) -> None:
        """A sequence ends after the steps that have arrived: now, if there are none."""
        self._cut(sequence, why, len(sequence.steps or ()))
        if self._idle.pop(sequence, None) is not None:
            self._leave(sequence, now_ns)

    def _lose(self, sequence: Sequence[RequestT], why: SequenceEnd, keep: int = 0) -> None:
        """A step was lost in front of all but the first `keep` of those that wait: these are dropped, up to one that
        starts anew, as that needs nothing of it. Without such a one, the sequence ends."""
        steps = sequence.steps or deque[RequestT]()
        behind = takewhile(lambda request: not (request.step and request.step.start), islice(steps, keep, None))
        lost = sum(1 for _ in behind)
        if keep + lost == len(steps):
            self._cut(sequence, why, keep)
            return
        steps.rotate(-keep)
        for _ in range(lost):
            self._drop(sequence, steps.popleft(), why)
        steps.rotate(keep)

    def _cut(self, sequence: Sequence[RequestT], why: SequenceEnd, keep: int = 0) -> None:
        """End a sequence after the first `keep` of its waiting steps; the others are dropped."""
        steps = sequence.steps or deque[RequestT]()
        for request in [*islice(steps, keep, None)]:
            steps.pop()
            self._drop(sequence, request, why)
        self._forget(sequence)
        if sequence.ends in (None, SequenceEnd.END):
            sequence.ends = why
            self._note_gone(sequence.id, why)

    def _drop(self, sequence: Sequence[RequestT], request: RequestT, why: SequenceEnd) -> None:
        self._stop_waiting(request)
        del self._of[request]
        self.dropped.append((request, NotStarted(self._model, sequence.id, why.text)))

    def _forget(self, sequence: Sequence[RequestT]) -> None:
        """Its id is free for another sequence."""
        if self._by_id.get(sequence.id) is sequence:
            del self._by_id[sequence.id]
            if self._policy.places:
                self._ending[sequence.id] = sequence

    def _note_gone(self, id_: int | str, why: SequenceEnd) -> None:
        if id_ not in self._by_id:
            self._gone[id_] = why
            self._gone.move_to_end(id_)
            if len(self._gone) > _MAX_GONE:
                self._gone.popitem(last=False)

    def _leave_unplaced(self, sequence: Sequence[RequestT], now_ns: int) -> None:
        """A sequence is over before it had a place. One that follows another is counted when that is over."""
        if self._placeless.pop(sequence, self) is None:
            self._leave(sequence, now_ns)
        else:
            self._following -= 1

    def _leave(self, sequence: Sequence[RequestT], now_ns: int) -> None:
        """A sequence is over."""
        assert sequence.ends is not None
        self.ended[sequence.ends] += 1
        if sequence.place in self._held:
            self.over.append(Over(sequence.id, sequence.place.instance, sequence.ends))
        self._give_up_place(sequence, now_ns)

    def _give_up_place(self, sequence: Sequence[RequestT], now_ns: int) -> None:
        """A sequence that isn't at the batcher has its place no more. If it has steps, it waits for another one, else
        one with the same id does."""
        place, sequence.place = sequence.place, None
        if place is not None:
            self.live -= 1
            if self._held.pop(place, None) is not None:
                heappush(self._free, place)
        follower: Sequence[RequestT] | None = sequence
        while follower is not None and not follower.steps:
            # Over, or all its steps were lost before its turn came.
            if follower is not sequence:
                assert follower.ends is not None
                self.ended[follower.ends] += 1
            if self._ending.get(follower.id) is follower:
                del self._ending[follower.id]
            follower = follower.follower
        if follower is not None:
            self._following -= follower is not sequence
            self._placeless[follower] = None
        self._fill_places(now_ns)

    def _fill_places(self, now_ns: int) -> None:
        while self._placeless and self._give_place(first := next(iter(self._placeless))):
            del self._placeless[first]
            self._go_on(first, now_ns)

    def _give_place(self, sequence: Sequence[RequestT]) -> bool:
        """Whether there was a place for it: the lowest row that is free on any instance."""
        if not self._policy.places:
            if self.live >= self._policy.max_sequences:
                return False
            sequence.place = ANYWHERE
        elif not self._free:
            return False
        else:
            place = sequence.place = heappop(self._free)
            self._held[place] = sequence
        self.live += 1
        return True
