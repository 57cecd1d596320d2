"""Results in print: a table for people, JSON for programs, an .npz file for numpy.

Lives here: pure formatting, and the one writer of a file. Must not live here: options of the command line, servers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO
from zipfile import ZipFile

import numpy as np

from paceline.clients.casting import Array
from paceline.clients.messages import InferResult
from paceline.clients.printable import printable
from paceline.clients.repeat import Outcome, Report

__all__ = ["outcome_json", "outcome_text", "progress_line", "result_json", "result_text", "save_npz"]


_FEW_VALUES = 32


def result_text(result: InferResult, *, most_values: int = _FEW_VALUES) -> str:
    """Name, datatype, shape and values of each output; of one with more than `most_values`, a few lines: those at the
    beginning and the end, as rows of the last dimension."""
    heading = " ".join(filter(None, (result.model_name, result.model_version and f"version {result.model_version}")))
    lines = [heading]
    if result.id:
        lines.append(f"id {result.id}")
    lines += [f"{name} = {value}" for name, value in result.parameters.items()]
    lines = list(map(printable, lines))
    for name, array in result.outputs.items():
        lines.append(printable(f"{name}  {result.datatypes[name]}  {list(array.shape)}"))
        if array.size > most_values and array.ndim > 2:
            array = array.reshape(-1, array.shape[-1])
        lines.append(np.array2string(_readable(array), threshold=most_values))  # text as its repr
    return "\n".join(lines)


def result_json(result: InferResult) -> str:
    """The answer in the form of the v2 REST protocol, with flat data.

    BYTES become text, with backslash escapes for bytes that aren't UTF-8; NaN and the infinities become strings.
    """
    document = {
        "model_name": result.model_name,
        "model_version": result.model_version,
        "id": result.id,
        "parameters": result.parameters,
        "outputs": [
            {
                "name": name,
                "datatype": result.datatypes[name],
                "shape": list(array.shape),
                "data": [_json_value(item) for item in _readable(array).ravel().tolist()],
            }
            for name, array in result.outputs.items()
        ],
    }
    return json.dumps(document, allow_nan=False)


def _readable(array: Array) -> Array:
    if array.dtype.kind != "O":
        return array
    texts = (item.decode("utf-8", "backslashreplace") for item in array.flat)
    return np.fromiter(texts, np.dtype(object), array.size).reshape(array.shape)


def _json_value(value: Any) -> Any:
    # JSON has no such numbers; these spellings are protobuf's.
    if not isinstance(value, float) or math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def outcome_text(outcome: Outcome) -> str:
    """One line: how many calls succeeded, how many failed and how, how fast."""
    parts = [f"ok {outcome.ok}", f"errors {sum(outcome.errors.values())}"]
    parts += [f"{status} {count}" for status, count in sorted(outcome.errors.items())]
    parts.append(f"{outcome.per_second():.1f} requests/s")
    parts += [f"p{percent} {outcome.percentile_ms(percent):.3f} ms" for percent in _PERCENTS if outcome.ok]
    return "  ".join(parts)


def outcome_json(outcome: Outcome) -> str:
    """The same as a JSON object; percentiles are there only if a call succeeded."""
    document: dict[str, Any] = {
        "ok": outcome.ok,
        "errors": dict(outcome.errors),
        "requests_per_second": outcome.per_second(),
    }
    document |= {f"p{percent}_ms": outcome.percentile_ms(percent) for percent in _PERCENTS if outcome.ok}
    return json.dumps(document)


@contextmanager
def progress_line(out: TextIO | None, repeat: int) -> Iterator[Report]:
    """Yields what shows the progress of `repeat` calls on the terminal `out`, in a line that is gone at the end. If
    `out` is no terminal, nothing is shown."""

    def write(text: str) -> None:
        if out is not None and out.isatty():
            out.write(f"\r{text}\x1b[K")
            out.flush()

    try:
        yield lambda done, elapsed_ns: write(f"{done} of {repeat}  {done / (elapsed_ns / 1e9):.1f} requests/s")
    finally:
        write("")


_PERCENTS = (50, 90, 99)


def save_npz(path: Path, outputs: Mapping[str, Array]) -> None:
    """Writes the outputs for `numpy.load`, whatever their names; BYTES as numpy's fixed-width byte strings.

    Raises OSError, and ValueError for elements of BYTES that end in NUL, which numpy would cut off.
    """
    storable = {name: _storable(name, array) for name, array in outputs.items()}
    # numpy.savez takes names as keywords, which rules out "file".
    with ZipFile(path, "w") as archive:
        for name, array in storable.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def _storable(name: str, array: Array) -> Array:
    if array.dtype.kind != "O":
        return array
    if any(item.endswith(b"\0") for item in array.flat):
        raise ValueError(f"output {name!r} has elements that end in NUL, which .npz can't hold")
    return array.astype(np.bytes_)
