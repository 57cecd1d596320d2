"""The server's side of a process that may say something at any time, such as that its model calls another one.

Lives here: listening to it, and saying to it what nobody waits for. Must not: what is said of requests or of calls. The
rule: the thread that listens to the process waits for nothing else, so that neither end ever waits for the other to
read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np

from paceline.backends.base import Device, ModelSource
from paceline.backends.errors import LoadError
from paceline.backends.open_request import OpenRequest
from paceline.backends.python.calls import Calls
from paceline.backends.python.messages import CALL, CALL_OVER, CALL_READ, CALLING, CLOSE, TAKEN, Declared
from paceline.backends.python.process import ModelProcess
from paceline.backends.spec import Array
from paceline.backends.transport.duplex_link import DuplexLink
from paceline.backends.transport.parcel import Message


class DuplexProcess(ModelProcess):
    """A process whose model gets batches and calls other models. `calls` are those that haven't ended."""

    _link_class = DuplexLink
    _link: DuplexLink
    _mode = CALLING

    def __init__(self, source: ModelSource, device: Device) -> None:
        self._answers: SimpleQueue[Message | None] = SimpleQueue()
        self._unsaid: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._listener: threading.Thread | None = None
        # Of the execution that is asked for now, which is the `_executions`th.
        self._is_taken = False
        self._executions = 0
        super().__init__(source, device)
        self.calls = Calls(self._link, self._unsaid.put, source.on_call, self._open_requests)

    def load(self) -> tuple[Declared | None, Declared | None]:
        try:
            for run, name in ((self._say, "to"), (self._listen, "from")):
                thread = threading.Thread(target=run, name=f"{name} {self._source.name}", daemon=True)
                thread.start()
            self._listener = thread
        except RuntimeError as error:
            self._unsaid.put(None)
            self.kill()
            raise LoadError(f"model '{self._source.name}': its process can't be listened to: {error}") from None
        return super().load()

    def buffer(self, number: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array | None:
        """None: such buffers are for the arrays that are packed next, and those may be answers to calls."""
        return None

    def release_buffers(self) -> None:
        pass

    def calls_as(self, caller: object) -> None:
        self.calls.caller = caller

    def call_off(self) -> None:
        self.calls.call_off()

    def _asked(self, kind: int, *content: object) -> Message:
        self._is_taken = False
        return super()._asked(kind, *content)

    def _answer(self) -> Message | None:
        return self._answers.get()

    def _has_begun(self) -> bool:
        return self._is_taken

    def _listen(self) -> None:
        """Hand on what the process says, until it goes."""
        while (messages := self._link.receive_all()) is not None:
            for message in messages:
                self._hear(message)
        self._unsaid.put(None)
        self.calls.cancel()
        self.wait_ended()
        self._on_gone()
        self._answers.put(None)

    def _hear(self, message: Message) -> None:
        kind = message[0]
        if kind == TAKEN:
            self._is_taken = True
            self._executions += 1
        elif kind in (CALL, CALL_OVER, CALL_READ):
            self.calls.hear(message, self._executions if self._is_taken else 0)
        else:
            self._on_answer(message)

    def _on_answer(self, message: Message) -> None:
        """The process has answered what it was asked."""
        self._is_taken = False
        self._answers.put(message)

    def _open_requests(self, execution: int) -> Sequence[OpenRequest]:
        """Those that were handed over in an execution, and may still be answered."""
        return ()

    def _on_gone(self) -> None:
        """The process has ended; whoever waits for its answer is told after this."""

    def _say(self) -> None:
        """Say what is to be said, until the process goes."""
        while (say := self._unsaid.get()) is not None:
            say()
            del say  # the next may be long in coming, and it holds what was said

    def _tell_over_soon(self) -> None:
        self._unsaid.put(self._tell_over)

    def _say_close(self) -> None:
        self._unsaid.put(lambda: self._link.send(CLOSE))

    def _close_link(self) -> None:
        if self._listener is not None:
            self._listener.join()
        self._link.close()
