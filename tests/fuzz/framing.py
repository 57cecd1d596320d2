"""Fuzz target: the stream between processes, cut wherever the system cuts it.

Both of its ends are ours, run the same code and trust each other, so a frame's contents aren't hostile: marshal
promises nothing for bytes that it hasn't written. Frames may arrive in any pieces, or never.
"""

from __future__ import annotations

from typing import Any

from paceline.backends.transport.parcel import FrameReader, frame
from tests.fuzz.judging import Finding, Target

__all__ = ["targets"]


def targets() -> list[Target]:
    """The only one."""
    return [Target("frames", _frames)]


def _frames(data: bytes) -> None:
    """The first byte selects the sizes of the pieces, the second where the stream breaks off; the others, split by
    their own values, are messages, some of which are sent together."""
    if len(data) < 3:
        return
    step, missing, rest = data[0] or 256, data[1], data[2:]
    frames: list[list[tuple[Any, ...]]] = []
    while rest:
        size, together = rest[0] % 64, rest[0] >> 6
        frames.append([(number, rest[1 : 1 + size], size, [None, True, 0.5, "é"]) for number in range(together)])
        rest = rest[1 + size :]
    whole = b"".join(map(frame, frames))
    stream = whole[: max(0, len(whole) - missing)]
    reader, read, at = FrameReader(), [], 0
    while at < len(stream):
        piece = 1 + (at * 7 + step) % step if step < 200 else len(stream)
        read += reader.feed(stream[at : at + piece])
        at += piece
    sent, complete = [], 0
    for messages in frames:
        complete += len(frame(messages))
        if complete <= len(stream):
            sent += messages
    if read != sent:
        raise Finding(f"sent {sent}, read {read}")
