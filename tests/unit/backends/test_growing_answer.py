"""What a generation's tokens become for its caller: texts that end, whyever the answer does."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest

from paceline.backends.generation import OPTIONAL_OUTPUTS, TEXT_SPEC, GenerationLimits, Wanted
from paceline.backends.growing_answer import GrowingAnswer
from paceline.backends.open_request import Answer, OpenRequest, Told
from paceline.backends.sampling import Logprobs, Sampling
from paceline.backends.spec import MISSING
from paceline.backends.text import Tokenizer
from tests import text_models

END = 2
TOKENIZER = Tokenizer(text_models.byte_level())
LIMITS = GenerationLimits(300, 100, (END,), tokenizer=TOKENIZER)
TEXT = len(TEXT_SPEC.outputs) - 1


class Caller(OpenRequest):
    def __init__(self, wanted: Wanted, outputs: Sequence[int] = (0, TEXT), *, one: bool = False) -> None:
        super().__init__((), outputs)
        self.takes_one = one
        self.answers: list[Answer] = []
        self.answer = GrowingAnswer(self, wanted, LIMITS)

    def on_answer(self, answer: Answer, *, last: bool) -> None:
        self.answers.append(answer)

    def texts(self) -> list[str]:
        return [one[TEXT].item().decode() for one in self.answers if isinstance(one, tuple)]

    def reason(self) -> str:
        (last,) = [one for one in self.answers if isinstance(one, Told)]
        return str(last.parameters["finish_reason"])


def wanted(**given: object) -> Wanted:
    return Wanted(np.array([5]), Sampling(), 0, 20)._replace(**given)


def tokens_of(text: str) -> list[int]:
    return TOKENIZER.encode(text)


@pytest.mark.parametrize("one", [True, False])
def test_text_in_time_is_told_with_what_was_held_back(one: bool) -> None:
    caller = Caller(wanted(stop=("cat!",)), one=one)
    for token in tokens_of("the cat"):
        assert not caller.answer.add(token)
    assert "".join(caller.texts()) == ("" if one else "the ")
    caller.answer.time_out()
    assert ("".join(caller.texts()), caller.reason()) == ("the cat", "timeout")


def test_broken_character_is_told_at_the_end() -> None:
    first, *_ = tokens_of("日本")
    caller = Caller(wanted())
    assert not caller.answer.add(first)
    assert caller.answer.add(END)
    assert (caller.texts(), caller.reason()) == (["", "\ufffd"], "stop")


def test_stop_with_the_last_token_is_the_reason() -> None:
    tokens = tokens_of("the cat")
    caller = Caller(wanted(stop=("t",), min_tokens=1, max_tokens=len(tokens)), one=True)
    assert [caller.answer.add(token) for token in tokens] == [False] * (len(tokens) - 1) + [True]
    assert (caller.texts(), caller.reason()) == (["the ca"], "stop")


def test_text_that_nobody_wants_is_not_made() -> None:
    caller = Caller(wanted(), outputs=(0,))
    caller.answer.add(5)
    (answer,) = caller.answers
    assert isinstance(answer, tuple)
    assert [one is MISSING for one in answer] == [False, *[True] * (1 + len(OPTIONAL_OUTPUTS))]


def test_ended_answer_has_no_logprobs_of_what_ended_it() -> None:
    caller = Caller(wanted(outputs=frozenset({"logprobs", "cumulative_logprob"}), logprobs=1))
    assert caller.answer.logprobs == 1
    caller.answer.add(5, Logprobs(-2.0, 3, [7], [-0.5]))
    caller.answer.add(END, Logprobs(-1.0, 1, [END], [-1.0]))
    told = [one for one in caller.answers if isinstance(one, tuple)]
    assert [json.loads(one[1].item()) for one in told] == [
        [
            {
                "5": {"logprob": -2.0, "rank": 3, "decoded_token": TOKENIZER.piece(5)},
                "7": {"logprob": -0.5, "rank": 1, "decoded_token": TOKENIZER.piece(7)},
            }
        ],
        [],
    ]
    assert [one[2].tolist() for one in told] == [[-2.0], [-2.0]]
