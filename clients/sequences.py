"""Sequences: requests that share state in the server, in order, for both clients.

Lives here: the id, the flags of START and END, and when a step may be sent. Must not live here: calls and messages; the
clients hand in what sends a step. The rule: START goes with the first step until one was answered, and again after the
server has lost the sequence; END goes with the step that the caller says is the last, as the protocol has no END
without inputs.
"""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
)
from typing import Any, ClassVar, Final, Self

from paceline.clients.base import Timeout, blocking, blocking_each
from paceline.clients.errors import SequenceLost, no_answer
from paceline.clients.messages import InferResult, Inputs, Parameters, checked_text

SequenceId = int | str

SEQUENCE_ID: Final = "sequence_id"
_START: Final = "sequence_start"
_END: Final = "sequence_end"
_INT64: Final = 2**63
_MAX_TEXT_BYTES: Final = 128


def _checked_id(sequence_id: SequenceId) -> SequenceId:
    """`sequence_id` itself. Raises TypeError and ValueError for what servers take for none, or refuse."""
    if isinstance(sequence_id, str):
        length_bytes = len(checked_text("id", sequence_id).encode())
        if not 0 < length_bytes <= _MAX_TEXT_BYTES or "\0" in sequence_id:
            raise ValueError(f"id: expected text of 1 to {_MAX_TEXT_BYTES} bytes without NUL, got {sequence_id!r}")
        return sequence_id
    if not isinstance(sequence_id, int) or isinstance(sequence_id, bool):
        raise TypeError(f"id: expected an int, a str, or None for a fresh one, got {sequence_id!r}")
    if not sequence_id or not -_INT64 <= sequence_id < _INT64:
        raise ValueError(f"id: expected a 64-bit signed integer other than 0, got {sequence_id}")
    return sequence_id


class _Sequence(ABC):
    """Which step is the first, whether the last has been sent, and whose turn it is."""

    _new_lock: ClassVar[Any]
    """Held by the step whose turn it is."""

    def __init__(
        self,
        infer: Callable[..., Awaitable[InferResult]],
        bound_s: Callable[[Timeout], float | None],
        sequence_id: SequenceId,
        parameters: Parameters | None,
    ) -> None:
        self.id = _checked_id(sequence_id)
        """The id that the server knows the sequence by."""
        self._infer = infer
        self._bound_s = bound_s
        self._parameters = dict(parameters or {})
        self._is_started = self._is_over = False
        self._lock: Any = self._new_lock()
        # The stream that steps take, and how many steps that gave up their turn early wait there for answers.
        self._stream: Any = None
        self._unanswered = 0
        self._is_quiet = asyncio.Event()
        self._is_quiet.set()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"

    @abstractmethod
    async def _acquire(self, timeout_s: float | None) -> float | None:
        """Wait for the turn. Returns what is left of the timeout; raises DeadlineExceeded."""


async def infer(
    self: _Sequence,
    inputs: Inputs,
    *,
    last: bool = False,
    request_id: str = "",
    timeout_s: Timeout = ...,
    datatypes: Mapping[str, str] | None = None,
) -> InferResult:
    """Sends a step and returns its outputs. Arguments and errors are as in the client's `infer`; `timeout_s` includes
    the wait for the steps before, or other threads'."""
    left_s = await self._acquire(self._bound_s(timeout_s))
    turn = StepTurn(self)
    try:
        if not self._is_started:
            # No step may follow on the stream before it is known that there is a sequence to go on with.
            left_s = await turn.alone(left_s)
            turn.stream = None
        if self._is_over:
            raise RuntimeError(f"sequence {self.id!r} is over: begin another one with the client's sequence()")
        self._is_over = bool(last)
        flags = {SEQUENCE_ID: self.id, _START: not self._is_started, _END: bool(last)}
        try:
            answer = await self._infer(
                inputs,
                parameters={**self._parameters, **flags},
                request_id=request_id,
                timeout_s=left_s,
                datatypes=datatypes,
                turn=turn,
            )
        except BaseException as error:
            if last:
                self._is_over = False
            if isinstance(error, SequenceLost):
                self._is_started = False
            raise
        self._is_started = True
        return answer
    finally:
        turn.end()


async def infer_all(
    self: _Sequence,
    steps: Iterable[Inputs] | AsyncIterable[Inputs],
    *,
    timeout_s: Timeout = ...,
    datatypes: Mapping[str, str] | None = None,
) -> AsyncGenerator[InferResult, None]:
    """Sends all steps, ends the sequence with the last of them, and yields their answers. Each step is sent once the
    next one, or the end, is known. `timeout_s` and `datatypes` are those of each step. Only the asyncio client takes
    steps from an asynchronous iterable."""
    waiting: list[Inputs] = []
    async for step in _each(self, steps):
        if waiting:
            yield await infer(self, waiting.pop(), timeout_s=timeout_s, datatypes=datatypes)
        waiting.append(step)
    if waiting:
        yield await infer(self, waiting.pop(), last=True, timeout_s=timeout_s, datatypes=datatypes)


