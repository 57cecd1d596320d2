"""Messages of a model's process that can't be marshalled, beside large arrays: no memory stays taken."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from paceline.backends.python import messages
from paceline.backends.python.loaded_model import RunningModel
from paceline.backends.python.requests_worker import Desk, RequestState
from paceline.backends.python.worker import _serve
from paceline.backends.transport.blocking_link import BlockingLink
from paceline.backends.transport.parcel import Message

LARGE = np.zeros(20_000, np.float32)


class Text(str):
    """A subclass, which can't be marshalled."""

    __slots__ = ()


class Model(RunningModel):
    """Says what became of a request by a `Text`."""

    def answered(self, link: BlockingLink, message: Message) -> Message:
        return messages.DONE, [[Text("bad"), "ExecutionError"]], link.pack([LARGE])

    def sequences_over(self, over: object) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def ends() -> Iterator[tuple[BlockingLink, BlockingLink]]:
    here, remote = BlockingLink.pair(1 << 20)
    there = BlockingLink.join(remote)
    yield here, there
    here.close()
    there.close()


def test_outcome_of_a_batch_leaves_no_memory_taken(ends: tuple[BlockingLink, BlockingLink]) -> None:
    here, there = ends
    asked = iter([(messages.HAND, []), (messages.CLOSE,)])
    _serve(Model(), here, lambda: next(asked), lambda: None)
    kind, text, _ = there.receive() or (0, "", "")
    assert (kind, text) == (messages.FAILED, "outputs can't be handed to the server: unmarshallable object")
    assert here.used_bytes == 0


def test_answer_to_a_request_leaves_no_memory_taken(ends: tuple[BlockingLink, BlockingLink]) -> None:
    state = RequestState(Desk(ends[0]), 1)
    with pytest.raises(ValueError, match="unmarshallable"):
        state.send([0], [LARGE], True, Text("{}"))
    assert ends[0].used_bytes == 0


def test_call_of_a_model_leaves_no_memory_taken(ends: tuple[BlockingLink, BlockingLink]) -> None:
    with pytest.raises(ValueError, match="unmarshallable"):
        Desk(ends[0]).calls.begin(Text("m"), {"x": LARGE}, print, takes_more=False)
    assert ends[0].used_bytes == 0
