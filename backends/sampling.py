"""Choosing the next token of each of many rows from their logits.

Lives here: the formulas, over all rows at once, and what each row draws from. Must not: know models or requests. The
rule: what a row chooses depends on its own logits, parameters and earlier choices alone, whoever is beside it.

In this order: tokens that the row has seen are penalized (`repetition_penalty` divides positive logits and multiplies
negative ones), and those that it mustn't choose yet are ruled out. With a `temperature` of 0 the largest logit is
chosen, the first of equal ones. Otherwise logits are divided by the temperature, all but the `top_k` largest are ruled
out, softmax makes probabilities of them, of which the largest are kept until they sum up to `top_p`, and one number
from the row's own stream says which is chosen.

Log probabilities are those of the model's own distribution, before any of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple

import numpy as np

from paceline.backends.spec import Array

NONE = -1
"""In place of a token: the row's logits aren't numbers, or rule out everything."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose. `top_k` 0: from all. `seed`: None for another one each time."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int | None = None


class Sampler:
    """What a row chooses by. `not_yet`: tokens that it mustn't choose. `is_plain`: it takes the largest logit."""

    __slots__ = ("_not_yet", "_random", "_seen", "is_plain", "sampling")

    def __init__(self, sampling: Sampling, vocabulary: int, prompt: Array) -> None:
        self.sampling = sampling
        self._random = np.random.Generator(np.random.PCG64(sampling.seed)) if sampling.temperature else None
        self._seen: Array | None = None
        if sampling.repetition_penalty != 1:
            self._seen = np.zeros(vocabulary, np.bool_)
            self._seen[prompt] = True
        self.not_yet = ()

    @property
    def not_yet(self) -> Sequence[int]:
        return self._not_yet

    @not_yet.setter
    def not_yet(self, tokens: Sequence[int]) -> None:
        self._not_yet = tokens
        self.is_plain = self._random is None and self._seen is None and not tokens

    def change(self, logits: Array) -> None:
        if self._seen is not None:
            seen, bounds = logits[self._seen], np.finfo(logits.dtype)
            own_penalty = self.sampling.repetition_penalty
            penalty = logits.dtype.type(min(max(own_penalty, float(bounds.tiny)), float(bounds.max)))
            with np.errstate(over="ignore"):
                penalized = np.where(seen > 0, seen / penalty, seen * penalty)
            # What is a number stays one, however far the penalty is from 1.
            logits[self._seen] = np.where(np.isfinite(seen), penalized.clip(bounds.min, bounds.max), seen)
        if self.not_yet:
            logits[list(self.not_yet)] = -np.inf

    def draw(self) -> float:
        """The next number from 0 up to 1 of its stream."""
        assert self._random is not None
        return float(self._random.random())

    def chosen(self, token: int) -> None:
        if self._seen is not None:
            self._seen[token] = True


# hot path: greedy, 32 rows of 4,096 logits take 45 us
def choose(logits: Array, rows: Sequence[Sampler | None]) -> list[int]:
    """The next token of each of `rows`, whose logits are [rows, vocabulary]; only read. Of None: anything."""
    tokens = _largest(logits)
    others = [(place, row) for place, row in enumerate(rows) if row is not None and not row.is_plain]
    if others:
        own = logits[[place for place, _ in others]]
        for one, (_, row) in zip(own, others, strict=True):
            row.change(one)
        chosen = np.array(_largest(own))
        drawing = [at for at, (_, row) in enumerate(others) if row.sampling.temperature and chosen[at] != NONE]
        if drawing:
            chosen[drawing] = _drawn(own[drawing].astype(np.float64), [others[at][1] for at in drawing])
        for (place, row), token in zip(others, chosen.tolist(), strict=True):
            tokens[place] = token
            row.chosen(token)
    return tokens


def _largest(logits: Array) -> list[int]:
    """The token with the largest logit of each row, the first of equal ones; NONE if that isn't a number."""
    item = logits.item
    # Of a row with NaN, the first of these is found.
    found = logits.argmax(axis=1).tolist()
    return [token if isfinite(item(row, token)) else NONE for row, token in enumerate(found)]


class Logprobs(NamedTuple):
    """The log probability of the token `chosen`, its rank from 1 on, and the `best` tokens with theirs, in order."""

    chosen: float
    rank: int
    best: Sequence[int]
    logprobs: Sequence[float]


def logprobs_of(logits: Array, tokens: Sequence[int], counts: Sequence[int | None]) -> Sequence[Logprobs | None]:
    """Of each row's token, and of so many of the likeliest; None where that isn't wanted, or no token was chosen."""
    found: list[Logprobs | None] = [None] * len(tokens)
    places = [place for place, count in enumerate(counts) if count is not None and tokens[place] != NONE]
    if not places:
        return found
    own = logits[places]
    most = own.max(axis=1, keepdims=True)
    totals = np.log(np.exp(own - most).sum(axis=1, dtype=np.float64, keepdims=True)) + most
    chosen = own[np.arange(len(places)), [tokens[place] for place in places], None]
    ranks = (own > chosen).sum(axis=1) + 1
    of_chosen = chosen - totals
    for row, place in enumerate(places):
        count = min(counts[place] or 0, own.shape[1])
        # By token, then by logit, so that of equal ones the first tokens come first.
        among = np.sort(np.argpartition(own[row], -count)[-count:]) if count else np.empty(0, np.intp)
        best = among[np.argsort(-own[row, among], kind="stable")]
        best = best[np.isfinite(own[row, best])]
        logprobs = own[row, best] - totals[row]
        found[place] = Logprobs(float(of_chosen[row, 0]), int(ranks[row]), best.tolist(), logprobs.tolist())
    return found


def _drawn(logits: Array, rows: Sequence[Sampler]) -> Array:
    """`logits` are written to."""
    logits -= logits.max(axis=1, keepdims=True)  # now, so that no temperature is too small
    with np.errstate(over="ignore"):
        logits /= np.array([[row.sampling.temperature] for row in rows])
    for own, row in zip(logits, rows, strict=True):
        if 0 < (count := row.sampling.top_k) < len(own):
            own[own < np.partition(own, -count)[-count]] = -np.inf
    shares = np.exp(logits)
    shares /= shares.sum(axis=1, keepdims=True)
    for own, row in zip(shares, rows, strict=True):
        if row.sampling.top_p < 1:
            order = np.argsort(-own, kind="stable")
            before = np.cumsum(own[order]) - own[order]
            own[order[before >= row.sampling.top_p]] = 0  # the first is always kept
    sums = shares.cumsum(axis=1)
    drawn = np.array([[row.draw()] for row in rows]) * sums[:, -1:]
    places: Array = (sums <= drawn).sum(axis=1)
    return places
