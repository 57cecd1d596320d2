"""Concurrent inferences of few rows, merged into one request of many, for the asyncio client.

Lives here: which inferences may share a request, when it is sent, and which rows of the answer are whose. Must not live
here: channels, calls, streams. Each caller keeps its own timeout and cancellation, and gets no error that isn't its
own, as far as can be told: a merged request that is refused or fails because of its contents is sent again for each
caller alone, and one for which there is no room, or no time, is sent again in smaller ones.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Final

import grpc

from paceline.clients import errors
from paceline.clients.errors import Cancelled, DeadlineExceeded, InferenceError, ResponseError
from paceline.clients.messages import MAX_TENSOR_BYTES, InferResult
from paceline.protos.inference_pb2 import ModelInferRequest

Send = Callable[[ModelInferRequest, float | None], Awaitable[InferResult]]
"""Makes one inference with a timeout in seconds, None for no timeout."""

# While one request is computed, the next is on its way; a third would only make all of them smaller.
_UNDER_WAY: Final = 2
# Idle groups that had too little room or time for large requests are kept, as long as there are no more groups than
# this.
_MAX_SHORT: Final = 100
# What shows that a refusal is due to the request's size: paceline's queue limits count rows and bytes, besides
# requests; a batch may find no memory; gRPC's implementations say "larger than max" of a message beyond the receiver's
# limit.
_SIZE: Final = re.compile(r"\b(rows|bytes|memory)\b|larger than max")
# Among these, errors about the answer, whose size the request doesn't tell: paceline's, and gRPC's of this end or the
# other one.
_ITS_ANSWER: Final = re.compile(r"\boutputs\b|CLIENT: Received|SERVER: Sent")
_TOO_LATE: Final = "the deadline can't be met"


@dataclass(slots=True, eq=False)
class _Member:
    """One caller's inference. `task` is that of the last request that it was a part of."""

    request: ModelInferRequest
    rows: int
    size_bytes: int
    until_s: float | None
    answer: asyncio.Future[InferResult]
    task: asyncio.Task[Sequence[_Member]] | None = None


