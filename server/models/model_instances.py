"""The instances of one version of a model while it serves, each with its thread, and what happens to one that hangs or
is lost.

Lives here: which instances there are. Must not: batches, or the decision that one hangs (`scheduler.instances`) or is
lost (`scheduler.batcher`, or the instance itself). The rule: what a hanging execution uses is released only if the
execution ends after all, which few instances can be made to do; and what a lost device held is never released, since
the driver may end the process over that.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from paceline.backends.base import Abandonable, CanEnd, Device, ModelInstance, Slotted, StepsAlone
from paceline.backends.errors import DeviceLost, InstanceLost, StepHangs
from paceline.backends.model_call import MakesCalls
from paceline.backends.remote import RemoteInstance, RemoteModel
from paceline.backends.remote_messages import RemoteRequest
from paceline.backends.spec import Tensors
from paceline.scheduler.request import AnyRequest
from paceline.scheduler.runner import TaskRunner, ThreadRunner
from paceline.server.errors import ConfigError, Ending, LoadHangs
from paceline.server.memory.reading import ExecuteInputs
from paceline.server.memory.region_tensors import Inputs
from paceline.server.models.ensemble_config import EnsembleInstance, EnsembleModel
from paceline.server.models.load_queue import call_soon, start_thread, submit
from paceline.server.models.loader import LoadedVersion
from paceline.server.models.warmup import Supervisor
from paceline.server.telemetry.metrics import AnyBatcher
from paceline.server.telemetry.model_statistics import VersionStatistics

_log = logging.getLogger("paceline.server.instances")

_MAX_HANGING = 16
"""Per version at a time. Each keeps a thread and maybe a device's memory; after this many, the next would hang too."""
_LOOKS = 8
"""At what executes by itself, in the time that it may take."""
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
"""Between attempts to replace an instance."""
_FIRST_PAUSE_S, _LONGEST_FIRST_PAUSE_S = 0.1, 10.0
"""Before the first attempt, if instances end one after the other without having executed anything."""

Runner = ThreadRunner[Inputs, Tensors] | TaskRunner[RemoteRequest, Tensors] | EnsembleInstance
Instance = ModelInstance | RemoteInstance | EnsembleInstance


class Caller(NamedTuple):
    """An instance whose code calls other models: its executions are those of `runner`."""

    batcher: AnyBatcher
    runner: Runner

    def executing(self) -> Sequence[AnyRequest]:
        """The requests that it executes now, none if it is idle. On the event loop."""
        return self.batcher.executing(self.runner)


