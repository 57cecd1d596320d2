"""When requests arrive.

Lives here: sources of requests, in virtual time, determined by their seed. Must not: know what becomes of them, except
that closed-loop clients are told when one has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Protocol

from paceline.scheduler.policy import NEVER

__all__ = ["Arrival", "Clients", "OnOff", "Poisson", "Source"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that arrives at `at_ns` and whose caller gives up at `deadline_ns`."""

    at_ns: int
    rows: int = 1
    key: Hashable = ""
    deadline_ns: int = NEVER
    client: int = 0


class Source(Protocol):
    """Requests that arrive by themselves, in order of time, and those that follow an answer."""

    def arrivals(self) -> Iterator[Arrival]: ...

    def following(self, arrival: Arrival, now_ns: int) -> Arrival | None: ...


class Poisson:
    """Open loop: independent requests, `per_s` of them a second, each with `timeout_ns` from its arrival (0: none)."""

    def __init__(self, per_s: float, seed: int, timeout_ns: int = 0) -> None:
        self._mean_ns = 1e9 / per_s
        self._random = Random(seed)
        self._timeout_ns = timeout_ns

    def arrivals(self) -> Iterator[Arrival]:
        at_ns = 0.0
        while True:
            at_ns += self._gap_ns(at_ns)
            now_ns = int(at_ns)
            yield Arrival(now_ns, deadline_ns=now_ns + self._timeout_ns if self._timeout_ns else NEVER)

    def following(self, arrival: Arrival, now_ns: int) -> Arrival | None:
        return None

    def _gap_ns(self, at_ns: float) -> float:
        return self._random.expovariate(1) * self._mean_ns


class OnOff(Poisson):
    """Open loop in bursts: like Poisson, but twice as many for a stretch, then none; both last `stretch_ns` on
    average."""

    def __init__(self, per_s: float, seed: int, stretch_ns: int) -> None:
        super().__init__(2 * per_s, seed)
        self._stretch_ns = stretch_ns
        self._on_until_ns = 0.0

    def _gap_ns(self, at_ns: float) -> float:
        next_ns = at_ns + super()._gap_ns(at_ns)
        while next_ns > self._on_until_ns:
            # The gaps have no memory, so what was left of one may be drawn anew when the next burst begins.
            on_ns = self._on_until_ns + self._random.expovariate(1) * self._stretch_ns
            self._on_until_ns = on_ns + self._random.expovariate(1) * self._stretch_ns
            next_ns = on_ns + super()._gap_ns(on_ns)
        return next_ns - at_ns


class Clients:
    """Closed loop: `count` clients, each sending again some time after its answer, `think_ns` on average (exponential;
    0: at once). The n-th request of client i has the key `key_of(i, n)`."""

    def __init__(
        self, count: int, think_ns: int, seed: int, key_of: Callable[[int, int], Hashable] = lambda client, number: ""
    ) -> None:
        self._think_ns = think_ns
        self._random = Random(seed)
        self._key_of = key_of
        self._sent = [0] * count

    def arrivals(self) -> Iterator[Arrival]:
        first = [(self._think(), client) for client in range(len(self._sent))]
        return (self._next(at_ns, client) for at_ns, client in sorted(first))

    def following(self, arrival: Arrival, now_ns: int) -> Arrival | None:
        return self._next(now_ns + self._think(), arrival.client)

    def _next(self, at_ns: int, client: int) -> Arrival:
        key = self._key_of(client, self._sent[client])
        self._sent[client] += 1
        return Arrival(at_ns, key=key, client=client)

    def _think(self) -> int:
        return int(self._random.expovariate(1) * self._think_ns)
