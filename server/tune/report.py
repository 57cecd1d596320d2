"""What tuning has found, as text and as JSON.

Lives here: words and figures. Must not: compute more than their units.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from paceline.clients.options import one_line
from paceline.server.tune.causes import why
from paceline.server.tune.choosing import Choice, Found, Goal, Tried
from paceline.server.tune.config_file import Change, plain, plain_time

__all__ = ["PREDICTED", "Tuned"]

_NAMES = ("best", "second", "third")
_AS_GOOD = 1.05
"""A difference up to this may be chance."""
_PREDICTED = "Figures are of this machine, and of the server from inside: gRPC and the network come on top."
_TRIED = "Figures are of this machine, which also sends the requests; live ones are of a server, with gRPC."


@dataclass(frozen=True, slots=True)
class Tuned:
    """A model, what was asked for, and what was chosen. `set_back`: what would be met if only one of the changes, by
    its name, weren't made; if that was wanted."""

    model: str
    goal: Goal
    choice: Choice
    changes: Sequence[Change]
    seed: int
    set_back: Mapping[str, Tried] = field(default_factory=dict)

    @property
    def is_met(self) -> bool:
        """Whether the load that was asked for was served as it is to be; without a trial, would be."""
        best, goal = self.choice.best[0], self.goal
        if best.load is None:
            return best.is_met
        return best.holds and (goal.is_most or best.load.load >= goal.load)

    def verdict(self) -> str:
        """Whether the goal can be met, and what follows if not."""
        best, goal = self.choice.best[0], self.goal
        if not self.is_met:
            return self._unmet()
        if goal.is_most:
            found = best.live or best.found
            return f"{self._asked()}: {plain(found.throughput)} requests/s"
        if goal.clients:
            met = f" with p99 {_p99(best.live or best.found)}" if goal.p99_ns else ""
            return f"{self._asked()}: {plain((best.live or best.found).throughput)} requests/s{met}"
        tried = f" (p99 was {_p99(best.live)} when it was tried)" if best.live is not None else ""
        now, said, longer = self.choice.now, f"{self._asked()} is met{tried}", ""
        # Where both were tried, the figures of that stand beside each other.
        was_tried = best.live is not None and now.live is not None
        if best.setting != now.setting and now.p99_ns < best.p99_ns / _AS_GOOD and not was_tried:
            as_now = f"{plain_time(best.p99_ns)} after {plain_time(now.p99_ns)}"
            longer = f". By prediction, p99 is longer than now, {as_now}."
        if best.most < _AS_GOOD * goal.rate:
            return said + longer

        def more(load: float) -> str:
            if goal.recorded is not None:
                return f"{plain(load / goal.rate, 3)} times as fast"
            return f"{plain(load)} requests/s ({load / goal.rate - 1:+.0%})"

        if best.room:
            return f"{said}, and so is {more(best.room)}{longer}"
        if best.too_much:
            should = f"though {more(best.most)} should be by prediction"
            return f"{said}; {more(best.too_much)} wasn't when tried, {should}{longer}"
        return f"{said}, and would be up to {more(best.most)} by prediction, which wasn't tried{longer}"

    def reason(self) -> str:
        """What decided against what is served now; nothing if that stays."""
        best, goal, now = self.choice.best[0], self.goal, self.choice.now
        if best.setting == now.setting:
            return ""
        if now.failure:
            return "what is served now couldn't be tried"
        mine, theirs, tried = best.live, now.live, ""
        if mine is not None and theirs is not None and best.load is not None and now.load is not None:
            tried = f"p99 was {_p99(mine)} when tried, {_p99(theirs)} as it is now"
            if not best.holds:
                return tried
            if not now.holds and best.load.load >= now.load.load:
                return f"what is served now didn't serve {_load(now.load)} as asked for when tried (p99 {_p99(theirs)})"
            by_throughput = not goal.rate or goal.is_most or not best.is_met
            if now.holds and by_throughput and mine.throughput > theirs.throughput:
                answered = plain(mine.throughput), plain(theirs.throughput)
                return "{} requests/s were answered when tried, {} as it is now".format(*answered)
            mine_ns, theirs_ns = (live.latencies.percentile_ns(99) or 0 for live in (mine, theirs))
            if now.holds and not by_throughput and not goal.p99_ns and mine_ns < theirs_ns:
                return tried
        if best.is_met and not now.is_met and not now.holds:
            return "by prediction, what is served now wouldn't serve the load as asked for"
        if best.most > now.most and (goal.p99_ns or not best.is_met):
            as_now = f", up to {_load(goal.at(now.most))} as it is now" if now.most else ""
            return f"by prediction, up to {_load(goal.at(best.most))} would be served as asked for{as_now}"
        if not goal.rate and best.is_met:
            answered = plain(best.found.throughput), plain(now.found.throughput)
            return "by prediction, {} requests/s are answered, {} as it is now".format(*answered)
        if best.p99_ns < now.p99_ns:
            return f"by prediction, p99 is {_p99(best.found)}, {_p99(now.found)} as it is now"
        return tried or "it is best by prediction"

    def _unmet(self) -> str:
        best = self.choice.best[0]
        if best.is_met and best.live is not None:
            expected = f"should be met by prediction, with p99 {_p99(best.found)}, but wasn't when it was tried."
            said = [f"{self._asked()} {expected}", self._highest()]
        else:
            found = f": with the best setting, p99 is {_p99(best.found)} at {plain(best.found.throughput)} requests/s"
            if not best.found.throughput:  # so much too much that none was answered while it came
                found = ""
            said = [f"{self._asked()} can't be met here{found}.", self._highest(), _what_helps(self.choice)]
        return " ".join(one for one in said if one)

    def _highest(self) -> str:
        """The largest load with which the goal is met; nothing if that isn't known."""
        best, goal = self.choice.best[0], self.goal
        if best.load is not None and best.load.load != goal.load:
            p99 = f"when tried (p99 {_p99(best.live)})."
            return f"Up to {_load(best.load)} was met {p99}" if best.holds else f"Nor was {_load(best.load)} {p99}"
        if best.is_met:
            return ""
        if best.most:
            return f"By prediction, up to {_load(goal.at(best.most))} would be met."
        return "With less load it wouldn't, either, by prediction."

    @property
    def named(self) -> dict[str, Tried]:
        """What is served now, the best, and what couldn't be tried of the others, by what they are called."""
        now, best = self.choice.now, self.choice.best
        others = [(f"no. {place}", one) for place, one in enumerate(best[len(_NAMES) :], len(_NAMES) + 1)]
        failed = {name: one for name, one in others if one.failure and one.setting != now.setting}
        return {"now": now, **dict(zip(_NAMES, best, strict=False)), **failed}

    def table(self) -> list[tuple[str, ...]]:
        """A heading, and a row for each of `named`."""
        rows = [_HEADING, *((name, *_row(one)) for name, one in self.named.items())]
        return [row[:PREDICTED] for row in rows] if self.choice.best[0].live is None else rows

    def text(self) -> str:
        """Lines, without an end of the last."""
        choice, rows = self.choice, self.table()
        widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
        table = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
        layout = choice.best[0].setting.layout
        measured = ", ".join(f"{size} rows {plain_time(layout.curve.mean_ns(size))}" for size in layout.curve.sizes)
        changes = [f"  {one.field}: {one.before} -> {one.after}: {one.why}" for one in self.changes]
        return "\n".join(
            [
                f"{self.model}: {self.verdict()}",
                "",
                *table,
                "",
                self.caution(),
                *self.apart(),
                f"Executions with the best layout, all instances busy: {measured}.",
                *([f"to change, as {self.reason()}:", *changes] if changes else ["nothing to change"]),
            ]
        )

    def caution(self) -> str:
        """Where figures come from, and why they may not be what they seem."""
        from_where = _PREDICTED if self.choice.best[0].live is None else _TRIED
        return " ".join([f"{self.choice.tried} settings simulated. {from_where}", *self.doubts()])

    def doubts(self) -> list[str]:
        """A sentence for each of `named` that couldn't be tried, and for what else was not as it should be."""
        failed = {name: one.failure for name, one in self.named.items() if one.failure}
        doubted: dict[str, list[str]] = {}
        for name, one in self.named.items():
            for doubt in one.live.doubts if one.live is not None else ():
                doubted.setdefault(doubt, []).append(name)
        return [
            *(f"{name.capitalize()} couldn't be tried: {one_line(failure)}." for name, failure in failed.items()),
            *(f"When tried, {doubt}: {', '.join(names)}." for doubt, names in doubted.items()),
        ]

    def apart(self) -> list[str]:
        """A sentence for each of `named` whose measurement is far from what was predicted of the same load."""
        found = [(name, self.why(one)) for name, one in self.named.items()]
        return [f"{name.capitalize()}: {said}." for name, said in found if said]

    def why(self, one: Tried) -> str:
        """Why what was measured of `one` is far from what was predicted; nothing if it isn't, or had another load."""
        return why(one) if one.load is not None and one.load.load == self.goal.load else ""

    def as_json(self) -> str:
        """One object."""
        goal = self.goal
        return json.dumps(
            {
                "model": self.model,
                "goal": {
                    "rate": goal.rate or None,
                    "clients": goal.clients or None,
                    "p99_ms": goal.p99_ns / 1e6 or None,
                    "rows": goal.mean_rows,
                    "most": goal.is_most,
                    "recorded": len(goal.recorded.at_ns) if goal.recorded is not None else None,
                },
                "seed": self.seed,
                "met": self.is_met,
                "verdict": self.verdict(),
                "now": self._json(self.choice.now),
                "best": [self._json(one) for one in self.choice.best],
                "tried": self.choice.tried,
                "needs": _needs_json(self.choice),
                "reason": self.reason() or None,
                "changes": [one._asdict() for one in self.changes],
                "set_back": {name: self._json(one) for name, one in self.set_back.items()},
            }
        )

    def _json(self, one: Tried) -> dict[str, object]:
        policy, found, layout = one.setting.policy, one.found, one.setting.layout
        percentiles = {f"p{percent:g}_ms": found.latencies.percentile_ns(percent) for percent in (50, 90, 99, 99.9)}
        return {
            "instances": layout.instances,
            "intra_op_threads": layout.offline.intra_op_threads or None,
            "spins": layout.spins and layout.allow_spinning,
            "max_batch_size": policy.max_batch_rows,
            "max_queue_delay_microseconds": policy.max_queue_delay_ns // 1_000,
            "batch_sizes": policy.batch_sizes,
            "gpus": layout.gpus,
            "prepared": layout.prepared,
            "met": one.is_met,
            "requests_per_s": found.throughput,
            "most": one.most or None,
            "most_tried": one.room or None,
            "too_much_tried": one.too_much or None,
            **{name: None if ns is None else ns / 1e6 for name, ns in percentiles.items()},
            "refused": found.refused,
            "busy": found.busy,
            "batches": {str(rows): number for rows, number in found.batches.items()},
            "measured_ms": {str(size): layout.curve.mean_ns(size) / 1e6 for size in layout.curve.sizes},
            "costs": [
                {
                    "requests_per_batch": cost.requests,
                    "server_us": cost.loop_ns / 1e3,
                    "sender_us": cost.sender_ns / 1e3,
                    "waits": cost.waits,
                    "slowdown": cost.slowdown,
                }
                for cost in layout.costs
            ],
            "failure": one.failure or None,
            "live": _live_json(one, self.why(one)),
        }

    def _asked(self) -> str:
        goal = self.goal
        load = "as much as possible" if goal.is_most else _load(goal)
        if goal.recorded is not None:
            load = f"{len(goal.recorded.at_ns)} recorded arrivals, {plain(goal.rate)} a second,"
        return f"{load} with p99 within {plain_time(goal.p99_ns)}" if goal.p99_ns else load


