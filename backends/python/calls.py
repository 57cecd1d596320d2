"""The calls of a model to others, as its process makes them: the server's side.

Lives here: from messages to calls, and from their answers to messages. Must not: know who answers them
(`backends.model_call`). The rules: a call that the process waits for gets its end, unless the process goes; and then
whoever answers it is told.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from paceline.backends.model_call import ModelCall, OnCall
from paceline.backends.open_request import OpenRequest
from paceline.backends.python.messages import CALL, CALL_FAILED, CALL_READ, CALLED
from paceline.backends.spec import Array
from paceline.backends.transport.duplex_link import DuplexLink
from paceline.backends.transport.parcel import Message


class Calls:
    """Those of one process that haven't ended: the way back to it (`CallAnswers`). What is said to the process over
    `link` is handed to `say`, which has it said by a thread that may wait for it. `on_call` takes calls.
    `open_requests` gives those of an execution that may still be answered."""

    def __init__(
        self,
        link: DuplexLink,
        say: Callable[[Callable[[], object]], None],
        on_call: OnCall | None,
        open_requests: Callable[[int], Sequence[OpenRequest]],
    ) -> None:
        self._link = link
        self._say = say
        self._on_call = on_call
        self._open_requests = open_requests
        self._lock = threading.Lock()
        # By number, with the execution that it belongs to.
        self._open: dict[int, tuple[ModelCall, int]] = {}
        self.caller: Any = None
        """What the server wants to find in calls."""

    def hear(self, message: Message, executing: int) -> None:
        """Take what the process says of a call. `executing` is the execution that goes on, 0 if none does."""
        kind, number, *content = message
        if kind == CALL:
            self._begin(number, executing, *content)
            return
        with self._lock:
            call, _ = self._open.get(number, (None, 0)) if kind == CALL_READ else self._open.pop(number, (None, 0))
        if call is None:
            return  # its end and this have crossed
        if kind == CALL_READ:
            call.read(content[0])
        else:
            call.cancel()

    def _begin(
        self,
        number: int,
        executing: int,
        execution: int,
        model: str,
        version: str,
        request_id: str,
        names: tuple[str, ...],
        parcel: Any,
        outputs: tuple[str, ...],
        parameters: dict[str, bool | int | float | str],
        timeout_ns: int,
        takes_more: bool,
    ) -> None:
        call = ModelCall(
            self,
            number,
            model,
            version,
            dict(zip(names, self._link.unpack(parcel), strict=True)),
            outputs,
            id=request_id,
            parameters=parameters,
            timeout_ns=timeout_ns,
            takes_more=takes_more,
            caller=self.caller,
            executing=execution == executing != 0,
            beside=execution == 0 != executing,
            open_requests=self._open_requests(execution) if execution not in (0, executing) else (),
        )
        with self._lock:
            self._open[number] = call, execution
        if self._on_call is None:
            self.fail(call, "UNIMPLEMENTED", "nobody takes calls of models here", last=True)
        else:
            self._on_call(call)

    def answer(self, call: ModelCall, outputs: Mapping[str, Array] | None, *, last: bool) -> None:
        self._say(partial(self._send, call, outputs, last))

    def fail(self, call: ModelCall, status: str, text: str, *, last: bool) -> None:
        self._say(partial(self._send_error, call, status, text, last))

    def call_off(self) -> None:
        """Nobody waits any more for what some of them were made for."""
        with self._lock:
            calls = [call for call, _ in self._open.values()]
        for call in calls:
            call.call_off()

    def cancel(self, execution: int = 0) -> None:
        """Nobody waits for the calls of an execution any more; 0: for any."""
        with self._lock:
            calls = [call for call, of in self._open.values() if not execution or of == execution]
        for call in calls:
            call.cancel()
            self.fail(call, "CANCELLED", "nobody waits any more for what the call was made for", last=True)

    def _send(self, call: ModelCall, outputs: Mapping[str, Array] | None, last: bool) -> None:
        if not self._is_open(call, last):
            return
        if outputs is None:
            self._link.send(CALLED, call.number, last, (), None)
            return
        parcel = None
        try:
            parcel = self._link.pack([*outputs.values()])
            self._link.send(CALLED, call.number, last, tuple(outputs), parcel)
        except (TypeError, ValueError) as error:  # of tensors beyond what memory and messages hold
            if parcel is not None:
                self._link.unsent(parcel)
            if not last and self._is_open(call, True):
                call.cancel()
            text = f"outputs can't be handed to the model that called: {error}"
            self._link.send(CALL_FAILED, call.number, True, "INTERNAL", text)

    def _send_error(self, call: ModelCall, status: str, text: str, last: bool) -> None:
        if self._is_open(call, last):
            self._link.send(CALL_FAILED, call.number, last, status, text)

    def _is_open(self, call: ModelCall, last: bool) -> bool:
        """Whether the process still waits for it. After the `last` answer, it doesn't."""
        with self._lock:
            if call.number not in self._open:
                return False
            if last:
                del self._open[call.number]
            return True
