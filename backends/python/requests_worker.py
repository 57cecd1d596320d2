"""The process of a model that gets requests: a decoupled one, which answers each as often as it likes, or one written
for Triton.

Lives here: the request as the model sees it, and the talk with the server. Must not: as `worker`. The rules: a request
ends once; the server is told of each that it isn't told of otherwise, such as one that the model drops; the thread that
listens to the server never waits for the model.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any

from paceline.backends.python import messages
from paceline.backends.python.calls_worker import EXECUTION, Calls
from paceline.backends.python.loaded_model import EXECUTION_ERROR, LoadedModel, as_array, print_error
from paceline.backends.spec import MISSING, Array
from paceline.backends.transport.blocking_link import BlockingLink
from paceline.backends.transport.parcel import Message

_MOST_ANSWERS, _MOST_BYTES = 16, 2**20
"""As many answers to one request may be on their way to its caller; and no more once they have this many bytes."""


class DecoupledModel(LoadedModel):
    """Our own class, decoupled."""

    def answered(self, link: BlockingLink, message: Message) -> Message:
        requests: list[Request] = message[1]
        states = [request._state for request in requests]
        try:
            returned = self.execute(requests)
            self.end_fork()
            if returned is not None:
                what = "expected None from execute of a decoupled model, which answers by request.send"
                raise TypeError(f"{what}, got {type(returned).__name__}")
        except BaseException as error:  # noqa: BLE001 - the model's; passed to the server
            for state in states:
                state.close()  # the server fails those that haven't ended
            return self.failure(error)
        return messages.DONE, (), None


class Request:
    """A request of a decoupled model. `inputs` are arrays by name, `outputs` the names of those that its caller wants,
    `parameters` what else it sent. It may be kept after `execute` has returned, and used on any thread."""

    __slots__ = ("__weakref__", "_places", "_state", "id", "inputs", "outputs", "parameters")

    def __init__(
        self,
        desk: Desk,
        input_names: Sequence[str],
        output_names: Sequence[str],
        number: int,
        request_id: str,
        parameters: Mapping[str, bool | int | float | str],
        wanted: Sequence[int],
        arrays: Sequence[Array],
        *_: object,
    ) -> None:
        self._state = RequestState(desk, number)
        self._places = {name: place if place in wanted else -1 for place, name in enumerate(output_names)}
        self.id = request_id
        self.parameters = parameters
        self.inputs = {name: one for name, one in zip(input_names, arrays, strict=True) if one is not MISSING}
        self.outputs = tuple(output_names[place] for place in wanted)

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for answers any more. What is sent all the same is dropped."""
        return self._state.cancelled

    def send(self, outputs: Mapping[str, object], end: bool = False) -> None:
        """Answer with arrays by name; with `end`, for the last time. Outputs may be left out. Blocks while the caller
        has yet to read too many earlier answers; see `room`.

        Raises RuntimeError if the request has ended, TypeError or KeyError for what aren't its model's outputs.
        """
        if not isinstance(outputs, Mapping):
            raise TypeError(f"send: expected a dict of outputs by name, got {type(outputs).__name__}")
        arrays: list[Array] = []
        places: list[int] = []
        for name, value in outputs.items():
            if name not in self._places:
                raise KeyError(f"send: expected some of the outputs {list(self._places)}, got '{name}'")
            if self._places[name] >= 0:
                places.append(self._places[name])
                arrays.append(as_array(name, value))
        self._state.send(places, arrays, end)

    def fail(self, text: str, end: bool = True) -> None:
        """Answer with an error; without `end`, there may be further answers."""
        self._state.say(str(text), end)

    def end(self) -> None:
        """There are no further answers, and may have been none. Raises RuntimeError if the request has ended."""
        self._state.say(None, True)

    async def room(self) -> None:
        """Wait until `send` doesn't block, for coroutines: on an event loop, blocking holds up everything."""
        await self._state.room()

    def __del__(self) -> None:
        self._state.drop()


