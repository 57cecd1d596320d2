"""A job's memory: how much there is, and how large batches, chunks and units are, so that it stays bounded.

Lives here: this arithmetic, from what a probe has measured; what Linux says of memory, and what allocators are told.
Must not: measure, or decide when.

`memory_bytes` is for all that a job holds beyond the loaded model. It is divided among the units that are done at once,
and each holds one chunk, as often as `_COPIES` says: as it was read, as the model's inputs, as its outputs, and as what
is written. Outputs are there once more while those of all calls are joined.
"""

from __future__ import annotations

import ctypes
import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.server.bulk.values import Fixed

__all__ = [
    "Probed",
    "fixed_sizes",
    "give_back_when_freed",
    "memory_left",
    "peak_bytes",
    "resident_bytes",
    "too_large",
    "units_at_once",
]

_COPIES = 4
_MOST_UNITS = 3
"""Units at once: one is read or written while others are computed. More only take memory."""
_UNIT_S = 30.0
"""A unit takes about this long, which is what a job that is killed loses of each."""
_LEAST_UNITS = 24
"""But there are as many of them: one alone is read, computed and written in turn."""
_MOST_UNITS_OF_JOB = 90_000
"""And no more, if that can be helped: names of output files have five digits, and are in order as long as they do."""
_LEAST_BATCHES, _LEAST_SORTED_BATCHES = 16, 64
"""But it has as many batches of each instance, so that what is left at its end is a small part of it."""
_MOST_UNIT_ROWS = 2**18
_CHUNK_BATCHES = 64
_LEAST_CHUNK_ROWS, _MOST_CHUNK_ROWS = 1_024, 2**15


def too_large(what: str, chunk_bytes: int) -> str:
    """Why a row can't be in any chunk. A larger one would need that no other unit is done meanwhile."""
    share = _COPIES * (_MOST_UNITS + 1)
    return f"{what}, more than the {chunk_bytes} that one row may have, a {share}th of --memory"


@dataclass(frozen=True, slots=True)
class Probed:
    """What the first rows have shown: the best number of rows of a batch, how many rows a second that gives, with how
    many instances of how many threads each (0: as configured); how large a row is, as read and as computed; and about
    how many there are."""

    batch_rows: int
    rows_per_s: float
    instances: int
    intra_op_threads: int
    input_row_bytes: float
    output_row_bytes: float
    job_rows: float = math.inf


def fixed_sizes(probed: Probed, memory_bytes: int, unit_rows: int, *, by_length: bool = False) -> Fixed:
    """`unit_rows`: as asked for; 0: as many as take a while. `by_length`: rows of a chunk are sorted, which is worth
    more the more there are."""
    batch = probed.batch_rows
    share_bytes = memory_bytes // (_MOST_UNITS + 1)  # one for what decompressing and allocators take
    row_bytes = _COPIES * max(1.0, probed.input_row_bytes + probed.output_row_bytes) + probed.output_row_bytes
    fitting = int(share_bytes / row_bytes)
    least = batch * max(1, probed.instances) * (_LEAST_SORTED_BATCHES if by_length else _LEAST_BATCHES)
    most = min(_MOST_UNIT_ROWS, probed.rows_per_s * _UNIT_S, probed.job_rows / _LEAST_UNITS)
    if math.isfinite(probed.job_rows):
        least = max(least, min(_MOST_UNIT_ROWS, int(probed.job_rows / _MOST_UNITS_OF_JOB)))
    unit = unit_rows or max(least, int(most))
    wanted = _MOST_CHUNK_ROWS if by_length else max(_LEAST_CHUNK_ROWS, min(_CHUNK_BATCHES * batch, _MOST_CHUNK_ROWS))
    chunk = max(1, min(fitting, wanted, unit))
    if chunk > batch:
        chunk -= chunk % batch  # so that only a file's last batch has fewer rows
    return Fixed(
        unit_rows=unit_rows or unit // chunk * chunk,
        chunk_rows=chunk,
        chunk_bytes=max(1, share_bytes // _COPIES),
        batch_rows=batch,
        intra_op_threads=probed.intra_op_threads,
        instances=probed.instances,
    )


def units_at_once(fixed: Fixed, memory_bytes: int, held_bytes: int = 0) -> int:
    """How many units are done at once, also by a start with less memory than the one that has chosen `fixed`.
    `held_bytes`: of a unit that is read, besides its chunks."""
    decompressing = memory_bytes // (_MOST_UNITS + 1) // held_bytes if held_bytes else _MOST_UNITS
    return max(1, min(_MOST_UNITS, memory_bytes // (fixed.chunk_bytes * _COPIES) - 1, decompressing))


_LIMITS = (
    ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
    ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Of a container's cgroup, as it sees it: versions 2 and 1."""
_MMAP_THRESHOLD, _LARGE_BYTES = -3, 2**19
"""glibc's M_MMAP_THRESHOLD. With half of it, small rows cost a tenth of their speed; with four times as much, they take
40 MiB more."""


def memory_left(root: Path = Path("/")) -> float:
    """Bytes, without swapping, in this machine and container; infinite where nobody says. Source: proc_meminfo(5)."""
    left = math.inf
    with suppress(OSError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                left = int(line.split()[1]) * 1024
    for limit, used in _LIMITS:
        with suppress(OSError, ValueError):  # the other version, or no limit ("max")
            left = min(left, max(0, int((root / limit).read_text()) - int((root / used).read_text())))
    return left


def resident_bytes(root: Path = Path("/")) -> int:
    """Of this process; 0 where nobody says."""
    return _status_bytes("VmRSS", root)


def peak_bytes(root: Path = Path("/")) -> int:
    """The most that this process has had; 0 where nobody says. Not `ru_maxrss`, which is never less than what the
    parent had."""
    return _status_bytes("VmHWM", root)


def _status_bytes(field: str, root: Path) -> int:
    """Source: proc_pid_status(5)."""
    with suppress(OSError):
        for line in (root / "proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return 0


def give_back_when_freed() -> None:
    """For the whole process: arrays of half a MiB and more go back to the kernel as soon as they are freed. By itself,
    glibc takes whatever has the size of the largest that was freed, up to 32 MiB, from the heaps that it keeps for
    threads: a job with large rows then has twice what it uses."""
    if setting := getattr(ctypes.CDLL(None), "mallopt", None):  # glibc's
        setting(_MMAP_THRESHOLD, _LARGE_BYTES)
