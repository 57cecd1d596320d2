"""Steps of 64 sequences in closed loops without gRPC: from a request's bytes to its outputs, in one process.

Lives here: what this server itself makes of them; between it and `bench.sequences` over streams is gRPC. Must not:
compare.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from bench import sequence_models
from bench.sequence_models import FIXED, VAD, Recurrent
from paceline.backends.registry import backend
from paceline.scheduler.request import Request
from paceline.server.codec.wire_request import RequestReader
from paceline.server.models.layout import model_folder
from paceline.server.models.loader import load_model
from paceline.server.models.served_model import ServedModel
from paceline.server.telemetry.metrics import Metrics
from paceline.server.tuning import SWITCH_INTERVAL_S

__all__ = ["main", "steps_per_s"]

_SEQUENCES = 64
_WARMUP_S = 1.0
_BY_NAME = {model.name: model for model in (VAD, FIXED)}


class _Callers:
    """Sends the next step of each sequence as soon as the one before it is answered."""

    def __init__(self, model: ServedModel, sequences: Sequence[Sequence[bytes]]) -> None:
        self._model = model
        self._sequences = sequences
        self._next = [0] * len(sequences)
        self._read = RequestReader()
        self.answered = 0
        self._open = 0
        self._quiet = asyncio.Event()
        self.stops = False

    def send(self, callers: Sequence[int]) -> None:
        requests = []
        for caller in callers:
            steps = self._sequences[caller]
            message: Any = self._read(steps[self._next[caller] % len(steps)])
            self._next[caller] += 1
            group = self._model.codec.read(message)
            request: Request[Any, Any] = Request(
                group.inputs[0], 1, group.options.key, size_bytes=max(0, group.options.size_bytes), tag=caller
            )
            request.step, request.on_answers = group.steps[0], self._on_answers
            requests.append(request)
        self._open += len(requests)
        assert not any(self._model.batcher.submit(requests))

    def _on_answers(self, requests: list[Request[Any, Any]]) -> None:
        for request in requests:
            request.result()
        self.answered += len(requests)
        self._open -= len(requests)
        if not self.stops:
            self.send([request.tag for request in requests])
        elif not self._open:
            self._quiet.set()

    async def end(self) -> None:
        self.stops = True
        await self._quiet.wait()


async def steps_per_s(model: Recurrent, file: Path, seconds: float, steps: int = 100) -> dict[str, float]:
    """How many steps a second, and how many of them in a batch."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        sequence_models.add(model, file, Path(name))
        (loaded,) = load_model(model_folder(model.name, Path(name) / model.name), backend)
        served = ServedModel(loaded, Metrics())
        served.start()
        sequences = [sequence_models.messages(model, number, steps) for number in range(_SEQUENCES)]
        callers = _Callers(served, sequences)
        callers.send(range(_SEQUENCES))
        await asyncio.sleep(_WARMUP_S)
        before, began_s = callers.answered, time.perf_counter()
        await asyncio.sleep(seconds)
        rate = (callers.answered - before) / (time.perf_counter() - began_s)
        await callers.end()
        rows = served.statistics.rows / served.statistics.execution_count
        await served.stop()
    return {"steps_per_s": rate, "rows_per_batch": rows}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.sequences_inside", description=__doc__.partition("\n")[0])
    parser.add_argument("model", choices=[*_BY_NAME])
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, default=5.0)
    got = parser.parse_args(arguments)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    uvloop.install()
    print(json.dumps(asyncio.run(steps_per_s(_BY_NAME[got.model], got.file, got.seconds))))


if __name__ == "__main__":
    main()
