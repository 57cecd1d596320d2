"""What files beside a model say of tokens: read, and applied to logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.backends.errors import LoadError
from paceline.backends.onnx.decoding_rules import DecodingRules, read_rules

WHISPER = {
    "decoder_start_token_id": 50,
    "forced_decoder_ids": [[1, None], [2, 60]],
    "suppress_tokens": [3, 4, 500],
    "begin_suppress_tokens": [7],
}


def test_prompt_begins_with_start_and_what_is_forced() -> None:
    rules = read_rules("m", {"decoder_start_token_id": 9, "forced_bos_token_id": 8, "forced_decoder_ids": [[2, 6]]}, 97)
    assert rules.prompt([]) == [9, 8, 6]
    assert rules.prompt([9]) == [9, 8, 6]
    assert rules.prompt([9, 5]) == [9, 5, 6]
    assert rules.prompt([5, 4, 3]) == [9, 5, 4, 3]


def test_model_without_a_start_token_has_that_of_texts() -> None:
    assert read_rules("m", {"bos_token_id": 1}, 97).prompt([]) == [1]
    assert read_rules("m", {}, 97).prompt([]) == []


@pytest.mark.parametrize(
    ("length", "possible"),
    [(1, {0, 1, 2, 5, 6, 7, 60}), (2, {60}), (3, {0, 1, 2, 5, 6, 60}), (4, {0, 1, 2, 5, 6, 7, 60})],
)
def test_rules_go_by_place_behind_what_is_forced(length: int, possible: set[int]) -> None:
    rules = read_rules("m", WHISPER, 97)
    logits = np.zeros((2, 97), np.float32)
    rules.apply(logits, [9, length], [1, 1])
    assert set(np.flatnonzero(np.isfinite(logits[1]))) & {*range(8), 60} == possible
    assert set(np.flatnonzero(~np.isfinite(logits[0]))) == {3, 4}


def test_only_words_of_one_token_are_never_chosen() -> None:
    rules = read_rules("m", {"bad_words_ids": [[5], [6, 7], [200]]}, 97)
    assert rules == DecodingRules(never=[5], never_first=[])
    assert bool(rules)
    assert not read_rules("m", {"bad_words_ids": [[6, 7]]}, 97)


@pytest.mark.parametrize(
    "said",
    [
        {"decoder_start_token_id": "0"},
        {"forced_decoder_ids": [[1, "x"]]},
        {"suppress_tokens": [1.5]},
        {"bad_words_ids": [["x"]]},
        {"begin_suppress_tokens": {}},
    ],
)
def test_tokens_that_are_none_fail_the_load(said: dict[str, Any]) -> None:
    (name,) = said
    with pytest.raises(LoadError, match=f"^model 'm': .*generation_config.json: {name}: expected integers, got"):
        read_rules("m", said, 97)
