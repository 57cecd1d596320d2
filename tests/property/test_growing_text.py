"""Texts that grow token by token: their parts are those of the whole, however the tokenizer makes it; those that end
before a text end where the naive search does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.backends.growing_answer import StoppedText
from paceline.backends.text import Tokenizer
from tests.text_models import KINDS

MORE = 2
"""Tokens that only the model knows."""


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    return Tokenizer(KINDS[kind]())


def tokens_of(kind: str, data: st.DataObject, most: int = 24) -> list[int]:
    """Any, and runs of those at the end of the vocabulary and of single bytes."""
    last = tokenizer_of(kind).largest_token
    some = st.one_of(st.integers(0, last + MORE), st.integers(3, min(last, 258)), st.integers(last - 15, last))
    return data.draw(st.lists(some, max_size=most))


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_parts_together_are_the_whole_text(kind: str, data: st.DataObject) -> None:
    tokenizer, tokens = tokenizer_of(kind), tokens_of(kind, data)
    text = tokenizer.growing([])
    assert "".join([*map(text.add, tokens), text.end()]) == tokenizer.decode(tokens)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "byte_level"])
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_text_goes_on_where_the_prompt_ends(kind: str, data: st.DataObject) -> None:
    tokenizer, prompt, tokens = tokenizer_of(kind), tokens_of(kind, data, 5), tokens_of(kind, data)
    shown = [token for token in prompt if tokenizer.is_shown(token)]
    if shown and tokenizer.is_byte(shown[-1]):
        return  # what the prompt ends with isn't a character yet
    text = tokenizer.growing(prompt)
    parts = [*map(text.add, tokens), text.end()]
    assert tokenizer.decode(prompt) + "".join(parts) == tokenizer.decode([*prompt, *tokens])


@pytest.mark.parametrize("kind", ["byte_level", "sentence_pieces"])
def test_no_part_ends_within_a_character(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    whole = "日本語 👋🏽, é 日"
    tokens = tokenizer.encode(whole)
    assert len(tokens) > len(whole)
    text = tokenizer.growing([])
    parts = [text.add(token) for token in tokens]
    assert "\ufffd" not in "".join(parts)
    assert "".join([*parts, text.end()]) == whole


class Spelled:
    """A text whose parts are the tokens' places in it, then its end."""

    def __init__(self, parts: Sequence[str]) -> None:
        self._parts = parts

    def add(self, token: int) -> str:
        return self._parts[token]

    def end(self) -> str:
        return self._parts[-1]


def stopped(text: str, stops: Sequence[str]) -> str:
    """The naive search: after each character, whether one of `stops` has just ended."""
    for end in range(len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)]
    return text


letters = st.text("ab", min_size=1, max_size=6)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.text("abc", max_size=4), min_size=1, max_size=12), st.lists(letters, max_size=3))
def test_text_ends_before_the_first_stop_however_it_comes(parts: list[str], stops: list[str]) -> None:
    text, told = StoppedText(Spelled(parts), stops), ""
    whole = stopped("".join(parts), stops)
    for place in range(len(parts) - 1):
        told += text.add(place)
        assert whole.startswith(told)
        if text.stopped:
            break
    else:
        told += text.end()
    assert told == whole
    assert text.stopped == (whole != "".join(parts) or any(stop in whole for stop in stops))


def test_certain_text_is_not_held_back() -> None:
    text = StoppedText(Spelled(["one two", " st", "op", " sto", "p!", ""]), ["stop!", "two st!"])
    assert [text.add(place) for place in range(5)] == ["one ", "", "two ", "stop ", ""]
    assert text.stopped
