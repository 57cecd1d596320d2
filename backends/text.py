"""Texts and tokens: a model's `tokenizer.json`, read by the package `tokenizers`.

Lives here: the tokens of a prompt, and the text of an answer while it grows. Must not: know requests, or when an answer
ends. The rule: the parts of a growing text together are what the tokenizer makes of all its tokens at once, and none
ends within a character.
"""

from __future__ import annotations

import json
import re
from codecs import getincrementaldecoder
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from paceline.backends.errors import ExecutionError, ModelRefused
from paceline.backends.installed import how_to_install
from paceline.backends.paths import open_beside

_FILE: Final = "tokenizer.json"
_LARGEST_BYTES = 2**28
"""Of that file; with 256,000 tokens it has some 35 MB."""
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
_BROKEN = "\ufffd"
_LONGEST_CHARACTER = 4
"""In bytes of UTF-8, each of which may be a token."""


class GrowingText(Protocol):
    """What a text becomes as tokens are added. Each part is handed out as soon as no further token can change it."""

    def add(self, token: int) -> str: ...

    def end(self) -> str:
        """What is left, if no further token comes."""


class Tokenizer:
    """`own` is the package's. Callable on any thread."""

    def __init__(self, own: Any) -> None:
        own.no_truncation()
        own.no_padding()
        self._own = own
        decoder = json.loads(own.to_str())["decoder"] or {}
        vocabulary: dict[str, int] = own.get_vocab(with_added_tokens=True)
        self.largest_token = max(vocabulary.values(), default=-1)
        self.most_bytes = max((len(text.encode()) for text in vocabulary), default=0)
        """Of a token."""
        self._special = {token for token, added in own.get_added_tokens_decoder().items() if added.special}
        # Of these, a run is broken as a whole if any of its bytes is.
        falls_back = "ByteFallback" in json.dumps(decoder)
        self._single_bytes = {token for text, token in vocabulary.items() if falls_back and _BYTE.fullmatch(text)}
        self._alphabet = _alphabet() if decoder.get("type") == "ByteLevel" else None
        self._bytes: dict[int, bytes] = {}
        self._pieces: dict[int, str] = {}
        words = (token for token in sorted(vocabulary.values()) if self.is_shown(token) and not self.is_byte(token))
        self._word = next((token for token in words if self.decode([token]).strip()), -1)

    def encode(self, text: str) -> list[int]:
        """Its tokens, with those that belong around a text. Takes 0.5 us a byte, without the interpreter's lock. Raises
        ModelRefused."""
        try:
            (found,) = self._own.encode_batch_fast([text])
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 - the package's panics are no Exceptions
            why = f"input 'text_input': the tokenizer can't read it: {error}"
            raise ModelRefused("INVALID_ARGUMENT", why) from None
        return list(found.ids)

    def growing(self, before: Sequence[int]) -> GrowingText:
        """The text of what follows the tokens `before`."""
        if self._alphabet is not None:
            return _OfBytes(self)
        shown = (token for token in reversed(before) if self.is_shown(token) and not self.is_byte(token))
        return _OfWords(self, next(shown, -1))

    def piece(self, token: int) -> str:
        """What a token alone adds to a text; of a special one, its name."""
        piece = self._pieces.get(token)
        if piece is None:
            text = self.growing([self._word])
            shown = self.is_shown(token)
            piece = text.add(token) + text.end() if shown else self._own.id_to_token(token) or ""
            self._pieces[token] = piece
        return piece

    def is_shown(self, token: int) -> bool:
        """Whether texts contain it: special ones are left out, and those that only the model knows."""
        return token not in self._special and self._own.id_to_token(token) is not None

    def is_byte(self, token: int) -> bool:
        return token in self._single_bytes

    def decode(self, tokens: Sequence[int]) -> str:
        """Raises ExecutionError."""
        try:
            return str(self._own.decode(tokens))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 - the package's panics are no Exceptions
            raise ExecutionError(f"the tokenizer can't make a text of {list(tokens)}: {error}") from None

    def bytes_of(self, token: int) -> bytes:
        """What a token of a byte-level vocabulary adds to a text."""
        found = self._bytes.get(token)
        if found is None:
            assert self._alphabet is not None
            text = str(self._own.id_to_token(token)) if self.is_shown(token) else ""
            known = [self._alphabet.get(character, -1) for character in text]
            found = self._bytes[token] = text.encode() if -1 in known else bytes(known)
        return found


class _OfBytes:
    """By the bytes of each token. 0.5 us a token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes_of = tokenizer.bytes_of
        self._decode = getincrementaldecoder("utf-8")("replace").decode

    def add(self, token: int) -> str:
        return self._decode(self._bytes_of(token))

    def end(self) -> str:
        return self._decode(b"", True)


class _OfWords:
    """By decoding the tokens since the last part, behind those of the last part: what a token adds depends on whether
    one is before it, as a text's first blank is left out, and maybe on which. `before` is such a token, -1 for none.
    3 us a token."""

    def __init__(self, tokenizer: Tokenizer, before: int) -> None:
        self._tokenizer = tokenizer
        self._tokens = [before] if before >= 0 else []
        self._told, self._told_text = len(self._tokens), tokenizer.decode(self._tokens)

    def add(self, token: int) -> str:
        if not self._tokenizer.is_shown(token):
            return ""
        self._tokens.append(token)
        return "" if self._tokenizer.is_byte(token) else self._part()

    def end(self) -> str:
        return self._part(is_last=True)

    def _part(self, *, is_last: bool = False) -> str:
        text = self._tokenizer.decode(self._tokens)
        if not is_last and text.endswith(_BROKEN) and len(self._tokens) - self._told < _LONGEST_CHARACTER:
            return ""
        part = text[len(self._told_text) :]
        if part:
            del self._tokens[: self._told]
            self._told, self._told_text = len(self._tokens), self._tokenizer.decode(self._tokens)
        return part


def open_tokenizer(path: Path, vocabulary: int) -> Tokenizer | str | None:
    """That of the model file `path`, which knows `vocabulary` tokens, if there is one. A text: why it can't be used."""
    try:
        file = open_beside(path, _FILE)
        if file is None:
            return None
        with file:
            content = file.read(_LARGEST_BYTES)
    except OSError as error:
        return f"{_FILE} can't be read: {error}"
    try:
        from tokenizers import Tokenizer as Own  # an extra
    except ImportError:
        return f"{_FILE} needs the package tokenizers: {how_to_install('text')}"
    try:
        tokenizer = Tokenizer(Own.from_buffer(content))
    except Exception as error:  # noqa: BLE001 - the package raises nothing narrower
        return f"{_FILE} can't be read: {error}"
    if tokenizer.largest_token >= vocabulary:
        return f"{_FILE} has the token {tokenizer.largest_token}, and the model knows those up to {vocabulary - 1}"
    return tokenizer


def _alphabet() -> Mapping[str, int]:
    """The characters that stand for bytes in byte-level vocabularies: themselves if they can be seen, and for the
    others, in order, those from 256 on."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + place): byte for place, byte in enumerate(others)}
