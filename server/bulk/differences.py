"""What differs between the job that was begun and the one that is asked for, in words.

Lives here: comparison of plain values. Must not: touch a file, or know which values there are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TypeAlias, cast

__all__ = ["Plain", "differences", "files_differ", "plain"]

Plain: TypeAlias = "bool | int | float | str | Sequence[Plain] | Mapping[str, Plain] | None"

_LONGEST = 60
"""Letters of a value that are shown."""
_NAMED = 3
"""How many files are named of those that differ."""


def plain(values: Mapping[str, Plain]) -> Mapping[str, Plain]:
    """As it comes back from a file: only then can two be compared."""
    return cast(Mapping[str, Plain], json.loads(json.dumps(values)))


def differences(old: Mapping[str, Plain], new: Mapping[str, Plain], within: str = "") -> list[str]:
    """Phrases such as "with batch 32, got 64"."""
    found: list[str] = []
    for key in [*old, *(key for key in new if key not in old)]:
        name = f"{within}{key}"
        before, now = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(now, dict):
            found += differences(before, now, f"{name}.")
        elif key not in old:
            found.append(f"without {name}, got {_shown(now)}")
        elif key not in new:
            found.append(f"with {name} {_shown(before)}, got none")
        elif before != now:
            found.append(f"with {name} {_shown(before)}, got {_shown(now)}")
    return found


def files_differ(old: Sequence[Sequence[str | int]], new: Sequence[Sequence[str | int]]) -> list[str]:
    """The same for input files, each of which is path, bytes, time."""
    if old == new:
        return []
    before, now = ({file[0]: tuple(file[1:]) for file in files} for files in (old, new))
    each = [f"without input {path}" for path in now if path not in before]
    each += [f"with input {path}, which is gone" for path in before if path not in now]
    for path in now:
        if path in before and before[path][0] != now[path][0]:
            each.append(f"with input {path} of {before[path][0]} bytes, got {now[path][0]}")
        elif path in before and before[path] != now[path]:
            each.append(f"before input {path} was changed")
    more = [f"with {len(each) - _NAMED} more inputs that differ"] if len(each) > _NAMED else []
    return [*each[:_NAMED], *more] or ["with its inputs in another order"]


def _shown(value: Plain) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
