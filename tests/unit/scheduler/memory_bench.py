"""A batcher over instances some of which have no memory."""

from __future__ import annotations

from typing import Any

from paceline.scheduler.isolation import Blame
from paceline.scheduler.policy import BatchPolicy
from tests.unit.scheduler.workbench import Bench, one_turn

__all__ = ["MemoryBench"]

BLAMES = {MemoryError: Blame.SIZE, OSError: Blame.INSTANCE, EOFError: Blame.FATAL, ValueError: Blame.REQUESTS}


class MemoryBench(Bench):
    """Instances of `slots` slots each; those in `full` have no memory for anything."""

    def __init__(self, instances: int = 2, slots: int = 1, **more: Any) -> None:
        self.full: set[int] = set()
        self.gone: set[int] = set()
        self._slots = slots
        policy = more.pop("policy", BatchPolicy(max_batch_rows=4))
        if slots > 1:
            more["instance_of"] = self.instance_of
        super().__init__(policy, instances * slots, blames=lambda error: BLAMES[type(error)], replacer=self, **more)

    def instance_of(self, runner: Any) -> int:
        instance = self.runners.index(runner) // self._slots if runner in self.runners else -1
        assert instance not in self.gone, "nothing is known any more of what was given up"
        return instance

    def on_hang(self, runner: Any, others: Any) -> None:
        self.gone.add(self.runners.index(runner) // self._slots)

    def on_loss(self, runner: Any, error: BaseException) -> None:
        self.on_hang(runner, ())

    def on_return(self, runner: Any) -> None:
        pass

    def busy(self, *instances: int) -> list[Any]:
        """The runners that execute, of these instances or of all."""
        return [
            one
            for place, one in enumerate(self.runners)
            if one.busy and place // self._slots in (instances or range(99))
        ]

    async def end(self, *instances: int) -> None:
        """Have these instances, or all, end their executions."""
        for runner in self.busy(*instances):
            if self.runners.index(runner) // self._slots in self.full:
                runner.fail(MemoryError())
            else:
                runner.finish(str.upper)
        await one_turn()

    def executing(self, *names: str) -> list[Any]:
        """The runners that execute these payloads, each alone."""
        return [next(one for one in self.busy() if one.batches[-1] == [name]) for name in names]

    async def warm(self) -> None:
        """Let each instance execute something."""
        await self.submit(*"w" * 4 * len(self.runners))
        assert len(self.busy()) == len(self.runners)
        while self.busy():
            await self.end()
