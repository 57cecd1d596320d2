"""What the server and a model's process say to each other: one asks, the other answers, over a `BlockingLink`.

Lives here: the kinds of messages, with their contents. Must not: behaviour.
"""

from __future__ import annotations

from typing import TypeAlias

__all__ = ["ANSWERED", "ASK", "CLOSE", "DONE", "FAILED", "READY", "RUN", "START", "TRY", "Declared"]

START = 1
"""From the server, first: the model's name, the path of its file, the device's kind and index, its parameters as pairs.
Answered by READY or FAILED."""

READY = 2
"""Inputs and outputs: `Declared`, or None if the class leaves them to the configuration."""

RUN = 3
"""From the server: a parcel of arrays, their names, the names of the wanted outputs. Answered by DONE or FAILED."""

DONE = 4
"""A parcel of outputs, in the order of the request."""

FAILED = 5
"""The reason, in one line, and the name of its class in `backends.errors`."""

CLOSE = 6
"""From the server, last. The answer is the end of the process."""

ASK = 7
"""From the server, to a model that is part of it, whose class has a method `answer`: bytes. Answered by ANSWERED or
FAILED. Callers' data, which is only in RUN, can't be mistaken for it."""

ANSWERED = 8
"""Bytes: what `answer` returned."""

TRY = 9
"""As RUN, but what the model raises isn't printed."""

Declared: TypeAlias = tuple[tuple[str, str, tuple[int, ...]], ...]
"""Name, datatype and dims of each tensor."""
