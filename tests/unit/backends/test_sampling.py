"""The next tokens of many rows at once, against the formulas for one row in `tests.generation_truth`."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.backends.sampling import NONE, Sampler, Sampling, choose, logprobs_of
from tests.generation_truth import TIE, Asked
from tests.generation_truth import choose as choose_one

VOCABULARY = 50


@st.composite
def asked(draw: st.DrawFn) -> Asked:
    return Asked(
        temperature=draw(st.sampled_from([0.0, 0.5, 1.0, 3.0])),
        top_k=draw(st.sampled_from([0, 1, 5, 50, 80])),
        top_p=draw(st.sampled_from([0.1, 0.7, 1.0])),
        repetition_penalty=draw(st.sampled_from([0.5, 1.0, 1.7])),
        seed=draw(st.integers(0, 5)),
    )


def sampler(one: Asked, prompt: list[int]) -> Sampler:
    made = Sampling(one.temperature, one.top_k, one.top_p, one.repetition_penalty, one.seed)
    return Sampler(made, VOCABULARY, np.array(prompt))


@settings(deadline=None)
@given(st.lists(asked(), min_size=1, max_size=6), st.integers(0, 1_000))
def test_rows_choose_as_each_does_alone(rows: list[Asked], seed: int) -> None:
    random = np.random.default_rng(seed)
    seen = [random.integers(0, VOCABULARY, 4).tolist() for _ in rows]
    samplers = [sampler(*both) for both in zip(rows, seen, strict=True)]
    draws = [np.random.default_rng(one.seed).random for one in rows]
    for step in range(4):
        logits = (4 * random.standard_normal((len(rows), VOCABULARY))).astype(np.float32)
        given_logits = logits.copy()
        barred = [3] if step < 2 else []
        for one in samplers:
            one.not_yet = barred
        tokens = choose(logits, samplers)
        assert np.array_equal(logits, given_logits)
        for own, token, one, before, draw in zip(logits, tokens, rows, seen, draws, strict=True):
            expected, margin = choose_one(own.astype(np.float64), before, barred, one, draw)
            assert token == expected or margin < TIE
            before.append(token)


@pytest.mark.parametrize("row", [[1, np.nan, 2], [np.inf, 1, 2], [-np.inf] * 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_choose_nothing(row: list[float], temperature: float) -> None:
    good = Sampler(Sampling(), 3, np.array([0]))
    bad = Sampler(Sampling(temperature), 3, np.array([0]))
    assert choose(np.array([[0, 5, 1], row], np.float32), [good, bad]) == [1, NONE]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("penalty", [1e-320, 1e-6, 1e6, 1e300])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_any_penalty_leaves_a_token_to_choose(penalty: float, dtype: type) -> None:
    row = Sampler(Sampling(repetition_penalty=penalty), 5, np.array([0, 1, 2, 3]))
    # A smaller one makes what was seen more likely, if it was likely at all.
    assert choose(np.array([[5, -5, 0, -np.inf, 1]], dtype), [row]) == [0 if penalty < 1 else 4]


def test_smallest_temperature_chooses_the_largest() -> None:
    rows = [Sampler(Sampling(temperature=5e-324, seed=1), 3, np.array([0]))]
    assert choose(np.array([[1e30, -1e30, 9e29]], np.float32), rows) == [0]


def test_logprobs_are_of_the_models_own_distribution() -> None:
    logits = (4 * np.random.default_rng(1).standard_normal((4, VOCABULARY))).astype(np.float32)
    logits[1, :48] = -np.inf
    logits[2, 7] = logits[2, 9] = logits[2].max()  # as likely
    tokens, counts = [3, 49, NONE, 5], [2, 20, 3, None]
    found = logprobs_of(logits, tokens, counts)
    assert found[2:] == [None, None]
    for row, token, count, one in zip(logits.astype(np.float64)[:2], tokens, [2, 2], found, strict=False):
        shares = np.exp(row - row.max())
        truth = np.log(shares[np.flatnonzero(shares)] / shares.sum())
        assert one is not None
        assert one.chosen == pytest.approx(row[token] - row.max() - np.log(shares.sum()))
        assert one.rank == 1 + (row > row[token]).sum()
        assert one.best == np.argsort(-row, kind="stable")[:count].tolist()
        assert one.logprobs == pytest.approx(np.sort(truth)[::-1][:count])
    (equal,) = logprobs_of(logits[2:3], [9], [3])
    assert equal is not None
    assert (equal.best[:2], equal.rank) == ([7, 9], 1)
