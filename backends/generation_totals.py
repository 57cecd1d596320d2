"""What the generations of a model come to, in plain numbers.

Lives here: `GenerationTotals`, which metrics read, and `GenerationWatch`, by which an instance tells of its own. Must
not: names of metrics, or clocks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from threading import Lock

GENERATION_BOUNDS_NS = tuple(
    us * 1_000 * 10**power for power in range(6) for us in (500, 1_000, 2_500)
)  # from 0.5 ms to 250 s


class TokenTimes:
    """How many durations were up to each of `GENERATION_BOUNDS_NS`, or above all of them, and their sum."""

    __slots__ = ("counts", "total_ns")

    def __init__(self) -> None:
        self.counts = [0] * (len(GENERATION_BOUNDS_NS) + 1)
        self.total_ns = 0

    def add(self, duration_ns: int, count: int = 1) -> None:
        self.counts[bisect_left(GENERATION_BOUNDS_NS, duration_ns)] += count
        self.total_ns += count * duration_ns

    def merge(self, other: TokenTimes) -> None:
        self.counts = [mine + others for mine, others in zip(self.counts, other.counts, strict=True)]
        self.total_ns += other.total_ns


class GenerationTotals:
    """Of one version of a model. `first_token` has the times from when requests arrived until they had a token,
    `next_token` those from one token to the next, `whole` those until the last answer. `prompt_tokens` are those of
    prompts that have been computed, each once; `generation_tokens` those that were chosen, with the ones that end
    answers. `preemptions`: how often generations were put out. `finished`: answers, by the reason of their end.

    `first_token`, `next_token` and the numbers of tokens are written by the threads of instances, `finished` and
    `whole` on the event loop; any thread may read.
    """

    def __init__(self) -> None:
        self.prompt_tokens = self.generation_tokens = self.preemptions = 0
        self.first_token = TokenTimes()
        self.next_token = TokenTimes()
        self.whole = TokenTimes()
        self.finished = Counter({"length": 0, "stop": 0})
        self._lock = Lock()
        self._watches: tuple[GenerationWatch, ...] = ()

    @property
    def running(self) -> int:
        """How many have a place now."""
        return sum(map(len, self._watches))

    @property
    def cache_usage(self) -> float:
        """Share of the room for keys and values that is used now, 0 to 1; the mean over instances."""
        watches = self._watches
        return sum(watch.cache_usage() for watch in watches) / max(1, len(watches))

    def watch(self, cache_usage: Callable[[], float]) -> GenerationWatch:
        """For an instance, which says how much of its room for keys and values is used."""
        watch = GenerationWatch(self, self._lock, cache_usage)
        with self._lock:
            self._watches = (*self._watches, watch)
        return watch

    def drop(self, watch: GenerationWatch) -> None:
        with self._lock:
            self._watches = tuple(one for one in self._watches if one is not watch)

    def on_finish(self, reason: str, duration_ns: int) -> None:
        """A request has its last answer, so long after it arrived."""
        self.finished[reason] += 1
        self.whole.add(duration_ns)

    def merge(self, other: GenerationTotals) -> None:
        """Add what `other` has counted so far, but nothing of what it has now."""
        self.prompt_tokens += other.prompt_tokens
        self.generation_tokens += other.generation_tokens
        self.preemptions += other.preemptions
        self.first_token.merge(other.first_token)
        self.next_token.merge(other.next_token)
        self.whole.merge(other.whole)
        self.finished.update(other.finished.copy())


class GenerationWatch:
    """An instance's generations, by number, each from when it has a place. One that wasn't told of isn't counted."""

    def __init__(self, totals: GenerationTotals, lock: Lock, cache_usage: Callable[[], float]) -> None:
        self.cache_usage = cache_usage
        self._totals = totals
        self._lock = lock
        # Those without a token: how many their prompts have, and when they arrived. When others had their last one.
        self._beginning: dict[int, tuple[int, int]] = {}
        self._told_ns: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._beginning) + len(self._told_ns)

    def entered(self, number: int, prompt_tokens: int, arrived_ns: int) -> None:
        self._beginning[number] = prompt_tokens, arrived_ns

    # hot path: 0.2 us a row
    def chose(self, numbers: Sequence[int], now_ns: int) -> None:
        """Each of these has another token."""
        totals, told_ns = self._totals, self._told_ns
        with self._lock:
            then = [told_ns[number] for number in numbers if number in told_ns]
            # Those that share steps have had their last tokens at the same time.
            for then_ns in {*then}:
                totals.next_token.add(now_ns - then_ns, then.count(then_ns))
            totals.generation_tokens += len(then)
            if len(then) == len(numbers):
                told_ns.update(dict.fromkeys(numbers, now_ns))
                return
            for number in numbers:
                if (began := self._beginning.pop(number, None)) is not None:
                    totals.prompt_tokens += began[0]
                    totals.first_token.add(now_ns - began[1])
                    totals.generation_tokens += 1
                    told_ns[number] = now_ns
                elif number in told_ns:
                    told_ns[number] = now_ns

    def put_out(self, count: int) -> None:
        with self._lock:
            self._totals.preemptions += count

    def left(self, number: int) -> None:
        self._beginning.pop(number, None)
        self._told_ns.pop(number, None)

    def end(self) -> None:
        """The instance has none any more."""
        self._totals.drop(self)
