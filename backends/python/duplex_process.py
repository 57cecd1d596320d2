"""The server's side of a process that may say something at any time, such as that its model calls another one.

Lives here: listening to it, saying to it what nobody waits for, and its calls of other models: from messages to calls,
and from their answers to messages. Must not: what is said of requests (`decoupled`); know who answers calls
(`backends.model_call`). The rules: the thread that listens to the process waits for nothing else, so that neither end
ever waits for the other to read; a call that the process waits for gets its end, unless the process goes; and then
whoever answers it is told.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np

from paceline.backends.base import Device, ModelSource
from paceline.backends.errors import LoadError
from paceline.backends.model_call import ModelCall, Parameters
from paceline.backends.open_request import OpenRequest
from paceline.backends.python import messages
from paceline.backends.python.messages import Declared
from paceline.backends.python.process import ModelProcess
from paceline.backends.spec import Array
from paceline.backends.transport.parcel import Message, Parcel


class DuplexProcess(ModelProcess):
    """A process whose model gets batches and calls other models. It is the way back to it (`CallAnswers`)."""

    _mode = messages.CALLING

    def __init__(self, source: ModelSource, device: Device) -> None:
        self._answers: SimpleQueue[Message | None] = SimpleQueue()
        self._listener: threading.Thread | None = None
        # Of the execution that is asked for now, which is the `_executions`th.
        self._is_taken = False
        self._executions = 0
        # Calls that haven't ended, by number, with the execution that each belongs to.
        self._calling = threading.Lock()
        self._calls: dict[int, tuple[ModelCall, int]] = {}
        self._caller: object = None
        super().__init__(source, device)

    def load(self) -> tuple[Declared | None, Declared | None]:
        try:
            self._start_saying()
            thread = threading.Thread(target=self._listen, name=f"from {self._source.name}", daemon=True)
            thread.start()
            self._listener = thread
        except RuntimeError as error:
            self.kill()
            raise LoadError(f"model '{self._source.name}': its process can't be listened to: {error}") from None
        return super().load()

    def buffer(self, number: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array | None:
        """None: such buffers are for the arrays that are packed next, and those may be answers to calls."""
        return None

    def release_buffers(self) -> None:
        pass

    def calls_as(self, caller: object) -> None:
        self._caller = caller

    def call_off(self) -> None:
        for call, _ in self._all_calls():
            call.call_off()

    def answer(
        self, call: ModelCall, outputs: Mapping[str, Array] | None, parameters: Parameters, *, last: bool
    ) -> None:
        self._unsaid.put(partial(self._send_answer, call, outputs, {**parameters}, last))

    def fail(self, call: ModelCall, status: str, text: str, *, last: bool) -> None:
        self._unsaid.put(partial(self._send_error, call, status, text, last))

    def _asked(self, kind: int, *content: object) -> Message:
        self._is_taken = False
        return super()._asked(kind, *content)

    def _answer(self) -> Message | None:
        return self._answers.get()

    def _has_begun(self) -> bool:
        return self._is_taken

    # ---- on the thread that listens ----

    def _listen(self) -> None:
        """Hand on what the process says, until it goes."""
        while (came := self._link.receive_all()) is not None:
            for message in came:
                self._hear(message)
        self._cancel_calls()
        self.wait_ended()
        self._on_gone()
        self._answers.put(None)

    def _hear(self, message: Message) -> None:
        kind, *content = message
        if kind == messages.TAKEN:
            self._is_taken = True
            self._executions += 1
        elif kind == messages.CALL:
            self._begin_call(*content)
        elif kind == messages.CALL_READ:
            with self._calling:
                call, _ = self._calls.get(content[0], (None, 0))
            if call is not None:  # else its end and this have crossed
                call.read(content[1])
        elif kind == messages.CALL_OVER:
            with self._calling:
                call, _ = self._calls.pop(content[0], (None, 0))
            if call is not None:
                call.cancel()
        else:
            self._on_answer(message)

    def _begin_call(
        self, number: int, execution: int, names: Sequence[str], parcel: Parcel, said: Mapping[str, Any]
    ) -> None:
        executing = self._executions if self._is_taken else 0
        call = ModelCall(
            self,
            number,
            inputs=dict(zip(names, self._link.unpack(parcel), strict=True)),
            **said,
            caller=self._caller,
            executing=execution == executing != 0,
            beside=execution == 0 != executing,
            open_requests=self._open_requests(execution) if execution not in (0, executing) else (),
        )
        with self._calling:
            self._calls[number] = call, execution
        if self._source.on_call is None:
            self.fail(call, "UNIMPLEMENTED", "nobody takes calls of models here", last=True)
        else:
            self._source.on_call(call)

    def _on_answer(self, message: Message) -> None:
        """The process has answered what it was asked."""
        self._is_taken = False
        self._answers.put(message)

    def _open_requests(self, execution: int) -> Sequence[OpenRequest]:
        """Those that were handed over in an execution, and may still be answered."""
        return ()

    def _on_gone(self) -> None:
        """The process has ended; whoever waits for its answer is told after this."""

    # ---- calls ----

    def _all_calls(self) -> Sequence[tuple[ModelCall, int]]:
        with self._calling:
            return [*self._calls.values()]

    def _cancel_calls(self, execution: int = 0) -> None:
        """Nobody waits for the calls of an execution any more; 0: for any."""
        for call, of in self._all_calls():
            if execution in (0, of):
                call.cancel()
                self.fail(call, "CANCELLED", "nobody waits any more for what the call was made for", last=True)

    def _send_answer(
        self, call: ModelCall, outputs: Mapping[str, Array] | None, parameters: Parameters, last: bool
    ) -> None:
        if not self._is_open(call, last):
            return
        try:
            parcel = None if outputs is None else self._link.pack([*outputs.values()])
            self._link.send(messages.CALLED, call.number, last, tuple(outputs or ()), parcel, parameters, parcel=parcel)
        except (TypeError, ValueError) as error:  # of tensors beyond what memory and messages hold
            if not last and self._is_open(call, True):
                call.cancel()
            text = f"outputs can't be handed to the model that called: {error}"
            self._link.send(messages.CALL_FAILED, call.number, True, "INTERNAL", text)

    def _send_error(self, call: ModelCall, status: str, text: str, last: bool) -> None:
        if self._is_open(call, last):
            self._link.send(messages.CALL_FAILED, call.number, last, status, text)

    def _is_open(self, call: ModelCall, last: bool) -> bool:
        """Whether the process still waits for it. After the `last` answer, it doesn't."""
        with self._calling:
            if call.number not in self._calls:
                return False
            if last:
                del self._calls[call.number]
            return True

    # ---- its end ----

    def _tell_over_soon(self) -> None:
        self._unsaid.put(self._tell_over)

    def _say_close(self) -> None:
        self._unsaid.put(lambda: self._link.send(messages.CLOSE))

    def _close_link(self) -> None:
        if self._listener is not None:
            self._listener.join()
        self._link.close()
