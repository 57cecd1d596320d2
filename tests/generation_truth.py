"""What a decoder generates, by the plainest means there are: one request at a time, `session.run` for each token.

Lives here: the loop, the choice of a token by the reference formulas in float64, and the comparison with it. Must not:
anything of the server, or more than one request in a run.

A choice, in this order, as in Hugging Face's `transformers`:

1. `repetition_penalty`: the score of each token of prompt and answer is divided by it, or multiplied if below 0.
2. `min_tokens`: before so many tokens, none that ends the answer.
3. `temperature` 0: the highest score, of equals the lowest token. Otherwise scores are divided by it.
4. `top_k`, if not 0: scores below the k-th highest are out.
5. `top_p`: of the others, in ascending order, those are out whose shares sum up to at most 1 - `top_p`; the highest
   stays.
6. A number is drawn from [0, 1), one per token. Along the vocabulary, shares of what is left are summed up; the first
   token whose sum is above the number is chosen.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped,unused-ignore]

from tests.wire import Array

__all__ = ["DTYPES", "TIE", "Asked", "Generation", "NaiveLoop", "choose", "is_same"]

TIE = 1e-4
"""Choices closer than that may go either way where sums are made in another order."""

DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
_END = -1


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request may ask for; by default greedy."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0


@dataclass(slots=True)
class Generation:
    """An answer without the token that ended it. `margins`: how far each choice, that of an ending token as well, was
    from another one; `logprobs`: the logarithms of the shares of its tokens by the model's own scores."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str = "length"
    margins: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class NaiveLoop:
    """A decoder's folder, on one thread."""

    def __init__(self, folder: Path) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        (path,) = folder.glob("*model*.onnx")
        self.session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self._inputs = {one.name: one for one in self.session.get_inputs()}
        self._outputs = [one.name for one in self.session.get_outputs()]
        files = ("config", "generation_config", "genai_config")
        said = {name: json.loads(one.read_text()) for name in files if (one := folder / f"{name}.json").exists()}
        built = said.get("genai_config", {}).get("model", {})
        config, generation = said.get("config", built), said.get("generation_config", built)
        self._size: int | None = built["decoder"]["head_size"] if built else None
        lengths = ("max_position_embeddings", "n_positions", "context_length")
        self.positions: int = next(config[key] for key in lengths if key in config)
        ends = generation.get("eos_token_id", config.get("eos_token_id"))
        self.end_tokens = [ends] if isinstance(ends, int) else list(ends or [])

    @property
    def wants_positions(self) -> bool:
        return "position_ids" in self._inputs

    def empty_past(self, rows: int = 1) -> dict[str, Array]:
        """Keys and values of nothing."""
        return {
            name: np.zeros((rows, one.shape[1], 0, self._size or one.shape[3]), DTYPES[one.type])
            for name, one in self._inputs.items()
            if name.startswith("past_key_values.")
        }

    def step(
        self, ids: Array, past: dict[str, Array], *, mask: Array | None = None, positions: Array | None = None
    ) -> tuple[Array, dict[str, Array]]:
        """The logits of all `ids` [rows, now], and the past after them. By default all of the past and all ids count,
        and positions go on where the past ends."""
        before = next(iter(past.values())).shape[2]
        rows, now = ids.shape
        if mask is None:
            mask = np.ones((rows, before + now), np.int64)
        if positions is None:
            positions = np.broadcast_to(np.arange(before, before + now), ids.shape)
        feeds: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, **past}
        feeds["use_cache_branch"] = np.array([before > 0])
        feeds["seqlens_k"] = (mask.sum(1) - 1).astype(np.int32)
        feeds["total_sequence_length"] = np.array(mask.shape[1], np.int32)
        found = self.session.run(self._outputs, {name: feeds[name] for name in self._inputs})
        outputs = dict(zip(self._outputs, found, strict=True))
        logits = outputs.pop("logits")
        return logits, {name.replace("present", "past_key_values"): one for name, one in outputs.items()}

    def generate(self, prompt: Sequence[int], asked: Asked, draw: Callable[[], float] | None = None) -> Generation:
        """The answer to one request. `draw` gives the number for each token; by default, they are those of
        `numpy.random.default_rng(seed).random()`."""
        draw = draw or np.random.default_rng(asked.seed).random
        found, past, ids = Generation(), self.empty_past(), list(prompt)
        while len(found.tokens) < min(asked.max_tokens, self.positions - len(prompt)):
            logits, past = self.step(np.array([ids], np.int64), past)
            scores = logits[0, -1].astype(np.float64)
            barred = self.end_tokens if len(found.tokens) < asked.min_tokens else []
            token, margin = choose(scores, [*prompt, *found.tokens], barred, asked, draw)
            found.margins.append(margin)
            if token in self.end_tokens:
                found.finish_reason = "stop"
                break
            found.tokens.append(token)
            found.logprobs.append(float(np.log(_shares(scores)[token])))
            ids = [token]
        return found


def choose(
    scores: Array, seen: Sequence[int], barred: Sequence[int], asked: Asked, draw: Callable[[], float]
) -> tuple[int, float]:
    """A token by its scores [vocabulary], float64, and how far the choice was from another: the least of the distances
    between scores, sums and numbers that were compared. `seen`: tokens so far; `barred`: those that can't be chosen."""
    scores = scores.copy()
    said = np.unique(np.asarray(seen, np.int64))
    scores[said] = np.where(
        scores[said] < 0, scores[said] * asked.repetition_penalty, scores[said] / asked.repetition_penalty
    )
    scores[np.asarray(barred, np.int64)] = -np.inf
    if asked.temperature == 0:
        second, first = np.sort(scores)[-2:]
        return int(np.argmax(scores)), float(first - second)
    scores /= asked.temperature
    margins = []
    if 0 < asked.top_k < len(scores):
        ranked = np.sort(scores)[::-1]
        margins.append(ranked[asked.top_k - 1] - ranked[asked.top_k])
        scores[scores < ranked[asked.top_k - 1]] = -np.inf
    if asked.top_p < 1:
        ascending = np.argsort(scores, kind="stable")
        sums = np.cumsum(_shares(scores)[ascending])
        out = sums <= 1 - asked.top_p
        out[-1] = False
        margins.append(np.abs(sums[:-1] - (1 - asked.top_p)).min())
        scores[ascending[out]] = -np.inf
    sums = np.cumsum(_shares(scores))
    drawn = draw() * sums[-1]
    token = int(np.searchsorted(sums, drawn, side="right"))
    margins.append(sums[token] - drawn)
    margins.append(drawn - sums[token - 1] if token and sums[token - 1] else np.inf)
    return token, float(min(margins))


def _shares(scores: Array) -> Array:
    powers = np.exp(scores - scores.max())
    return powers / powers.sum()


def is_same(truth: Generation, tokens: Sequence[int], finish_reason: str, tie: float = TIE) -> bool:
    """Whether an answer is the true one. False if it went another way where the true choice was closer than `tie`;
    raises AssertionError if it did elsewhere."""
    if (truth.tokens, truth.finish_reason) == (list(tokens), finish_reason):
        return True
    true, found = (
        [*answer, *([_END] if reason == "stop" else [])]
        for answer, reason in ((truth.tokens, truth.finish_reason), (tokens, finish_reason))
    )
    at = next((at for at, (one, other) in enumerate(zip(true, found, strict=False)) if one != other), None)
    assert at is not None, f"{len(found)} tokens and {finish_reason}, not {len(true)} and {truth.finish_reason}"
    assert truth.margins[at] < tie, f"token {at} is {found[at]}, not {true[at]}, which led by {truth.margins[at]:.2g}"
    return False
