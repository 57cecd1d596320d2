"""Calls of a model to others, in its process.

Lives here: what a model's code uses for that, and its talk with the server. Must not: as `worker`. The rules: the
thread that listens to the server never waits for the model; each call gets its end, and one that nobody waits for any
more is withdrawn.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any, TypedDict, Unpack

import numpy as np

from paceline.backends.python.loaded_model import CallFailed, as_array
from paceline.backends.python.messages import CALL, CALL_FAILED, CALL_OVER, CALL_READ
from paceline.backends.spec import Array
from paceline.backends.transport.blocking_link import BlockingLink
from paceline.backends.transport.parcel import Message

_MOST_CALLS = 1_024
"""As many calls of a process may be under way: each is a request, and holds its tensors."""

_READ_AT_ONCE = 8
"""As many answers to a call were read before the server is told of it."""

EXECUTION: ContextVar[int] = ContextVar("execution", default=0)
"""Which execution the code is a part of that runs, by number. Tasks and `asyncio.to_thread` take it along, threads
don't."""

Parameters = Mapping[str, bool | int | float | str]
Inputs = Mapping[str, object]


class Outputs(dict[str, Array]):
    """Those of a called model by name, and the `parameters` of its response."""

    parameters: Parameters = {}  # noqa: RUF012 - of responses without any; only read


Answer = tuple[Outputs | CallFailed | None, bool]
"""Outputs, an error or nothing, and whether it is the last."""


class Options(TypedDict, total=False):
    """What else a call may say."""

    version: str
    outputs: Sequence[str]
    request_id: str
    parameters: Parameters | None
    timeout_s: float | None


class Calls:
    """The calls of this process. What is said to the server of those that were dropped is handed to `say`, which has it
    said by a thread of its own."""

    def __init__(self, link: BlockingLink, say: Callable[[Callable[[], object]], object]) -> None:
        self._link = link
        self._say = say
        self._pid = os.getpid()
        self._numbers = count(1)
        # What to do with the answers of those that haven't ended.
        self._tell: dict[int, Callable[[Answer], object]] = {}

    def begin(
        self,
        model: str,
        inputs: Inputs,
        tell: Callable[[Answer], object],
        *,
        version: str = "",
        outputs: Sequence[str] = (),
        request_id: str = "",
        parameters: Parameters | None = None,
        timeout_s: float | None = None,
        takes_more: bool,
    ) -> int:
        """Call `model`. `tell` gets the answers, on the thread that listens to the server. Returns the call's number.
        Raises RuntimeError in a fork and CallFailed if there are too many calls; TypeError or ValueError for what can't
        be sent."""
        if os.getpid() != self._pid:
            raise RuntimeError("models can only be called in the process that the server has started, not in a fork")
        if len(self._tell) >= _MOST_CALLS:
            what = f"{_MOST_CALLS} calls of this process are under way, as many as it may have"
            raise CallFailed("RESOURCE_EXHAUSTED", f"model '{model}' isn't called: {what}")
        if not isinstance(inputs, Mapping):
            raise TypeError(f"model '{model}': expected a dict of inputs by name, got {type(inputs).__name__}")
        if isinstance(outputs, str):
            raise TypeError(f"model '{model}': expected a list of outputs, got the text '{outputs}'")
        if timeout_s is not None and not timeout_s > 0:
            raise ValueError(f"model '{model}': expected a timeout_s above 0, got {timeout_s}")
        arrays = [as_array(name, value, "input") for name, value in inputs.items()]
        timeout_ns = 0 if timeout_s is None else max(1, int(min(timeout_s, 1e9) * 1e9))
        given = {str(name): _plain(name, value) for name, value in (parameters or {}).items()}
        number = next(self._numbers)
        self._tell[number] = tell
        try:
            said = {
                "model": model,
                "version": str(version),
                "outputs": tuple(map(str, outputs)),
                "id": str(request_id),
                "parameters": given,
                "timeout_ns": timeout_ns,
                "takes_more": takes_more,
            }
            names = tuple(map(str, inputs))
            parcel = self._link.pack(arrays)
            self._link.send(CALL, number, EXECUTION.get(), names, parcel, said, parcel=parcel)
        except BaseException:
            del self._tell[number]
            raise
        return number

    def withdraw(self, number: int) -> None:
        """Nobody waits for answers to a call any more. Does nothing if it has ended, or in a fork, which may drop what
        it has inherited. Iterators call it wherever the interpreter happens to drop them, maybe on a thread that holds
        a lock."""
        if self._tell.pop(number, None) is not None and os.getpid() == self._pid:
            self._say(partial(self._link.send, CALL_OVER, number))

    def read(self, number: int, answers: int) -> None:
        self._link.send(CALL_READ, number, answers)

    def hear(self, message: Message) -> None:
        """Take what the server says of a call."""
        kind, number, last, *content = message
        if kind == CALL_FAILED:
            answer: Outputs | CallFailed | None = CallFailed(*content)
        elif content[1] is None:
            answer = None
        else:
            # Even if nobody waits: that gives its place back.
            answer = Outputs(zip(content[0], self._link.unpack(content[1]), strict=True))
            answer.parameters = content[2]
        tell = self._tell.pop(number, None) if last else self._tell.get(number)
        if tell is not None:
            tell((answer, last))


