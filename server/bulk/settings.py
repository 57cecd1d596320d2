"""What a bulk job was asked to do.

Lives here: these settings, and how their texts are read, also which shard Kubernetes says. Must not: flags
(`command.py`), or what is found out later.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.clients.options import ConnectionOptions

__all__ = [
    "COMPLETIONS",
    "INDEX",
    "BulkSettings",
    "MaxBad",
    "Parameters",
    "parse_max_bad",
    "parse_memory",
    "parse_shard",
]

Parameters = Mapping[str, bool | int | float | str]

_UNITS = {
    "": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
    "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40,
}  # fmt: skip
_BYTES = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>|[kmgt]i?)b?", re.IGNORECASE)
_MAX_BAD = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<percent>%?)")
_FIRST_ROWS = 1_000
_LEAST_MEMORY_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class MaxBad:
    """A job ends early once more than `rows` are at fault, or more than `share` of those read so far, of which there
    have to be a thousand first. At its end, all its rows are judged, however few they are."""

    rows: int | None = None
    share: float = 0.01

    def is_exceeded(self, bad: int, read: int, *, are_all: bool = False) -> bool:
        """`are_all`: there are no more rows than those that are read."""
        if self.rows is not None:
            return bad > self.rows
        return (are_all or read >= _FIRST_ROWS) and bad > self.share * read

    def __str__(self) -> str:
        return f"{self.rows:,} rows" if self.rows is not None else f"{100 * self.share:g} %"


@dataclass(frozen=True, slots=True)
class BulkSettings:
    """`model` is a path, or with `server` the name of its model. `columns` says by input which column feeds it,
    `outputs` by column which output it gets; all of them if there are none. `batch_rows`, `instances` and `unit_rows`:
    0 if the job is to find out. `shard` is its number, from 0, and how many there are."""

    model: str
    inputs: tuple[str, ...]
    out: Path
    columns: Mapping[str, str] = field(default_factory=dict)
    keep: tuple[str, ...] = ()
    outputs: Mapping[str, str] = field(default_factory=dict)
    binary: tuple[str, ...] = ()
    parameters: Parameters = field(default_factory=dict)
    format: str = ""
    output_format: str = "parquet"
    batch_rows: int = 0
    instances: int = 0
    unit_rows: int = 0
    memory_bytes: int = 2 * 2**30
    sort_by_length: bool = False
    shard: tuple[int, int] = (0, 1)
    server: str = ""
    access: ConnectionOptions = field(default_factory=ConnectionOptions)
    ray: str = ""
    ray_actors: int = 0
    ray_actor_cpus: int = 0
    ray_actor_gpus: float = 0.0
    fails_on_bad: bool = False
    max_bad: MaxBad = MaxBad()
    retries_bad: bool = False
    resumes: bool = True
    allow_python_models: bool = False
    execution_timeout_s: float = 0.0


def parse_memory(text: str) -> int:
    """Such as "2GiB", "500 MB" or "1048576". Raises ValueError."""
    found = _BYTES.fullmatch(text.strip())
    if found is None or not 1 <= (size := float(found["number"]) * _UNITS[found["unit"].lower()]) < 2**63:
        raise ValueError(f"expected bytes, such as 2GiB or 500MB, got '{text}'")
    if size < _LEAST_MEMORY_BYTES:
        raise ValueError(f"expected 16MiB or more, as files are read and written a MiB at a time, got '{text}'")
    return int(size)


def parse_max_bad(text: str) -> MaxBad:
    """Such as "1%" or "100". Raises ValueError."""
    found = _MAX_BAD.fullmatch(text.strip())
    if found is not None and found["percent"] and float(found["number"]) <= 100:
        return MaxBad(share=float(found["number"]) / 100)
    if found is None or found["percent"] or "." in found["number"]:
        raise ValueError(f"expected a share or a number of rows, such as 1% or 100, got '{text}'")
    return MaxBad(rows=int(found["number"]))


INDEX = "JOB_COMPLETION_INDEX"
"""Kubernetes sets it in pods of Indexed Jobs: the pod's number, from 0. How many there are, it doesn't tell."""
COMPLETIONS = "JOB_COMPLETIONS"
"""Whoever writes the Job sets it: its `completions`."""

_SHARD = re.compile(r"(\d{1,9})/(\d{1,9})", re.ASCII)


def parse_shard(text: str | None, environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """The number of a shard, from 0, and how many there are: of a text such as "2/8", else as the environment says,
    else the only one. Raises ValueError."""
    given = "" if text is None else text.strip()
    if text is None:
        if INDEX not in environment:
            return 0, 1
        if not environment.get(COMPLETIONS):
            raise ValueError(f"{INDEX} is set and {COMPLETIONS} isn't: set it to the Job's completions, or say K/N")
        given = f"{environment[INDEX]}/{environment[COMPLETIONS]}"
    source = f" from {INDEX} and {COMPLETIONS}" if text is None else ""
    found = _SHARD.fullmatch(given)
    if found is None:
        raise ValueError(f"expected K/N, such as 2/8, got '{given}'{source}")
    number, count = int(found[1]), int(found[2])
    if number >= count:
        raise ValueError(f"expected K/N with K from 0 to N - 1, got '{given}'{source}")
    return number, count
