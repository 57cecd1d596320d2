"""A request that a model's code makes to another model: the contract between its process and whoever answers.

Lives here: the two directions between them. Must not: know how answers travel, or how models are found. The rule: a
call has at most one last answer, and none once it was cancelled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Protocol, runtime_checkable

from paceline.backends.spec import Array

Parameters = Mapping[str, bool | int | float | str]
_NO_PARAMETERS: Parameters = {}


def _nothing() -> None:
    pass


def _ignore(answers: int) -> None:
    pass


class CallAnswers(Protocol):
    """The way back to the code that has made calls. Callable on any thread; nothing blocks."""

    def answer(
        self, call: ModelCall, outputs: Mapping[str, Array] | None, parameters: Parameters, *, last: bool
    ) -> None:
        """Outputs by name, which are held until they are copied, and what the called model says besides; None: there
        are no further answers."""

    def fail(self, call: ModelCall, status: str, text: str, *, last: bool) -> None:
        """An error in place of an answer. `status` is the name of a gRPC status."""


@dataclass(slots=True, eq=False, repr=False)
class ModelCall:
    """A request to version `version` of `model` ("": the latest), with `inputs` by name and the names of wanted
    `outputs` (none: all). It is to end within `timeout_ns` (0: not said). `takes_more`: it may be answered more than
    once. `caller` is what the server has told the process about itself; `executing`: the call belongs to what the
    caller executes; `beside`: it was made by a thread of the model's own, which that may be waiting for;
    `open_requests`: it belongs to an execution that is over, and these of its requests (`backends.open_request`) may
    still be answered.
    """

    _answers: CallAnswers
    number: int
    model: str
    version: str
    inputs: Mapping[str, Array]
    outputs: Sequence[str]
    _: KW_ONLY
    id: str = ""
    parameters: Parameters = field(default_factory=dict)
    timeout_ns: int = 0
    takes_more: bool = False
    caller: Any = None
    executing: bool = False
    beside: bool = False
    open_requests: Sequence[object] = ()
    cancelled: bool = field(init=False, default=False)
    _on_cancel: Callable[[], None] = field(init=False, default=_nothing)
    _on_read: Callable[[int], None] = field(init=False, default=_ignore)
    _on_call_off: Callable[[], None] = field(init=False, default=_nothing)

    def taken_by(
        self, on_cancel: Callable[[], None], on_read: Callable[[int], None], on_call_off: Callable[[], None]
    ) -> None:
        """From now on, `on_cancel` is called once nobody waits for answers any more, `on_read` with how many more
        answers were read, and `on_call_off` when it may be that nobody waits for what the call was made for. All on any
        thread; they mustn't block or raise. Whoever calls this looks at `cancelled` afterwards."""
        self._on_cancel, self._on_read, self._on_call_off = on_cancel, on_read, on_call_off

    def let_go(self) -> None:
        """It has ended, for who has taken it: its tensors aren't needed any more, nor what was to be called."""
        self.inputs = {}
        self._on_cancel = self._on_call_off = _nothing
        self._on_read = _ignore

    def answer(
        self, outputs: Mapping[str, Array] | None, parameters: Parameters = _NO_PARAMETERS, *, last: bool
    ) -> None:
        self._answers.answer(self, outputs, parameters, last=last)

    def fail(self, status: str, text: str, *, last: bool = True) -> None:
        self._answers.fail(self, status, text, last=last)

    def cancel(self) -> None:
        """Nobody waits for answers any more. On any thread."""
        self.cancelled = True
        self._on_cancel()

    def call_off(self) -> None:
        """Nobody may wait for what it was made for any more; whoever has taken it knows. On any thread."""
        self._on_call_off()

    def read(self, answers: int) -> None:
        """So many more of its answers were read."""
        self._on_read(answers)


@runtime_checkable
class MakesCalls(Protocol):
    """An instance whose model may call others."""

    def calls_as(self, caller: object) -> None:
        """From now on, its calls have this `caller`."""

    def call_off(self) -> None:
        """Nobody waits for what it executes any more, or has just executed: calls that belong to that are to fail. On
        any thread; doesn't block."""


OnCall = Callable[[ModelCall], None]
"""Takes a call, on any thread; mustn't block or raise."""
