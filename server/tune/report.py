"""What tuning has found, as text and as JSON.

Lives here: words and figures. Must not: compute more than their units.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.server.tune.choosing import Choice, Goal, Tried
from paceline.server.tune.config_file import Change

__all__ = ["Tuned"]

_NOT_IN_IT = "Figures are of this machine, and of the server from inside: gRPC and the network come on top."


@dataclass(frozen=True, slots=True)
class Tuned:
    """A model, what was asked for, and what was chosen."""

    model: str
    goal: Goal
    choice: Choice
    changes: Sequence[Change]
    seed: int

    @property
    def is_met(self) -> bool:
        return self.choice.best[0].is_met

    def verdict(self) -> str:
        """Whether the goal can be met, and what follows if not."""
        best, goal = self.choice.best[0], self.goal
        if not best.is_met:
            found = f"at best, p99 is {_ms(best.p99_ns)} at {best.found.throughput:.4g} requests/s"
            return (
                f"{self._asked()} can't be met here: {found}. It takes more or faster CPUs, a GPU, or a smaller model"
            )
        if goal.rate:
            times = best.sustained / goal.rate
            most = f"{best.sustained:.4g} requests/s ({times - 1:+.0%})"
            if goal.recorded is not None:
                most = f"{times:.3g} times as fast"
            return f"{self._asked()} is met, and would be up to {most}"
        return f"{self._asked()}: {best.found.throughput:.4g} requests/s"

    def text(self) -> str:
        """Lines, without an end of the last."""
        choice = self.choice
        rows: list[tuple[str, ...]] = [
            ("", "instances", "threads", "max batch", "delay us", "requests/s", "p50", "p99", "rows/batch", "busy")
        ]
        rows.append(("now", *_row(choice.now)))
        rows += [(name, *_row(one)) for name, one in zip(("best", "second", "third"), choice.best, strict=False)]
        widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
        table = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
        layout = choice.best[0].setting.layout
        measured = ", ".join(f"{size} rows {_ms(layout.curve.mean_ns(size))}" for size in layout.curve.sizes)
        changes = [f"  {one.field}: {one.before} -> {one.after}: {one.why}" for one in self.changes]
        return "\n".join(
            [
                f"{self.model}: {self.verdict()}",
                "",
                *table,
                "",
                f"{choice.tried} settings simulated. {_NOT_IN_IT}",
                f"Executions with the best layout, all instances busy: {measured}.",
                *(["to change:", *changes] if changes else ["nothing to change"]),
            ]
        )

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
                    "recorded": len(goal.recorded.at_ns) if goal.recorded is not None else None,
                },
                "seed": self.seed,
                "met": self.is_met,
                "verdict": self.verdict(),
                "now": _json(self.choice.now),
                "best": [_json(one) for one in self.choice.best],
                "tried": self.choice.tried,
                "changes": [one._asdict() for one in self.changes],
            }
        )

    def _asked(self) -> str:
        goal = self.goal
        load = f"{goal.rate:g} requests/s" if goal.rate else f"{goal.clients} clients"
        if goal.recorded is not None:
            load = f"{len(goal.recorded.at_ns)} recorded arrivals, {goal.rate:.4g} a second,"
        return f"{load} with p99 within {_ms(goal.p99_ns)}" if goal.p99_ns else load


def _row(one: Tried) -> tuple[str, ...]:
    policy, found, layout = one.setting.policy, one.found, one.setting.layout
    return (
        str(layout.instances),
        str(layout.offline.intra_op_threads or "-"),
        str(policy.max_batch_rows),
        str(policy.max_queue_delay_ns // 1_000),
        f"{found.throughput:.4g}",
        _ms(found.latencies.percentile_ns(50) or 0),
        _ms(one.p99_ns),
        f"{found.rows_per_batch:.3g}",
        f"{found.busy:.0%}",
    )


def _json(one: Tried) -> dict[str, object]:
    policy, found, layout = one.setting.policy, one.found, one.setting.layout
    percentiles = {f"p{percent:g}_ms": found.latencies.percentile_ns(percent) for percent in (50, 90, 99, 99.9)}
    return {
        "instances": layout.instances,
        "intra_op_threads": layout.offline.intra_op_threads or None,
        "max_batch_size": policy.max_batch_rows,
        "max_queue_delay_microseconds": policy.max_queue_delay_ns // 1_000,
        "met": one.is_met,
        "requests_per_s": found.throughput,
        "sustained_per_s": one.sustained or None,
        **{name: None if ns is None else ns / 1e6 for name, ns in percentiles.items()},
        "refused": found.refused,
        "busy": found.busy,
        "batches": {str(rows): number for rows, number in found.batches.items()},
        "measured_ms": {str(size): layout.curve.mean_ns(size) / 1e6 for size in layout.curve.sizes},
        "handling_us": layout.handling_ns / 1e3,
    }


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.3g} ms"
