"""Why a prediction and what was measured are apart.

Lives here: the causes that are known, each with what says of it that it is one. Must not: measure, or predict.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from paceline.server.tune.choosing import Tried
from paceline.server.tune.config_file import plain_time
from paceline.server.tune.costs import costs_at
from paceline.server.tune.live import MUCH_OTHERS, Live

__all__ = ["APART", "why"]

APART: Final = 1.2
"""A prediction that is further off than so many times is explained."""
_BUSY, _NEAR, _FULL, _LATE, _FEW, _UNANSWERED = 0.85, 0.85, 0.9, 0.1, 1_000, 0.01
_LONGER: Final = 1.1
"""What is part of a latency needn't be as far off as all of it is."""

_Check = Callable[[Tried, Live], str]
"""A sentence without its end if that is a cause; else nothing."""


def why(one: Tried) -> str:
    """In one sentence, why what was measured of `one`, with the load that was simulated, is more than `APART` times
    what was predicted, or as much less; nothing if it isn't."""
    live = one.live
    if live is None or not live.latencies.count:
        return ""
    figures = _figures(one, live)
    off = [f"{name} is {ratio:.2f}" for name, ratio in figures.items() if not 1 / APART <= ratio <= APART]
    if not off:
        return ""
    checks = [check for check in _CHECKS if _is_worse(one, live) or check not in _WORSENS]
    found = next((said for check in checks if (said := check(one, live))), _UNKNOWN)
    return f"{' and '.join(off)} times what was predicted: {found}"


def _figures(one: Tried, live: Live) -> dict[str, float]:
    """What was met, over what was predicted."""
    return {
        "p99": (live.latencies.percentile_ns(99) or 0.0) / max(1.0, one.found.latencies.percentile_ns(99) or 0.0),
        "throughput": live.throughput / max(1e-9, one.found.throughput),
    }


def _is_worse(one: Tried, live: Live) -> bool:
    figures = _figures(one, live)
    return figures["p99"] > APART or figures["throughput"] < 1 / APART


_UNKNOWN: Final = "nothing that was measured says why"


def _others(one: Tried, live: Live) -> str:
    if live.others <= MUCH_OTHERS:
        return ""
    return f"other processes, or other machines on this host, had {live.others:.0%} of the processors' time meanwhile"


def _sender(one: Tried, live: Live) -> str:
    if live.not_sent or live.lag_ns > _LATE * (live.latencies.percentile_ns(99) or 0.0):
        return f"requests were sent late, the last 1 % of them by {plain_time(live.lag_ns)} and more"
    busy = live.sender_ns * live.offered / 1e9
    return f"whoever sent the requests was busy for {busy:.0%} of the time" if busy > _BUSY else ""


def _batches(one: Tried, live: Live) -> str:
    predicted, met = one.found.rows_per_batch, live.rows_per_batch
    if not predicted or not met or 1 / APART <= met / predicted <= APART:
        return ""
    return f"batches had {met:.3g} rows, {predicted:.3g} were predicted"


def _executions(one: Tried, live: Live) -> str:
    known = costs_at(one.setting.layout.costs, _requests(live)).slowdown
    if not live.executed_ns or not live.batches:
        return ""
    return _times(_slowdown(one, live) / known, "executions took", _is_worse(one, live))


def _loop(one: Tried, live: Live) -> str:
    known = costs_at(one.setting.layout.costs, _requests(live))
    ratio = live.loop_ns / max(1.0, known.loop_ns)
    return _times(ratio, "a request took the server's event loop", _is_worse(one, live))


def _idle(one: Tried, live: Live) -> str:
    layout = one.setting.layout
    own_ns = sum(number * layout.curve.mean_ns(rows) for rows, number in live.batches.items())
    busy = own_ns * _slowdown(one, live) * (1 - layout.prepared) / (live.seconds * 1e9 * layout.instances)
    # With a rate, so long as all are answered, it's the load that says how long instances have nothing to do.
    if not busy or one.load is None or one.load.rate or busy * _LONGER > one.found.busy:
        return ""
    return f"instances executed for {busy:.0%} of the time instead of {one.found.busy:.0%}, as the rest took longer"


def _saturation(one: Tried, live: Live) -> str:
    load = one.load
    if load is None or not load.rate:
        return ""
    share = load.rate / one.setting.most_per_s(load.mean_rows)
    # Instances that are busy all the time can serve more so long as batches can grow.
    if one.found.rows_per_batch >= _FULL * one.setting.policy.max_batch_rows:
        share = max(share, one.found.busy)
    # By prediction, it can't be served as it comes.
    if 0 < one.found.throughput < load.rate / _LONGER:
        share = max(share, load.rate / one.found.throughput)
    if share < _NEAR:
        return ""
    return f"the load is {share:.2f} of what can be served at most by prediction, and near that, waits differ most"


def _unanswered(one: Tried, live: Live) -> str:
    share = live.refused / (live.refused + live.latencies.count)
    if one.found.refused or share < _UNANSWERED:
        return ""
    return f"{share:.0%} of the requests weren't answered, though all are by prediction"


def _wait(one: Tried, live: Live) -> str:
    delay_ns = one.setting.policy.max_queue_delay_ns
    return f"what a wait of {plain_time(delay_ns)} for more requests does was only simulated" if delay_ns else ""


def _few(one: Tried, live: Live) -> str:
    count = live.latencies.count
    return f"only {count} requests were answered, too few for a 99th percentile" if count < _FEW else ""


def _halves(one: Tried, live: Live) -> str:
    if not live.halves_ns or not min(live.halves_ns):
        return ""
    ratio = max(live.halves_ns) / min(live.halves_ns)
    return f"the p99 of the two halves of the measurement differ by {ratio:.2f} times, too" if ratio > APART else ""


def _tail(one: Tried, live: Live) -> str:
    predicted, met = ((each.latencies.percentile_ns(50) or 0.0) for each in (one.found, live))
    alike = (met / max(1.0, predicted), _figures(one, live)["throughput"])
    if not all(1 / APART <= ratio <= APART for ratio in alike):
        return ""
    return f"the median is {met / predicted:.2f} times what was predicted, and what holds up a few isn't simulated"


def _times(ratio: float, what: str, is_worse: bool) -> str:
    """If what takes longer makes it worse, or what takes less makes it better."""
    if ratio <= _LONGER if is_worse else ratio >= 1 / _LONGER:
        return ""
    return f"{what} {ratio:.2f} times as long as when that was measured before"


def _slowdown(one: Tried, live: Live) -> float:
    """How many times as long executions took as on their own, of a request on average; 0: none is known."""
    curve, rows = one.setting.layout.curve, sum(rows * number for rows, number in live.batches.items())
    own_ns = sum(number * each * curve.mean_ns(each) for each, number in live.batches.items())
    return live.executed_ns * rows / own_ns if own_ns else 0.0


def _requests(live: Live) -> float:
    """Of a batch."""
    return 1 / live.batches_per_request if live.batches_per_request else 1.0


# What disturbs comes first, then what is simulated wrongly, then what can't be known better.
_CHECKS: Final[tuple[_Check, ...]] = (
    _others, _sender, _batches, _executions, _loop, _saturation, _unanswered, _few, _halves, _wait, _idle, _tail
)  # fmt: skip
_WORSENS: Final[frozenset[_Check]] = frozenset((_others, _sender, _idle, _tail))
"""By these, nothing is better than was predicted."""
