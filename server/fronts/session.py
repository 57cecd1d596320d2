"""What one front asks for, done in the engine.

Lives here: receiving its messages, its requests, and answering them. Must not: processes, or steps of a request that a
server of one process has too (`server.requests.inference`). When a front goes, what it was waiting for is given up.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from paceline.backends.transport.link import Link
from paceline.backends.transport.memory import ALIGNMENT
from paceline.backends.transport.parcel import Message, Parcel
from paceline.scheduler.errors import QueueFull
from paceline.scheduler.observer import Drop
from paceline.server.call_facts import NO_PASSED_HEADERS, PassedHeaders, TraceParent
from paceline.server.codec.answers import Pieces
from paceline.server.codec.codec import AnyResponse, ModelCodec
from paceline.server.codec.wire_request import AnyMessage, RequestReader, Unread
from paceline.server.errors import AnswerTooLarge
from paceline.server.fronts.protocol import (
    MAX_INLINE_BYTES,
    WHAT_IS_FULL,
    CallContext,
    Kind,
    packed_error,
)
from paceline.server.models.model_lookup import ModelLookup
from paceline.server.requests.in_flight import InFlight, NextAnswer
from paceline.server.requests.inference import Inference, encode
from paceline.server.rpc.gate import Usage
from paceline.server.rpc.handlers import serialized

_log = logging.getLogger("paceline.server.fronts")

Handlers = Mapping[str, Any]
"""gRPC's handlers of the RPCs, by name."""


class FrontRequest(InFlight):
    """A request of the front of `session`, which has numbered it, and got it at `arrived_ns`. It is answered with
    `pieces`. If it `takes_more` answers than one, these go through the socket, in front of the last: they are few at a
    time. `_held` are those that haven't left the front."""

    __slots__ = ("_held", "failed", "pieces", "session", "takes_more")

    _held: deque[NextAnswer]

    def __init__(
        self,
        session: FrontSession,
        number: int,
        takes_more: bool,
        message: AnyMessage,
        deadline_ns: int,
        parent: TraceParent | None,
        passed: PassedHeaders,
        arrived_ns: int,
    ) -> None:
        super().__init__(message, deadline_ns, parent, passed, arrived_ns)
        self.session = session
        self.number = number
        self.takes_more = takes_more
        self.failed = False
        self.pieces: Pieces = ()

    def on_failure(self, error: BaseException) -> None:
        self.failed = True
        self.session.fail(self.number, error, self.message.model_name)

    # hot path
    def on_done(self) -> None:
        self.session.on_done(self)

    def too_large(self, answer: AnyResponse) -> AnswerTooLarge | None:
        self.answer = made = serialized(answer)
        return self.session.too_large(self, (made,))

    def on_open(self) -> None:
        self._held = deque()
        self.session.link.send((Kind.OPENED, self.number))

    def on_more(self, answer: NextAnswer, error: Exception | None) -> None:
        self._held.append(answer)
        if error is not None:
            self.session.link.send((Kind.NEXT_FAILED, self.number, *packed_error(error, self.message.model_name)))
            return
        assert answer.answer is not None
        self.session.link.send((Kind.NEXT, self.number, serialized(answer.answer)))

    def end_of_answers(self) -> bytes:
        """The front makes what its caller gets."""
        return b""

    def on_sent(self, size_bytes: int) -> None:
        """The oldest answer, with so many bytes, has left the front."""
        self._held.popleft().sent(size_bytes)


