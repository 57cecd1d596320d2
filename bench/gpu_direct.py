"""The ceiling on a GPU: the model without a server, with bound tensors, in one process.

Lives here: `session.run_with_iobinding` in a loop, for as many seconds as each line of stdin says; prints a line of
JSON each time. Must not: use the product, except to find CUDA's libraries. Tensors stay on the device, or are copied
there from the host's memory and back each time. A run ends when the device has finished: ONNX Runtime waits for it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped,unused-ignore]

from backends.onnx.sessions import prepare_cuda

__all__ = ["open_session"]

_CHANGES = 5
"""Changes of the number of rows, each way, in a measurement."""


def open_session(model: Path, device: str) -> ort.InferenceSession:
    """A session with the product's own options: the convolutions' algorithm by HEURISTIC, one thread."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    providers: list[Any] = ["CPUExecutionProvider"]
    if device == "cuda":
        prepare_cuda()
        providers.insert(0, ("CUDAExecutionProvider", {"cudnn_conv_algo_search": "HEURISTIC", "device_id": "0"}))
    session = ort.InferenceSession(str(model), options, providers=providers, enable_fallback=0)
    if device == "cuda" and "CUDAExecutionProvider" not in session.get_providers():
        sys.exit("onnxruntime couldn't use the GPU")
    return session


def measure(session: ort.InferenceSession, batch: Any, device: str, copies: bool, seconds: float) -> dict[str, float]:
    """Rows per second, and the median time of one run in ms."""
    (taken,), (given,) = session.get_inputs(), session.get_outputs()
    binding = session.io_binding()
    value = ort.OrtValue.ortvalue_from_numpy(batch, device, 0)
    times: list[float] = []
    until = time.perf_counter() + seconds
    began = time.perf_counter()
    while len(times) < 3 or time.perf_counter() < until:
        start = time.perf_counter()
        if copies:
            binding.bind_cpu_input(taken.name, batch)
            binding.bind_output(given.name, "cpu")
        else:
            binding.bind_ortvalue_input(taken.name, value)
            binding.bind_output(given.name, device, 0)
        session.run_with_iobinding(binding)
        times.append(time.perf_counter() - start)
    rows_per_s = len(batch) * len(times) / (time.perf_counter() - began)
    return {"rows_per_s": rows_per_s, "batch_ms": 1e3 * statistics.median(times)}


def after_smaller_ms(session: ort.InferenceSession, batch: Any, device: str) -> float:
    """The median time of a run, in ms, if the run before had half the rows: more, if something is planned anew for each
    shape."""
    (taken,), (given,) = session.get_inputs(), session.get_outputs()
    binding = session.io_binding()
    half, whole = (ort.OrtValue.ortvalue_from_numpy(one, device, 0) for one in (batch[: len(batch) // 2], batch))
    times: list[float] = []
    for _ in range(_CHANGES):
        for value in (half, whole):
            start = time.perf_counter()
            binding.bind_ortvalue_input(taken.name, value)
            binding.bind_output(given.name, device, 0)
            session.run_with_iobinding(binding)
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_direct", description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path, help="an ONNX file with one input and one output")
    parser.add_argument("batch", type=Path, help="a .npy file with the batch")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    got = parser.parse_args(arguments)
    session, batch = open_session(got.model, got.device), np.load(got.batch)
    for copies in (True, False):
        measure(session, batch, got.device, copies, 0)
    print("{}", flush=True)
    for line in sys.stdin:
        seconds = float(line)
        found = {how: measure(session, batch, got.device, how == "copies", seconds) for how in ("bound", "copies")}
        found["bound"]["after_smaller_ms"] = after_smaller_ms(session, batch, got.device)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
