"""Which executions wait for calls that can't be answered before they end: a model that calls itself while all its
instances wait, or a cycle of several models, ensembles among them.

Lives here: who waits for whom, and whether anything can go on. Must not: say so to anybody. The rule: an execution with
calls under way is taken to wait for them, and goes on as soon as one of them is answered. What is found never changes
by itself, so it is enough to look when a call begins, when one of several has ended, and when a step of a called
ensemble begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from paceline.scheduler.request import AnyRequest
from paceline.scheduler.runner import AnyRunner
from paceline.server.codec.array_request import ArrayRequest
from paceline.server.models.callers import Caller
from paceline.server.models.served_model import ServedModel
from paceline.server.requests.inner_request import InnerRequest

__all__ = ["CallWaits", "MadeCall"]


class MadeCall(NamedTuple):
    """A call by an execution of `caller`, that of `made_for`, and the request that it is, to `model`. `refuse` ends it
    with an error. `beside`: it isn't known whether the execution waits for it."""

    caller: Caller
    made_for: Sequence[AnyRequest]
    model: ServedModel
    flight: InnerRequest
    refuse: Callable[[], None]
    beside: bool = False


class _Wait(NamedTuple):
    """What a request waits for at `model`: the end of any of the executions of `runners`, or of `all` of them; without
    any, for nothing that is known here."""

    model: ServedModel
    runners: tuple[AnyRunner, ...]
    all: bool = False

    def ends(self, stuck: set[AnyRunner]) -> bool:
        if not self.runners:
            return True
        on = (runner not in stuck for runner in self.runners)
        return all(on) if self.all else any(on)


class CallWaits:
    """The calls under way that belong to executions. Everything on the event loop."""

    def __init__(self) -> None:
        self._calls: dict[AnyRunner, list[MadeCall]] = {}

    def add(self, call: MadeCall) -> None:
        self._calls.setdefault(call.caller.runner, []).append(call)

    def discard(self, call: MadeCall) -> None:
        calls = self._calls.get(call.caller.runner, [])
        if call in calls:
            calls.remove(call)
            if not calls:
                del self._calls[call.caller.runner]

    @property
    def of_ensembles(self) -> list[MadeCall]:
        return [one for calls in self._calls.values() for one in calls if one.model.pipeline is not None]

    def others(self, call: MadeCall) -> list[MadeCall]:
        """Calls of the same execution."""
        of_same = self._of(call.caller.runner, call.made_for, beside=False)
        return [one for one in of_same if one is not call]

    def is_stuck(self, call: MadeCall, *, beside: bool = False) -> bool:
        """Whether it can't be answered before an execution has ended that waits for it. With `beside`, executions are
        taken to wait for those calls, too."""
        # All executions that it depends on are stuck until something says that they can go on.
        wanted, waits = _wait(call.model, call.flight), dict[AnyRunner, list[_Wait]]()
        unseen = [wanted]
        while unseen:
            wait = unseen.pop()
            for runner in wait.runners:
                if runner not in waits:
                    waits[runner] = self._waits_of(wait.model, runner, beside=beside)
                    unseen += waits[runner]
        stuck = {*waits}
        while free := {one for one in stuck if not waits[one] or any(wait.ends(stuck) for wait in waits[one])}:
            stuck -= free
        return not wanted.ends(stuck)

    def _waits_of(self, model: ServedModel, runner: AnyRunner, *, beside: bool) -> list[_Wait]:
        """What the execution of `runner` waits for: its calls or, of an ensemble, its steps."""
        requests = model.batcher.executing(runner)
        if model.pipeline is not None:
            return [_wait(step.model, step) for one in requests for step in one.payload.under_way]
        return [_wait(one.model, one.flight) for one in self._of(runner, requests, beside=beside)]

    def _of(self, runner: AnyRunner, requests: Sequence[AnyRequest], *, beside: bool) -> list[MadeCall]:
        """The calls of the execution of `requests`; those of earlier ones aren't waited for any more."""
        calls = (one for one in self._calls.get(runner, ()) if one.made_for is requests)
        return [one for one in calls if beside or not one.beside]


def _wait(model: ServedModel, flight: InnerRequest) -> _Wait:
    """What the request waits for now."""
    executions = {runner: model.batcher.executing(runner) for runner in model.instances.runners}
    for runner, requests in executions.items():
        if flight in requests or _precede(requests, flight):
            return _Wait(model, (runner,))
    if not all(executions.values()):
        return _Wait(model, ())  # an instance is idle, and about to take it
    return _Wait(model, (*executions,), all=model.batcher.policy.preserve_ordering)


def _precede(requests: Iterable[AnyRequest], flight: InnerRequest) -> bool:
    """Whether one of `requests` is an earlier step of its sequence."""
    step = flight.message.step if isinstance(flight.message, ArrayRequest) else None
    return step is not None and any(one.step is not None and one.step.id == step.id for one in requests)
