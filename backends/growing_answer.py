"""What becomes of a generation's tokens: when it ends, and what its caller is told of each.

Lives here: `GrowingAnswer`. Must not: choose tokens (`sampling`), or know how they are computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.backends.generation import GenerationLimits, Wanted
from paceline.backends.open_request import OpenRequest, Told
from paceline.backends.sampling import Sampler
from paceline.backends.spec import Array

__all__ = ["GrowingAnswer"]


class GrowingAnswer:
    """Of a request that has a place. `tokens` are its prompt's and those chosen since."""

    __slots__ = ("_wanted", "request", "sampler", "tokens")

    def __init__(self, request: OpenRequest, wanted: Wanted, limits: GenerationLimits) -> None:
        self.request = request
        self.tokens: list[int] = wanted.prompt.tolist()
        self.sampler = Sampler(wanted.sampling, limits.vocabulary, wanted.prompt)
        self.sampler.not_yet = limits.end_tokens if wanted.min_tokens else ()
        self._wanted = wanted

    @property
    def chosen(self) -> list[int]:
        return self.tokens[self._wanted.prompt.size :]

    def add(self, token: int, ends: Sequence[int]) -> bool:
        """Take the next token, and answer. Returns whether it was the last."""
        reason = "stop" if token in ends else ""
        if not reason:
            self.tokens.append(token)
            count = len(self.tokens) - self._wanted.prompt.size
            if count >= self._wanted.min_tokens:
                self.sampler.not_yet = ()
            if count == self._wanted.max_tokens:
                reason = "length"
        if reason or not self.request.takes_one:
            self._tell([] if reason == "stop" else [token], reason)
        return bool(reason)

    def time_out(self) -> None:
        """End with what there is."""
        self._tell([], "timeout")

    def _tell(self, new: list[int], reason: str) -> None:
        ids = self.chosen if self.request.takes_one else new
        answer: tuple[Array, ...] = (np.array(ids, np.int64),)
        if reason:
            answer = Told(answer)
            answer.parameters = {"finish_reason": reason}
        self.request.on_answer(answer, last=bool(reason))
