"""What files beside a model say of the tokens of its answers, whatever a request asks for.

Lives here: reading and applying it. Must not: choose tokens. Names and meanings are those of Hugging Face's
`generation_config.json`; what takes more than a look at tokens and their places there is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.backends.errors import LoadError
from paceline.backends.spec import Array


@dataclass(frozen=True, slots=True)
class DecodingRules:
    """`start`: the token that what a decoder gets begins with, if it has an encoder. `forced`: tokens by their places.
    `never` are never chosen, and `never_first` not as the first that isn't forced."""

    start: int | None = None
    forced: Mapping[int, int] = field(default_factory=dict)
    never: Sequence[int] = ()
    never_first: Sequence[int] = ()

    def prompt(self, given: Sequence[int]) -> list[int]:
        """What the decoder gets first, of which a request has `given`: with the start token, and with what is forced
        behind that."""
        tokens = [*given]
        if self.start is not None and tokens[:1] != [self.start]:
            tokens.insert(0, self.start)
        while tokens and (token := self.forced.get(len(tokens))) is not None:
            tokens.append(token)
        return tokens

    def apply(self, logits: Array, lengths: Sequence[int], prompts: Sequence[int]) -> None:
        """Write to `logits`, [rows, vocabulary], of rows that have so many tokens, of which so many are their
        prompt's."""
        if self.never:
            logits[:, self.never] = -np.inf
        for row, length, prompt in zip(logits, lengths, prompts, strict=True):
            if (token := self.forced.get(length)) is not None:
                row[:] = -np.inf
                row[token] = 0
            elif self.never_first and length == max(prompt, 1 + max(self.forced, default=0)):
                row[self.never_first] = -np.inf

    def __bool__(self) -> bool:
        return bool(self.forced or self.never or self.never_first)


def read_rules(model: str, said: Mapping[str, Any], vocabulary: int) -> DecodingRules:
    """What `said` says, of which tokens beyond `vocabulary` don't count. Raises LoadError."""

    def numbers(name: str, found: object) -> list[int]:
        listed: list[Any] = found if isinstance(found, list) else [found]
        if not all(type(one) is int for one in listed):
            where = "config.json and generation_config.json"
            raise LoadError(f"model '{model}': {where}: {name}: expected integers, got {found!r}")
        return listed

    def tokens(name: str) -> list[int]:
        return [one for one in numbers(name, said.get(name, [])) if 0 <= one < vocabulary]

    start = [*tokens("decoder_start_token_id"), *tokens("bos_token_id")]
    forced = dict(zip([1], tokens("forced_bos_token_id"), strict=False))
    for pair in said.get("forced_decoder_ids") or []:
        # A place may have no token: there the model says itself which language it hears.
        found = pair[:1] if isinstance(pair, list) and pair[1:] == [None] else pair
        place, *of_place = numbers("forced_decoder_ids", found)
        forced |= zip([place], (token for token in of_place if 0 <= token < vocabulary), strict=False)
    words = [numbers("bad_words_ids", one) for one in said.get("bad_words_ids") or []]
    never = [*tokens("suppress_tokens"), *(one[0] for one in words if len(one) == 1 and 0 <= one[0] < vocabulary)]
    return DecodingRules(start[0] if start else None, forced, never, tokens("begin_suppress_tokens"))
