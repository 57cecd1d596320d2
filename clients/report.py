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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, TextIO
from unicodedata import category
from zipfile import ZipFile

import numpy as np

from paceline.clients.casting import Array
from paceline.clients.errors import InferenceError
from paceline.clients.generations import GenerationChunk
from paceline.clients.messages import InferResult
from paceline.clients.options import printable, terminal_line

Report = Callable[[int, int], None]
"""Told how many calls have ended, and how many nanoseconds that took."""

_REPORT_EVERY_S = 1.0
_PERCENTS = (50, 90, 99)
FEW_VALUES = 32


def result_text(result: InferResult, most_values: int) -> str:
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


def generation_text(chunks: Sequence[GenerationChunk]) -> str:
    """The text of these chunks, with a question mark for each control character but tabs and ends of lines."""
    return "".join(
        letter if letter in "\t\n" or category(letter) != "Cc" else "?" for chunk in chunks for letter in chunk.text
    )


def generation_json(chunks: Sequence[GenerationChunk]) -> str:
    """What these chunks say together."""
    document = {
        "text": "".join(chunk.text for chunk in chunks),
        "token_ids": [token for chunk in chunks for token in chunk.token_ids],
        "finish_reason": chunks[-1].finish_reason if chunks else None,
    }
    return json.dumps(document)


def _readable(array: Array) -> Array:
    if array.dtype.kind != "O":
        return array
    texts = (item.decode("utf-8", "backslashreplace") for item in array.flat)
    return np.fromiter(texts, np.dtype(object), array.size).reshape(array.shape)


def _json_value(value: Any) -> Any:
    # JSON has no such numbers; these spellings are protobuf's.
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def save_npz(path: Path, outputs: Mapping[str, Array]) -> None:
    """Writes the outputs for `numpy.load`, whatever their names; BYTES as numpy's fixed-width byte strings.

    Raises OSError, and ValueError for elements of BYTES that end in NUL, which numpy would cut off.
    """
    storable = dict(outputs)
    for name, array in outputs.items():
        if array.dtype.kind == "O":
            if any(item.endswith(b"\0") for item in array.flat):
                raise ValueError(f"output {name!r} has elements that end in NUL, which .npz can't hold")
            storable[name] = array.astype(np.bytes_)
    # numpy.savez takes names as keywords, which rules out "file".
    with ZipFile(path, "w") as archive:
        for name, array in storable.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How many calls succeeded, and how many failed, by the name of their status. `percentiles_ms` are of the latencies
    of those that succeeded, by percent; there are none if no call did."""

    ok: int
    errors: Mapping[str, int]
    ok_per_second: float
    percentiles_ms: Mapping[int, float]


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
    elapsed_s = (time.perf_counter_ns() - started_ns) / 1e9
    outcomes = list(chain.from_iterable(of_threads))
    latencies_ns = [outcome for outcome in outcomes if isinstance(outcome, int)]
    return Outcome(
        ok=len(latencies_ns),
        errors=Counter(outcome for outcome in outcomes if isinstance(outcome, str)),
        ok_per_second=len(latencies_ns) / elapsed_s,
        percentiles_ms={p: float(np.percentile(latencies_ns, p)) / 1e6 for p in _PERCENTS if latencies_ns},
    )


def outcome_text(outcome: Outcome) -> str:
    """One line: how many calls succeeded, how many failed and how, how fast."""
    parts = [f"ok {outcome.ok}", f"errors {sum(outcome.errors.values())}"]
    parts += [f"{status} {count}" for status, count in sorted(outcome.errors.items())]
    parts.append(f"{outcome.ok_per_second:.1f} requests/s")
    parts += [f"p{percent} {latency_ms:.3f} ms" for percent, latency_ms in outcome.percentiles_ms.items()]
    return "  ".join(parts)


def outcome_json(outcome: Outcome) -> str:
    """The same as a JSON object; percentiles are there only if a call succeeded."""
    latencies_ms = {f"p{percent}_ms": latency_ms for percent, latency_ms in outcome.percentiles_ms.items()}
    document = {"ok": outcome.ok, "errors": outcome.errors, "requests_per_second": outcome.ok_per_second}
    return json.dumps(document | latencies_ms)


@contextmanager
def progress_line(out: TextIO | None, repeat: int) -> Iterator[Report]:
    """Yields what shows the progress of `repeat` calls on the terminal `out`."""
    with terminal_line(out) as write:
        yield lambda done, elapsed_ns: write(f"{done} of {repeat}  {done / (elapsed_ns / 1e9):.1f} requests/s")
