"""By what a job is recognised as the one that was begun, and what differs from that, in words.

Lives here: which facts count, everything that the output depends on; and their comparison, as plain values. Must not:
list input files. The rule: contents of a model's files count, and not where they are or when they were changed, so that
a copy of it continues the job.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from operator import eq
from pathlib import Path
from typing import TypeAlias, cast

import numpy as np

from paceline.server.bulk.models import model_paths
from paceline.server.bulk.settings import BulkSettings
from paceline.server.bulk.values import BulkError, FlagError

__all__ = ["Plain", "differences", "files_differ", "fingerprint"]


def fingerprint(settings: BulkSettings) -> Mapping[str, Plain]:
    """What of the settings the output depends on, as plain values: the same for all starts and shards of a job; with
    the model's contents. Blocks while it reads the model's files. Raises BulkError if they can't be read."""
    if settings.server:
        # Which model a server has may change at any time, so that a job there promises rows, and not their bytes.
        model: Mapping[str, Plain] = {"server's": settings.model}
    else:
        paths = model_paths(Path(settings.model))
        # Of models that a pipeline needs besides, the names of their folders tell which they are.
        model = {f"{path.name}/{name}" if number else name: digest
                 for number, path in enumerate(paths) for name, digest in _digests(path)}  # fmt: skip
    return {
        "model": model,
        "map": dict(settings.columns),
        "keep": list(settings.keep),
        "output": [f"{column}={name}" for column, name in settings.outputs.items()],  # columns are in this order
        "binary": list(settings.binary),
        "parameter": dict(settings.parameters),
        "format": settings.format,
        "batch": settings.batch_rows or "auto",
        "rows-per-part": settings.unit_rows or "auto",
        "sort-by-length": settings.sort_by_length,
    }


def _digests(path: Path) -> Iterator[tuple[str, str]]:
    """A digest of each file of the model: of its folder, or the `.onnx` file and those beside it that begin with its
    name, as its weights' do."""
    if path.is_dir():
        found = [Path(folder, name) for folder, _, names in os.walk(path, followlinks=True) for name in names]
        root = path
    else:
        found = [one for one in path.parent.glob("*") if one.name.startswith(path.name) and one.is_file()]
        root = path.parent
    if not found:
        raise FlagError(f"expected a model's folder or a .onnx file, found nothing at {path}")
    for one in sorted(found):
        if "__pycache__" in one.parts:
            continue
        try:
            with one.open("rb") as file:
                yield str(one.relative_to(root)), hashlib.file_digest(file, "blake2b").hexdigest()[:32]
        except OSError as error:
            raise BulkError(f"{one} can't be read: {error.strerror}") from None


Plain: TypeAlias = "bool | int | float | str | Sequence[Plain] | Mapping[str, Plain] | None"

_LONGEST = 60
"""Letters of a value that are shown."""
_NAMED = 3
"""How many files are named of those that differ."""


def differences(old: Mapping[str, Plain], new: Mapping[str, Plain]) -> list[str]:
    """Phrases such as "with --batch 32, got 64". A value is a flag's, by its name without dashes; that of "model"
    has digests of its files by their names."""
    found: list[str] = []
    # As they come back from a file: only then can two be compared.
    old, new = (cast(Mapping[str, Plain], json.loads(json.dumps(one))) for one in (old, new))
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
