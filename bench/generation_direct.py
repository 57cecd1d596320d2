"""Generations without a server, stepped by `session.run` alone: batches, or callers that ask for one answer after the
other.

Lives here: the loops, and what they make of many. Must not: anything of the server. Of a batch, prompts are padded on
the left, and all rows are stepped until the longest answer is there: a static batch. With rows of equal lengths, none
waits or is padded. Of callers in a closed loop, the server's `Iterations` say who is stepped with whom, its `Stepping`
does that, and the likeliest token is taken: what continuous batching can reach.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped,unused-ignore]

from bench.generation_requests import Wanted
from bench.sessions import open_session
from paceline.backends.base import Device, DeviceKind, ModelSource
from paceline.backends.cuda.accelerator import accelerator_of
from paceline.backends.errors import ExecutionError
from paceline.backends.onnx.backend import OnnxModel
from paceline.backends.onnx.decoder_block import GONE
from paceline.backends.onnx.decoder_layout import find_layout
from paceline.backends.onnx.options import DecoderSettings, parse_options
from paceline.backends.onnx.stepping import Stepping
from paceline.scheduler.iterations import Iterations, StepCosts
from tests.wire import Array

__all__ = ["Callers", "answers", "in_closed_loop", "main", "open_model", "tokens_per_s"]

_WARMUP_S = 3.0


def answers(session: ort.InferenceSession, batch: Sequence[Wanted]) -> list[list[int]]:
    """The greedy answers to a batch."""
    lengths = np.array([len(one.prompt) for one in batch])
    width, longest = int(lengths.max()), max(one.tokens for one in batch)
    # The mask of the last step: each step sees one place more of it.
    mask = np.ones((len(batch), width + longest), np.int64)
    mask[:, :width] = is_token = np.arange(width) >= (width - lengths)[:, None]
    ids = np.zeros((len(batch), width), np.int64)
    ids[is_token] = np.concatenate([one.prompt for one in batch])
    positions = np.where(is_token, np.cumsum(is_token, axis=1) - 1, 1)
    outputs = [one.name for one in session.get_outputs()]
    past = {
        one.name: _value(np.zeros((len(batch), one.shape[1], 0, one.shape[3]), np.float32))
        for one in session.get_inputs()
        if one.name.startswith("past_key_values.")
    }
    chosen = np.empty((len(batch), longest), np.int64)
    for step in range(longest):
        now = {"input_ids": ids, "attention_mask": mask[:, : width + step], "position_ids": positions}
        feeds = {name: _value(array) for name, array in now.items()} | past
        logits, *present = session.run_with_ort_values(outputs, feeds)
        past = dict(zip((name.replace("present", "past_key_values") for name in outputs[1:]), present, strict=True))
        chosen[:, step] = logits.numpy()[:, -1].argmax(axis=1)
        ids, positions = chosen[:, step : step + 1], (lengths + step)[:, None]
    return [row[: one.tokens].tolist() for row, one in zip(chosen, batch, strict=True)]


def _value(array: Array) -> Any:
    return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))


def tokens_per_s(session: ort.InferenceSession, batches: Sequence[Sequence[Wanted]], seconds: float) -> float:
    """Tokens of answers per second, over whole batches in turn, until the time is over."""
    answers(session, [Wanted(one.prompt, 2) for one in batches[0]])
    tokens, number, began_s = 0, 0, time.perf_counter()
    while not tokens or time.perf_counter() < began_s + seconds:
        tokens += sum(map(len, answers(session, batches[number % len(batches)])))
        number += 1
    return tokens / (time.perf_counter() - began_s)


def open_model(file: Path, device: Device, threads: int) -> OnnxModel:
    """The product's session, which keeps on a device what stays there. Libraries beside the file have operators."""
    parameters, libraries = {"intra_op_thread_count": str(threads)}, tuple(file.parent.glob("*.so"))
    source = ModelSource("decoder", file, parameters=parameters, op_libraries=libraries)
    return OnnxModel(source, file, parse_options(source), device, accelerator_of)


