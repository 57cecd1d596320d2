"""What one front asks for, done in the engine.

Lives here: receiving its messages, its requests, and answering them. Must not: processes, or steps of a request that a
server of one process has too (`server.requests.inference`). When a front goes, what it was waiting for is given up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from paceline.backends.errors import ExecutionError
from paceline.backends.spec import MISSING, Array
from paceline.backends.transport.link import Link
from paceline.backends.transport.parcel import Message, Parcel, is_inline
from paceline.protos import inference_pb2 as pb
from paceline.protos.datatypes import by_name
from paceline.protos.tensors import TensorError, encode_raw
from paceline.scheduler.errors import QueueFull
from paceline.scheduler.observer import Drop
from paceline.server.call_facts import NO_PASSED_HEADERS, PassedHeaders, TraceParent
from paceline.server.codec.answers import Facts, batch_facts_of
from paceline.server.codec.codec import tensor_bytes
from paceline.server.codec.known_requests import Group
from paceline.server.codec.parameters import NO_PARAMETERS, RequestOptions, RequestParameters
from paceline.server.codec.remote import NOTHING_PASSED_ON, PassedOn
from paceline.server.codec.wire_request import RequestReader, Unread
from paceline.server.errors import AnswerTooLarge, value_or_error
from paceline.server.fronts.protocol import (
    MAX_WHOLE_BYTES,
    WHAT_IS_FULL,
    Aborted,
    CallContext,
    Handles,
    Kind,
    packed_error,
)
from paceline.server.limits import LARGEST_RESPONSE_BYTES
from paceline.server.requests.in_flight import InFlight, NextAnswer
from paceline.server.requests.inference import Inference, encode
from paceline.server.rpc.gate import Usage
from paceline.server.rpc.handlers import serialized

Handlers = Mapping[str, Any]
"""gRPC's handlers of the RPCs, by name."""


_Values = tuple[Any, ...]  # the fields of a named tuple, as `marshal` brings them
_Result = tuple[int, int, list[Array], Facts | None]
"""Kind of message, the front's number, what to pack, and the facts about a batch if the caller asked for them."""

_NAMELESS = pb.ModelInferRequest()


class FrontRequest(InFlight):
    """A request of the front of `session`, which has numbered it, read it at `arrived_ns`, and decoded it; it makes the
    answer."""

    __slots__ = ("failed", "session")

    session: FrontSession
    failed: bool

    def on_failure(self, error: BaseException) -> None:
        self.failed = True
        self.session.fail(self.number, error)


