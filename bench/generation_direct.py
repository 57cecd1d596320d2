"""Generations without a server: batches stepped by `session.run` alone, whose keys and values stay where the session
left them.

Lives here: the loop over a batch, and what it makes of many. Must not: anything of the server. Prompts are padded on
the left, and all rows are stepped until the longest answer is there: a static batch. With rows of equal lengths, none
waits or is padded.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped,unused-ignore]

from bench.generation_requests import Wanted
from tests.wire import Array

__all__ = ["answers", "main", "open_session", "tokens_per_s"]


def open_session(file: Path, threads: int) -> ort.InferenceSession:
    """`threads`: 0 for as many as cores."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    return ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.generation_direct", description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path, help="a decoder")
    parser.add_argument("batches", type=Path, help="JSON: batches of pairs, of a prompt and the length of its answer")
    parser.add_argument("--seconds", type=float, default=10.0, help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of the session, 0 for as many as cores")
    got = parser.parse_args(arguments)
    batches = [[Wanted(*pair) for pair in batch] for batch in json.loads(got.batches.read_text())]
    print(json.dumps({"tokens_per_s": tokens_per_s(open_session(got.file, got.threads), batches, got.seconds)}))


if __name__ == "__main__":
    main()
