"""What a file says of arrivals: one line of JSON for each, or for those of a stretch of time; or a server's traces.

Lives here: the format, to read and to write. Must not: files, clocks. A line is
`{"at_s": 12.25, "model": "m", "requests": 40, "seconds": 2, "shapes": {"ids": [1, 37]}}`: so many requests, one if it
doesn't say, within so many seconds from then on; 0 if it doesn't say. When in these they came isn't known, so they are
taken to come at random. Only `at_s` is needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from random import Random
from typing import Any, Final, NamedTuple

from paceline.clients.load.arrivals import Recorded
from paceline.clients.options import printable

_NS: Final = 1_000_000_000
_MOST: Final = 10_000_000
_LONGEST_S: Final = 1e15
"""Of times, which are multiplied later, and have to stay finite."""

Shapes = Mapping[str, tuple[int, ...]]


class RecordError(ValueError):
    """A recording can't be used; the message is one line and names the line of the file."""


class _Arrivals(NamedTuple):
    model: str
    at_s: float
    requests: int = 1
    seconds: float = 0.0
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    line: int = 0


@dataclass(frozen=True, slots=True)
class Recording:
    """What a file says: when requests came, in nanoseconds from the first, and which shapes each had by the place in
    `shapes`, which a line of the file, in `lines`, was the first to have; the shapes of inputs that it doesn't say are
    for the reader to choose."""

    at_ns: tuple[int, ...]
    contents: tuple[int, ...]
    shapes: tuple[Shapes, ...]
    lines: tuple[int, ...]

    @property
    def has_shapes(self) -> bool:
        return any(self.shapes)

    def arrivals(self, speed: float = 1.0) -> Recorded:
        """By shapes, if they were recorded; else requests go round."""
        contents = self.contents if self.has_shapes else tuple(range(len(self.at_ns)))
        return Recorded(self.at_ns, contents, speed)


def recorded_line(model: str, at_s: float, seconds: float, requests: int) -> str:
    """That so many requests for `model` came in the `seconds` from `at_s` on."""
    return json.dumps({"at_s": round(at_s, 6), "seconds": round(seconds, 6), "model": model, "requests": requests})


def read_recording(lines: Iterable[str], model: str = "", seed: int = 0) -> Recording:
    """The arrivals for `model` that `lines` of JSON say, in any order; or those of a file of traces, which is an array.
    Lines that name no model count, too, and if the file names only one, its name doesn't matter. `seed` is for when
    requests came in a stretch of time. Blank lines are skipped. Raises RecordError."""
    numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    first = next(numbered, (0, ""))
    whole = chain((first,), numbered) if first[0] else iter(())
    if first[1].lstrip().startswith("["):
        found = _of_traces("".join(line for _, line in whole))
    else:
        found = [_of_line(number, line) for number, line in whole]
    models = {one.model for one in found} - {""}
    if len(models) > 1:
        found = [one for one in found if one.model in ("", model)]
    requests = sum(one.requests for one in found)
    if not requests:
        if len(models) < 2:
            raise RecordError("--arrivals: no arrivals")
        others = ", ".join(map(printable, sorted(models - {model})))
        none = "0 requests were recorded" if model in models else "no arrivals"
        raise RecordError(f"--arrivals: {none} for model '{model}'; the file has lines for {others}, too")
    if requests > _MOST:
        raise RecordError(f"--arrivals: expected at most {_MOST:,} arrivals, got {requests:,}")
    random = Random(seed)
    each = [(one.at_s + one.seconds * random.random(), one.shapes) for one in found for _ in range(one.requests)]
    each.sort(key=lambda one: one[0])
    first_s, kinds = each[0][0], {shapes: place for place, shapes in enumerate(dict.fromkeys(one[1] for one in each))}
    says = {one.shapes: one.line for one in reversed(found)}
    return Recording(
        tuple(round((at_s - first_s) * _NS) for at_s, _ in each),
        tuple(kinds[shapes] for _, shapes in each),
        tuple(map(dict, kinds)),
        tuple(says[shapes] for shapes in kinds),
    )


def _of_line(number: int, line: str) -> _Arrivals:
    try:
        return _parsed(json.loads(line))._replace(line=number)
    except (ValueError, RecursionError, OverflowError) as error:
        what = str(error) if isinstance(error, RecordError) else "not JSON"
        raise RecordError(f"--arrivals, line {number}: {what}") from None


def _parsed(document: Any) -> _Arrivals:
    at_s: Any = document.get("at_s") if isinstance(document, dict) else None
    if not _is_time(at_s):
        raise RecordError(f'expected an object with the seconds "at_s", from {-_LONGEST_S:g} to {_LONGEST_S:g}')
    shapes, model = document.get("shapes", {}), document.get("model", "")
    if not isinstance(shapes, dict) or not all(map(_is_shape, shapes.values())):
        raise RecordError('expected "shapes" to be lists of sizes, by the names of inputs')
    if not isinstance(model, str):
        raise RecordError('expected "model" to be a name')
    requests, seconds = document.get("requests", 1), document.get("seconds", 0)
    if type(requests) is not int or requests < 0:
        raise RecordError('expected "requests" to be a number from 0 up')
    if not _is_time(seconds) or seconds < 0:
        raise RecordError(f'expected "seconds" to be a number from 0 up, to {_LONGEST_S:g}')
    sorted_shapes = tuple(sorted((name, tuple(shape)) for name, shape in shapes.items()))
    return _Arrivals(model, float(at_s), requests, float(seconds), sorted_shapes)


def _of_traces(text: str) -> list[_Arrivals]:
    """A trace's model and times may stand in entries of their own, which have its id."""
    models, starts_ns = dict[Any, str](), dict[Any, int]()
    try:
        for entry in json.loads(text):
            models[entry["id"]] = str(entry.get("model_name", models.get(entry["id"], "")))
            for one in entry.get("timestamps", ()):
                if one["name"] == "REQUEST_START":
                    starts_ns[entry["id"]] = int(one["ns"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        raise RecordError('--arrivals: expected traces, objects with "id", "model_name" and "timestamps"') from None
    first_ns, last_ns = min(starts_ns.values(), default=0), max(starts_ns.values(), default=0)
    if last_ns - first_ns > _LONGEST_S * _NS:
        most = f"at most {_LONGEST_S:g} seconds from the first REQUEST_START to the last"
        raise RecordError(f"--arrivals: expected traces of {most}")
    return [_Arrivals(models[one], (at_ns - first_ns) / _NS) for one, at_ns in starts_ns.items()]


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LONGEST_S


def _is_shape(shape: object) -> bool:
    return isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