class ModelInstances:
    """The instances of `loaded`, executing with what `execute_of` makes of each, or of each of its slots. `on_change`
    is called when `can_execute` may have changed."""

    def __init__(
        self,
        loaded: LoadedVersion,
        execute_of: Callable[[ModelInstance], ExecuteInputs],
        statistics: VersionStatistics,
        on_change: Callable[[], None],
    ) -> None:
        self._loaded = loaded
        self._what = f"model '{loaded.name}' version {loaded.version}"
        self._execute_of = execute_of
        self._statistics = statistics
        self._on_change = on_change
        self._made = 0
        # Of all instances that neither hang nor are lost. Slots of one instance have a runner each.
        self.runners = {runner: one for one in loaded.instances for runner in self._new_runners(one)}
        self._whole = len(self.runners)
        # Runners that still execute although their instance was given up.
        self._hanging: dict[Runner, Instance] = {}
        # Warm-ups of replacement instances that hang as well.
        self._stuck: set[Ending] = set()
        # What else the model must not be closed for: instances that don't serve any more, or never did, until they are
        # closed, which those whose device is lost never are; and tasks that replace some.
        self._users: set[object] = set()
        self._unrecoverable_reason = ""
        # By the ids of replacement instances, for how long the replacement was put off.
        self._first_pauses_s: dict[int, float] = {}
        self._stays_cold = False
        self._pausing: set[asyncio.Task[None]] = set()
        self._closed = self._model_is_left = False
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop
        self.batcher: AnyBatcher

    @property
    def can_execute(self) -> bool:
        """Whether anything can execute."""
        return bool(self.runners)

    @property
    def is_whole(self) -> bool:
        """Whether as many slots can execute as there were at first."""
        return len(self.runners) >= self._whole

    @property
    def unrecoverable_reason(self) -> str:
        """Why nothing can execute any more unless the process is restarted, as far as is known: a device was lost, and
        an attempt to replace the instance failed. "" otherwise."""
        return "" if self.runners else self._unrecoverable_reason

    @property
    def hangs(self) -> bool:
        """Whether there are threads that may never end, or instances that aren't closed yet, or never can be. What
        hangs is closed if it ends after all."""
        return bool(self._hanging or self._stuck or self._users)

    @property
    def instance_of(self) -> Callable[[Runner], int]:
        """A function that gives the same number for all slots of one instance, of those that don't hang."""
        if len(self.runners) == _count(self.runners):
            return id
        return lambda runner: id(self.runners[runner])

    def start(self) -> None:
        """From now on, replace instances that end; on the running event loop."""
        self._loop = asyncio.get_running_loop()
        for runner, instance in self.runners.items():
            self._watch(runner, instance)

    def on_hang(self, runner: Runner, others: Sequence[Runner]) -> None:
        """Replace the instance, unless too many hang. `others` are its other slots that execute."""
        self._statistics.hung_executions += 1
        instance = self._remove_live(runner, "an execution hangs and was given up")
        self._first_pauses_s.pop(id(instance), None)
        self._hanging.update((one, instance) for one in (runner, *others))
        if isinstance(instance, Abandonable):
            instance.abandon()
        if self._may_make_more():
            self._start_replacing(instance.device)

    def on_loss(self, runner: Runner, error: BaseException) -> None:
        """Replace the instance. One whose device is lost is kept until the process ends, and one whose step hangs until
        that ends."""
        if isinstance(error, StepHangs):
            self._statistics.hung_executions += 1
            hanging = self._remove_live(runner, str(error))
            assert not isinstance(hanging, (RemoteInstance, EnsembleInstance))
            self._leave(hanging, error.ended)
            if self._may_make_more():
                self._start_replacing(hanging.device)
            return
        self._statistics.lost_instances += 1
        instance = self._remove_live(runner, f"an instance is lost: {error}")
        if isinstance(error, DeviceLost):
            self._users.add(instance)
        else:
            self._start_giving_back(instance)
        pause_s = min(max(_FIRST_PAUSE_S, 2 * self._first_pauses_s.pop(id(instance), 0.0)), _LONGEST_FIRST_PAUSE_S)
        if not isinstance(instance, CanEnd) or instance.has_executed:
            pause_s = 0.0  # it was of use: ending it harms nobody beyond the time that a start takes
        self._start_replacing(instance.device, error, pause_s)

    def on_return(self, runner: Runner) -> None:
        """Release what the hanging execution used; on a thread, since that may take as long as a load."""
        instance = self._hanging.pop(runner, None)
        if instance is None:
            return  # of an instance that was lost
        _log.warning("%s: an execution that hung has ended", self._what)
        if all(one is not instance for one in self._hanging.values()):
            self._start_giving_back(instance)

    async def close(self) -> None:
        """Close everything that nothing executes on. What still hangs keeps what it uses."""
        self._closed = True
        if pausing := list(self._pausing):
            for task in pausing:
                task.cancel()
            await asyncio.wait(pausing)
        replacing = any(isinstance(one, asyncio.Task) for one in self._users)
        if replacing and isinstance(opened := self._loaded.opened, Abandonable):
            # Nobody needs what is being loaded, and its load may never end.
            opened.abandon()
        # Closing what loads, hangs or is lost isn't safe, nor is closing the model that such instances are made of.
        instances = list(dict.fromkeys(self.runners.values()))
        await asyncio.wrap_future(submit(lambda: self._close(instances), _start_thread_when_possible))

    def _remove_live(self, runner: Runner, why: str) -> Instance:
        """Take the instance that `runner` is a slot of out of the live ones, and return it."""
        instance = self.runners[runner]
        self.runners = {one: its for one, its in self.runners.items() if its is not instance}
        _log.error("%s: %s; instances left: %d", self._what, why, _count(self.runners))
        self._on_change()
        return instance

    def _may_make_more(self) -> bool:
        hanging = _count(self._hanging) + len(self._stuck)
        if hanging > _MAX_HANGING:
            _log.error("%s: %d instances hang, so no more are started; restart the server", self._what, hanging)
        return hanging <= _MAX_HANGING

    def _watch(self, runner: Runner, instance: Instance) -> None:
        if isinstance(instance, MakesCalls):
            instance.calls_as(Caller(self.batcher, runner))
        if isinstance(instance, CanEnd):
            instance.when_lost(lambda error: call_soon(self._loop, partial(self.batcher.lose, runner, error)))
        if isinstance(instance, StepsAlone) and self._loaded.plan.step_limit_ns:
            self._look_after(runner, instance)

    def _look_after(self, runner: Runner, instance: StepsAlone, began_ns: int = 0, looks: int = 0) -> None:
        """Give it up if it executes the same at so many looks in a row as a limit has; while the whole process is
        stopped, it isn't looked at."""
        if self._closed or runner not in self.runners:
            return
        limit_ns, now_ns = self._loaded.plan.step_limit_ns, instance.began_ns
        looks = looks + 1 if now_ns and now_ns == began_ns else 0
        if looks > _LOOKS:
            self.batcher.lose(runner, instance.give_up(limit_ns))
        else:
            self._loop.call_later(limit_ns / 1e9 / _LOOKS, self._look_after, runner, instance, now_ns, looks)

    def _start_giving_back(self, instance: Instance) -> None:
        self._users.add(instance)
        _start_thread_when_possible(lambda: self._give_back(instance))

    def _start_replacing(self, device: Device, lost: BaseException | None = None, pause_s: float = 0.0) -> None:
        task = asyncio.get_running_loop().create_task(self._replace(device, lost, pause_s))
        self._users.add(task)
        task.add_done_callback(self._on_replaced)

    def _on_replaced(self, task: asyncio.Task[None]) -> None:
        self._users.discard(task)
        if self._model_is_left:
            _start_thread_when_possible(self._close_model)

    async def _replace(self, device: Device, lost: BaseException | None, first_pause_s: float) -> None:
        """Try until there is a new one. `lost`: why the old one was lost, None if it hangs."""
        pause_s = _PAUSE_S
        await self._pause(first_pause_s)
        while not self._closed:
            try:
                instance = await asyncio.wrap_future(submit(lambda: self._open(device)))
                try:
                    if not self._closed:
                        self._add(instance)
                        self._first_pauses_s[id(instance)] = first_pause_s
                        return
                except RuntimeError:
                    self._start_giving_back(instance)
                    raise
                self._start_giving_back(instance)  # it comes too late
            except Exception as error:  # noqa: BLE001 - the backend's; opening is tried again
                if self._closed:
                    return
                _log.error("model '%s': replacing an instance failed: %s", self._loaded.name, error)
                # If nothing can execute, requests are refused instead of waiting for what may never be back; but not
                # after a hang, which may yet end. A restart of the server is known to help only with lost devices.
                if not self.runners and lost is not None:
                    self._unrecoverable_reason = str(lost) if isinstance(lost, DeviceLost) else ""
                    self.batcher.suspend()
                    self._on_change()
                if isinstance(error, LoadHangs) and not self._may_make_more():
                    return
                await self._pause(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _pause(self, pause_s: float) -> None:
        """Sleep; meanwhile, `close` may cancel the task."""
        task = asyncio.current_task()
        assert task is not None
        self._pausing.add(task)
        try:
            await asyncio.sleep(pause_s)
        finally:
            self._pausing.discard(task)

    def _add(self, instance: Instance) -> None:
        """Raises RuntimeError if no thread can be started for any of its slots."""
        runners = self._new_runners(instance)
        for number, runner in enumerate(runners):
            self.runners[runner] = instance
            try:
                self.batcher.add(runner)
            except RuntimeError as error:
                del self.runners[runner]
                if not number:
                    raise
                text = "%s: an instance runs with only %d of its %d slots: %s"
                _log.warning(text, self._what, number, len(runners), error)
                break
            self._watch(runner, instance)
        self._unrecoverable_reason = ""
        _log.warning("%s: an instance has been replaced", self._what)
        self._on_change()

    def _open(self, device: Device) -> ModelInstance:
        """A new instance, warmed up if the model has a warm-up. Blocks."""
        opened, plan = self._loaded.opened, self._loaded.plan
        # Executions on another server are only limited by the calls' deadlines, and its devices aren't lost here.
        assert not isinstance(opened, (RemoteModel, EnsembleModel))
        instance = opened.instance(plan.spec.executed, device)
        if self._stays_cold or self._loaded.warm_up is None:
            return instance
        supervise = Supervisor(plan.policy.execution_limit_ns or plan.step_limit_ns)
        try:
            self._loaded.warm_up.run([instance], supervise)
        except LoadHangs as error:
            self._leave(instance, error.ended)
            raise
        except ConfigError as error:
            if isinstance(error.__cause__, InstanceLost):
                instance.close()
                raise
            _log.warning("model '%s': an instance serves without warm-up: %s", self._loaded.name, error)
        except BaseException:
            instance.close()
            raise
        finally:
            supervise.close()
        if not (isinstance(instance, CanEnd) and instance.has_ended):
            return instance
        # Its made-up warm-up requests end it. It may do well with what it was made for.
        self._stays_cold = True
        instance.close()
        return opened.instance(plan.spec.executed, device)

    def _leave(self, instance: ModelInstance, ended: Ending) -> None:
        """Close an instance whose warm-up hangs, once that has `ended`, if ever."""
        self._users.add(instance)
        self._stuck.add(ended)

        def give_back(_: object) -> None:
            self._stuck.discard(ended)
            self._give_back(instance)

        ended.add_done_callback(give_back)
        if isinstance(instance, Abandonable):
            instance.abandon()

    def _give_back(self, instance: Instance) -> None:
        """Close one of those that are leaving, and the model if that is left to do. Blocks."""
        try:
            instance.close()
        finally:
            self._users.discard(instance)
            self._close_model()

    def _close(self, instances: Sequence[Instance]) -> None:
        """Blocks. If one of them raises, the others and the model are closed all the same."""
        with ExitStack() as closing:
            closing.callback(self._close_model)
            closing.callback(setattr, self, "_model_is_left", True)
            for instance in reversed(instances):
                closing.callback(instance.close)

    def _close_model(self) -> None:
        """Close the model if that is left to do and nothing uses it any more. Blocks."""
        with self._lock:
            if not self._model_is_left or self.hangs:
                return
            self._model_is_left = False
        self._loaded.opened.close()

    def _new_runners(self, instance: Instance) -> Sequence[Runner]:
        if isinstance(instance, EnsembleInstance):
            return [instance]
        if isinstance(instance, RemoteInstance):
            return [TaskRunner(instance.execute)]
        name = f"{self._loaded.name}_{self._loaded.version}_{self._made}"
        self._made += 1
        if not isinstance(instance, Slotted):
            call_off = instance.call_off if isinstance(instance, MakesCalls) else lambda: None
            return [ThreadRunner(name, self._execute_of(instance), call_off=call_off)]
        return [
            ThreadRunner(f"{name}_{number}", self._execute_of(slot), slot.start, stages=False)
            for number, slot in enumerate(instance.slots)
        ]


def _start_thread_when_possible(function: Callable[[], object]) -> None:
    """Run `function` on a thread of its own, as soon as one can be started."""
    try:
        start_thread(function)
    except RuntimeError:
        asyncio.get_running_loop().call_later(_PAUSE_S, _start_thread_when_possible, function)


def _count(instances: Mapping[Runner, Instance]) -> int:
    """How many instances there are, regardless of their slots."""
    return len(set(instances.values()))
