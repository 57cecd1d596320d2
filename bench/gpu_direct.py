"""The ceiling on a GPU: the model without a server, with bound tensors, in one process.

Lives here: `session.run_with_iobinding` in a loop. Must not: use the product. It reads
lines and answers each with a line of JSON: `measure SECONDS` with tensors that stay on the device, and that are copied
there from the host's memory and back each time; `change SECONDS` with batches that follow smaller ones. A run ends when
the device has finished: ONNX Runtime waits for it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped,unused-ignore]

from bench.sessions import open_session

__all__ = ["Bound"]

_RAMP_S = 0.3
"""Not counted before each measurement: a GPU that was idle raises its clocks first."""
_FEWEST = 3
_DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


class Bound:
    """`session` with `batch` and room for its output on `device`, bound once."""

    def __init__(self, session: ort.InferenceSession, batch: Any, device: str) -> None:
        (taken,), (given,) = session.get_inputs(), session.get_outputs()
        self._session, self._batch = session, batch
        self._input = ort.OrtValue.ortvalue_from_numpy(batch, device, 0)
        shape, dtype = [len(batch), *given.shape[1:]], _DTYPES[given.type]
        self._output = ort.OrtValue.ortvalue_from_shape_and_type(shape, dtype, device, 0)
        self._binding = session.io_binding()
        self._binding.bind_ortvalue_input(taken.name, self._input)
        self._binding.bind_ortvalue_output(given.name, self._output)

    def run(self) -> None:
        self._session.run_with_iobinding(self._binding)

    def run_with_copies(self) -> Any:
        """The output, in the host's memory, for the batch as it is there now."""
        self._input.update_inplace(self._batch)
        self.run()
        return self._output.numpy()


def measure(run: Callable[[], Any], rows: int, seconds: float) -> dict[str, float]:
    """Rows per second, and the median time of one run in ms."""
    _times_s(run, min(seconds, _RAMP_S))
    began = time.perf_counter()
    times_s = _times_s(run, seconds)
    rows_per_s = rows * len(times_s) / (time.perf_counter() - began)
    return {"rows_per_s": rows_per_s, "batch_ms": 1e3 * statistics.median(times_s)}


def after_smaller_ms(whole: Bound, half: Bound, seconds: float) -> float:
    """The median time of a run, in ms, if the run before had half the rows: more, if something is planned anew for each
    shape."""
    times_s: list[float] = []
    until = time.perf_counter() + seconds
    while not times_s or time.perf_counter() < until:
        half.run()
        start = time.perf_counter()
        whole.run()
        times_s.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times_s)


def _times_s(run: Callable[[], Any], seconds: float) -> list[float]:
    """What each run took, until `seconds` have passed."""
    times_s: list[float] = []
    until = time.perf_counter() + seconds
    while len(times_s) < _FEWEST or time.perf_counter() < until:
        start = time.perf_counter()
        run()
        times_s.append(time.perf_counter() - start)
    return times_s


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_direct", description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path, help="an ONNX file with one input and one output")
    parser.add_argument("batch", type=Path, help="a .npy file with the batch")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--graphs", action="store_true", help="replay a CUDA graph; batches of other sizes can't run")
    got = parser.parse_args(arguments)
    session, batch = open_session(got.model, got.device, graphs=got.graphs), np.load(got.batch)
    whole = Bound(session, batch, got.device)
    whole.run()
    print("{}", flush=True)
    for line in sys.stdin:
        what, seconds = line.split()
        if what == "change":
            half = Bound(session, batch[: len(batch) // 2], got.device)
            found: dict[str, Any] = {"batch_ms": after_smaller_ms(whole, half, float(seconds))}
        else:
            ways = {"bound": whole.run, "copies": whole.run_with_copies}
            found = {how: measure(run, len(batch), float(seconds)) for how, run in ways.items()}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
