"""The naive loop that answers are compared with chooses tokens as its formulas say, and ends where it is to end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests import decoder_models
from tests.decoder_models import TINY
from tests.generation_truth import Asked, Generation, NaiveLoop, choose, is_same

SHARES = np.array([0.1, 0.4, 0.2, 0.3])
SAMPLED = Asked(temperature=1)
PROMPT = [3, 1, 4, 1, 5]


def chosen(asked: Asked, seen: tuple[int, ...] = (), barred: tuple[int, ...] = ()) -> list[int]:
    """The tokens that numbers from 0.05 to 0.95 choose by `SHARES`, each once."""
    drawn = np.arange(0.05, 1, 0.1).tolist()
    scores = np.log(SHARES)
    return [choose(scores, seen, barred, asked, lambda number=number: number)[0] for number in drawn]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (SAMPLED, [0] + [1] * 4 + [2] * 2 + [3] * 3),
        (replace(SAMPLED, top_k=2), [1] * 6 + [3] * 4),
        (replace(SAMPLED, top_k=9), [0] + [1] * 4 + [2] * 2 + [3] * 3),
        (replace(SAMPLED, top_p=0.69), [1] * 6 + [3] * 4),
        (replace(SAMPLED, top_p=0.71), [1] * 4 + [2] * 3 + [3] * 3),
        (replace(SAMPLED, top_p=0), [1] * 10),
        (replace(SAMPLED, temperature=1e-3), [1] * 10),
        (Asked(), [1] * 10),
    ],
)
def test_numbers_choose_tokens_by_their_shares(asked: Asked, expected: list[int]) -> None:
    assert chosen(asked) == expected


def test_tokens_that_were_are_penalised() -> None:
    scores = np.array([2.0, -1.0, 1.5, -1.1])
    asked = Asked(repetition_penalty=2)
    assert choose(scores, [], [], asked, float) == (0, 0.5)
    assert choose(scores, [0, 0], [], asked, float) == (2, 0.5)
    assert choose(scores, [0, 2], [], asked, float) == (0, 0.25)
    assert choose(np.array([-1.0, -1.5]), [0], [], asked, float) == (1, 0.5)


def test_barred_tokens_are_not_chosen() -> None:
    assert 1 not in chosen(SAMPLED, barred=(1,))
    assert chosen(Asked(), barred=(1,)) == [3] * 10


def test_margin_is_distance_to_another_choice() -> None:
    assert choose(np.log(SHARES), [], [], SAMPLED, lambda: 0.48)[1] == pytest.approx(0.02)
    assert choose(np.log(SHARES), [], [], SAMPLED, lambda: 0.13)[1] == pytest.approx(0.03)
    cut = replace(SAMPLED, top_p=0.7001)
    assert choose(np.log(SHARES), [], [], cut, lambda: 0.5)[1] == pytest.approx(0.0001)
    close = replace(SAMPLED, top_k=3)
    assert choose(np.array([0, 1, 0.001, 2.0]), [], [], close, lambda: 0.5)[1] == pytest.approx(0.001)


def test_end_token_ends_and_is_left_out(tmp_path: Path) -> None:
    free = NaiveLoop(decoder_models.write(replace(TINY, end_tokens=()), tmp_path / "free"))
    whole = free.generate(PROMPT, Asked(max_tokens=12))
    assert (len(whole.tokens), whole.finish_reason, len(whole.margins)) == (12, "length", 12)
    end = whole.tokens[6]
    at = whole.tokens.index(end)
    ending = NaiveLoop(decoder_models.write(replace(TINY, end_tokens=(end, 0)), tmp_path / "ending"))
    cut = ending.generate(PROMPT, Asked(max_tokens=12))
    assert (cut.tokens, cut.finish_reason, len(cut.margins)) == (whole.tokens[:at], "stop", at + 1)
    kept = ending.generate(PROMPT, Asked(max_tokens=12, min_tokens=at + 1))
    assert kept.tokens[:at] == whole.tokens[:at]
    assert len(kept.tokens) > at


def test_length_of_model_ends_answers(tmp_path: Path) -> None:
    loop = NaiveLoop(decoder_models.write(replace(TINY, end_tokens=(), positions=8), tmp_path))
    found = loop.generate(PROMPT, Asked(max_tokens=100))
    assert (len(found.tokens), found.finish_reason) == (3, "length")


def test_seed_repeats_its_own_answer(tmp_path: Path) -> None:
    loop = NaiveLoop(decoder_models.write(replace(TINY, end_tokens=()), tmp_path))
    first, again, other = (loop.generate(PROMPT, replace(SAMPLED, seed=seed)).tokens for seed in (1, 1, 2))
    assert first == again != other
    assert first != loop.generate(PROMPT, Asked()).tokens


def test_answers_differ_only_where_true_choice_is_a_tie() -> None:
    truth = Generation([4, 5, 6], "stop", [1.0, 1e-5, 1.0, 1.0])
    assert is_same(truth, [4, 5, 6], "stop")
    assert not is_same(truth, [4, 7, 8, 9, 9], "length")
    assert not is_same(truth, [4], "stop")
    for tokens, reason in (([4, 5, 7], "stop"), ([4, 5, 6], "length"), ([4, 5, 6, 7], "length"), ([3], "length")):
        with pytest.raises(AssertionError):
            is_same(truth, tokens, reason)