@dataclass(slots=True, eq=False)
class _Group:
    """Inferences that may share a request: those that wait, in order, and the requests in flight.

    If the server has no room for as many rows as a request may have (because it never has, or because it is full of
    others' requests just now), or can't answer them in time, the next request has half as many rows and is sent when no
    other is in flight. With each request that is answered, the number grows again by a quarter. Until it has grown
    back, the group is short (`is_short`).
    """

    key: Hashable
    most_rows: int
    waiting: deque[_Member] = field(default_factory=deque)
    tasks: dict[asyncio.Task[Sequence[_Member]], Sequence[_Member]] = field(default_factory=dict)
    flush_is_due: bool = False
    is_short: bool = False

    def shrink(self, members: Sequence[_Member]) -> None:
        """Halve the rows of the next request: there was no room, or no time, for several `members` in one."""
        self.is_short = True
        self.most_rows = max(1, min(self.most_rows, sum(member.rows for member in members) // 2))

    def refuse_with(self, member: _Member, refusal: InferenceError) -> None:
        """Fail others along with `member`, for which there was no room even alone. In a short group, those that wait
        and are no smaller would fare no better, and a full server isn't asked for each of them."""
        size_bytes = member.request.ByteSize()
        for other in self.waiting if self.is_short else ():
            if other.request.ByteSize() >= size_bytes:
                errors.fail(other.answer, errors.own(refusal))

    def grow(self, most_rows: int) -> None:
        """A request was answered: the next may have more rows again, up to `most_rows`."""
        if self.is_short:
            self.most_rows = min(most_rows, self.most_rows + max(1, self.most_rows // 4))
            self.is_short = self.most_rows < most_rows


class Coalescer:
    """Merges concurrent requests of few rows into ones of up to `max_rows` rows and `most_bytes` of tensors.

    While fewer than two requests of a kind are in flight, new ones are sent at the end of the event loop's turn; if the
    server is short of room or time, only while none is. Otherwise they wait for an answer to come back, or until there
    are enough rows for a full request.
    """

    def __init__(self, send: Send, max_rows: int, most_bytes: int = MAX_TENSOR_BYTES) -> None:
        self._send = send
        self._max_rows = max_rows
        self._most_bytes = most_bytes
        self._groups: dict[Hashable, _Group] = {}

    async def infer(self, request: ModelInferRequest, timeout_s: float | None) -> InferResult:
        """The answer to `request`, as `Send` would give it."""
        counts = {tensor.shape[0] if tensor.shape else 0 for tensor in request.inputs}
        rows = counts.pop() if len(counts) == 1 else 0  # else the inputs have no rows in common
        if not 0 < rows < self._max_rows:
            return await self._send(request, timeout_s)
        loop = asyncio.get_running_loop()
        until_s = None if timeout_s is None else loop.time() + timeout_s
        size_bytes = sum(map(len, request.raw_input_contents))
        member = _Member(request, rows, size_bytes, until_s, loop.create_future())
        key = _key(request)
        group = self._groups.setdefault(key, _Group(key, self._max_rows))
        group.waiting.append(member)
        self._flush_soon(group)
        alarm: asyncio.TimerHandle | None = None
        if timeout_s is not None:
            alarm = loop.call_later(timeout_s, lambda: errors.fail(member.answer, errors.no_answer(timeout_s)))
        try:
            return await member.answer
        finally:
            if alarm is not None:
                alarm.cancel()
            self._leave(group, member)

    async def close(self) -> None:
        """Fail all who wait with Cancelled, and cancel the requests in flight. Has to be called while `Send` still
        works: otherwise waiting inferences would be sent when an answer comes back."""
        tasks = [task for group in self._groups.values() for task in group.tasks]
        for group in self._groups.values():
            for member in chain(group.waiting, *group.tasks.values()):
                errors.fail(member.answer, errors.closed())
            group.waiting.clear()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _flush_soon(self, group: _Group) -> None:
        if not group.flush_is_due:
            group.flush_is_due = True
            asyncio.get_running_loop().call_soon(self._flush, group)

    def _flush(self, group: _Group) -> None:
        """Send what needn't wait."""
        group.flush_is_due = False
        loop = asyncio.get_running_loop()
        while members := self._next(group):
            task = loop.create_task(self._run(group, members))
            group.tasks[task] = members
            for member in members:
                member.task = task
            task.add_done_callback(partial(self._on_done, group))
        is_known = group.is_short and len(self._groups) <= _MAX_SHORT
        if not group.waiting and not group.tasks and not is_known:
            self._groups.pop(group.key, None)

    def _next(self, group: _Group) -> list[_Member]:
        """The members of the next request; none while it has to wait."""
        waiting = group.waiting
        members: list[_Member] = []
        rows, size_bytes, is_whole = 0, 0, False
        while waiting and not is_whole:
            if waiting[0].answer.done():
                waiting.popleft()
            elif members and (
                rows + waiting[0].rows > group.most_rows or size_bytes + waiting[0].size_bytes > self._most_bytes
            ):
                is_whole = True
            else:
                members.append(waiting.popleft())
                rows += members[-1].rows
                size_bytes += members[-1].size_bytes
                is_whole = rows >= group.most_rows
        # Whether it may join those in flight. In a short group, full ones wait too.
        if len(group.tasks) < (1 if group.is_short else _UNDER_WAY) or (is_whole and not group.is_short):
            return members
        waiting.extendleft(reversed(members))
        return []

    def _on_done(self, group: _Group, task: asyncio.Task[Sequence[_Member]]) -> None:
        members = group.tasks.pop(task)
        error = None if task.cancelled() else task.exception()
        again = () if task.cancelled() or error else task.result()
        group.waiting.extendleft(reversed(again))
        for member in () if again else members:
            # A task ends before its members have their answers only if it was cancelled, or because of a bug here.
            errors.fail(member.answer, error or Cancelled(grpc.StatusCode.CANCELLED, "the call was cancelled"))
        self._flush_soon(group)

    def _leave(self, group: _Group, member: _Member) -> None:
        """The member's caller has an answer, or has given up; a request that nobody waits for is cancelled."""
        task = member.task
        if task is None or task.done():
            return
        members, answer = group.tasks[task], member.answer
        if all(one.answer.done() for one in members):
            has_expired = not answer.cancelled() and isinstance(answer.exception(), DeadlineExceeded)
            if len(members) > 1 and has_expired:
                group.shrink(members)
            task.cancel()

    async def _run(self, group: _Group, members: Sequence[_Member]) -> Sequence[_Member]:
        """Answer the members, except for those that it returns, which are to be sent again in smaller requests."""
        try:
            await self._ask(members)
        except InferenceError as error:
            are_several = len(members) > 1
            # Requests of fewer rows may be accepted.
            is_too_large = isinstance(error, errors.ResourceExhausted) and _SIZE.search(error.message) is not None
            # Fewer rows may be in time: paceline says so before it has done anything. A request that expired in a queue
            # has waited as long as it would have alone, and had better not wait again.
            is_too_late = isinstance(error, DeadlineExceeded) and _TOO_LATE in error.message
            if are_several and (is_too_large or is_too_late):
                group.shrink(members)
                return [member for member in members if not member.answer.done()]
            if is_too_large and not _ITS_ANSWER.search(error.message):
                group.refuse_with(members[0], error)
            # Some of the rows may be at fault.
            if are_several and isinstance(error, (errors.InvalidArgument, errors.Internal)):
                await asyncio.gather(*(self._ask_alone(member) for member in members if not member.answer.done()))
            else:
                for member in members:
                    errors.fail(member.answer, errors.own(error) if are_several else error)
        else:
            group.grow(self._max_rows)
        return ()

    async def _ask_alone(self, member: _Member) -> None:
        try:
            await self._ask([member])
        except InferenceError as error:
            errors.fail(member.answer, error)

    async def _ask(self, members: Sequence[_Member]) -> None:
        """Answer the members. Raises InferenceError."""
        try:
            # Members with earlier deadlines than the last have alarms of their own.
            bounds_s = [member.until_s for member in members if member.until_s is not None]
            timeout_s = None
            if len(bounds_s) == len(members):
                timeout_s = max(0.0, max(bounds_s) - asyncio.get_running_loop().time())
            result = await self._send(_merged(members), timeout_s)
            for member, share in zip(members, _shares(result, members), strict=True):
                if not member.answer.done():
                    member.answer.set_result(share)
        except ResponseError as error:
            for member in members:
                errors.fail(member.answer, ResponseError(str(error)))


def _key(request: ModelInferRequest) -> Hashable:
    """What requests must have in common to be sent as one: all but id, number of rows and values."""
    return (
        request.model_name,
        request.model_version,
        tuple((tensor.name, tensor.datatype, *tensor.shape[1:]) for tensor in request.inputs),
        tuple(output.name for output in request.outputs),
        frozenset((name, value.SerializeToString()) for name, value in request.parameters.items()),
    )


def _merged(members: Sequence[_Member]) -> ModelInferRequest:
    """One request for all members; for a single one its own, so that its id reaches the server."""
    if len(members) == 1:
        return members[0].request
    requests = [member.request for member in members]
    merged = ModelInferRequest()
    merged.CopyFrom(requests[0])
    merged.id = ""
    for place, tensor in enumerate(merged.inputs):
        tensor.shape[0] = sum(member.rows for member in members)
        # All datatypes are stored row by row, so the rows of one request are in one piece.
        merged.raw_input_contents[place] = b"".join(request.raw_input_contents[place] for request in requests)
    return merged


def _shares(result: InferResult, members: Sequence[_Member]) -> list[InferResult]:
    """Each member's result, with its rows of the outputs. Raises ResponseError if an output doesn't have the rows that
    were sent."""
    if len(members) == 1:
        return [result]
    total = sum(member.rows for member in members)
    for name, array in result.outputs.items():
        if not array.ndim or array.shape[0] != total:
            raise ResponseError(
                f"model {result.model_name!r}, output {name!r}: expected the {total} rows that were sent in the first "
                f"dimension, got shape {list(array.shape)}; coalesce is for models that answer row by row"
            )
    shares, start = [], 0
    for member in members:
        outputs = {name: array[start : start + member.rows] for name, array in result.outputs.items()}
        shares.append(replace(result, id=member.request.id, outputs=outputs))
        start += member.rows
    return shares
