"""Which part of a job a process does, as whoever starts it says.

Lives here: reading that. Must not: know which units these are (`plan.py`).

Kubernetes tells each pod of an Indexed Job its number, and not how many there are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

__all__ = ["COMPLETIONS", "INDEX", "parse_shard"]

INDEX = "JOB_COMPLETION_INDEX"
"""Kubernetes sets it in pods of Indexed Jobs: the pod's number, from 0."""
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
