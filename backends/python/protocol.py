"""What the server and a model's process say to each other: one asks, the other answers, over a `Line`.

Lives here: the kinds of messages, with what follows them. Must not: behaviour.
"""

from __future__ import annotations

from typing import TypeAlias

__all__ = ["ANSWERED", "ASK", "CLOSE", "DONE", "FAILED", "READY", "RUN", "START", "Declared"]

START = 1
"""From the server, first: model's name, path of its file, device's kind and index, its parameters as pairs. Answered by
READY or FAILED."""

READY = 2
"""Inputs, outputs: `Declared`, or None where the class leaves them to the configuration."""

RUN = 3
"""From the server: a parcel of arrays, their names, the names of the outputs that are wanted. Answered by DONE or
FAILED."""

DONE = 4
"""A parcel of outputs, in the order asked for."""

FAILED = 5
"""Why, in one line, and which of `backends.errors` that is."""

CLOSE = 6
"""From the server, last. The answer is the process's end."""

ASK = 7
"""From the server, to a model of its own, whose class has a method `answer`: bytes. Answered by ANSWERED or FAILED. Of
what callers send, which is in RUN alone, nothing can be taken for it."""

ANSWERED = 8
"""Bytes: what `answer` returned."""

Declared: TypeAlias = tuple[tuple[str, str, tuple[int, ...]], ...]
"""Name, datatype and dims of each tensor."""
