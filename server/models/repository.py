"""The models being served: the order in which they are loaded, replaced and unloaded.

Lives here: operations on models, which take turns, and what they need of other models. Must not: know RPCs, read files
(the loader does), or say what is found (`model_lookup`). Everything runs on the event loop except the loads themselves.

The rule of a reload: the new versions are loaded and warm before anything changes. Then all look-ups change in one step
of the loop, in which no request is between its look-up and its batcher, since announced requests are taken first. The
old versions answer what they have taken, and are closed when that is done.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from paceline.backends.errors import BackendError
from paceline.backends.spec import Tensors
from paceline.protos import model_config_pb2 as pb
from paceline.scheduler.waiting import SharedQueueLimits
from paceline.server.bounded_pool import BoundedPool
from paceline.server.errors import (
    ConfigError,
    InvalidRequest,
    LoadFailed,
    ModelNotFound,
    ModelNotReady,
    ServerError,
    TooManyModels,
    error_text,
)
from paceline.server.limits import Limits
from paceline.server.memory.regions import Regions
from paceline.server.models.ensembles import Ensembles, Joined
from paceline.server.models.layout import ModelFolder
from paceline.server.models.load_queue import Find, LoadQueue, always
from paceline.server.models.loader import LoadedVersion
from paceline.server.models.model_lookup import ModelLookup
from paceline.server.models.model_record import ModelRecord
from paceline.server.models.served_model import ServedModel
from paceline.server.telemetry.metrics import Metrics
from paceline.server.telemetry.tracing import Tracer

_log = logging.getLogger("paceline.server.repository")


class Repository(ModelLookup):
    """Has models loaded by `loads`, and finds them.

    `strict_readiness`: as for `ModelLookup`. `regions`: shared memory that may hold tensors, besides messages. `tracer`
    may trace batches, and keeps settings by name. `max_models`: how many may serve or load at a time. `shared_limits`:
    the limits that all queues share. `response_pool`: where models keep answers whose configurations ask for that.
    """

    def __init__(
        self,
        metrics: Metrics,
        loads: LoadQueue,
        *,
        strict_readiness: bool = True,
        regions: Regions | None = None,
        tracer: Tracer | None = None,
        max_models: int = Limits().models,
        shared_limits: SharedQueueLimits | None = None,
        response_pool: BoundedPool[Tensors] | None = None,
    ) -> None:
        super().__init__(strict_readiness=strict_readiness)
        self._shared_limits = shared_limits
        self._response_pool = response_pool
        self._max_models = max_models
        self.refused_loads = 0
        self._regions = regions
        self._tracer = tracer
        self._metrics = metrics
        self._loads = loads
        self._ensembles = Ensembles(self._records, self.get)
        self.find_needed: Callable[[str], Find] | None = None
        """Gives a model that an ensemble needs; None if only what was asked for is loaded."""
        self._operations: set[asyncio.Task[None]] = set()
        # By models that are being loaded, which one they wait for: calls of models may go round in circles.
        self._waiting: dict[str, str] = {}
        self.leaving: dict[ServedModel, asyncio.Task[None]] = {}
        """Versions that accept no more requests and still execute some."""
        self._stopping = False
        self._hung: list[ServedModel] = []

    @property
    def hangs(self) -> bool:
        """Whether a thread is loading something, or there are executions that may never end: neither can be
        interrupted."""
        versions = (*self.models, *self.leaving, *self._hung)
        return self._loads.under_way or any(one.instances.hangs for one in versions)

    def take_note(self, folders: Sequence[ModelFolder]) -> None:
        """Remember these as the models on disk, and forget those that neither serve nor are there."""
        on_disk = {folder.name: folder for folder in folders}
        for name in on_disk:
            self._records.setdefault(name, ModelRecord(name))
        for name, record in list(self._records.items()):
            record.on_disk = name in on_disk
            record.duplicates = record.on_disk and bool(on_disk[name].duplicates)
            if record.forgettable:
                self._forget(name)

    async def load_all(self, folders: Sequence[ModelFolder]) -> Mapping[str, LoadFailed]:
        """Load models, several at a time. One that fails becomes unavailable, with the reason; the others serve.
        Returns the failures, by name."""
        _log.info("loading %d model%s", len(folders), "s"[: len(folders) != 1])
        loads = (self.load(folder.name, always(folder)) for folder in folders)
        failures = {}
        for folder, outcome in zip(folders, await asyncio.gather(*loads, return_exceptions=True), strict=True):
            if isinstance(outcome, LoadFailed):
                failures[folder.name] = outcome
            elif isinstance(outcome, BaseException):
                raise outcome
        return failures

    async def load(
        self, name: str, find: Find, override: pb.ModelConfig | None = None, *, explicit: bool = True
    ) -> None:
        """Load model `name` from what `find` gives, with `override` instead of its configuration if there is one, in
        place of what it serves now. If all of that is there, its last load succeeded and was of the very files and the
        configuration that are there now, it goes on. `explicit`: it isn't loaded because another model needs it. Models
        that it needs itself are loaded first, and ensembles that need it follow. Loads and unloads of one model take
        turns, in the order of the calls.

        Goes on if the caller is cancelled. Raises LoadFailed, or what `find` does; then only what is reported about the
        model has changed.
        """

        def load(record: ModelRecord[ServedModel]) -> Awaitable[None]:
            serving = record.serving.values()
            stays = override is None and not record.failure and all(one.instances.is_whole for one in serving)
            unless = [one.sight for one in serving] if stays else []
            provide = partial(self._provide_called, name)
            return self._load(
                record,
                lambda: self._loads.load(name, find, override, record.loading_versions, provide, unless),
                explicit=explicit,
            )

        await self._in_turn(name, load)

    async def install(self, name: str, bring: Callable[[], Awaitable[Sequence[LoadedVersion]]]) -> None:
        """The same for a model that `bring` gives, without a thread that loads it."""
        await self._in_turn(name, lambda record: self._load(record, bring))

    def set_unreachable(self, name: str, reason: str) -> None:
        """Refuse requests for a loaded model, which can't be reached for `reason`; accept them again if that is "".
        Accepted requests go on."""
        record = self._records.get(name)
        if record is None or not record.serving or record.unreachable_reason == reason:
            return
        record.unreachable_reason = reason
        versions = list(record.serving.values())
        self._serve(name, [] if reason else versions, versions if reason else [])
        self.on_change()

    async def unload(self, name: str, *, dependents: bool = False) -> None:
        """Accept no more requests for a model, and for ensembles that need it. Returns while it still executes accepted
        ones. Does nothing for an unknown name. `dependents`: the models go, too, that were loaded only because this one
        needs them."""
        if name in self._records:
            needs = self._ensembles.needs(name)
            await self._in_turn(name, self._unload)
            for need in needs if dependents else ():
                if need in self._records and not (self._records[need].explicit or self._ensembles.is_needed(need)):
                    await self.unload(need, dependents=True)

    async def stop(self) -> None:
        """Stop every model, each once its queue is executed. Loads in progress come to nothing."""
        self._stopping = True
        for task in self._operations:
            task.cancel()
        left = self.models
        while left:
            # Those that need others first, as these have to answer them; in circles, all together.
            needed = {name for one in left for name in one.needs if name != one.name}
            first = [one for one in left if one.name not in needed] or left
            await asyncio.gather(*map(_stop, first))
            left = [one for one in left if one not in first]
        await asyncio.gather(*self.leaving.values())

    def abandon(self) -> None:
        """Stop every model now."""
        for model in self.models:
            model.abandon()
        for model, task in self.leaving.items():
            # Otherwise it would mistake the batcher's end for that of the executions, and close what still runs.
            task.cancel()
            model.abandon()

    async def _in_turn(self, name: str, operation: Callable[[ModelRecord[ServedModel]], Awaitable[None]]) -> None:
        task = asyncio.create_task(self._operate(name, operation))
        self._operations.add(task)
        task.add_done_callback(self._operations.discard)
        # Its caller may be gone, and asyncio would complain about an error that nobody has retrieved.
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise ModelNotReady("the server is stopping") from None
            raise
        finally:
            # It has the error, whose traceback refers to this frame and to what was to be loaded.
            del task

    async def _operate(self, name: str, operation: Callable[[ModelRecord[ServedModel]], Awaitable[None]]) -> None:
        if self._stopping:
            raise ModelNotReady("the server is stopping")
        record = self._records.setdefault(name, ModelRecord(name))
        record.operations += 1
        try:
            async with record.turn:
                await operation(record)
        finally:
            record.operations -= 1
            self._follow()
            if record.state is None and record.forgettable:
                self._forget(name)
            # Callers who may load choose names; those known from failed loads alone are forgotten beyond `max_models`.
            strangers = [name for name, record in self._records.items() if record.stranger]
            for stranger in strangers[: -self._max_models]:
                self._forget(stranger)
            self.on_change()

    def _forget(self, name: str) -> None:
        """Forget the model and all that is kept by its name, as the number of names is unbounded."""
        del self._records[name]
        self._ensembles.forget(name)
        if self._tracer is not None:
            self._tracer.forget(name)

    async def _load(
        self,
        record: ModelRecord[ServedModel],
        bring: Callable[[], Awaitable[Sequence[LoadedVersion]]],
        *,
        explicit: bool = True,
    ) -> None:
        has_place = record.serving or self.places < self._max_models
        record.loading = []
        self.on_change()
        try:
            if not has_place:
                self.refused_loads += 1
                raise TooManyModels(record.name, self._max_models)
            if loaded := await bring():
                models = await self._joined(record, loaded)
            else:
                await self._provide_all(record.name, [need for one in record.serving.values() for need in one.needs])
        except (asyncio.CancelledError, InvalidRequest, ModelNotFound, ModelNotReady):
            # Nothing was tried: there is nothing to load, or the server stops.
            record.loading = None
            raise
        except TooManyModels as error:
            record.fail_load(error.reason)
            raise
        except Exception as error:  # whatever it is, it is this model's and not the others'
            if isinstance(error, (BackendError, ServerError)):
                reason = error_text(error).removeprefix(f"model '{record.name}': ")
            else:
                reason = f"{type(error).__name__}: {error_text(error)}"
                _log.error("model '%s' failed to load with an unexpected error", record.name, exc_info=error)
            record.fail_load(reason)
            raise LoadFailed(record.name, reason) from error
        record.explicit = record.explicit or explicit
        if not loaded:
            record.loading = None
            _log.info("model '%s' isn't loaded again: it is ready, and nothing in its folder has changed", record.name)
            return
        before = self._replace(record, models)
        if before:
            was, now = ([model.version for model in some] for some in (before, models))
            _log.info("model '%s': versions %s replace versions %s", record.name, now, was)

    async def _joined(self, record: ModelRecord[ServedModel], loaded: Sequence[LoadedVersion]) -> Sequence[ServedModel]:
        """Versions that accept requests, once the models that they need serve."""
        before = self._ensembles.learn(record.name, loaded)
        try:
            await self._provide_all(record.name, self._ensembles.needs(record.name))
            return self._started(self._ensembles.joined(loaded))
        except BaseException:
            if record.serving:
                self._ensembles.learn(record.name, before)  # what serves goes on, and follows the models that it needs
            raise

    async def _provide_all(self, name: str, needs: Sequence[str]) -> None:
        """Have the models loaded that `name` needs, which is being loaded: an ensemble, or code that calls others."""
        try:
            for need in needs:
                waits_for: str | None = need
                while waits_for not in (name, None):
                    waits_for = self._waiting.get(str(waits_for))
                if waits_for is None:
                    self._waiting[name] = need
                    await self._provide(need)
        finally:
            self._waiting.pop(name, None)

    async def _provide_called(self, name: str, calls: Sequence[str]) -> None:
        """The same for a load that waits on a thread."""
        task = asyncio.current_task()
        assert task is not None
        self._operations.add(task)  # if the server stops, it is cancelled
        try:
            await self._provide_all(name, calls)
        finally:
            self._operations.discard(task)

    async def _provide(self, name: str) -> None:
        """Have a model loaded that another one needs, unless it serves or is being loaded; return when that has ended,
        however."""
        record = self._records.get(name)
        if record is not None and record.operations:
            async with record.turn:
                pass
        elif (record is None or not record.serving) and self.find_needed is not None:
            try:
                await self.load(name, self.find_needed(name), explicit=False)
            except ServerError as error:
                _log.error("a model that another one needs: %s", error)  # which then says what it lacks

    async def _unload(self, record: ModelRecord[ServedModel]) -> None:
        self._ensembles.forget(record.name)
        record.explicit = False
        self._replace(record, ())
        _log.info("model '%s' unloaded", record.name)

    def _replace(self, record: ModelRecord[ServedModel], models: Sequence[ServedModel]) -> list[ServedModel]:
        """Have `models` serve in place of what did, which is returned; none: it is unloaded."""
        before = record.end_load({model.version: model for model in models}) if models else record.unload()
        self._serve(record.name, models, before)
        for model in before:
            self.leaving[model] = asyncio.create_task(self._leave(record, model))
        return before

    def _follow(self) -> None:
        """Have ensembles follow the models that they need, without waiting for anything: until the next iteration of
        the loop, requests find none that is executed by a version that has left."""
        for name, now in self._ensembles.changes():
            record = self._records[name]
            try:
                if now is None:
                    self._replace(record, ())
                    _log.info("ensemble '%s' goes with a model that it needs", name)
                elif isinstance(now, ConfigError):
                    raise now
                else:
                    self._replace(record, self._started(now))
                    _log.info("ensemble '%s' follows the models that it needs", name)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is this ensemble's
                self._replace(record, ())
                record.fail_load(error_text(error))
                _log.error("ensemble '%s' can't be executed any more: %s", name, error_text(error))

    def _started(self, loaded: Sequence[Joined]) -> list[ServedModel]:
        """Versions that accept requests: all of them or, with an error, none."""
        models: list[ServedModel] = []
        try:
            self._loads.check_descriptors()
            for one, pipeline in loaded:
                model = ServedModel(
                    one,
                    self._metrics,
                    self._regions,
                    self._tracer,
                    lambda: self.on_change(),
                    self._shared_limits,
                    self._response_pool,
                    pipeline,
                )
                model.start()
                models.append(model)
        except BaseException:
            for model in models:
                model.abandon()
            for one, _ in loaded:
                one.close()
            raise
        return models

    async def _leave(self, record: ModelRecord[ServedModel], model: ServedModel) -> None:
        try:
            await _stop(model)
        finally:
            self._hung = [one for one in (*self._hung, model) if one.instances.hangs]
            del self.leaving[model]
            record.drained(model.version)
            self.on_change()


async def _stop(model: ServedModel) -> None:
    try:
        await model.stop()
    except Exception:  # noqa: BLE001 - the backend's; the other models must be stopped too
        _log.exception("model '%s' version %s could not be closed", model.name, model.version)
