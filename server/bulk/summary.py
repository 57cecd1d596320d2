"""What a job has done, once it has ended, however it did: for people, and as JSON.

Lives here: the words. Must not: what is counted (tally.py), where it is written to.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from paceline.server.bulk.amounts import amount, duration, several, size
from paceline.server.bulk.tally import Tally

__all__ = ["Outcome", "Summary"]

_SHOWN_REASONS = 5
_JSON_REASONS = 100


class Outcome(StrEnum):
    FINISHED = "finished"
    SHARD_FINISHED = "shard finished"
    """All of this shard's units are, but others' aren't yet."""
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Summary:
    """`why` it was stopped or has failed. `elapsed_s` is the time of this start; `computing_s` that of it in which rows
    were computed: without loading, probing and looking for what is finished. `tally` mustn't change any more."""

    outcome: Outcome
    why: str
    model: str
    out: Path
    shard: tuple[int, int]
    elapsed_s: float
    computing_s: float
    peak_memory_bytes: int
    tally: Tally

    def text(self) -> str:
        """For people: lines, without an end of the last."""
        tally = self.tally
        rows_bad = tally.rows_bad_before + tally.rows_bad
        lines = [f"{self.outcome}: {self.why or self._all_done()}"]
        if tally.rows_computed:
            this_time = [
                f"this time: {several(tally.rows_computed, 'row')} in {duration(self.computing_s)}",
                self._rate(),
            ]
            if tally.rows_per_batch is not None and tally.rows_per_batch > 1:
                this_time.append(f"{amount(tally.rows_per_batch)} rows/batch")
            if tally.filled_elements and tally.padding is not None:
                this_time.append(f"{100 * tally.padding:.1f} % padding")
            lines.append(", ".join(this_time))
        if rows_bad:
            read = tally.rows_before + tally.rows_read
            of = f" of the {read:,} read" if tally.rows_computed < tally.rows_read else ""
            earlier = f", {tally.rows_bad_before:,} of them found earlier" if tally.rows_bad_before else ""
            lines.append(f"at fault: {several(rows_bad, 'row')} ({100 * rows_bad / max(1, read):.2g} %{of}{earlier})")
            lines += [f"{count:>12,}  {reason}" for reason, count in tally.reasons.commonest(_SHOWN_REASONS)]
        lines.append(f"in all: {duration(self.elapsed_s)}, {size(self.peak_memory_bytes)} of memory at most")
        lines.append(f"output: {self.out}" + (f", rows at fault: {self.out / '_bad'}" if rows_bad else ""))
        return "\n".join([*lines, *self._next(rows_bad)])

    def as_json(self) -> str:
        """One object: every number, what can't be known as null."""
        tally = self.tally
        reasons = [{"reason": reason, "rows": count} for reason, count in tally.reasons.commonest(_JSON_REASONS)]
        found = {
            "outcome": self.outcome,
            "why": self.why,
            "model": self.model,
            "out": str(self.out),
            "shard": self.shard[0],
            "shards": self.shard[1],
            "units": tally.units,
            "units_before": tally.units_before,
            "units_done": tally.units_done,
            "rows_before": tally.rows_before,
            "rows_bad_before": tally.rows_bad_before,
            "rows_read": tally.rows_read,
            "rows_computed": tally.rows_computed,
            "rows_written": tally.rows_written,
            "rows_bad": tally.rows_bad,
            "reasons": reasons,
            "executions": tally.executions,
            "rows_per_batch": tally.rows_per_batch,
            "padding": tally.padding,
            "rows_per_s": self._rows_per_s,
            "elapsed_s": self.elapsed_s,
            "computing_s": self.computing_s,
            "peak_memory_bytes": self.peak_memory_bytes,
        }
        return json.dumps(found, indent=2, ensure_ascii=False) + "\n"

    @property
    def _rows_per_s(self) -> float | None:
        rows = self.tally.rows_computed
        return rows / self.computing_s if rows and self.computing_s > 0 else None

    def _rate(self) -> str:
        return f"{amount(self._rows_per_s)} rows/s" if self._rows_per_s is not None else "too short to tell a speed"

    def _all_done(self) -> str:
        tally = self.tally
        rows, parts = tally.rows_before + tally.rows_read, tally.units_before + tally.units_done
        done = f"{several(rows, 'row')} in {several(parts, 'part')}"
        if not tally.units_done and tally.units_before:
            return f"{done}, all of them earlier: there was nothing to do"
        return done

    def _next(self, rows_bad: int) -> list[str]:
        done = self.tally.units_before + self.tally.units_done
        if self.outcome in (Outcome.STOPPED, Outcome.FAILED):
            of = f" of {self.tally.units:,}" if self.tally.planned_share >= 1 else ""
            kept = f"; parts that are finished, {done:,}{of}, won't be computed again" if done else ""
            return [f"next: start it again to go on{kept}"] if done or self.outcome is Outcome.STOPPED else []
        lines = []
        if self.outcome is Outcome.SHARD_FINISHED:
            lines.append(
                f"next: this was shard {self.shard[0]} of {self.shard[1]}; _SUCCESS appears with the last part"
            )
        if rows_bad:
            lines.append("next: see why rows are at fault; --retry-bad does the parts again that have such rows")
        return lines
