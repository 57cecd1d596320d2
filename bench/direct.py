"""The ceiling: the model without any server, in one process and one thread.

Lives here: `session.run` in a loop; prints one line of JSON, rows per second by rows of a batch. Must not: use the
product.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped,unused-ignore]

from bench.sessions import open_session

__all__ = ["rows_per_s"]


def rows_per_s(session: ort.InferenceSession, rows: int, seconds: float) -> float:
    """How many rows per second batches of `rows` make, over at least `seconds` and two runs. Integers are 0 to 99."""
    tensor, chance = session.get_inputs()[0], np.random.default_rng(0)
    shape = (rows, *tensor.shape[1:])
    is_whole = tensor.type == "tensor(int64)"
    batch = chance.integers(0, 100, shape) if is_whole else chance.standard_normal(shape, np.float32)
    for _ in range(2):
        session.run(None, {tensor.name: batch})
    began, runs = time.perf_counter(), 0
    while runs < 2 or time.perf_counter() - began < seconds:
        session.run(None, {tensor.name: batch})
        runs += 1
    return rows * runs / (time.perf_counter() - began)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.direct", description="Measure session.run on one thread.")
    parser.add_argument("model", type=Path, help="an ONNX file with one input, batch axis first")
    parser.add_argument("rows", nargs="*", type=int, default=[1, 8, 16, 32, 64], help="batch sizes")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each size (default: %(default)s)")
    got = parser.parse_args(arguments)
    session = open_session(got.model)
    print(json.dumps({rows: rows_per_s(session, rows, got.seconds) for rows in got.rows}), flush=True)


if __name__ == "__main__":
    main()
