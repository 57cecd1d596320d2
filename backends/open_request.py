"""A request that its model gets by itself, and may answer whenever it likes: the contract between such a model and
whoever asks it.

Lives here: the two directions between them. Must not: know how answers travel, or what a request is outside. The rule:
answers are handed on in the model's order, and the last of them is handed on once: as the result of the execution, or
by `on_answer`; after `cancel`, none need be.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from paceline.backends.base import Execution, ModelInstance
from paceline.backends.errors import ExecutionError
from paceline.backends.spec import Array, Tensors

Parameters = Mapping[str, bool | int | float | str]

Answer = Tensors | ExecutionError | None
"""One of a request's answers: outputs, of which those left out are MISSING; an error; or none, just the end."""

ELSEWHERE: Final[Tensors] = []
"""In place of a result of `execute_open`: the request is answered by `on_answer`. By identity."""
AGAIN: Final[Tensors] = []
"""In place of a result of `execute_open`: the model wants the request once more. By identity."""

NEVER: Final = (1 << 63) - 1
"""A time that is never reached."""

Step = tuple[int | str, bool, bool]
"""The id of a request's sequence, and whether it is the first and the last in it."""


class Told(tuple[Array, ...]):
    """Outputs with `parameters` for the caller."""

    parameters: Parameters

    def __new__(cls, outputs: Iterable[Array], parameters: Parameters) -> Told:
        self = super().__new__(cls, outputs)
        self.parameters = parameters
        return self


class Channel(Protocol):
    """The way to the model, for a request that it has. Both callable on any thread; they don't block."""

    def cancel(self, number: int) -> None:
        """Tell the model that nobody waits for further answers to request `number`, and forget it."""

    def sent(self, number: int, answers: int) -> None:
        """The oldest `answers` answers to request `number` aren't held any more: the model may send more."""


@dataclass(slots=True, eq=False, repr=False)
class OpenRequest(ABC):
    """A request with its `inputs`, as the model sees them, and what its caller said besides. Where they have to be read
    first they are `given`, and `inputs` are there only while its instance takes it; what is given may go as soon as
    nobody waits for the request. `outputs` are the indices of those that are wanted. `step`: what it is in its
    sequence, if it says so; `row`: where that is in a batch, -1 for anywhere. `execution`: by which of its process's
    executions the model got it. `takes_one`: its caller takes a single answer. `arrived_ns`: when it came; 0 for one
    that is made up. `deadline_ns`: when its caller gives up; `ends_ns`: when it is to end with what there is. All
    monotonic. `wanted`: what a model that generates has read of it before it was handed over, if anything."""

    inputs: Tensors
    outputs: Sequence[int]
    id: str = ""
    parameters: Parameters = field(default_factory=dict)
    arrived_ns: int = field(init=False, default=0)
    step: Step | None = field(init=False, default=None)
    row: int = field(init=False, default=-1)
    given: Tensors = field(init=False, default=())
    execution: int = field(init=False, default=0)
    timeout_us: int = field(init=False, default=0)
    deadline_ns: int = field(init=False, default=NEVER)
    ends_ns: int = field(init=False, default=NEVER)
    takes_one: bool = field(init=False, default=False)
    wanted: Any = field(init=False, default=None)
    cancelled: bool = field(init=False, default=False)
    _channel: Channel | None = field(init=False, default=None)
    _number: int = field(init=False, default=0)

    @abstractmethod
    def on_answer(self, answer: Answer, *, last: bool) -> None:
        """The model's next answer. On any thread; mustn't block or raise."""

    def open(self, channel: Channel, number: int) -> None:
        """It is about to be handed to the model, as `number`. Whoever does that looks at `cancelled` afterwards."""
        self._number, self._channel = number, channel

    def close(self) -> None:
        """The model has done with it."""
        self._channel = None

    def cancel(self) -> None:
        """Nobody waits for further answers. On any thread."""
        self.cancelled = True
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.cancel(self._number)

    def sent(self, answers: int) -> None:
        """So many more of its answers, the oldest, aren't held any more."""
        if (channel := self._channel) is not None:
            channel.sent(self._number, answers)


class AnswersOpenly(ModelInstance, Protocol):
    """An instance of a model that gets requests. Its `execute` is for made-up requests: each is cancelled after its
    first answer, which is its result."""

    def execute_open(self, requests: Sequence[OpenRequest]) -> Execution:
        """Hand `requests` to the model, together. Returns when it is ready for others, with a result for each: its last
        answer, or ELSEWHERE or AGAIN. Those answered elsewhere are answered, maybe for long, by `on_answer`, also if
        the instance ends. If this raises, those that haven't ended get nothing more."""
