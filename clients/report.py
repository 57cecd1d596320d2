"""What came of a call, or of many: a table for people, JSON for programs, an .npz file for numpy.

Lives here: pure formatting, the one writer of a file, and making the same call many times, for a quick look at a
server. Must not live here: options of the command line, servers, or a benchmark's care (arrival processes, warm-up,
percentiles over windows), which is the load generator's work.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, TextIO
from zipfile import ZipFile

import numpy as np

from paceline.clients.casting import Array
from paceline.clients.errors import InferenceError
from paceline.clients.messages import InferResult
from paceline.clients.options import printable

__all__ = [
    "Outcome",
    "Report",
    "outcome_json",
    "outcome_text",
    "progress_line",
    "result_json",
    "result_text",
    "run_repeated",
    "save_npz",
]

Report = Callable[[int, int], None]
"""Told how many calls have ended, and how many nanoseconds that took."""

_REPORT_EVERY_S = 1.0
_PERCENTS = (50, 90, 99)
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


@dataclass(frozen=True, slots=True)
class Outcome:
    """Latencies of the calls that succeeded, in nanoseconds; failures counted by the name of their status."""

    latencies_ns: tuple[int, ...]
    errors: Mapping[str, int]
    elapsed_ns: int

    @property
    def ok(self) -> int:
        return len(self.latencies_ns)

    def per_second(self) -> float:
        """Calls that succeeded per second."""
        return self.ok / (self.elapsed_ns / 1e9)

    def percentile_ms(self, percent: float) -> float:
        """That percentile (0 to 100) of the latencies, in milliseconds; at least one call must have succeeded."""
        return float(np.percentile(self.latencies_ns, percent)) / 1e6


def run_repeated(call: Callable[[], object], report: Report, *, repeat: int, concurrency: int) -> Outcome:
    """Makes the call `repeat` times, at most `concurrency` at once: as one ends, the next begins. Calls `report` every
    second, and at the end.

    InferenceError is counted by status; anything else is raised.
    """

    turns, is_over = iter(range(repeat)), threading.Event()

    def timed() -> int | str:
        started_ns = time.perf_counter_ns()
        try:
            call()
        except InferenceError as error:
            return error.status.name
        return time.perf_counter_ns() - started_ns

    def work(own: list[int | str]) -> None:
        # Turns are taken one by one: a future for each of many millions would fill the memory before the first ends.
        own.extend(timed() for _ in takewhile(lambda _: not is_over.is_set(), turns))

    started_ns = time.perf_counter_ns()
    of_threads: list[list[int | str]] = [[] for _ in range(min(concurrency, repeat))]
    with ThreadPoolExecutor(len(of_threads)) as pool:
        try:
            working = {pool.submit(work, own) for own in of_threads}
            while working:
                ended, working = wait(working, _REPORT_EVERY_S, FIRST_EXCEPTION)
                for thread in ended:
                    thread.result()
                report(sum(map(len, of_threads)), time.perf_counter_ns() - started_ns)
        finally:
            is_over.set()
    outcomes = list(chain.from_iterable(of_threads))
    return Outcome(
        latencies_ns=tuple(outcome for outcome in outcomes if isinstance(outcome, int)),
        errors=Counter(outcome for outcome in outcomes if isinstance(outcome, str)),
        elapsed_ns=time.perf_counter_ns() - started_ns,
    )


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
