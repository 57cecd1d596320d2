"""Offline work: which part of ONNX Runtime's own rows per second a bulk job has.

Lives here: the jobs, the best that could be had, the ratios. Must not: assert. Jobs are whole ones, from Parquet to
Parquet, in processes of their own, with rows of a call, instances and threads as they choose them; their time begins
when units do. The best that could be had: `session.run` and nothing else, with the best of these that was found.

1. `of_best`: rows of a perceptron that takes 100 us or more a row.
2. `of_clean`: one row of a thousand is at fault, which its execution only finds at its end; over all rows being good.
   `most_of_clean`: what nothing that calls `session.run` can exceed, as a call that fails has cost its time; by its
   rows per second at each size, if the row at fault were known then.
3. `texts_of_best`: texts of log-normal lengths with `--sort-by-length` on one thread; over all of them sorted by length
   and cut into batches of the best size.
4. `texts_of_clean`: one of a thousand of them has a token that the model doesn't know; over all of them being good.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
from onnx import TensorProto, helper, numpy_helper

from bench import text_model
from bench.lengths import packed_per_s
from bench.report import Rounds
from bench.sessions import open_session
from bench.steps import run_module
from paceline.server.bulk.job import Job
from paceline.server.bulk.settings import BulkSettings, MaxBad
from paceline.server.bulk.tally import Tally
from paceline.server.tuning import SWITCH_INTERVAL_S, new_loop

__all__ = ["Sizes", "main", "measure"]

_WIDTH = 256
_BATCHES = (16, 32, 64, 128, 256)
_POISON = 1_000
RATIOS = ("of_best", "of_clean", "most_of_clean", "texts_of_best", "texts_of_clean")


class Sizes:
    """How much is done. `given`: settings of the jobs that save the time to find out, where only their end counts."""

    def __init__(self, *, quick: bool) -> None:
        self.hidden = 16 if quick else 1_792
        self.encoder = text_model.QUICK if quick else text_model.FULL
        self.most_rows = 2_000 if quick else 2_000_000
        self.texts = 64 if quick else 2_048
        self.given: dict[str, int] = {"batch_rows": 8, "instances": 1} if quick else {}


def write_model(folder: Path, hidden: int) -> Path:
    """A perceptron in `folder`. A row whose `k` isn't 0 or 1 fails once all else is computed."""
    random, sizes = np.random.default_rng(0), [_WIDTH, *[hidden] * 4, 8]
    nodes, constants, x = [], [], "x"
    for layer, (inputs, outputs) in enumerate(pairwise(sizes)):
        weights = random.standard_normal((inputs, outputs), np.float32) / np.float32(np.sqrt(inputs))
        constants.append(numpy_helper.from_array(weights, f"w{layer}"))
        nodes += [
            helper.make_node("MatMul", [x, f"w{layer}"], [f"m{layer}"]),
            helper.make_node("Relu", [f"m{layer}"], [f"r{layer}"]),
        ]
        x = f"r{layer}"
    constants += [
        numpy_helper.from_array(np.zeros(1, np.float32), "zero"),
        numpy_helper.from_array(np.array([1], np.int64), "axis"),
        numpy_helper.from_array(np.array([[1.0], [2.0]], np.float32), "table"),
    ]
    nodes += [
        helper.make_node("ReduceMax", [x, "axis"], ["largest"], keepdims=0),
        helper.make_node("Mul", ["largest", "zero"], ["nothing"]),
        helper.make_node("Cast", ["nothing"], ["late"], to=TensorProto.INT64),
        helper.make_node("Add", ["k", "late"], ["index"]),
        helper.make_node("Gather", ["table", "index"], ["factor"]),
        helper.make_node("Mul", [x, "factor"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "perceptron",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", _WIDTH]),
            helper.make_tensor_value_info("k", TensorProto.INT64, ["batch"]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 8])],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    (folder / "perceptron" / "1").mkdir(parents=True)
    onnx.save(model, str(folder / "perceptron" / "1" / "model.onnx"))
    (folder / "perceptron" / "config.pbtxt").write_text(f"max_batch_size: {_BATCHES[-1]} dynamic_batching {{ }}")
    return folder / "perceptron"


def most_of_clean(bare: dict[str, float]) -> float:
    """The largest share of the best of `bare` that is left if calls of rows at fault are made twice."""
    left = [rate / (2 - (1 - 1 / _POISON) ** int(key.split()[-2])) for key, rate in bare.items()]
    return max(left) / max(bare.values())


def bare_rows_per_s(file: Path, seconds: float) -> dict[str, float]:
    """By sessions, threads of each and rows of a batch: rows per second of `session.run` in a loop for each session."""
    cpus, found = os.cpu_count() or 1, {}
    feeds = {"x": np.random.default_rng(0).standard_normal((_BATCHES[-1], _WIDTH), np.float32)}
    feeds["k"] = np.zeros(_BATCHES[-1], np.int64)
    for count in sorted({1, max(1, cpus // 2), cpus}):
        threads = max(1, cpus // count)
        sessions = [open_session(file, threads=threads) for _ in range(count)]
        for rows in _BATCHES:
            batch = {name: array[:rows] for name, array in feeds.items()}
            key = f"{count} x {threads}, {rows} rows"
            found[key] = _looped(sessions, batch, rows, seconds)
    return found


def _looped(sessions: Sequence[Any], batch: dict[str, Any], rows: int, seconds: float) -> float:
    runs, began = [0] * len(sessions), time.perf_counter()

    def loop(number: int) -> None:
        while not runs[number] or time.perf_counter() - began < seconds:
            sessions[number].run(None, batch)
            runs[number] += 1

    threads = [threading.Thread(target=loop, args=(number,)) for number in range(len(sessions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return rows * sum(runs) / (time.perf_counter() - began)


async def _job(settings: BulkSettings) -> dict[str, float]:
    """A job's rows per second, once it has begun to compute, and how many were at fault."""
    tally = Tally()
    job = asyncio.create_task(Job(settings, tally, None).run())
    while not job.done() and tally.doing != "computing":
        await asyncio.sleep(0.005)
    began = time.perf_counter()
    await job
    rows = tally.rows_executed + tally.rows_bad
    return {
        "rows_per_s": rows / (time.perf_counter() - began),
        "rows_per_batch": tally.rows_per_batch or 0.0,
        "bad": tally.rows_bad,
    }


def measure(seconds: float, sizes: Sizes) -> dict[str, Any]:
    """One round of everything. Raises BenchError for a job that fails."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        folder = Path(name)
        model = write_model(folder, sizes.hidden)
        bare = run_module(
            "bulk", "--bare", str(model / "1" / "model.onnx"), "--seconds", str(seconds / 8), timeout_s=600
        )
        best = max(bare.values())
        rows = int(min(best * seconds, sizes.most_rows))
        given = json.dumps(sizes.given)
        found: dict[str, Any] = {"bare": bare}
        for kind, every in (("clean", 0), ("poisoned", _POISON)):
            _write_rows(folder / f"{kind}.parquet", rows, every)
            found[kind] = _timed(folder, kind, model, given)
        file = text_model.write(folder, sizes.encoder)
        lengths = text_model.lengths(sizes.texts)
        text_model.add("encoder", file, folder, pads=True)
        given = json.dumps(sizes.given | {"instances": 1, "sort_by_length": True})
        for kind, every in (("texts", 0), ("poisoned_texts", _POISON)):
            _write_texts(folder / f"{kind}.parquet", lengths, every)
            found[kind] = _timed(folder, kind, folder / "encoder", given)
        found["packed"] = run_module(
            "bulk", "--packed", str(file), "--texts", str(sizes.texts), "--seconds", str(seconds / 8), timeout_s=1_200
        )
    kinds = ("clean", "poisoned", "texts", "poisoned_texts")
    rates = {kind: found[kind]["rows_per_s"] for kind in kinds}
    ratios = (
        rates["clean"] / best,
        rates["poisoned"] / rates["clean"],
        most_of_clean(bare),
        rates["texts"] / max(found["packed"].values()),
        rates["poisoned_texts"] / rates["texts"],
    )
    return found | dict(zip(RATIOS, ratios, strict=True))


def _timed(folder: Path, kind: str, model: Path, given: str) -> dict[str, Any]:
    place = ("--job", str(model), "--rows", str(folder / f"{kind}.parquet"), "--out", str(folder / f"{kind}-out"))
    return run_module("bulk", *place, "--given", given, timeout_s=1_200)


def _write_rows(path: Path, rows: int, every: int) -> None:
    """Rows of the perceptron, of which one in `every` is at fault; 0: none."""
    x = np.random.default_rng(0).standard_normal((rows, _WIDTH), np.float32)
    k = np.zeros(rows, np.int64)
    if every:
        k[:: min(every, rows)] = 7
    columns = {"x": pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), _WIDTH), "k": pa.array(k)}
    pq.write_table(pa.table(columns), path, row_group_size=8_192)


def _write_texts(path: Path, lengths: Sequence[int], every: int) -> None:
    """Of which one in `every` is at fault; 0: none."""
    feeds = [text_model.feeds([size]) for size in lengths]
    for number in range(0, len(feeds), min(every, len(feeds))) if every else ():
        feeds[number][text_model.IDS][0, -1] = 1_000_000
    columns = {name: pa.array([one[name][0].tolist() for one in feeds]) for name in feeds[0]}
    pq.write_table(pa.table(columns), path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.bulk", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="the median is reported (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=16.0, help="of a job, about (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="tiny models: check that everything works")
    alone = parser.add_argument_group("one part, as JSON")
    for name in ("bare", "packed", "job", "rows", "out"):
        alone.add_argument(f"--{name}", type=Path)
    alone.add_argument("--texts", type=int)
    alone.add_argument("--given", type=json.loads, default={})
    got = parser.parse_args(arguments)
    if got.bare or got.packed or got.job:
        print(json.dumps(_part(got)))
        return
    rounds = Rounds()
    for _ in range(got.rounds):
        rounds.add(measure(got.seconds, Sizes(quick=got.quick)))
    print(f"\n{rounds.medians(RATIOS)}", flush=True)


def _part(got: argparse.Namespace) -> dict[Any, float]:
    if got.bare:
        return bare_rows_per_s(got.bare, got.seconds)
    if got.packed:
        return packed_per_s(got.packed, text_model.lengths(got.texts), got.seconds)
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as the command does
    logging.getLogger("paceline.server.inference").setLevel(logging.CRITICAL)
    settings = BulkSettings(str(got.job), (str(got.rows),), got.out, max_bad=MaxBad(share=1.0), **got.given)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(_job(settings))


if __name__ == "__main__":
    main()
