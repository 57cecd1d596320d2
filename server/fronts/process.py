"""A front: the process that speaks gRPC and hands requests to the engine.

Lives here: its main function, doing what the engine says, and handing on all RPCs that need a model but inference. Must
not: anything that needs a model itself. It follows the engine in everything: the signals that a supervisor sends to a
whole group of processes are ignored, and when the connection to the engine ends, for whatever reason, the front ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

from paceline.backends.transport.link import Gathering, Link, RemoteEnd
from paceline.backends.transport.parcel import Message
from paceline.scheduler.answering import notify
from paceline.server.config import Settings
from paceline.server.errors import StartError
from paceline.server.fronts.inference import FrontInference, Replies, Reply
from paceline.server.fronts.protocol import Kind
from paceline.server.rpc.calls import Context, HeaderRules, answering
from paceline.server.rpc.gate import Refused, Registry, Usage
from paceline.server.rpc.handlers import METHODS, add_handlers, handler_of
from paceline.server.rpc.listener import Listener, until_quiet
from paceline.server.rpc.streaming import Streaming
from paceline.server.rpc.unary_inference import UnaryInference
from paceline.server.telemetry import log
from paceline.server.telemetry.log_output import exit_now, take_stderr
from paceline.server.tuning import SWITCH_INTERVAL_S, keep_freed_memory, new_loop

_TELL_EVERY_S = 0.5

_log = logging.getLogger("paceline.server.fronts")


@dataclass(frozen=True, slots=True)
class Greeting:
    """The engine's first message: what to listen on, and how to log."""

    settings: Settings
    port: int
    log: log.LogSettings
    reads_parents: bool


def main(socket: int, own: int, other: int) -> None:
    """Run a front, at the end of the link that has these descriptors, in a process that ignores SIGINT and SIGTERM."""
    take_stderr()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    keep_freed_memory()
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(_Front(Link.join(RemoteEnd(socket, own, other), Gathering())).run())
    # The end of this process takes down what gRPC would take down now.
    exit_now(0)


class _Front:
    def __init__(self, link: Link) -> None:
        self._link = link
        self._replies = Replies(link)
        self._inference = FrontInference(self._replies)
        self._listener: Listener
        self._tasks: set[asyncio.Task[None]] = set()
        self._listening: asyncio.Task[None]
        self._leaving: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Return when the engine has told the front to end, and everything is answered."""
        self._ended = asyncio.Event()
        # If the engine was killed, or ended in haste, there is nobody left to answer for.
        self._link.start(self._on_messages, lambda: os._exit(1))
        await self._ended.wait()

    # hot path
    def _on_messages(self, messages: list[Message]) -> None:
        done = []
        for message in messages:
            if message[0] < Kind.FAILED:
                try:
                    self._obey(*message)
                except Exception:  # noqa: BLE001 - the messages behind it are others'
                    _log.exception("a frontend can't do as it is told, a bug in paceline")
                    if message[0] == Kind.HELLO:
                        exit_now(1)  # as in `_on_task`
            elif (reply := self._replies.on_message(message)) is not None:
                done.append(reply)
        notify(done)

    def _obey(self, kind: int, *fields: Any) -> None:
        if kind == Kind.HELLO:
            self._start(pickle.loads(fields[0]))
        elif kind == Kind.STATE:
            self._set_state(*fields)
        elif kind == Kind.LOG:
            log.apply(pickle.loads(fields[0]))
            _log.debug("a frontend has applied the new log settings")
        elif kind == Kind.LEAVE:
            self._leaving = self._begin(self._leave())
        elif kind == Kind.END:
            self._begin(self._end(*fields))

    def _start(self, greeting: Greeting) -> None:
        log.apply(greeting.log)
        settings = greeting.settings
        self._inference.reads_parents = greeting.reads_parents
        rules = HeaderRules.of(settings)
        unary = UnaryInference(self._inference, rules)
        streaming = Streaming(self._inference, settings.grpc_max_stream_requests, rules)
        add_services = partial(self._add_services, unary, streaming, settings.limits.request_elements)
        self._listener = Listener(settings, add_services, streaming.close, shares_port=True)
        self._listening = self._begin(self._listen(greeting.port))
        self._begin(self._tell_usage())

    def _add_services(self, unary: UnaryInference, streaming: Streaming, max_elements: int, server: Registry) -> None:
        own = {"ModelInfer": unary.ModelInfer, "ModelStreamInfer": streaming.ModelStreamInfer}
        handlers = {
            method.name: handler_of(method, own[method.name], max_elements)
            if method.name in own
            else grpc.unary_unary_rpc_method_handler(forwarded(method.name, self._link, self._replies))
            for method in METHODS
        }
        add_handlers(server, handlers)

    async def _listen(self, port: int) -> None:
        try:
            self._link.send((Kind.LISTENS, await self._listener.open(port), ""))
        except StartError as error:
            self._link.send((Kind.LISTENS, 0, str(error)))

    async def _tell_usage(self) -> None:
        """Report usage regularly, for the metrics and so that the engine hears from this process."""
        while True:
            own = Usage(refused=tuple(self._replies.refused if one is Refused.UNREAD else 0 for one in Refused))
            self._link.send((Kind.USAGE, *self._listener.usage.plus(own)))
            await asyncio.sleep(_TELL_EVERY_S)

    def _set_state(self, serving: bool, ready: bool, stops: bool, live: bool) -> None:
        self._inference.serving = serving
        self._listener.set_serving(ready, live)
        if stops:
            self._listener.announce_end()

    async def _leave(self) -> None:
        await self._listening
        await until_quiet(lambda: self._replies.last_number)
        self._listener.leave()

    async def _end(self, grace_s: float) -> None:
        await (self._leaving or self._listening)
        await self._listener.stop(grace_s)
        self._ended.set()

    def _begin(self, coroutine: Coroutine[object, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_task)
        return task

    def _on_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a frontend failed with an unexpected error and exits", exc_info=error)
            exit_now(1)  # the engine starts another, or doesn't start at all


def forwarded(rpc: str, link: Link, replies: Replies) -> Callable[[bytes, Context], Any]:
    """A unary handler from bytes to bytes, whose answers the engine gives: that of all RPCs but inference, health and
    reflection, whatever their messages."""

    async def call(_: None, data: bytes, context: Context) -> bytes:
        replies.refuse_if_full()
        remaining_s = context.time_remaining()
        deadline_ns = None if remaining_s is None else time.monotonic_ns() + int(remaining_s * 1e9)
        headers = tuple((key, value) for key, value in context.invocation_metadata())
        reply = Reply(None, 0, None)
        link.send((Kind.CALL, replies.expect(reply), rpc, deadline_ns, headers, data), len(data))
        try:
            answered = await reply
        finally:
            # An error's traceback refers to this frame, which would refer back to the error through the reply.
            del reply
        return answered

    call.__name__ = rpc
    return partial(answering(call), None)
