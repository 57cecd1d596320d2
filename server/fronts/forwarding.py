"""RPCs that a front hands to the engine as they come: all but inference, health and reflection.

Lives here: the one handler that they share, whatever their messages. Must not: know any of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from paceline.backends.transport.link import Link
from paceline.scheduler.errors import QueueFull
from paceline.server.errors import STATUS_OF
from paceline.server.fronts import protocol
from paceline.server.fronts.calls import Aborted
from paceline.server.fronts.inference import Replies, Reply
from paceline.server.rpc.calls import Context

__all__ = ["forwarded"]


def forwarded(rpc: str, link: Link, replies: Replies) -> Callable[[bytes, Context], Any]:
    """A unary handler from bytes to bytes, whose answers the engine gives."""

    async def call(data: bytes, context: Context) -> bytes:
        try:
            return await answer(data, context)
        except Aborted as aborted:
            refusal = context.abort(aborted.code, aborted.text)
        # As in `server.rpc.calls`: what this raises keeps this frame alive.
        del data, context
        await refusal
        raise AssertionError("abort returned")

    async def answer(data: bytes, context: Context) -> bytes:
        try:
            replies.refuse_if_full()
        except QueueFull as error:
            raise Aborted(STATUS_OF[QueueFull], str(error)) from None
        remaining_s = context.time_remaining()
        deadline_ns = None if remaining_s is None else time.monotonic_ns() + int(remaining_s * 1e9)
        headers = tuple((key, value) for key, value in context.invocation_metadata())
        reply = Reply(None, 0, None)
        link.send((protocol.CALL, replies.expect(reply), rpc, deadline_ns, headers, data))
        try:
            answered = await reply
        finally:
            # An error's traceback refers to this frame, which would refer back to the error through the reply.
            del reply
        return answered

    return call