class CalledModel:
    """Another model, to be called. Each method takes the inputs by name, as arrays, and gives outputs by name: those
    named in `outputs`, or all. Its other options are `version` (by default the latest), `request_id`, `parameters` that
    clients may send, such as "priority" and "sequence_id", and `timeout_s`. Raises CallFailed."""

    CallFailed = CallFailed

    def __init__(self, calls: Calls, name: str) -> None:
        self._calls = calls
        self.name = name

    def infer(self, inputs: Inputs, **options: Unpack[Options]) -> Outputs:
        """What the model answers. Blocks; in coroutines, use `async_infer`."""
        answers: SimpleQueue[Answer] = SimpleQueue()
        number = self._calls.begin(self.name, inputs, answers.put, takes_more=False, **options)
        try:
            return _outputs(answers.get()[0])
        finally:
            self._calls.withdraw(number)

    async def async_infer(self, inputs: Inputs, **options: Unpack[Options]) -> Outputs:
        """The same for coroutines. Cancelling it withdraws the call."""
        answers = AsyncAnswers()
        number = self._calls.begin(self.name, inputs, answers.put, takes_more=False, **options)
        try:
            return _outputs((await answers.get())[0])
        finally:
            self._calls.withdraw(number)

    def stream_infer(self, inputs: Inputs, **options: Unpack[Options]) -> Generator[Outputs, None, None]:
        """Yields each answer of a model that may answer any number of times, as it comes; the call is made when the
        first one is asked for. Closing the iterator withdraws the call."""
        answers: SimpleQueue[Answer] = SimpleQueue()
        number = self._calls.begin(self.name, inputs, answers.put, takes_more=True, **options)
        read = 0
        try:
            while True:
                answer, last = answers.get()
                if not (last and answer is None):
                    yield _outputs(answer)
                if last:
                    return
                read = self._read(number, read + 1)
        finally:
            self._calls.withdraw(number)

    async def async_stream_infer(self, inputs: Inputs, **options: Unpack[Options]) -> AsyncGenerator[Outputs, None]:
        """The same for `async for`."""
        answers = AsyncAnswers()
        number = self._calls.begin(self.name, inputs, answers.put, takes_more=True, **options)
        read = 0
        try:
            while True:
                answer, last = await answers.get()
                if not (last and answer is None):
                    yield _outputs(answer)
                if last:
                    return
                read = self._read(number, read + 1)
        finally:
            self._calls.withdraw(number)

    def _read(self, number: int, answers: int) -> int:
        """Tell the server now and then how many answers were read. Returns how many it hasn't been told of."""
        if answers < _READ_AT_ONCE:
            return answers
        self._calls.read(number, answers)
        return 0


class Models(dict[str, CalledModel]):
    """The models that `model` may call, by name. Without `calls`, it declares none."""

    CallFailed = CallFailed

    def __init__(self, model: str, names: Sequence[str], calls: Calls | None) -> None:
        super().__init__({name: CalledModel(calls, name) for name in names} if calls is not None else {})
        self._model = model

    def __missing__(self, name: str) -> CalledModel:
        names = ", ".join((*self, str(name)))
        raise KeyError(
            f"model '{self._model}' doesn't say that it calls '{name}'; to say so, put into its config.pbtxt: "
            f'parameters {{ key: "paceline.calls" value {{ string_value: "{names}" }} }}'
        )


class AsyncAnswers:
    """Answers for a coroutine, from another thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._answers: asyncio.Queue[Answer] = asyncio.Queue()
        self.get = self._answers.get

    def put(self, answer: Answer) -> None:
        with suppress(RuntimeError):  # the loop is closed, and nobody waits
            self._loop.call_soon_threadsafe(self._answers.put_nowait, answer)


def _outputs(answer: Outputs | CallFailed | None) -> Outputs:
    if isinstance(answer, CallFailed):
        raise answer
    return Outputs() if answer is None else answer


def _plain(name: str, value: Any) -> bool | int | float | str:
    if isinstance(value, np.generic):
        value = value.item()
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)  # subclasses can't be sent
    what = "expected a bool, a whole number, a float or a text"
    raise TypeError(f"parameter '{name}': {what}, got {type(value).__name__}")