class Callers:
    """Callers in a closed loop, each of which goes round in requests of its own. `answered`: the answers so far, each
    with what was asked for."""

    def __init__(self, model: OnnxModel, device: Device, asked: Sequence[Sequence[Wanted]]) -> None:
        self.answered: list[tuple[Wanted, list[int]]] = []
        self.executions = self.rows = 0
        layout = find_layout(model.spec, model.operators, {})
        assert not isinstance(layout, str), layout
        settings, costs = DecoderSettings(), StepCosts()
        most_tokens = settings.most_cache_bytes // layout.token_bytes
        self._iterations = Iterations(len(asked), most_tokens, settings.prefill_tokens, costs)
        self._stepping = Stepping(model.stepped(layout.executed, device), layout, costs)
        self._following = [cycle(own) for own in asked]
        self._wanted: dict[int, Wanted] = {}
        self._tokens: dict[int, list[int]] = {}
        for caller in range(len(asked)):
            self._ask(caller)

    def _ask(self, caller: int) -> None:
        self._wanted[caller] = wanted = next(self._following[caller])
        self._tokens[caller] = [*wanted.prompt]
        self._iterations.enter(caller, len(wanted.prompt))
        self._stepping.enter(caller, self._tokens[caller])

    def iterate(self) -> int:
        """How many tokens were chosen in one more iteration."""
        iteration, tokens = self._iterations.next(), 0
        for row in iteration.put_out:
            self._stepping.forget(row)
        for more in (*map(dict, iteration.pieces), *(dict.fromkeys(group, 1) for group in iteration.groups)):
            tokens += self._execute(more)
        return tokens

    def _execute(self, more: dict[int, int]) -> int:
        ((_, rows, logits),) = self._stepping.execute(more)
        if isinstance(logits, ExecutionError):
            raise logits
        self.executions, self.rows = self.executions + 1, self.rows + len(more)
        if not self._iterations.computed(more):
            return 0
        going = list[int]()
        for row, token in zip(rows, logits.argmax(axis=1).tolist(), strict=True):
            if row != GONE:
                self._tokens[row].append(token)
                (self._end if self._is_whole(row) else going.append)(row)
        self._iterations.extended(going)
        return len(more)

    def _is_whole(self, row: int) -> bool:
        wanted = self._wanted[row]
        return len(self._tokens[row]) == len(wanted.prompt) + wanted.tokens

    def _end(self, row: int) -> None:
        wanted = self._wanted[row]
        self.answered.append((wanted, self._tokens[row][len(wanted.prompt) :]))
        self._stepping.leave(row)
        self._iterations.leave(row)
        self._ask(row)


def in_closed_loop(callers: Callers, seconds: float) -> dict[str, float]:
    """Tokens of their answers per second, and the mean number of rows of an execution."""
    warm_s = time.perf_counter() + min(_WARMUP_S, seconds)
    while not callers.answered or time.perf_counter() < warm_s:
        callers.iterate()
    executions, rows, tokens, began_s = callers.executions, callers.rows, 0, time.perf_counter()
    while not tokens or time.perf_counter() < began_s + seconds:
        tokens += callers.iterate()
    took_s = time.perf_counter() - began_s
    return {
        "tokens_per_s": tokens / took_s,
        "rows": (callers.rows - rows) / (callers.executions - executions),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.generation_direct", description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path, help="a decoder")
    parser.add_argument("asked", type=Path, help="JSON: batches of pairs, of a prompt and the length of its answer")
    parser.add_argument("--callers", action="store_true", help="what each of several callers asks for, not batches")
    parser.add_argument("--seconds", type=float, default=10.0, help="(default: %(default)s)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of the session, 0 for as many as cores")
    got = parser.parse_args(arguments)
    asked = [[Wanted(*pair) for pair in batch] for batch in json.loads(got.asked.read_text())]
    if got.callers:
        device = Device(DeviceKind.GPU if got.device == "cuda" else DeviceKind.CPU)
        model = open_model(got.file, device, got.threads)
        print(json.dumps(in_closed_loop(Callers(model, device, asked), got.seconds)))
    else:
        session = open_session(got.file, got.device, got.threads)
        print(json.dumps({"tokens_per_s": tokens_per_s(session, asked, got.seconds)}))


if __name__ == "__main__":
    main()
