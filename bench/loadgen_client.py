"""One run of MLPerf's LoadGen against a server, in a process of its own, which prints JSON.

Lives here: LoadGen's settings, its samples as calls, checking answers, reading what it logged. Must not: start
servers, choose rates, compare. Each sample is a request of one row. A call that fails completes its sample, too, or
LoadGen would wait for it forever; such samples are counted, and so are answers that aren't the expected ones.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any

import grpc
import numpy as np

from paceline.clients.load.sending import METHOD
from paceline.protos.inference_pb2 import ModelInferResponse
from tests.harness import REPO
from tests.wire import Array

__all__ = ["HOME", "Calls", "difference", "read_log"]

HOME = REPO / ".bench" / "loadgen"
"""Where `make bench-loadgen` puts the module `mlperf_loadgen`."""

_TIMEOUT_S = 60.0
_UNBOUNDED = 1 << 20
_PERCENTILE = 0.99
_QUERIES = 700  # of fewer than 459, LoadGen can't say that 99 % are in time, even if all are; of 700, one may be late
_MOST_S = 30  # for so many; a rate at which that isn't enough is invalid
_MARK = ":::MLLOG "


class Calls:
    """Answers LoadGen's samples by calls, at most `under_way` at a time; `complete` is told each sample that has ended.

    `requests` are ready for the wire, by index of the sample, and `expected` the outputs, a row for each. `problems`
    counts samples without the right answer, by what came instead.
    """

    def __init__(
        self,
        call: Any,
        requests: Sequence[bytes],
        expected: Array,
        tolerance: float,
        under_way: int,
        complete: Any,
    ) -> None:
        self._call, self._requests, self._expected = call, requests, expected
        self._allowed = tolerance * float(np.abs(expected).max())
        self._room = BoundedSemaphore(under_way)
        self._complete = complete
        self.answered = 0
        self.problems: Counter[str] = Counter()

    def issue(self, samples: Sequence[Any]) -> None:
        """Called on LoadGen's thread; answers come on gRPC's."""
        for sample in samples:
            self._room.acquire()
            future = self._call.future(self._requests[sample.index], timeout=_TIMEOUT_S)
            future.add_done_callback(partial(self._answered, sample.id, sample.index))

    def _answered(self, sample_id: int, index: int, future: Any) -> None:
        try:
            if future.code() is not grpc.StatusCode.OK:
                self.problems[f"{future.code().name}: {future.details()}"] += 1
            elif difference(future.result(), self._expected[index]) > self._allowed:
                self.problems["wrong answer"] += 1
            else:
                self.answered += 1
        finally:
            self._room.release()
            self._complete(sample_id)


def difference(answer: bytes, expected: Array) -> float:
    """The largest difference between the output of a serialized ModelInferResponse and `expected`, float32; infinity
    if it has another size, or NaN in it."""
    found = np.frombuffer(b"".join(ModelInferResponse.FromString(answer).raw_output_contents), np.float32)
    if found.shape != expected.shape or np.isnan(found).any():
        return float("inf")
    return float(np.abs(found - expected).max())


def read_log(text: str) -> dict[str, Any]:
    """LoadGen's results, by key, from its detailed log: validity, samples per second, latencies in nanoseconds."""
    entries = (json.loads(line.removeprefix(_MARK)) for line in text.splitlines() if line.startswith(_MARK))
    return {one["key"]: one["value"] for one in entries if one["key"].startswith("result_")}


def _run(loadgen: Any, got: argparse.Namespace, log: Path) -> dict[str, Any]:
    requests = [path.read_bytes() for path in sorted(got.folder.glob("*.request"))]
    settings = loadgen.TestSettings()
    settings.mode = loadgen.TestMode.PerformanceOnly
    settings.min_duration_ms = round(1_000 * got.seconds)
    if got.scenario == "offline":
        settings.scenario = loadgen.TestScenario.Offline
        settings.offline_expected_qps = got.per_s
        settings.min_query_count = 1
    else:
        settings.scenario = loadgen.TestScenario.Server
        settings.server_target_qps = got.per_s
        settings.min_query_count = _QUERIES
        settings.max_duration_ms = max(1_000 * _MOST_S, settings.min_duration_ms)
        settings.server_target_latency_ns = round(1e6 * got.bound_ms)
        settings.server_target_latency_percentile = _PERCENTILE
    logs = loadgen.LogSettings()
    logs.log_output.outdir = str(log)
    logs.log_output.copy_summary_to_stdout = False
    logs.enable_trace = False
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(got.target, options=options) as channel:
        grpc.channel_ready_future(channel).result(_TIMEOUT_S)
        calls = Calls(
            channel.unary_unary(METHOD),
            requests,
            np.load(got.folder / "expected.npy"),
            got.tolerance,
            got.under_way,
            lambda sample_id: loadgen.QuerySamplesComplete([loadgen.QuerySampleResponse(sample_id, 0, 0)]),
        )
        system = loadgen.ConstructSUT(calls.issue, lambda: None)
        library = loadgen.ConstructQSL(len(requests), len(requests), lambda indices: None, lambda indices: None)
        loadgen.StartTestWithLogSettings(system, library, settings, logs)
        loadgen.DestroyQSL(library)
        loadgen.DestroySUT(system)
    found = read_log((log / "mlperf_log_detail.txt").read_text())
    return {**found, "answered": calls.answered, "problems": dict(calls.problems)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.loadgen_client", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="has samples: *.request, and expected.npy with their outputs")
    parser.add_argument("target")
    parser.add_argument("scenario", choices=["offline", "server"])
    parser.add_argument("--per-s", type=float, required=True, help="offline: as expected; server: as is sent")
    parser.add_argument("--seconds", type=float, required=True, help="how long at least")
    parser.add_argument("--bound-ms", type=float, default=100.0, help="server: of the 99th percentile")
    parser.add_argument("--under-way", type=int, default=_UNBOUNDED, help="requests at a time")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="of answers, as a share of the largest value")
    got = parser.parse_args(arguments)
    sys.path.append(str(HOME))
    import mlperf_loadgen  # type: ignore[import-not-found,unused-ignore]

    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as log:
        print(json.dumps(_run(mlperf_loadgen, got, Path(log))), flush=True)


if __name__ == "__main__":
    main()
