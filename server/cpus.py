"""How many CPUs this process may use: a container's limit, not the machine's number.

Lives here: reading cgroups (versions 1 and 2) and the affinity. Must not: decide what follows from it. The kernel
doesn't tell libraries of a cgroup's limit: they start a thread per core, and the process is then stopped for most of
each period.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Cpus:
    """`count`: how many this process can keep busy, rounded up. `limited_by`: what makes that fewer than the machine
    has; "" if nothing does."""

    count: int
    limited_by: str = ""


@cache
def usable_cpus() -> Cpus:
    """What affinity and cgroups leave of this machine's CPUs, as they were when this was first called."""
    machine = os.cpu_count() or 1
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else machine
    cpus = Cpus(affinity, f"affinity, of {machine}" if affinity < machine else "")
    limit, file = cgroup_limit()
    if limit < cpus.count:
        return Cpus(max(1, math.ceil(limit)), f"limit of {limit:g} in {file}, of {machine}")
    return cpus


def cgroup_limit(root: Path = Path("/")) -> tuple[float, str]:
    """The smallest limit of this process's cgroups and those around them, in CPUs, and the file that sets it; infinite
    if there is none. `root` has `proc` and the file systems that it names."""
    found = (limit for folder in _folders(root) for limit in _limits(folder))
    return min(found, default=(math.inf, ""))


def _limits(folder: Path) -> Iterator[tuple[float, str]]:
    file = folder / "cpu.max"  # version 2
    with suppress(OSError, ValueError, ZeroDivisionError):  # the other version, no limit ("max"), or the outermost
        quota, period = map(int, file.read_text().split())
        yield quota / period, str(file)
    file = folder / "cpu.cfs_quota_us"  # version 1
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = int(file.read_text()), int(file.with_name("cpu.cfs_period_us").read_text())
        yield quota / period if quota > 0 else math.inf, str(file)


def _folders(root: Path) -> Iterator[Path]:
    """Where this process's groups that may limit CPUs are seen, each followed by those around it."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:  # not Linux, or hidden from us
        return
    for group in groups:
        _, controllers, path = group.split(":", 2)
        for mount in mounts:
            before, _, after = mount.partition(" - ")
            kind, _, options = after.split(" ", 2)
            is_its = kind == "cgroup" and {"cpu"} <= {*controllers.split(",")} & {*options.split(",")}
            if is_its or (kind == "cgroup2" and not controllers):
                _, _, _, top, place, *_ = before.split()
                top_folder = root / _unescaped(place).lstrip("/")
                # As seen where the group `top` is mounted; a container may see paths of its host that it can't reach.
                inside = os.path.relpath(path, _unescaped(top))
                folder = top_folder / ("." if inside.startswith("..") else inside)
                yield from (one for one in (folder, *folder.parents) if one.is_relative_to(top_folder))


def _unescaped(text: str) -> str:
    """Spaces are octal in /proc/self/mountinfo: proc(5)."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
