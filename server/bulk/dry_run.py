"""What a job would do, and how long it would take: for people who look before it begins.

Lives here: counting the input for a few seconds, and the words. Must not: read rows, compute or write; whoever asks has
tried the model on the first rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from paceline.clients.description import ModelDescription
from paceline.clients.messages import TensorMetadata
from paceline.server.bulk.amounts import amount, duration, several, size
from paceline.server.bulk.memory import peak_bytes
from paceline.server.bulk.settings import BulkSettings
from paceline.server.bulk.tally import Reasons
from paceline.server.bulk.values import BadRow, Fixed, Source

__all__ = ["Counted", "DryRun", "counted"]

_LONGEST_NS = 10_000_000_000
_SHOWN_REASONS = 3


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
    """`sample_rows` were tried: `bad` of them are at fault, and `rows_per_s` is how fast the others were.
    `units_before` are finished already."""

    settings: BulkSettings
    source: Source
    description: ModelDescription
    output_schema: pa.Schema
    fixed: Fixed
    counted: Counted
    sample_rows: int
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
        lines = [
            f"model:     {self.description.name}; batches of up to {fixed.batch_rows:,} rows, "
            + (f"by {settings.server}" if settings.server else several(fixed.instances, "instance")),
            f"input:     {several(len(self.source.files), 'file')}, {size(size_bytes)}, {about}"
            f"{self.counted.rows:,} rows",
            *_table(self._read()),
            f"output:    {about}{several(self.counted.units, 'part')} of up to {fixed.unit_rows:,} rows, "
            f"{settings.output_format}, in {settings.out}"
            + (f"; {self.units_before:,} are finished" if self.units_before else ""),
            *_table((field.name, str(field.type), "") for field in self.output_schema),
            f"memory:    {size(peak_bytes())} until now{'' if settings.server else ', with the model'}; "
            f"up to {size(settings.memory_bytes)} more for rows",
            f"time:      about {duration(rows / self.rows_per_s)} for {about}{rows:,} rows at "
            f"{amount(self.rows_per_s)} rows/s" + (f", as shard {shard} of {shards}" if shards > 1 else ""),
        ]
        if self.bad:
            reasons = Reasons()
            for row in self.bad:
                reasons.add(row.reason)
            lines.append(f"at fault:  {len(self.bad):,} of the first {self.sample_rows:,} rows")
            lines += [f"{count:>12,}  {reason}" for reason, count in reasons.commonest(_SHOWN_REASONS)]
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
