"""Calls that a front forwards to the engine unparsed, with an engine that refuses them at the other end of the link."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import weakref
from collections.abc import AsyncIterator, Coroutine
from typing import Any, NoReturn, cast

import grpc
import pytest

from paceline.backends.transport.link import Gathering, Link
from paceline.backends.transport.parcel import Message
from paceline.protos import inference_pb2 as pb
from paceline.scheduler.policy import NEVER
from paceline.server.call_facts import NO_PASSED_HEADERS
from paceline.server.errors import Aborted, ServerStopping
from paceline.server.fronts.inference import Replies, Reply
from paceline.server.fronts.process import _Front, forwarded
from paceline.server.fronts.protocol import CallContext, Kind, packed_error
from paceline.server.requests.in_flight import InFlight

_STATUS = grpc.StatusCode.NOT_FOUND


class Context(CallContext):
    """Like gRPC's: the traceback of the exception that `abort` raises doesn't refer to it."""

    def __init__(self) -> None:
        super().__init__((("key", "value"),), None)

    def abort(self, code: grpc.StatusCode, details: str = "") -> Coroutine[Any, Any, NoReturn]:
        return _abort(code, details)


async def _abort(code: grpc.StatusCode, details: str) -> NoReturn:
    raise Aborted(code, details)


@pytest.fixture
async def link() -> AsyncIterator[tuple[Link, Replies]]:
    """A front's end of a link, and the replies that it waits for."""
    engine, remote = Link.pair(1 << 20)
    front = Link.join(remote)
    replies = Replies(front)

    def refuse(messages: list[Message]) -> None:
        for _, number, rpc, *_ in messages:
            stops = rpc == "ModelReady"
            error = ServerStopping() if stops else Aborted(_STATUS, f"no {rpc}")
            engine.send((Kind.FAILED, number, *packed_error(error)))

    def tell(messages: list[Message]) -> None:
        for message in messages:
            replies.on_message(message)

    engine.start(refuse, lambda: None)
    front.start(tell, lambda: None)
    yield front, replies
    front.close()
    engine.close()


async def test_refused_call_leaves_nothing_to_the_garbage_collector(link: tuple[Link, Replies]) -> None:
    """gRPC keeps the exception that `abort` raises with the call, and a request may have hundreds of MB."""
    call, data, context = forwarded("ModelMetadata", *link), os.urandom(100), Context()
    gone, references = weakref.ref(context), sys.getrefcount(data)
    gc.disable()
    try:
        with pytest.raises(Aborted) as kept:
            await call(data, context)
        assert (kept.value.status, str(kept.value)) == (_STATUS, "no ModelMetadata")
        del context
        await asyncio.sleep(0)
        assert sys.getrefcount(data) == references
        assert gone() is None
    finally:
        gc.enable()


async def test_call_to_a_stopping_engine_is_unavailable(link: tuple[Link, Replies]) -> None:
    with pytest.raises(Aborted, match="the server is stopping") as kept:
        await forwarded("ModelReady", *link)(b"", Context())
    assert kept.value.status == grpc.StatusCode.UNAVAILABLE


async def test_calls_of_one_moment_are_refused_as_those_of_many() -> None:
    """However many wait to leave together: the link's buffer has nothing of them yet."""
    engine, remote = Link.pair(1 << 20)
    front = Link.join(remote, Gathering())
    front.start(lambda messages: None, lambda: None)
    call, data = forwarded("ModelReady", front, Replies(front)), bytes(2**21)
    calls = [asyncio.create_task(call(data, Context())) for _ in range(40)]
    ended, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    assert len(waiting) == 64 // 2 + 1
    for one in ended:
        assert cast("Aborted", one.exception()).status is grpc.StatusCode.RESOURCE_EXHAUSTED
    for one in waiting:
        one.cancel()
    front.close()
    engine.close()


async def test_unforeseen_failure_leaves_other_replies_alone() -> None:
    engine, remote = Link.pair(1 << 20)
    front = _Front(Link.join(remote))
    heard = asyncio.Queue[Message]()
    engine.start(lambda messages: [heard.put_nowait(one) for one in messages], lambda: None)
    running = asyncio.create_task(front.run())
    first, second = Reply(None, 0, None), Reply(None, 0, None)
    generation = InFlight(pb.ModelInferRequest(), NEVER, None, NO_PASSED_HEADERS)
    for one in (first, second, generation):
        front._replies.expect(one)
    for message in (
        (Kind.STATE, "no state has so few fields"),
        (Kind.FAILED, first.number, "no status has this name", ""),
        (Kind.PIECES, 99, "no parcel"),
        (Kind.OPENED, generation.number),  # which nobody has said what to do about
        (Kind.ANSWER, second.number, b"data"),
    ):
        engine.send(message)
    assert await second == b"data"
    with pytest.raises(KeyError, match="no status has this name"):
        await first
    assert isinstance(generation.exception(), NotImplementedError)
    assert await heard.get() == (Kind.CANCEL, generation.number)
    running.cancel()
    front._link.close()
    engine.close()
