"""The thread that steps a decoder, without gRPC: its processor time for each row and step, the session's and the rest.

Lives here: 32 callers in a closed loop in this process, for each of whom it makes tokens. Must not: compare. Processor
time, so that it says something on a busy machine, too. The session has one thread, this one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import NamedTuple

import numpy as np

from bench import generation_requests
from bench.generation_requests import Lengths, Wanted
from bench.steps import BenchError
from paceline.backends.base import Device, ModelSource
from paceline.backends.batching import Share
from paceline.backends.onnx.backend import OnnxModel
from paceline.backends.onnx.decoder import decoder_of
from paceline.backends.onnx.decoder_block import Run, StepsModel
from paceline.backends.onnx.options import parse_options
from paceline.backends.open_request import Answer, AnswersOpenly, OpenRequest
from paceline.backends.spec import Array, ModelSpec, Tensors
from paceline.server.tuning import SWITCH_INTERVAL_S
from tests import decoder_models
from tests.decoder_models import FIXED_COST, Decoder

__all__ = ["main", "stepping"]

_REQUESTS = 16  # of each caller, who goes round in them
_WARMUP_S = 2.0
_AT_ONCE = 8
"""As many answers have been sent when the instance is told of them, as by the server."""
_LENGTHS = Lengths()


class _Spent(NamedTuple):
    """So far: processor time of the thread that steps, that of its session, executions and their rows."""

    all_ns: int = 0
    session_ns: int = 0
    executions: int = 0
    rows: int = 0


class _Timed:
    """`StepsModel`: `steps`, and what it has spent, as of the end of its last execution."""

    def __init__(self, steps: StepsModel) -> None:
        self._steps = steps
        self.spent = _Spent()

    def run(self, inputs: Sequence[Array]) -> Tensors:
        return self._timed(self._steps.run, inputs)

    def keeping(self, kept: Sequence[Array]) -> Run:
        run = self._steps.keeping(kept)
        return lambda inputs: self._timed(run, inputs)

    def abandon(self) -> None:
        self._steps.abandon()

    def close(self) -> None:
        self._steps.close()

    def _timed(self, run: Run, inputs: Sequence[Array]) -> Tensors:
        began_ns = time.thread_time_ns()
        outputs = run(inputs)
        now_ns = time.thread_time_ns()
        _, session_ns, executions, rows = self.spent
        self.spent = _Spent(now_ns, session_ns + now_ns - began_ns, executions + 1, rows + len(inputs[0]))
        return outputs


class _Stepped:
    """A model whose executions are timed, those of its last `timed`."""

    def __init__(self, model: OnnxModel) -> None:
        self.spec, self.operators = model.spec, model.operators
        self._model = model
        self.timed: _Timed

    def stepped(self, spec: ModelSpec, device: Device) -> StepsModel:
        self.timed = _Timed(self._model.stepped(spec, device))
        return self.timed

    tried = stepped

    def close(self) -> None:
        self._model.close()


class _Told:
    """What all callers have got."""

    def __init__(self) -> None:
        self.tokens = 0
        self.error: Exception | None = None


class _Asked(OpenRequest):
    """A caller's request. It counts in `told`, and is followed by another one."""

    def __init__(self, wanted: Wanted, told: _Told, ended: Callable[[], None], *, one: bool) -> None:
        super().__init__((np.array(wanted.prompt, np.int64),), (0,), parameters={"max_tokens": wanted.tokens})
        self.takes_one = one
        self.arrived_ns = time.monotonic_ns()
        self._told = told
        self._unsaid = 0
        self._ended = ended

    def on_answer(self, answer: Answer, *, last: bool) -> None:
        if isinstance(answer, Exception):
            self._told.error = answer
            return
        assert answer is not None
        # As the server, which makes no arrays of what answers share.
        self._told.tokens += answer.stop - answer.start if type(answer) is Share else len(answer[0])
        self._unsaid += 1
        if self._unsaid == _AT_ONCE:
            self.sent(_AT_ONCE)
            self._unsaid = 0
        if last:
            self._ended()


def _ask(instance: AnswersOpenly, asked: Sequence[Sequence[Wanted]], told: _Told, *, one: bool) -> Callable[[], None]:
    """Have each caller ask for one after the other, on a thread; what ends that."""
    callers: SimpleQueue[int | None] = SimpleQueue()
    for caller in range(len(asked)):
        callers.put(caller)

    def feed() -> None:
        following = [cycle(own) for own in asked]
        while (caller := callers.get()) is not None:
            request = _Asked(next(following[caller]), told, partial(callers.put, caller), one=one)
            instance.execute_open([request])

    thread = Thread(target=feed)
    thread.start()

    def end() -> None:
        callers.put(None)
        thread.join()

    return end


def stepping(
    decoder: Decoder, seconds: float, *, callers: int = 32, lengths: Lengths = _LENGTHS, one: bool = False
) -> dict[str, float]:
    """Processor time in us for each token: of the session, and of the rest of the thread. Raises BenchError."""
    asked = [generation_requests.drawn(caller, _REQUESTS, lengths, decoder.vocabulary) for caller in range(callers)]
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        path = decoder_models.write(decoder, Path(name)) / "model.onnx"
        source = ModelSource("m", path, parameters={"intra_op_thread_count": "1"})
        device, options = Device(), parse_options(source)
        model = _Stepped(OnnxModel(source, path, options, device, lambda device: None))
        generating = decoder_of(source, model, lambda path: model, device)
        assert generating is not None
        instance = generating.instance(generating.spec, device)
        told = _Told()
        end = _ask(instance, asked, told, one=one)
        time.sleep(min(_WARMUP_S, seconds))
        before, tokens = model.timed.spent, told.tokens
        time.sleep(seconds)
        after, tokens, error = model.timed.spent, told.tokens - tokens, told.error
        end()
        instance.close()
        generating.close()
    if error is not None or not tokens:
        raise BenchError(f"{tokens} tokens, error {error}")
    spent = _Spent(*(now - then for now, then in zip(after, before, strict=True)))
    return {
        "own_us": (spent.all_ns - spent.session_ns) / tokens / 1e3,
        "session_us": spent.session_ns / tokens / 1e3,
        "rows": spent.rows / spent.executions,
        "tokens_per_s_of_thread": 1e9 * tokens / spent.all_ns,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.generations_inside", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--one", action="store_true", help="whole answers instead of one for each token")
    got = parser.parse_args(arguments)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    print(json.dumps(stepping(FIXED_COST, got.seconds, one=got.one)), flush=True)


if __name__ == "__main__":
    main()
