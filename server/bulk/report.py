"""What people are told of a job: before it begins, and once it has ended, however it did; the latter also as JSON.

Lives here: the words, with amounts, times and sizes as people read them; and counting the input for a few seconds, for
those who look before it begins. Must not: what is counted while it runs (tally.py), read rows, compute or write.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import pyarrow as pa

from paceline.clients.description import ModelDescription
from paceline.clients.messages import TensorMetadata
from paceline.server.bulk.memory import peak_bytes
from paceline.server.bulk.settings import BulkSettings
from paceline.server.bulk.tally import Reasons, Tally
from paceline.server.bulk.values import BadRow, Fixed, Source

__all__ = ["Counted", "DryRun", "Outcome", "Summary", "amount", "counted", "duration", "several", "size"]


def amount(number: float) -> str:
    """For people: a decimal where it says something."""
    return f"{number:.1f}" if number < 100 else f"{number:,.0f}"


def duration(seconds: float) -> str:
    """For people: two units at most."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def several(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def size(size_bytes: int) -> str:
    number, unit = float(size_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if number < 1024:
            break
        number, unit = number / 1024, larger
    return f"{number:,.0f} {unit}" if unit == "bytes" or number >= 100 else f"{number:.1f} {unit}"


_LONGEST_NS = 10_000_000_000
_SHOWN_BEFORE = 3


@dataclass(frozen=True, slots=True)
class Counted:
    """Rows and units of all the input, of all shards. `exact` unless they were estimated from some of its files."""

    rows: int
    units: int
    exact: bool


def counted(source: Source, unit_rows: int, now_ns: Callable[[], int]) -> Counted:
    """Looks at file after file, for ten seconds or one file at least; the rest is estimated by its size. Blocks. Raises
    BulkError."""
    until_ns = now_ns() + _LONGEST_NS
    rows = units = seen_bytes = 0
    for place, file in enumerate(source.files):
        if place and now_ns() >= until_ns:
            break
        found = source.index(file, unit_rows).rows
        rows += found
        units += -(-found // unit_rows)
        seen_bytes += file.size_bytes
    else:
        return Counted(rows, units, exact=True)
    times = sum(file.size_bytes for file in source.files) / max(1, seen_bytes)
    return Counted(round(rows * times), round(units * times), exact=False)


@dataclass(frozen=True, slots=True)
class DryRun:
    """Of the first `sample_rows`, so many were tried: `bad` of them are at fault, and `rows_per_s` is how fast others
    were, or 0. `units_before` are finished already."""

    settings: BulkSettings
    source: Source
    description: ModelDescription
    output_schema: pa.Schema
    fixed: Fixed
    counted: Counted
    sample_rows: int
    tried_rows: int
    bad: Sequence[BadRow]
    rows_per_s: float
    units_before: int = 0

    def text(self) -> str:
        """Lines, without an end of the last."""
        settings, fixed = self.settings, self.fixed
        about = "" if self.counted.exact else "about "
        size_bytes = sum(file.size_bytes for file in self.source.files)
        shard, shards = settings.shard
        left = max(0, self.counted.units - self.units_before)
        rows = -(-self.counted.rows * left // (shards * max(1, self.counted.units)))
        instances = several(fixed.instances, "instance") if fixed.instances else "instances as configured"
        took, speed = "unknown, as none of the first could be computed, for ", ""
        if self.rows_per_s:
            took, speed = f"about {duration(rows / self.rows_per_s)} for ", f" at {amount(self.rows_per_s)} rows/s"
        lines = [
            f"model:     {self.description.name}; batches of up to {fixed.batch_rows:,} rows, "
            + (f"by {settings.server}" if settings.server else instances),
            f"input:     {several(len(self.source.files), 'file')}, {size(size_bytes)}, {about}"
            f"{self.counted.rows:,} rows",
            *_table(self._read()),
            f"output:    {about}{several(self.counted.units, 'part')} of up to {fixed.unit_rows:,} rows, "
            f"{settings.output_format}, in {settings.out}"
            + (f"; {self.units_before:,} are finished" if self.units_before else ""),
            *_table((field.name, str(field.type), "") for field in self.output_schema),
            f"memory:    {size(peak_bytes())} until now{'' if settings.server else ', with the model'}; "
            f"up to {size(settings.memory_bytes)} more for rows",
            f"time:      {took}{about}{rows:,} rows{speed}" + (f", as shard {shard} of {shards}" if shards > 1 else ""),
        ]
        if self.bad:
            reasons = Reasons()
            for row in self.bad:
                reasons.add(row.reason)
            some = f", of which {self.tried_rows:,} were tried" if self.tried_rows < self.sample_rows else ""
            lines.append(f"at fault:  {len(self.bad):,} of the first {self.sample_rows:,} rows{some}")
            lines += [f"{count:>12,}  {reason}" for reason, count in reasons.commonest(_SHOWN_BEFORE)]
        return "\n".join(lines)

    def _read(self) -> Iterable[tuple[str, str, str]]:
        """Each column of the input, and what becomes of it."""
        mapped = self.settings.columns
        feeds: dict[str, list[TensorMetadata]] = {}
        for one in self.description.inputs:
            feeds.setdefault(mapped.get(one.name, one.name), []).append(one)
        for field in self.source.schema:
            uses = [f"input {one.name}, {one.datatype} {self._shape(one)}" for one in feeds.get(field.name, ())]
            uses += ["kept"] if field.name in self.settings.keep else []
            yield field.name, str(field.type), "; ".join(uses) or "not read"

    def _shape(self, tensor: TensorMetadata) -> str:
        """A row's."""
        shape = tensor.shape[1:] if self.description.batching is not None else tensor.shape
        return f"[{', '.join('any' if dim < 0 else str(dim) for dim in shape)}]"


def _table(rows: Iterable[tuple[str, str, str]]) -> list[str]:
    cells = list(rows)
    widths = [max((len(row[place]) for row in cells), default=0) for place in range(2)]
    return [f"  {name:<{widths[0]}}  {kind:<{widths[1]}}  {use}".rstrip() for name, kind, use in cells]


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
    settings: BulkSettings
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
            lines.append(f"at fault: {several(rows_bad, 'row')} ({100 * rows_bad / max(1, read):.3g} %{of}{earlier})")
            lines += [f"{count:>12,}  {reason}" for reason, count in tally.reasons.commonest(_SHOWN_REASONS)]
        lines.append(f"in all: {duration(self.elapsed_s)}, {size(self.peak_memory_bytes)} of memory at most")
        out = self.settings.out
        lines.append(f"output: {out}" + (f", rows at fault: {out / '_bad'}" if rows_bad else ""))
        return "\n".join([*lines, *self._next(rows_bad)])

    def as_json(self) -> str:
        """One object: every number, what can't be known as null."""
        tally = self.tally
        reasons = [{"reason": reason, "rows": count} for reason, count in tally.reasons.commonest(_JSON_REASONS)]
        found = {
            "outcome": self.outcome,
            "why": self.why,
            "model": self.settings.model,
            "out": str(self.settings.out),
            "shard": self.settings.shard[0],
            "shards": self.settings.shard[1],
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
        done, is_planned = self.tally.units_before + self.tally.units_done, self.tally.planned_share >= 1
        if self.outcome is Outcome.FAILED and is_planned and done == self.tally.units:
            return []  # why it has failed says what would help
        if self.outcome in (Outcome.STOPPED, Outcome.FAILED):
            of = f" of {self.tally.units:,}" if is_planned else ""
            kept = f"; parts that are finished, {done:,}{of}, won't be computed again" if done else ""
            return [f"next: start it again to go on{kept}"] if done or self.outcome is Outcome.STOPPED else []
        lines = []
        if self.outcome is Outcome.SHARD_FINISHED:
            shard, shards = self.settings.shard
            lines.append(f"next: this was shard {shard} of {shards}; _SUCCESS appears with the last part")
        if rows_bad:
            lines.append("next: see why rows are at fault; --retry-bad does the parts again that have such rows")
        return lines