class Whole(FrontRequest):
    """One that the front has passed on as it came. If it `takes_more` answers than one, these go through the socket, in
    front of the last: they are few at a time. `_held` are those that haven't left the front."""

    __slots__ = ("_held", "takes_more")

    takes_more: bool
    _held: deque[NextAnswer]

    # hot path
    def on_done(self) -> None:
        self.session.on_done(self)

    def on_open(self) -> None:
        self._held = deque()
        self.session.link.send((Kind.OPENED, self.number))

    def on_more(self, answer: NextAnswer, error: Exception | None) -> None:
        self._held.append(answer)
        if error is not None:
            self.session.link.send((Kind.NEXT_FAILED, self.number, *packed_error(error)))
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
        handles: Handles,
        handlers: Handlers,
        on_listens: Callable[[int, str], None],
        on_end: Callable[[], None],
        read: RequestReader,
    ) -> None:
        self.link = link
        self._inference = inference
        self._handles = handles
        self._handlers = handlers
        self._read = read
        self._on_listens = on_listens
        self._on_end = on_end
        # What the front waits for, by the front's numbers.
        self._waited_for: dict[int, InFlight] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        # Results that wait for room in the memory that the front reads, first come first served.
        self._results: deque[_Result] = deque()
        self._quiet = asyncio.Event()
        self.usage = Usage()
        self.reports = 0
        """How often the front has reported its usage: it does so as long as its event loop runs."""

    @property
    def requests(self) -> int:
        """How many answers the front waits for."""
        return len(self._waited_for) + len(self._tasks) + len(self._results)

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
        self._results.clear()
        waited_for, self._waited_for = self._waited_for, {}
        for one in waited_for.values():
            self._inference.give_up(one)
        for task in self._tasks.values():
            task.cancel()
        self._quiet.set()

    # hot path: see bench/
    def _on_messages(self, messages: list[Message]) -> None:
        for message in messages:
            if message[0] == Kind.INFER:
                self._infer(*message[1:])
            elif message[0] == Kind.SUBMIT:
                self._submit(*message[1:])
            else:
                self._do(message)

    def _do(self, message: Message) -> None:
        kind, *fields = message
        if kind == Kind.CANCEL:
            self._cancel(*fields)
        elif kind == Kind.CALL:
            task = self._tasks[fields[0]] = asyncio.get_running_loop().create_task(self._call(*fields))
            task.add_done_callback(lambda _: self._on_task(fields[0]))
        elif kind == Kind.TAKEN:
            if isinstance(whole := self._waited_for.get(fields[0]), Whole):
                whole.on_sent(fields[1])
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
        headers: _Values | None,
        takes_more: bool,
        data: bytes,
    ) -> None:
        """A request as it came to the front, with its headers: from here on like one that came to this process."""
        request = self._read(data)
        if isinstance(request, Unread):
            self.fail(number, request)
            return
        passed = PassedHeaders(*headers) if headers else NO_PASSED_HEADERS
        whole = Whole(request, deadline_ns, parent, passed, began_ns)
        whole.session, whole.number, whole.failed, whole.takes_more = self, number, False, takes_more
        self._waited_for[number] = whole
        self._inference.announce(whole)

    # hot path
    def on_done(self, whole: Whole) -> None:
        """It has an answer, or has failed, or its answer is to be made now."""
        number = whole.number
        self._waited_for.pop(number, None)
        if whole.answer is None and not whole.failed:
            self._inference.conclude((whole,), self._make_answers)
        if whole.answer is not None and not whole.failed:
            try:
                self._send_answer(number, serialized(whole.answer))
            except Exception as error:  # noqa: BLE001 - the front's caller must get an answer
                self.fail(number, error)
        self._notify_if_quiet()

    def _make_answers(self, wholes: Sequence[Whole]) -> Sequence[Exception | None]:
        """As `encode`; also QueueFull for an answer too large for any front."""
        errors = encode(wholes)
        return [error or value_or_error(self._serialize, one) for one, error in zip(wholes, errors, strict=True)]

    def _serialize(self, whole: Whole) -> None:
        assert whole.answer is not None
        whole.answer = data = serialized(whole.answer)
        if len(data) > self.link.size_bytes // 2:
            raise QueueFull(self.link.size_bytes, WHAT_IS_FULL)

    # hot path
    def _send_answer(self, number: int, data: bytes) -> None:
        """Send an answer; large ones are sent as results are."""
        if len(data) <= MAX_WHOLE_BYTES:
            self.link.send((Kind.ANSWER, number, data))
            return
        result = Kind.PACKED, number, [np.frombuffer(data, np.uint8)], None
        if self._results or not self._try_send(*result):
            self._results.append(result)

    # hot path
    def _submit(
        self,
        number: int,
        handle: int,
        request_id: str,
        began_ns: int,
        deadline_ns: int,
        parent: TraceParent | None,
        rows: int,
        key: Hashable,
        sizes: tuple[int, ...],
        outputs: tuple[int, ...],
        parameter_values: _Values | None,
        parcel: Parcel,
        passed_on_values: _Values | None,
    ) -> None:
        inputs = self.link.unpack(parcel)
        model = self._handles.models.get(handle)
        if model is None:
            self.link.send((Kind.STALE, number))
            return
        parameters = RequestParameters(*parameter_values) if parameter_values else NO_PARAMETERS
        group = Group.of_one(RequestOptions(rows, key, outputs, parameters, sizes=sizes), inputs)
        request = pb.ModelInferRequest(id=request_id) if request_id else _NAMELESS
        submitted = FrontRequest(request, deadline_ns, parent, NO_PASSED_HEADERS, began_ns)
        submitted.session, submitted.number, submitted.failed = self, number, False
        try:
            passed_on = PassedOn(*passed_on_values) if passed_on_values else NOTHING_PASSED_ON
            self._inference.take(submitted, model, group, self._on_results, passed_on)
        except Exception as error:  # noqa: BLE001 - the front's caller must get an answer
            self.fail(number, error)
            return
        self._waited_for[number] = submitted

    # hot path
    def _on_results(self, done: list[FrontRequest]) -> None:
        """Requests have results, or errors instead."""
        wanted = [one for one in done if self._waited_for.pop(one.number, None) is not None]
        if len(wanted) < len(done):
            for one in done:
                if one.gone:
                    one.let_go()  # a pipeline's leads back to it
        self._inference.conclude(wanted, self._send_results)
        self._notify_if_quiet()

    # hot path
    def _send_results(self, done: Sequence[FrontRequest]) -> Sequence[Exception | None]:
        return [value_or_error(self._send_result, submitted) for submitted in done]

    # hot path
    def _send_result(self, submitted: FrontRequest) -> None:
        """Send what the request wants of its results, now or when there is room.

        Raises ExecutionError or AnswerTooLarge, as the codec would, for what no message can carry, and QueueFull for
        what no front could take.
        """
        number, options, results = submitted.number, submitted.options, submitted.value
        assert options is not None
        outputs = [MISSING] * len(results)
        for index in options.outputs:
            outputs[index] = results[index]
        facts = submitted.facts if options.parameters.batch_info else None
        result = Kind.RESULT, number, outputs, batch_facts_of(facts) if facts else None
        try:
            if self.link.size_bytes > LARGEST_RESPONSE_BYTES < sum(map(tensor_bytes, outputs)):
                raise AnswerTooLarge(submitted.model.name)  # as the front would, after it was counted
            if (not self._results or is_inline(outputs)) and self._try_send(*result):
                return
        except (TypeError, ValueError) as error:
            _check_sendable(submitted, outputs)
            raise ExecutionError(f"model '{submitted.model.name}': its outputs can't be sent: {error}") from None
        _check_sendable(submitted, outputs)
        if sum(map(tensor_bytes, outputs)) > self.link.size_bytes // 2:
            raise QueueFull(self.link.size_bytes, WHAT_IS_FULL)
        self._results.append(result)

    def _try_send(self, kind: int, number: int, outputs: list[Array], facts: Facts | None) -> bool:
        parcel = self.link.pack(outputs)
        if parcel is None:
            return False
        self.link.send((kind, number, parcel, facts))
        return True

    def _send_waiting(self) -> None:
        """Send waiting results, as there is more room."""
        while self._results and self._try_send(*self._results[0]):
            self._results.popleft()
        self._notify_if_quiet()

    def _cancel(self, number: int) -> None:
        if self._results:
            self._results = deque(result for result in self._results if result[1] != number)
        if (one := self._waited_for.pop(number, None)) is not None:
            self._inference.give_up(one)
        elif (task := self._tasks.get(number)) is not None:
            task.cancel()
        self._notify_if_quiet()

    def _refused(self, handle: int) -> None:
        if (model := self._handles.models.get(handle)) is not None:
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
        except Aborted as aborted:
            self.link.send((Kind.ABORTED, number, aborted.code.name, aborted.text))
        except Exception as error:  # noqa: BLE001 - the front's caller must get an answer
            self.fail(number, error)

    def fail(self, number: int, error: BaseException) -> None:
        self.link.send((Kind.FAILED, number, *packed_error(error)))

    def _notify_if_quiet(self) -> None:
        if not self.requests:
            self._quiet.set()


def _check_sendable(submitted: FrontRequest, outputs: Sequence[Array]) -> None:
    """Raise ExecutionError, in the codec's words, for outputs that no message can carry."""
    model, options = submitted.model, submitted.options
    assert options is not None
    for index in options.outputs:
        tensor, array = model.spec.outputs[index], outputs[index]
        if array is MISSING or not array.dtype.hasobject:
            continue
        try:
            encode_raw(array, by_name(tensor.datatype))
        except TensorError as error:
            raise ExecutionError(f"model '{model.name}': output '{tensor.name}': {error}") from None
