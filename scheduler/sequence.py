"""A sequence: what is known of it, where it is held, and why it ends.

Lives here: these values. Must not: decide anything; that is `sequences`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Final, Generic, NamedTuple, Protocol

from paceline.scheduler.request import AnyRequest, RequestT


class SequenceEnd(Enum):
    """Why a sequence has ended, and how callers are told who send more steps. Of an END they are if it has failed."""

    END = "end", "the last step of it failed, and ended it all the same"
    IDLE = "idle", "nothing of it waited or executed for longer than max_sequence_idle_microseconds"
    CANCELLED = "cancelled", "a step of it was cancelled while it waited, and was needed for the steps after it"
    EXPIRED = "expired", "a step of it waited for too long to be executed, and was needed for the steps after it"
    REFUSED = "refused", "a step of it was refused, and was needed for the steps that were sent after it"
    INSTANCE_LOST = "instance_lost", "the instance of the model that held it was lost"
    REPLACED = "replaced", "the model was loaded again"

    def __init__(self, label: str, text: str) -> None:
        self.label = label
        self.text = text


class Place(NamedTuple):
    """Where a sequence is held: its row in batches of its instance."""

    row: int
    instance: int


ANYWHERE = Place(-1, 0)
"""Any instance may execute the sequence's steps."""

NOWHERE = Place(-1, -1)
"""Its instance was lost while a step of it was at the batcher. What waits may begin anew when that has left."""


class Over(NamedTuple):
    """A sequence that an instance held is over."""

    sequence: int | str
    instance: int
    why: SequenceEnd


LOST: Final = object()
"""In place of a state: it is gone, for good."""


class StepPayload(Protocol):
    """A step's payload at the batcher."""

    @property
    def after(self) -> object:
        """The state that it has left; None if it has failed, or the model has no states; LOST if it has failed because
        the state that it needed is."""


@dataclass(slots=True, eq=False, repr=False)
class Sequence(Generic[RequestT]):
    """A sequence. `executing` is its step at the batcher, `steps` are those behind it, None if there never were any.
    `state` is what the last step left; None: nothing yet. A step that starts anew doesn't see it. `ends` is why it ends
    once these are done; None: it goes on. `payload` is that of the step at the batcher, `note` is for whoever makes
    payloads. `follower` has the same id, and mustn't begin before this one is over."""

    id: int | str
    executing: RequestT | None = None
    payload: StepPayload | None = None
    steps: deque[RequestT] | None = None
    state: object = None
    note: object = None
    place: Place | None = None
    has_begun: bool = False
    ends: SequenceEnd | None = None
    follower: Sequence[RequestT] | None = None


AnySequence = Sequence[AnyRequest]