class RequestState:
    """What is known of a request on both its model's and the server's threads."""

    __slots__ = ("_desk", "_ended", "_held", "_held_bytes", "_lock", "_number", "_room", "_waiters", "cancelled")

    def __init__(self, desk: Desk, number: int) -> None:
        self._desk = desk
        self._number = number
        self._lock = threading.Lock()
        # What few need is made for those.
        self._room: threading.Condition | None = None
        self._held: deque[int] | None = None
        """The sizes of answers that the server holds."""
        self._held_bytes = 0
        self._ended = self.cancelled = False
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] | None = None
        desk.states[number] = self

    def send(
        self, places: Sequence[int], arrays: Sequence[Array], end: bool, parameters: str = "", *, waits: bool = True
    ) -> None:
        """Answer, maybe with parameters as JSON. Unless it `waits`, also if too much is on its way."""
        # The lock is held while the answer is sent, so that answers of several threads stay in front of the last one.
        # The server always reads, so that doesn't take long.
        with self._lock:
            while waits and self._must_wait():
                self._wait()
            if not self._may_answer(end):
                return
            link = self._desk.link
            parcel = link.pack(arrays)
            link.send(messages.ANSWER, self._number, end, tuple(places), parcel, parameters, parcel=parcel)
            self._hold(sum(array.nbytes for array in arrays))
            self._finish(end)

    def say(self, error: str | None, end: bool, *kind: str, waits: bool = True) -> None:
        """Answer with an error of this class and status, or with nothing but the end."""
        with self._lock:
            while waits and error is not None and not end and self._must_wait():
                self._wait()
            if not self._may_answer(end):
                return
            if error is None:
                self._desk.link.send(messages.ANSWER, self._number, end, (), None, "")
            else:
                self._desk.link.send(messages.ERROR, self._number, end, error, *(kind or (EXECUTION_ERROR,)))
                self._hold(len(error))
            self._finish(end)

    async def room(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            with self._lock:
                if not self._must_wait():
                    return
                future: asyncio.Future[None] = loop.create_future()
                self._waiters = [*(self._waiters or ()), (loop, future)]
            await future

    def sent(self, answers: int) -> None:
        with self._lock:
            for _ in range(min(answers, len(self._held or ()))):
                assert self._held is not None
                self._held_bytes -= self._held.popleft()
            self._wake()

    def cancel(self) -> None:
        with self._lock:
            self.cancelled = True
            self._wake()

    def close(self) -> None:
        """The server ends it."""
        with self._lock:
            self._finish(True)
            self._wake()

    def say_if_open(self, error: str) -> None:
        """End with an error, if it hasn't ended."""
        with suppress(RuntimeError):
            self.say(error, True)

    def drop(self) -> None:
        """The model has nothing left to answer it with. Called wherever the interpreter happens to drop the request,
        maybe by a thread that holds a lock."""
        if not (self._ended or self.cancelled):
            self._desk.unsaid.put(partial(self.say_if_open, "the model dropped the request without ending it"))

    def _hold(self, size_bytes: int) -> None:
        if self._held is None:
            self._held = deque()
        self._held.append(size_bytes)
        self._held_bytes += size_bytes

    def _wait(self) -> None:
        if self._room is None:
            self._room = threading.Condition(self._lock)
        self._room.wait()

    def _must_wait(self) -> bool:
        full = len(self._held or ()) >= _MOST_ANSWERS or self._held_bytes >= _MOST_BYTES
        return full and not (self._ended or self.cancelled)

    def _may_answer(self, end: bool) -> bool:
        """Whether an answer has to be sent. Raises RuntimeError if there may be none."""
        if os.getpid() != self._desk.pid:
            raise RuntimeError("a request can only be answered in the process that got it, not in a fork of it")
        if self._ended:
            raise RuntimeError("the request has ended: there was a last answer, or execute raised an error")
        if self.cancelled:
            self._finish(end)
        return not self.cancelled

    def _finish(self, end: bool) -> None:
        if end:
            self._ended = True
            self._desk.states.pop(self._number, None)

    def _wake(self) -> None:
        if self._room is not None:
            self._room.notify_all()
        waiters, self._waiters = self._waiters, None
        for loop, future in waiters or ():
            with suppress(RuntimeError):  # the loop is closed, and nobody waits
                loop.call_soon_threadsafe(_set, future)


class Desk:
    """Where the model and the server meet, if they talk at any time. `tasks` are for the thread that calls the model:
    batches as they came; other kinds of messages, with requests where there are any; CLOSE at the end. `calls` are the
    model's own; `states` those of requests that haven't ended, by number; `unsaid` says what there is to say of what
    the model dropped, as that happens on any thread, which may hold a lock. `make_request` makes requests of what HAND
    says of them: this, the names of inputs and outputs, and what is their own; on the thread that listens to the
    server."""

    def __init__(self, link: BlockingLink) -> None:
        self.link = link
        self.pid = os.getpid()
        self.unsaid: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self.calls = Calls(link, self.unsaid.put)
        self.tasks: SimpleQueue[Message] = SimpleQueue()
        self.states: dict[int, RequestState] = {}
        self._executions = 0
        self.make_request: Callable[..., Any] = Request

    def start(self) -> None:
        """Listen to the server, and say what is `unsaid`, on threads."""
        threading.Thread(target=self._listen, name="from the server", daemon=True).start()
        threading.Thread(target=self._say, name="to the server", daemon=True).start()

    def begin_execution(self) -> None:
        """The model is called now, by this thread."""
        self._executions += 1
        EXECUTION.set(self._executions)
        self.link.send(messages.TAKEN)

    def _listen(self) -> None:
        """Receive from the server until it goes."""
        try:
            while (came := self.link.receive_all()) is not None:
                for message in came:
                    self._hear(message)
        except BaseException as error:  # noqa: BLE001 - printed; the server learns of it by the end of the process
            print_error(error)
            os._exit(1)  # threads of the model may wait for what will never be heard
        self.tasks.put((messages.CLOSE, ()))

    def _hear(self, message: Message) -> None:
        kind, *content = message
        if kind == messages.CANCEL:
            if (state := self.states.pop(content[0], None)) is not None:
                state.cancel()
        elif kind == messages.SENT:
            if (state := self.states.get(content[0])) is not None:
                state.sent(content[1])
        elif kind in (messages.CALLED, messages.CALL_FAILED):
            self.calls.hear(message)
        elif kind in (messages.OVER, messages.RUN, messages.TRY, messages.INITIALIZE):
            self.tasks.put(message)
        else:
            # Requests are made here, so that they are known when the next message comes.
            self.tasks.put((kind, self._requests(*content) if content else []))

    def _requests(
        self,
        inputs: Sequence[str],
        outputs: Sequence[str],
        handed: Sequence[Any],
        stacked: tuple[Any, Sequence[int]] | None,
    ) -> list[Any]:
        made = []
        columns: Sequence[Array] = ()
        bounds: Sequence[int] = ()
        if stacked is not None:
            columns, bounds = self.link.unpack(stacked[0]), stacked[1]
        for place, (number, request_id, parameters, wanted, parcel, *rest) in enumerate(handed):
            if parcel is not None:
                arrays: Sequence[Array] = self.link.unpack(parcel)
            else:
                arrays = [column[bounds[place] : bounds[place + 1]] for column in columns]
            made.append(self.make_request(self, inputs, outputs, number, request_id, parameters, wanted, arrays, *rest))
        return made

    def _say(self) -> None:
        while True:
            self.unsaid.get()()


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
