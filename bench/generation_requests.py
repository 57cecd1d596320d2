"""What clients of a decoder ask for: prompts and lengths of answers, drawn at random, as messages and as batches.

Lives here: drawing them, and files with all of a client's. Must not: send or step anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.clients.messages import infer_request

__all__ = [
    "Lengths",
    "Wanted",
    "batches",
    "drawn",
    "full_batch",
    "message",
    "read_messages",
    "write_messages",
]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A prompt, and how many tokens are to follow it."""

    prompt: list[int]
    tokens: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """The least and the most tokens of prompts and of answers, each length as likely as any other."""

    prompts: tuple[int, int] = (8, 128)
    answers: tuple[int, int] = (16, 256)


def drawn(client: int, count: int, lengths: Lengths, vocabulary: int) -> list[Wanted]:
    """What a client asks for, one after the other."""
    random = np.random.default_rng(client)
    found = []
    for _ in range(count):
        prompt, answer = (int(random.integers(low, high + 1)) for low, high in (lengths.prompts, lengths.answers))
        found.append(Wanted(random.integers(0, vocabulary, prompt).tolist(), answer))
    return found


def full_batch(rows: int, lengths: Lengths, vocabulary: int) -> list[Wanted]:
    """Rows as long as those of `drawn` are in the mean."""
    prompt, answer = (sum(bounds) // 2 for bounds in (lengths.prompts, lengths.answers))
    return [one for row in range(rows) for one in drawn(row, 1, Lengths((prompt,) * 2, (answer,) * 2), vocabulary)]


def message(model: str, wanted: Wanted) -> bytes:
    """A request, ready for the wire."""
    ids = np.array(wanted.prompt, np.int64)
    return infer_request(model, {"input_ids": ids}, parameters={"max_tokens": wanted.tokens}).SerializeToString()


def batches(asked: Sequence[Sequence[Wanted]]) -> list[list[Wanted]]:
    """The first of each client together, then the second, and so on."""
    return [list(batch) for batch in zip(*asked, strict=True)]


def write_messages(path: Path, messages: Sequence[bytes]) -> Path:
    """Write a client's own payloads, each after its length; returns `path`."""
    path.write_bytes(b"".join(len(message).to_bytes(4, "little") + message for message in messages))
    return path


def read_messages(path: Path) -> tuple[bytes, ...]:
    """What `write_messages` has written."""
    data, at, messages = path.read_bytes(), 0, []
    while at < len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4], "little")
        messages.append(data[at + 4 : end])
        at = end
    return tuple(messages)
