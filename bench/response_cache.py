"""What a response cache gains where it finds an answer, and costs where it doesn't.

Lives here: one server with a model twice, with and without a cache, under the same load in turn. Must not: measure
anything else. Of the sides, `plain` and `misses` send requests that differ, more of them than the cache has room for;
`hits` sends one again and again. Ratios are within a round, in which all sides follow each other.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench import models
from bench.load import closed
from bench.stats import ratio
from bench.steps import BenchError
from bench.subjects import cpu_s
from paceline.protos.inference_pb2 import ModelInferRequest
from tests.harness import ServerProcess

__all__ = ["Sample", "measure"]

_CACHE_BYTES = 2**13
"""Room for fewer answers than one client has requests."""
_OWN_BYTES, _MOST_OWN = 2**23, 200
"""There are as many different requests for each client as take that many bytes, up to that many."""
_LEAST_OWN = 2
_FEW = 0.01
_SIDES = ("plain", "hits", "misses")


class Sample(NamedTuple):
    """Requests per second, and microseconds of the server's processor time for each."""

    requests_per_s: float
    cpu_us: float


def measure(name: str, clients: int, rounds: int, seconds: float) -> list[dict[str, Sample]]:
    """What each side reaches, round by round."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        file, repository = models.write(name, folder), folder / "models"
        for side in ("plain", "cached"):
            models.add(name, file, repository)
            (repository / name).rename(repository / side)
        with (repository / "cached" / "config.pbtxt").open("a") as config:
            config.write("response_cache { enable: true }\n")
        loads = _loads(name, clients)
        found: list[dict[str, Sample]] = []
        with ServerProcess(repository, args=[f"--cache-config=local,size={_CACHE_BYTES}"], fresh=True) as server:
            for number in range(rounds):
                order = _SIDES if number % 2 == 0 else _SIDES[::-1]
                each = {side: _sample(server, side, loads[side], clients, seconds) for side in order}
                found.append({side: each[side] for side in _SIDES})
        return found


def _loads(name: str, clients: int) -> Mapping[str, Sequence[bytes]]:
    """What the clients of each side send in turn."""
    shape = models.MODELS[name].shape
    row_bytes = 4 * int(np.prod(shape))
    own = max(_LEAST_OWN, min(_MOST_OWN, _OWN_BYTES // row_bytes))
    rng = np.random.default_rng(0)

    def requests(model: str, count: int) -> list[bytes]:
        made = []
        for _ in range(count):
            message = ModelInferRequest(model_name=model)
            message.inputs.add(name=models.INPUT, datatype="FP32", shape=(1, *shape))
            message.raw_input_contents.append(rng.standard_normal(shape, np.float32).tobytes())
            made.append(message.SerializeToString())
        return made

    count = clients * own
    return {"plain": requests("plain", count), "misses": requests("cached", count), "hits": requests("cached", 1)}


def _sample(server: ServerProcess, side: str, requests: Sequence[bytes], clients: int, seconds: float) -> Sample:
    """Under load; checks that the cache did what the side is about."""
    before = _counted(server)
    told = closed(server.target, requests, clients, seconds, look=lambda: cpu_s(server.pid) or 0.0)
    hits, misses = (now - then for now, then in zip(_counted(server), before, strict=True))
    expected = {
        "plain": not hits + misses,
        "hits": hits and misses <= clients,
        "misses": misses and hits <= misses * _FEW,
    }
    if not told["answers"] or not expected[side]:
        raise BenchError(f"{side}: {told['answers']} answers, {hits:g} hits, {misses:g} misses")
    return Sample(told["requests_per_s"], (told["after"] - told["before"]) / told["answers"] * 1e6)


def _counted(server: ServerProcess) -> tuple[float, float]:
    metrics, labels = server.metrics(), '{model="cached",version="1"}'
    return metrics[f"nv_cache_num_hits_per_model{labels}"], metrics[f"nv_cache_num_misses_per_model{labels}"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.response_cache", description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", default=["tiny", "mlp", "image"], help="of bench/models.py")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    got = parser.parse_args(arguments)
    for name in got.models:
        rounds = measure(name, got.clients, got.rounds, got.seconds)
        print(f"{name}, {got.clients} clients; requests/s")
        for side in _SIDES:
            print(f"  {side:6}", *(f"{one[side].requests_per_s:10,.0f}" for one in rounds))
        for side, field in product(_SIDES[1:], Sample._fields):
            ours, plain = ([getattr(one[which], field) for one in rounds] for which in (side, "plain"))
            found = ratio(ours, plain)
            text = f"{found.median:.2f} ({found.low:.2f} to {found.high:.2f})"
            print(f"  {field} of {side} over plain: {text}", flush=True)


if __name__ == "__main__":
    main()
