"""What runs in the process of a Python model: its class is loaded, gets batches, and is closed.

Lives here: the process itself, and the loop in which it serves. Must not: import more of this product than
`backends.python`, `backends.spec` and `backends.transport`, or any package besides numpy, since the interpreter may be
another one. The rule: the process ends with the server, whatever the model is doing at the time.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from paceline.backends.python import messages
from paceline.backends.python.calls_worker import Calls, Models
from paceline.backends.python.loaded_model import (
    EXECUTION_ERROR,
    LoadedModel,
    RunningModel,
    end_fork,
    in_one_line,
    print_error,
)
from paceline.backends.python.requests_worker import DecoupledModel, Desk
from paceline.backends.python.triton.model import TritonModel
from paceline.backends.transport.blocking_link import BlockingLink
from paceline.backends.transport.link import RemoteEnd
from paceline.backends.transport.parcel import Message

RunningT = TypeVar("RunningT", bound=RunningModel)


def main(arguments: Sequence[str]) -> None:
    """Serve a model over the three descriptors that `arguments` begin with, in the mode that follows, until told to
    close."""
    faulthandler.enable()
    _end_with_the_server()
    _leave_signals_to_the_server()
    link, mode = BlockingLink.join(RemoteEnd(*map(int, arguments[:3]))), arguments[3]
    start = link.receive()
    if start is None:
        return
    if mode == messages.BATCHES:
        if (model := _loaded(link, LoadedModel, start, None)) is not None:
            _serve(model, link, link.receive, lambda: None)
        return
    desk = Desk(link)
    desk.start()
    if mode == messages.TRITON:
        running: RunningModel | None = _loaded_for_triton(desk, start)
    else:
        running = _loaded(link, DecoupledModel if mode == messages.REQUESTS else LoadedModel, start, desk.calls)
    if running is not None:
        _serve(running, link, partial(running.wait_for, desk.tasks.get), desk.begin_execution)


def _loaded(link: BlockingLink, kind: type[LoadedModel], start: Message, calls: Calls | None) -> LoadedModel | None:
    _, name, path, device, device_index, parameters, called = start
    models = Models(name, called, calls)
    model = _made(link, lambda: kind(name, path, device, device_index, parameters, models))
    if model is not None:
        link.send(messages.READY, model.inputs, model.outputs)
    return model


def _loaded_for_triton(desk: Desk, start: Message) -> TritonModel | None:
    """First its class is found, then there is an instance."""
    model = _made(desk.link, lambda: TritonModel(desk, *start[1:]))
    if model is None:
        return None
    desk.link.send(messages.READY, None, None, model.completed)
    kind, *rest = desk.tasks.get()
    if kind != messages.INITIALIZE or _made(desk.link, lambda: model.initialize(*rest)) is None:
        return None
    desk.link.send(messages.READY)
    return model


def _made(link: BlockingLink, make: Callable[[], RunningT]) -> RunningT | None:
    """What `make` makes; None if that fails, of which the server is told."""
    pid = os.getpid()
    try:
        model = make()
        model.end_fork()
    except BaseException as error:  # noqa: BLE001 - a model's file may raise SystemExit; the server needs the reason
        end_fork(pid, error)
        print_error(error)
        where = f" (its interpreter is {sys.executable})" if isinstance(error, ModuleNotFoundError) else ""
        link.send(messages.FAILED, f"{in_one_line(error)}{where}", EXECUTION_ERROR)
        return None
    return model


def _serve(
    model: RunningModel, link: BlockingLink, receive: Callable[[], Message | None], begin: Callable[[], None]
) -> None:
    """Serve `model` until told to close. `begin` is called before each execution."""
    while (message := receive()) is not None:
        kind = message[0]
        if kind == messages.CLOSE:
            model.close()
            return
        if kind == messages.OVER:
            model.sequences_over(message[1])
            continue
        begin()
        model.prints_errors = kind not in (messages.TRY, messages.HAND_MADE_UP)
        answer = model.answered(link, message)
        try:
            link.send(*answer, parcel=answer[-1] if answer[0] == messages.DONE else None)
        except ValueError as error:  # of subclasses of str, or tensors beyond what memory and messages hold
            link.send(messages.FAILED, f"outputs can't be handed to the server: {error}", EXECUTION_ERROR)
        del message, answer  # requests that the model hasn't kept end now


def _end_with_the_server() -> None:
    """Kill this process and what it has started as soon as stdin ends, whose other end the server has."""
    lifeline = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    if hasattr(fcntl, "F_SETSIG"):
        # The kernel does it, even if native code of the model never releases the GIL.
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)

    def watch() -> None:
        os.read(lifeline, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def _leave_signals_to_the_server() -> None:
    """Ignore signals that stop a whole process group: they are for the server, which answers what it has accepted
    before it ends this process. Handlers rather than SIG_IGN: programs that the model starts don't inherit them, and
    its forks get the defaults back."""

    def handle_by(handler: Any) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, handler)

    handle_by(lambda *_: None)
    os.register_at_fork(after_in_child=lambda: handle_by(signal.SIG_DFL))