_HEADING = (
    *("", "instances", "threads", "max batch", "delay us", "requests/s", "p50", "p99", "rows/batch", "busy"),
    *("live: load", "requests/s", "p50", "p99"),
)
PREDICTED: Final = _HEADING.index("live: load")
"""So many columns of `Tuned.table` have settings and predictions, the others what was tried."""


def _row(one: Tried) -> tuple[str, ...]:
    policy, found, layout, live = one.setting.policy, one.found, one.setting.layout, one.live
    return (
        str(layout.instances),
        str(layout.offline.intra_op_threads or "-"),
        str(policy.max_batch_rows),
        str(policy.max_queue_delay_ns // 1_000),
        f"{plain(found.throughput)}",
        plain_time(found.latencies.percentile_ns(50) or 0),
        _p99(found),
        f"{found.rows_per_batch:.3g}",
        f"{found.busy:.0%}",
        f"{plain(one.load.load)}" if one.load is not None else "-",
        *(
            (f"{plain(live.throughput)}", plain_time(live.latencies.percentile_ns(50) or 0), _p99(live))
            if live
            else ("-",) * 3
        ),
    )


def _what_helps(choice: Choice) -> str:
    if (needs := choice.needs) is None:
        return ""
    on_gpus = choice.best[0].setting.layout.gpus > 0
    devices, faster = ("GPUs", "model or a faster GPU") if on_gpus else ("CPUs", "model, a faster CPU or a GPU")
    if not needs.devices and not needs.speed:
        return f"Neither more {devices} nor a faster model would do: requests take too long besides their executions."
    ways = []
    if needs.devices:
        ways.append(f"about {needs.devices:g} times the {devices}")
    if needs.speed:
        ways.append(f"executions that are {needs.speed:g} times as fast: a smaller {faster}")
    return f"It takes {', or '.join(ways)}." + ("" if needs.devices else f" More {devices} alone wouldn't do.")


def _needs_json(choice: Choice) -> dict[str, float] | None:
    if choice.needs is None:
        return None
    return {"gpus" if choice.best[0].setting.layout.gpus else "cpus": choice.needs.devices, "speed": choice.needs.speed}


def _live_json(one: Tried, why: str) -> dict[str, object] | None:
    live, load = one.live, one.load
    if live is None or load is None:
        return None
    return {
        "rate": load.rate or None,
        "clients": load.clients or None,
        "met": one.holds,
        "requests_per_s": live.throughput,
        **{f"p{percent:g}_ms": (live.latencies.percentile_ns(percent) or 0) / 1e6 for percent in (50, 90, 99, 99.9)},
        "refused": live.refused,
        "not_sent": live.not_sent,
        "rows_per_batch": live.rows_per_batch,
        "doubts": list(live.doubts),
        "apart": why or None,
    }


def _load(goal: Goal) -> str:
    if not goal.rate:
        return f"{goal.clients} client{'s' * (goal.clients > 1)}"
    return f"{plain(goal.rate)} requests/s"


def _p99(found: Found | None) -> str:
    p99_ns = found.latencies.percentile_ns(99) if found is not None else None
    return "-" if p99_ns is None else plain_time(p99_ns)
