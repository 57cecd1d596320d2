"""What becomes of a generation's tokens: when it ends, and what its caller is told of each.

Lives here: `GrowingAnswer`, and the search for texts that end it. Must not: choose tokens (`sampling`), make texts of
them (`text`), or know how they are computed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.backends.generation import OPTIONAL_OUTPUTS, GenerationLimits, Wanted
from paceline.backends.open_request import OpenRequest, Told
from paceline.backends.sampling import Logprobs, Sampler
from paceline.backends.spec import MISSING, Array, Tensors
from paceline.backends.text import GrowingText

_MOST_UNSENT = 64
"""While so many answers wait for their caller, who reads slowly, tokens are gathered: the next one has all of them."""
_NO_OPTIONAL = (MISSING,) * len(OPTIONAL_OUTPUTS)


class GrowingAnswer:
    """Of a request that has a place. `tokens` are its prompt's and those chosen since. `logprobs`: of how many of the
    likeliest tokens `add` wants them, besides the token's own; None: of none. `sent`: how many answers have left."""

    __slots__ = (
        "_answers", "_ends", "_is_plain", "_logprobs", "_parts", "_sum", "_text", "_tokenizer", "_told", "_wanted",
        "_whole", "logprobs", "prompt_length", "request", "sampler", "sent", "tokens",
    )  # fmt: skip

    def __init__(self, request: OpenRequest, wanted: Wanted, limits: GenerationLimits) -> None:
        assert wanted.prompt is not None
        self.request = request
        self.tokens: list[int] = wanted.prompt.tolist()
        self.prompt_length = len(self.tokens)
        self.sampler = Sampler(wanted.sampling, limits.vocabulary, wanted.prompt)
        self.sampler.not_yet = limits.end_tokens if wanted.min_tokens else ()
        self.logprobs = wanted.logprobs if "logprobs" in wanted.outputs else None
        if self.logprobs is None and "cumulative_logprob" in wanted.outputs:
            self.logprobs = 0
        self._wanted = wanted
        self._ends = () if wanted.ignores_ends else limits.end_tokens
        self._whole = request.takes_one or not wanted.streams
        self._told = self.prompt_length
        self._answers = self.sent = 0
        self._tokenizer = limits.tokenizer
        self._text: StoppedText | None = None
        if self._tokenizer is not None and (wanted.stop or len(limits.spec.outputs) - 1 in request.outputs):
            self._text = StoppedText(self._tokenizer.growing(self.tokens), wanted.stop)
        self._is_plain = self._text is None and not wanted.outputs
        # What isn't told yet: of a whole answer, all.
        self._parts: list[str] = []
        self._logprobs: list[str] = []
        self._sum = 0.0
        excludes = wanted.excludes_input
        if wanted.text is not None and not ((wanted.streams or request.takes_one) if excludes is None else excludes):
            self._parts.append(wanted.text)

    # hot path: 1 us for tokens; 1 to 4 us for their text, and 0.7 us for each stop text
    def add(self, token: int, logprobs: Logprobs | None = None, alone: Tensors | None = None) -> bool:
        """Take the next token, and answer: with `alone`, which has nothing else, if it may. Whether it was the last."""
        wanted, text = self._wanted, self._text
        reason = "stop"
        if is_new := token not in self._ends:
            reason = ""
            self.tokens.append(token)
            if logprobs is not None:
                self._note(token, logprobs)
        count = len(self.tokens) - self.prompt_length
        if count == wanted.min_tokens:
            self.sampler.not_yet = ()
        if count == wanted.max_tokens:
            reason = "length"
        if is_new and text is not None:
            self._parts.append(text.add(token, searches=count > wanted.min_tokens))
            if text.stopped:
                reason = "stop"
        if reason or not (self._whole or self._answers - self.sent >= _MOST_UNSENT):
            if alone is not None and self._is_plain and not reason and self._told == len(self.tokens) - 1:
                self._told, self._answers = self._told + 1, self._answers + 1
                self.request.on_answer(alone, last=False)
            else:
                self._tell(reason)
        return bool(reason)

    def time_out(self) -> None:
        """End with what there is."""
        self._tell("timeout")

    def _tell(self, reason: str) -> None:
        tokens, text = self.tokens[self._told :], self._text
        self._told, self._answers = len(self.tokens), self._answers + 1
        if reason and text is not None and not text.stopped:
            searches = len(self.tokens) - self.prompt_length > self._wanted.min_tokens
            self._parts.append(text.end(searches=searches))
            if text.stopped:
                reason = "stop"
        answer: tuple[Array, ...] = (np.array(tokens, np.int64), *self._besides(len(tokens), reason))
        if reason:
            answer = Told(answer, {"finish_reason": reason})
        self.request.on_answer(answer, last=bool(reason))

    def _besides(self, count: int, reason: str) -> tuple[Array, ...]:
        """What an answer with `count` tokens has besides them."""
        optional, wanted = _NO_OPTIONAL, self._wanted.outputs
        if wanted:
            made = {
                "logprobs": _text("null" if self._wanted.logprobs is None else f"[{', '.join(self._logprobs)}]"),
                "cumulative_logprob": np.array([self._sum], np.float32),
                "finish_reason": _text(reason or "None"),
                "num_input_tokens": np.array([self.prompt_length], np.uint32),
                "num_output_tokens": np.array([count], np.uint32),
            }
            self._logprobs.clear()
            optional = tuple(made[one.name] if one.name in wanted else MISSING for one in OPTIONAL_OUTPUTS)
        if self._tokenizer is None:
            return optional
        text = MISSING if self._text is None else _text("".join(self._parts))
        self._parts.clear()
        return (*optional, text)

    def _note(self, token: int, found: Logprobs) -> None:
        self._sum += found.chosen
        if self._wanted.logprobs is None or "logprobs" not in self._wanted.outputs:
            return
        said: dict[int, dict[str, float | int | str]] = {token: {"logprob": found.chosen, "rank": found.rank}}
        for place, (one, logprob) in enumerate(zip(found.best, found.logprobs, strict=True)):
            said.setdefault(one, {"logprob": logprob, "rank": place + 1})
        if self._tokenizer is not None:
            for one, about in said.items():
                about["decoded_token"] = self._tokenizer.piece(one)
        self._logprobs.append(json.dumps(said))


@dataclass(slots=True, eq=False)
class StoppedText:
    """A text that ends before the first of `stops` in it. What may be the beginning of one is held back."""

    growing: GrowingText
    stops: Sequence[str]
    stopped: bool = field(init=False, default=False)
    _held: str = field(init=False, default="")

    def add(self, token: int, *, searches: bool = True) -> str:
        """What is certain now. Unless it `searches`, what the token adds is no part of what is searched."""
        new = self.growing.add(token)
        return self._found(new) if self.stops and searches else new

    def end(self, *, searches: bool = True) -> str:
        """The rest."""
        new = self.growing.end()
        if self.stops and searches:
            new = self._found(new)
        held, self._held = self._held, ""
        return new + held

    def _found(self, new: str) -> str:
        text = self._held + new
        # The one that ends first, and of those that end there the longest: whatever parts the text comes in.
        ends = [(place + len(stop), place) for stop in self.stops if (place := text.find(stop)) >= 0]
        if ends:
            self.stopped = True
            place, self._held = min(ends)[1], ""
        else:
            may_begin = (place for place in range(len(text)) if any(one.startswith(text[place:]) for one in self.stops))
            place = next(may_begin, len(text))
            self._held = text[place:]
        return text[:place]


def _text(text: str) -> Array:
    array = np.empty(1, object)
    array[0] = text.encode()
    return array
