"""A batcher of sequences whose instances finish, and whose clock moves, when told to: what its tests start from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.scheduler.policy import BatchPolicy, SequencePolicy
from paceline.scheduler.request import Request, SequenceStep
from paceline.scheduler.sequence import LOST, AnySequence, Over
from paceline.scheduler.sequence_batcher import SequenceBatcher
from paceline.scheduler.testing import ManualClock, RecordingObserver, StepRunner
from tests.unit.scheduler.workbench import _BLAMES, NeverWaits, one_turn

__all__ = ["MS", "Bench", "Payload", "done"]

MS = 1_000_000


class Payload:
    """A step `name`, which leaves the state `state + name`."""

    def __init__(self, name: str, state: str, place: tuple[int, int]) -> None:
        self.name, self.state, self.place = name, state, place
        self.after: str | None = None

    def __repr__(self) -> str:
        return self.state + self.name


class Bench:
    """A batcher of sequences whose instances finish, and whose clock moves, when told to."""

    def __init__(self, sequences: SequencePolicy | None = None, instances: int = 1, **policy: Any) -> None:
        self.clock, self.seen, self.overs = ManualClock(now_ns=1), RecordingObserver(), list[Over]()
        self.runners = [StepRunner[Payload, str](self.clock) for _ in range(instances)]
        limits = BatchPolicy(**{"max_batch_rows": 4, **policy, "sequences": sequences or SequencePolicy()})
        self.batcher: SequenceBatcher[Any, str] = SequenceBatcher(
            "m",
            self.make_step,
            limits,
            self.runners,
            clock=self.clock,
            observer=self.seen,
            blames=lambda error: _BLAMES[type(error)],
            replacer=self,
            arrivals=NeverWaits(),
            on_over=lambda runner, over: self.overs.append(over),
            are_lost=self.are_lost,
            failed_note=lambda request, error: "; the state of its sequence is as it was before",
        )
        self.lost = set[object]()
        self.batcher.start()

    def make_step(self, request: Any, sequence: AnySequence) -> Payload:
        state: Any = "" if request.step.start else sequence.state or ""
        assert sequence.place is not None
        name = getattr(request.payload, "name", request.payload)
        request.payload = Payload(name, state, sequence.place)
        payload: Payload = request.payload
        return payload

    def are_lost(self, state: object) -> bool:
        assert state is not LOST, "no model knows what that is"
        return state in self.lost

    def on_hang(self, runner: Any, others: Sequence[Any]) -> None:
        pass

    def on_loss(self, runner: Any, error: BaseException) -> None:
        pass

    def on_return(self, runner: Any) -> None:
        raise AssertionError("nothing hangs here")

    def refusal(self, id_: int | str, name: str, **how: Any) -> tuple[Request[Any, str], Exception | None]:
        step = SequenceStep(id_, how.pop("start", False), how.pop("end", False))
        request: Request[Any, str] = Request(name, 1, "k", **how)
        request.step = step
        (error,) = self.batcher.submit([request]) or (None,)
        return request, error

    async def send(self, id_: int | str, name: str, **how: Any) -> Request[Any, str]:
        request, error = self.refusal(id_, name, **how)
        assert error is None, error
        await one_turn()
        return request

    async def finish(self, runner: int = 0) -> None:
        self.runners[runner].finish(done)
        await one_turn()

    @property
    def running(self) -> str:
        """The batch that the first instance executes."""
        return str(self.runners[0].batches[-1]) if self.runners[0].busy else ""


def done(payload: Payload) -> str:
    payload.after = payload.state + payload.name
    return payload.after
