"""What differs between the job that was begun and the one that is asked for, in words.

Lives here: comparison of plain values. Must not: touch a file, or know which values there are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from operator import eq
from typing import TypeAlias, cast

import numpy as np

__all__ = ["Plain", "differences", "files_differ", "plain"]

Plain: TypeAlias = "bool | int | float | str | Sequence[Plain] | Mapping[str, Plain] | None"

_LONGEST = 60
"""Letters of a value that are shown."""
_NAMED = 3
"""How many files are named of those that differ."""


def plain(values: Mapping[str, Plain]) -> Mapping[str, Plain]:
    """As it comes back from a file: only then can two be compared."""
    return cast(Mapping[str, Plain], json.loads(json.dumps(values)))


def differences(old: Mapping[str, Plain], new: Mapping[str, Plain]) -> list[str]:
    """Phrases such as "with --batch 32, got 64". A value is a flag's, by its name without dashes; that of "model"
    has digests of its files by their names."""
    found: list[str] = []
    before, now = _flags(old), _flags(new)
    for name in dict.fromkeys([*before, *now]):
        if name not in before:
            found.append(f"without {name}{_shown(_text(now[name]))}")
        elif name not in now:
            found.append(f"with {name}{_shown(_text(before[name]))}, got none")
        elif (exact := json.dumps(before[name])) != (exact_now := json.dumps(now[name])):
            texts = [_text(before[name]), _text(now[name])]
            if texts[0] == texts[1]:  # of other types
                texts = [exact, exact_now]
            begin = max(0, sum(takewhile(bool, map(eq, *texts))) - _LONGEST // 2)
            found.append(f"with {name}{_shown(texts[0], begin)}, got {_shown(texts[1], begin)}")
    return found + _models_differ(*(cast("Mapping[str, str]", one.get("model", {})) for one in (old, new)))


def _flags(values: Mapping[str, Plain]) -> dict[str, Plain]:
    """Those given, each as what comes before its value, such as "--map x=", and the value."""
    flags: dict[str, Plain] = {}
    for key, value in values.items():
        if key == "model" or value in ("", False, [], None):
            continue
        if isinstance(value, dict):
            flags |= {f"--{key} {name}=": one for name, one in value.items()}
        elif value is True:
            flags[f"--{key}"] = ""
        else:
            flags[f"--{key} "] = value
    return flags


def _models_differ(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    found: list[str] = []
    for name in dict.fromkeys([*old, *new]):
        if old.get(name) == new.get(name):
            continue
        if name == "server's":
            found.append(f"with model {old.get(name, 'here')}, got {new.get(name, 'one here')}")
        elif name not in old:
            found.append(f"without the model's file {name}")
        elif name not in new:
            found.append(f"with the model's file {name}, which is gone")
        else:
            found.append(f"with other contents of the model's file {name}")
    return found


def files_differ(old: Sequence[Sequence[str | int]], new: Sequence[Sequence[str | int]]) -> list[str]:
    """The same for input files, each of which is path, bytes, time."""
    if old == new:
        return []
    before, now = ({file[0]: tuple(file[1:]) for file in files} for files in (old, new))
    each = [f"without input {path}" for path in now if path not in before]
    each += [f"with input {path}, which is gone" for path in before if path not in now]
    for path in now:
        if path in before and before[path] != now[path]:
            (size, changed), (size_now, changed_now) = before[path], now[path]
            same = "; only the time of its last change differs" if size == size_now else ""
            each.append(
                f"with input {path} of {size} bytes, changed at {_time(changed)}, "
                f"got {size_now} bytes, changed at {_time(changed_now)}{same}"
            )
    more = [f"with {len(each) - _NAMED} more inputs that differ"] if len(each) > _NAMED else []
    return [*each[:_NAMED], *more] or ["with its inputs in another order"]


def _time(changed_ns: str | int) -> str:
    return f"{np.datetime64(int(changed_ns), 'ns')}Z"


def _text(value: Plain) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _shown(text: str, begin: int = 0) -> str:
    end = begin + _LONGEST
    return f"{'…' if begin else ''}{text[begin:end]}{'…' if end < len(text) else ''}"
