"""What the server and the process of a Python model say to each other, over a link: the server asks, the process
answers.

Lives here: the kinds of messages, with their contents in order. Must not: import anything of this product; both sides
import this. To a process that gets batches the server says RUN, TRY or ASK, and waits for the answer. To one that gets
requests it says HAND or HAND_MADE_UP, and waits for DONE or FAILED. Everything else needs no answer: what is said of
requests, and of calls, which are requests the other way.
"""

from __future__ import annotations

from typing import TypeAlias

START = 1
"""From the server, first: the model's name, the path of its file, the device's kind and index, its parameters as pairs,
the models that it calls. To a model written for Triton also its configuration as JSON, whether it may complete that,
and whether it is to log details. Answered by READY or FAILED."""

READY = 2
"""Inputs and outputs: `Declared`, or None if the class leaves them to the configuration. Of a model written for Triton
also its configuration, completed; nothing if it was initialized."""

RUN = 3
"""From the server: a parcel of arrays, their names, the names of the wanted outputs. Answered by DONE or FAILED."""

DONE = 4
"""A parcel of outputs, in the order of the request. Of requests: what became of each, as far as that is known
(`Ended`), and a parcel of all outputs; no parcel if they are all answered otherwise."""

FAILED = 5
"""The reason, in one line, and the name of its class in `backends.errors`; if that keeps a status, also its name."""

CLOSE = 6
"""From the server, last. The answer is the end of the process."""

ASK = 7
"""From the server, to a model that is part of it, whose class has a method `answer`: bytes. Answered by ANSWERED or
FAILED. Callers' data, which is only in RUN, can't be mistaken for it."""

ANSWERED = 8
"""Bytes: what `answer` returned."""

TRY = 9
"""As RUN, but what the model raises isn't printed."""

HAND = 10
"""From the server: the names of all inputs and outputs, and for each of some requests its number, id, parameters, the
places of the outputs that it wants, a parcel of its inputs, its step in its sequence (id, whether it is the first, the
last) or None, and its timeout in microseconds. Then either None, or a parcel of the inputs of all, joined by rows, and
the rows where each begins and the last one ends; then the requests have no parcels. First TAKEN, then DONE or FAILED,
when `execute` has returned."""

HAND_MADE_UP = 11
"""As HAND, but what the model raises isn't printed."""

CANCEL = 12
"""From the server: the number of a request that isn't waited for any more."""

SENT = 13
"""From the server: the number of a request, and how many more of its answers, the oldest, aren't held any more."""

TAKEN = 14
"""From a process that talks at any time: the model is called now."""

ANSWER = 15
"""A request's number, whether it is its last answer, the places of outputs, a parcel of these, and parameters as JSON;
no parcel and no places: it only ends."""

ERROR = 16
"""A request's number, whether it is its last answer, and as FAILED."""

OVER = 17
"""From the server: for each of some sequences that this process has held, its id and why it is over, as a word."""

CALL = 18
"""To the server, from a process that talks to it at any time: a number, which execution it belongs to, the names of
inputs and a parcel of these, and what else `ModelCall` says. Executions are counted by TAKEN; 0: none."""

CALLED = 19
"""From the server: a call's number, whether it is its last answer, the names of outputs, a parcel of these (None and no
names: it only ends), and the response's parameters."""

CALL_FAILED = 20
"""From the server: a call's number, whether it is its last answer, the name of a gRPC status, and a text."""

CALL_OVER = 21
"""To the server: the number of a call that isn't waited for any more."""

CALL_READ = 22
"""To the server: the number of a call, and how many more of its answers were read."""

INITIALIZE = 23
"""From the server, to a model written for Triton, after READY: its whole configuration as JSON, and the instance's
name. Answered by READY or FAILED."""

BATCHES, CALLING, REQUESTS, TRITON = "batches", "calling", "requests", "triton"
"""What the model's `execute` gets: joined arrays; the same, of a model that calls others; of a decoupled model, each
request by itself; or the same as Triton's Python backend has it. The first kind of process only answers, the others
talk at any time."""

Ended: TypeAlias = tuple[tuple[int, ...], str, int] | list[str] | bool | None
"""What became of a request: it was answered, with the outputs at these places and parameters as JSON; it failed, as
FAILED says it; True: it is to come back; None: it is or will be answered otherwise. Outputs of one that was answered
are the next arrays of the parcel or, if a number of rows is given and not -1, the next of these rows of its arrays, in
which the outputs of all that were answered are joined."""

Declared: TypeAlias = tuple[tuple[str, str, tuple[int, ...]], ...]
"""Name, datatype and dims of each tensor."""
