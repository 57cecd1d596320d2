"""Calls that a front forwards to the engine unparsed, with an engine that refuses them at the other end of the link."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import weakref
from collections.abc import AsyncIterator, Coroutine
from typing import Any, NoReturn

import grpc
import pytest

from paceline.backends.transport.link import Link
from paceline.backends.transport.parcel import Message
from paceline.server.fronts.inference import Replies
from paceline.server.fronts.process import forwarded
from paceline.server.fronts.protocol import Aborted, CallContext, Kind

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
            engine.send((Kind.ABORTED, number, _STATUS.name, f"no {rpc}"))

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
        assert (kept.value.code, kept.value.text) == (_STATUS, "no ModelMetadata")
        del context
        await asyncio.sleep(0)
        assert sys.getrefcount(data) == references
        assert gone() is None
    finally:
        gc.enable()