class FrontSession:
    """Serves the front at the other end of `link`. `on_listens` is called with the port when the front listens, or with
    0 and why it can't; `on_end` is called once, when the front is gone and all that it had in progress is given up.
    `read` is shared by all fronts: their requests may be alike."""

    def __init__(
        self,
        link: Link,
        inference: Inference,
        models: ModelLookup,
        handlers: Handlers,
        on_listens: Callable[[int, str], None],
        on_end: Callable[[], None],
        read: RequestReader,
    ) -> None:
        self.link = link
        self._inference = inference
        self._models = models
        self._handlers = handlers
        self._read = read
        self._on_listens = on_listens
        self._on_end = on_end
        # What the front waits for, by the front's numbers.
        self._waited_for: dict[int, FrontRequest] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        # Answers that wait for room in the memory that the front reads, first come first served, with their numbers.
        self._large: deque[tuple[int, Pieces]] = deque()
        self._quiet = asyncio.Event()
        self.usage = Usage()
        self.reports = 0
        """How often the front has reported its usage: it does so as long as its event loop runs."""

    @property
    def requests(self) -> int:
        """How many answers the front waits for."""
        return len(self._waited_for) + len(self._tasks) + len(self._large)

    def start(self) -> None:
        self.link.start(self._on_messages, self._on_gone, self._send_waiting)

    async def until_quiet(self) -> None:
        """Wait until the front waits for nothing."""
        while self.requests:
            self._quiet.clear()
            await self._quiet.wait()

    def close(self) -> None:
        """As if the front had gone, but without `on_end`."""
        self.link.close()
        self._take_back()

    def _on_gone(self) -> None:
        self._take_back()
        self._on_end()

    def _take_back(self) -> None:
        self._large.clear()
        waited_for, self._waited_for = self._waited_for, {}
        for one in waited_for.values():
            self._inference.give_up(one)
        for task in self._tasks.values():
            task.cancel()
        self._quiet.set()

    # hot path: see bench/
    def _on_messages(self, messages: list[Message]) -> None:
        for message in messages:
            try:
                if message[0] == Kind.INFER:
                    self._infer(*message[1:])
                else:
                    self._do(message)
            except Exception as error:  # noqa: BLE001 - the messages behind it are others'
                self._on_unforeseen(message, error)

    def _on_unforeseen(self, message: Message, error: Exception) -> None:
        """A message could not be handled: whoever waits for its reply gets the error."""
        kind, *fields = message
        if kind in (Kind.INFER, Kind.CALL):
            self._cancel(fields[0])
            self.fail(fields[0], error)
        else:
            _log.error("a front's message failed with an internal error, a bug in paceline", exc_info=error)

    def _do(self, message: Message) -> None:
        kind, *fields = message
        if kind == Kind.CANCEL:
            self._cancel(*fields)
        elif kind == Kind.CALL:
            task = self._tasks[fields[0]] = asyncio.get_running_loop().create_task(self._call(*fields))
            task.add_done_callback(lambda _: self._on_task(fields[0]))
        elif kind == Kind.TAKEN:
            if (request := self._waited_for.get(fields[0])) is not None:
                request.on_sent(fields[1])
        elif kind == Kind.REFUSED:
            self._refused(*fields)
        elif kind == Kind.USAGE:
            self.usage = Usage(*fields)
            self.reports += 1
        elif kind == Kind.LISTENS:
            self._on_listens(*fields)

    # hot path
    def _infer(
        self,
        number: int,
        began_ns: int,
        deadline_ns: int,
        parent: TraceParent | None,
        headers: tuple[Any, ...] | None,
        takes_more: bool,
        data: bytes | Parcel,
    ) -> None:
        """A request as it came to the front, with its headers: from here on like one that came to this process. Its
        tensors stay where the front has put them."""
        if isinstance(data, bytes):
            message = self._read(data)
        else:
            (array,) = self.link.unpack(data)
            message = self._read(array.data)
        if isinstance(message, Unread):
            self.fail(number, message)
            return
        passed = PassedHeaders(*headers) if headers else NO_PASSED_HEADERS
        request = FrontRequest(self, number, takes_more, message, deadline_ns, parent, passed, began_ns)
        self._waited_for[number] = request
        self._inference.announce(request)

    # hot path
    def on_done(self, request: FrontRequest) -> None:
        """It has an answer, or has failed, or its answer is to be made now."""
        number = request.number
        self._waited_for.pop(number, None)
        try:
            if request.answer is not None:
                request.pieces = (serialized(request.answer),)
            elif not request.failed:
                self._inference.conclude((request,), self._make_pieces)
            if request.pieces:
                self._send_answer(number, request.pieces)
        except Exception as error:  # noqa: BLE001 - the front's caller must get an answer
            self.fail(number, error, request.message.model_name)
        self._notify_if_quiet()

    def _make_pieces(self, requests: Sequence[FrontRequest]) -> Sequence[Exception | None]:
        """As `encode`, for a request whose answer may be large: it isn't joined here, but copied to the front's
        memory."""
        (request,) = requests
        codec = request.model.codec
        if pieces := codec.pieces(request) if isinstance(codec, ModelCodec) else ():
            error: Exception | None = self.too_large(request, pieces)
        else:
            (error,) = encode(requests)
            if error is None:
                assert request.answer is not None
                pieces = (serialized(request.answer),)
        if error is None:
            request.pieces = pieces
        return [error]

    def too_large(self, request: FrontRequest, pieces: Pieces) -> AnswerTooLarge | None:
        """Why an answer can't be sent, joined of `pieces`: it is too large for any front's memory. It would wait
        forever, and all others behind it."""
        size_bytes = sum(-(-len(one) // ALIGNMENT) * ALIGNMENT for one in pieces)
        if size_bytes <= self.link.size_bytes:
            return None
        return AnswerTooLarge(request.message.model_name, self.link.size_bytes, " (--frontend-memory-mb)")

    # hot path
    def _send_answer(self, number: int, pieces: Pieces) -> None:
        """Send an answer, a large one when there is room."""
        if sum(map(len, pieces)) <= MAX_INLINE_BYTES:
            self.link.send((Kind.ANSWER, number, b"".join(pieces)))
        elif self._large or not self._try_send(number, pieces):
            self._large.append((number, pieces))

    def _try_send(self, number: int, pieces: Pieces) -> bool:
        parcel = self.link.pack([np.frombuffer(one, np.uint8) for one in pieces if len(one)])
        if parcel is None:
            return False
        self.link.send((Kind.PIECES, number, parcel))
        return True

    def _send_waiting(self) -> None:
        """Send waiting answers, as there is more room."""
        while self._large and self._try_send(*self._large[0]):
            self._large.popleft()
        self._notify_if_quiet()

    def _cancel(self, number: int) -> None:
        if self._large:
            self._large = deque(one for one in self._large if one[0] != number)
        if (one := self._waited_for.pop(number, None)) is not None:
            self._inference.give_up(one)
        elif (task := self._tasks.get(number)) is not None:
            task.cancel()
        self._send_waiting()  # it may have been in front of those that fit

    def _refused(self, name: str, version: str) -> None:
        if (model := self._models.find(name, version)) is not None:
            model.statistics.on_drop(Drop.FULL_BYTES)
            model.statistics.on_failure(QueueFull(self.link.size_bytes, WHAT_IS_FULL), 0)

    def _on_task(self, number: int) -> None:
        self._tasks.pop(number, None)
        self._notify_if_quiet()

    async def _call(
        self, number: int, rpc: str, deadline_ns: int | None, headers: tuple[tuple[str, str | bytes], ...], data: bytes
    ) -> None:
        """Any other RPC: call its handler as gRPC would."""
        handler = self._handlers[rpc]
        try:
            response = await handler.unary_unary(handler.request_deserializer(data), CallContext(headers, deadline_ns))
            self.link.send((Kind.ANSWER, number, handler.response_serializer(response)))
        except Exception as error:  # noqa: BLE001 - the front's caller must get an answer
            self.fail(number, error)

    def fail(self, number: int, error: BaseException, model: str = "") -> None:
        self.link.send((Kind.FAILED, number, *packed_error(error, model)))

    def _notify_if_quiet(self) -> None:
        if not self.requests:
            self._quiet.set()
