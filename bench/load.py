"""The product's load generator for benchmarks: requests that are ready for the wire, and the figures that are compared.

Lives here: `closed` and `open_loop`. Must not: send or count, which `clients.load` does, in processes of its own; know
models or build messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from paceline.clients.load.arrivals import Poisson
from paceline.clients.load.extent import FixedTime
from paceline.clients.load.measuring import LoadError, measure
from paceline.clients.load.outcome import Outcome
from paceline.clients.load.tally import merged
from paceline.clients.load.worker import Load

__all__ = ["GENERATOR", "BenchError", "Message", "closed", "open_loop"]

GENERATOR = "paceline load"
Message = bytes | Path
"""A serialized ModelInferRequest, or a file with one."""

_DEADLINE_S = 60.0
_LEAST, _MOST_S = 10, 60.0
"""A short time may have no answer, if the machine stands still for a moment: it goes on until so many have come."""
_IN_OVERLOAD = {"DEADLINE_EXCEEDED", "NOT_SENT", "RESOURCE_EXHAUSTED"}
_FULL = "UNAVAILABLE"  # refusals of some servers; expected as long as they answer other requests


class BenchError(Exception):
    """A measurement failed, so there is nothing to report."""


def closed(
    target: str,
    requests: Sequence[Message],
    clients: int,
    seconds: float,
    warmup_s: float = 0.5,
    *,
    processes: int = 1,
    connections: int = 1,
    stream: bool = False,
    steps: int | tuple[int, int] | None = None,
    look: Callable[[], Any] = lambda: None,
    meanwhile: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """What `clients` in all, who send `requests` in turn, get out of a server; with `steps`, sequences of so many,
    or of so many at least and at most.

    `before` and `after` are what `look` returned at the ends of the measured time; `meanwhile` is called when it
    begins, if there is a warm-up. Raises BenchError if an answer is an error.
    """
    calls = count()

    def looked() -> Any:
        seen = look()
        if next(calls) == 1:
            meanwhile()
        return seen

    load = Load(
        target,
        _read(requests),
        _DEADLINE_S,
        clients=clients,
        connections=connections,
        is_stream=stream,
        steps=(steps, steps) if isinstance(steps, int) else steps,
    )
    found = _told(load, seconds, warmup_s, processes, looked)
    if found["errors"]:
        raise BenchError(f"{found['ok']} answers, errors {found['errors']}")
    return found


def open_loop(
    target: str,
    requests: Sequence[Message],
    per_s: float,
    deadline_s: float,
    seconds: float,
    warmup_s: float,
    *,
    processes: int = 1,
    seed: int = 0,
    stream: bool = False,
    look: Callable[[], Any] = lambda: None,
) -> dict[str, Any]:
    """What becomes of `requests` that are sent in turn at random, `per_s` a second on average, whether or not answers
    come. Requests that are late or refused for lack of room are part of that, even if all are. Raises BenchError if
    there were other errors, or nothing was sent."""
    load = Load(target, _read(requests), deadline_s, arrivals=Poisson(per_s, seed), is_stream=stream)
    found = _told(load, seconds, warmup_s, processes, look)
    expected = _IN_OVERLOAD | {_FULL} if found["ok"] else _IN_OVERLOAD
    if not found["offered"] or found["errors"].keys() - expected:
        raise BenchError(f"{found['offered']} sent, {found['ok']} answered, errors {found['errors']}")
    return found


def _told(load: Load, seconds: float, warmup_s: float, processes: int, look: Callable[[], Any]) -> dict[str, Any]:
    extent = FixedTime(warmup_s, seconds, _LEAST, math.ceil(_MOST_S / seconds))
    try:
        measured = measure(load, extent, look, processes=processes)
    except LoadError as error:
        raise BenchError(f"{GENERATOR}: {error}") from None
    outcome = Outcome(measured, None, processes, load.arrivals is not None)
    total = outcome.total
    refused = total.errors.get("RESOURCE_EXHAUSTED", merged(()).latencies)
    times = {f"p{percent}_ms": _ms(outcome.value(f"p{percent}")) for percent in (50, 90, 99)}
    return {
        "ok": total.latencies.count,
        "answers": total.answered,
        "tokens": total.tokens,
        "offered": total.due,
        "errors": {status: one.count for status, one in total.errors.items()},
        "requests_per_s": total.answered / measured.seconds,
        **times,
        # Over streams: to the first answer, and from token to token.
        **{
            f"{name}_p{percent}_ms": _ms(outcome.value(f"{name}.p{percent}"))
            for name in ("first", "token")
            for percent in (50, 90, 99)
        },
        "refused_p50_ms": _ms(refused.percentile_ns(50)),
        "refused_p99_ms": _ms(refused.percentile_ns(99)),
        "lag_p99_ms": _ms(outcome.value("lag.p99")),
        "cores": outcome.cores,
        "before": measured.before,
        "after": measured.after,
    }


def _ms(ns: float | None) -> float | None:
    return None if ns is None else ns / 1e6


def _read(requests: Sequence[Message]) -> tuple[bytes, ...]:
    return tuple(one if isinstance(one, bytes) else one.read_bytes() for one in requests)