class InferenceSequence(_Sequence):
    """A sequence of the blocking client, made by its `sequence()`: `infer` sends a step and returns its answer.

        with client.sequence("vad") as speech:
            for chunk in chunks[:-1]:
                print(speech.infer({"input": chunk})["output"])
            print(speech.infer({"input": chunks[-1]}, last=True)["output"])

    The first step tells the server to start the sequence. If it fails or is refused, the next one does. `last=True`
    tells the server that the step is the last one, after which it forgets the sequence; a further step raises
    RuntimeError. If the server refuses that step, it can be sent again, or another one; if it fails in the model, the
    sequence has ended all the same, and a further step raises `SequenceLost`.

    If any other step fails in the model, the state is as before it, and the sequence goes on. After DeadlineExceeded
    and Cancelled, nobody knows whether the step was executed. `SequenceLost` means that the server has no such
    sequence, or none any more; the next step starts it afresh, without the state of those before.

    No END can be sent without inputs. So a sequence that is left without a last step merely takes no more: the server
    keeps its state until the model's idle limit (`max_sequence_idle_microseconds`, by default a second) has passed.

    Threads may share a sequence; their steps go one at a time, in no particular order.
    """

    _new_lock = threading.Lock

    infer = blocking(infer)
    infer_all = blocking_each(infer_all)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._is_over = True

    async def _acquire(self, timeout_s: float | None) -> float | None:
        began_s = time.monotonic()
        if not self._lock.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
            raise no_answer(timeout_s or 0.0)
        return None if timeout_s is None else timeout_s - (time.monotonic() - began_s)


class AsyncInferenceSequence(_Sequence):
    """A sequence of the asyncio client, made by its `sequence()`: `InferenceSequence` with `async with` and `await`.

    Steps may be sent without waiting for the answers of those before, as tasks, and reach the server in the order in
    which `infer` was called. With `transport="stream"`, all steps but the first are sent at once, over one stream. As
    calls, and for steps of more than 1 MiB, each waits in the client for the answers of those before it, because calls
    may overtake each other. If a step fails, those sent after it go on without it.

    Cancelling the task that awaits a step gives the step up; if the server hadn't begun with it, this ends the
    sequence, and the next step raises `SequenceLost`.
    """

    _new_lock = asyncio.Lock

    infer = infer
    infer_all = infer_all

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        self._is_over = True

    async def _acquire(self, timeout_s: float | None) -> float | None:
        return await _within(timeout_s, self._lock.acquire())


class StepTurn:
    """A step's turn, which has come. It ends when the step is on the stream behind those before it, or else when it is
    answered."""

    def __init__(self, sequence: _Sequence) -> None:
        self._sequence = sequence
        self._was_sent = False

    @property
    def stream(self) -> Any:
        """The one that the sequence's steps take; set by the first of them."""
        return self._sequence._stream

    @stream.setter
    def stream(self, stream: Any) -> None:
        self._sequence._stream = stream

    async def alone(self, timeout_s: float | None) -> float | None:
        """Wait until all steps before are answered, as before a call, which may overtake them. Returns what is left of
        the timeout; raises DeadlineExceeded."""
        sequence = self._sequence
        return await _within(timeout_s, sequence._is_quiet.wait()) if sequence._unanswered else timeout_s

    def sent(self) -> None:
        """The step is behind the others on `stream`: the next one may follow."""
        self._was_sent = True
        self._sequence._unanswered += 1
        self._sequence._is_quiet.clear()
        self._sequence._lock.release()

    def end(self) -> None:
        """The step is answered, or given up."""
        if not self._was_sent:
            self._sequence._lock.release()
            return
        self._sequence._unanswered -= 1
        if not self._sequence._unanswered:
            self._sequence._is_quiet.set()


async def _within(timeout_s: float | None, waiting: Awaitable[object]) -> float | None:
    """Wait. Returns how many seconds of the timeout are left; raises DeadlineExceeded if none are."""
    now_s = asyncio.get_running_loop().time
    began_s = now_s()
    try:
        async with asyncio.timeout(timeout_s):
            await waiting
    except TimeoutError:
        raise no_answer(timeout_s or 0.0) from None
    return None if timeout_s is None else timeout_s - (now_s() - began_s)


async def _each(sequence: _Sequence, steps: Iterable[Inputs] | AsyncIterable[Inputs]) -> AsyncIterator[Inputs]:
    """Raises TypeError if they can't be gone through: a blocking client has nothing that would wake it."""
    if isinstance(sequence, AsyncInferenceSequence) and isinstance(steps, AsyncIterable):
        async for step in steps:
            yield step
    else:
        for step in steps:  # type: ignore[union-attr]
            yield step
