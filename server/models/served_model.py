"""One version of a model while it serves: what joins it with its codec, its batcher and its instances' threads.

Lives here: their start and end. Must not: know other models, or which requests come here.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Collection
from functools import partial
from typing import cast

from paceline.backends.base import HoldsSequences, ModelInstance
from paceline.backends.errors import (
    DeviceLost,
    InstanceError,
    InstanceLost,
    OutOfMemory,
    ProcessEndedBeforeBatch,
    ProcessError,
    StalePlan,
)
from paceline.backends.generation import Generates
from paceline.backends.remote import RemoteModel
from paceline.backends.spec import Tensors
from paceline.scheduler.batcher import Batcher
from paceline.scheduler.failures import Blame
from paceline.scheduler.observer import Observer
from paceline.scheduler.request import AnyRequest
from paceline.scheduler.sequence import AnySequence, Over
from paceline.scheduler.sequence_batcher import SequenceBatcher
from paceline.scheduler.sequence_batcher import StepMaker as MakeStep
from paceline.scheduler.waiting import SharedQueueLimits
from paceline.server.bounded_pool import BoundedPool
from paceline.server.codec.adapting_codec import codec_for
from paceline.server.codec.codec import ModelCodec
from paceline.server.codec.remote import UndeclaredCodec
from paceline.server.errors import STATE_STAYS
from paceline.server.memory.reading import ExecuteInputs, over_shared_memory
from paceline.server.memory.regions import Regions
from paceline.server.models.batch_policy import called_models
from paceline.server.models.device_states import (
    are_lost,
    gpu_of,
    may_leave_states,
    room_on,
    with_states_at_hand,
)
from paceline.server.models.kept_responses import KeptResponses
from paceline.server.models.loader import LoadedVersion
from paceline.server.models.model_instances import ModelInstances, Runner
from paceline.server.models.open_requests import OpenRequests, OpenStepMaker, handing_over
from paceline.server.models.pipeline import Pipeline
from paceline.server.models.steps import StepMaker, executing_steps, shown_id
from paceline.server.telemetry.metrics import AnyBatcher, Metrics, VersionMetrics
from paceline.server.telemetry.model_statistics import VersionStatistics
from paceline.server.telemetry.tracing import Tracer

_MAX_PARTS = 1024
"""The most parts of a split request: rows without elements cost no bytes, so something has to bound them."""


class ServedModel:
    """One version of a model with its codec, batcher and instance threads, or tasks if it is `remote`. `regions` is the
    shared memory that may hold its tensors; `tracer` may trace its batches. `on_change` is called when `can_execute`
    may have changed. `shared_limits` are the limits that its queue shares with all others. Its answers are kept in
    `response_pool` if its configuration asks for that. `pipeline`: of an ensemble, the models that execute it, each of
    which serves until this has stopped."""

    def __init__(
        self,
        loaded: LoadedVersion,
        metrics: Metrics,
        regions: Regions | None = None,
        tracer: Tracer | None = None,
        on_change: Callable[[], None] = lambda: None,
        shared_limits: SharedQueueLimits | None = None,
        response_pool: BoundedPool[Tensors] | None = None,
        pipeline: Pipeline | None = None,
    ) -> None:
        self.pipeline = pipeline
        # Models that this one needs; how many need this one.
        self._needed = cast("Collection[ServedModel]", pipeline.models if pipeline is not None else ())
        self._held = 0
        self._let_go = asyncio.Event()
        self.name = loaded.name
        self.version = str(loaded.version)
        self.needs = (*(one.name for one in self._needed), *called_models(loaded.config))
        """The names of models that its requests may need."""
        self.spec = loaded.plan.spec
        self.labels = loaded.labels
        self.config = loaded.config
        self.load_ns = loaded.load_ns
        self.found = loaded.found
        self.sight = loaded.sight
        self.platform = loaded.opened.platform
        self.max_batch_rows = loaded.plan.max_batch_rows
        self.remote = isinstance(loaded.opened, RemoteModel)
        # Whether a request may have any number of answers.
        self.decoupled = loaded.plan.decoupled
        self.for_triton = loaded.plan.for_triton
        # Reads prompts and their parameters, if its requests are prompts: then they are answered as often as their
        # callers take it.
        self.generates = loaded.opened if isinstance(loaded.opened, Generates) else None
        self.iterates = self.spec.sequence is not None and self.spec.sequence.iterative
        # Of a model that gets requests one by one; None for all others.
        self.open_requests = OpenRequests(loaded.plan.most_open) if loaded.plan.most_open else None
        # Whether outputs are written to GPUs' memory on the instances' threads.
        self.writes_outputs = self.spec.executed.by_rows and self.open_requests is None
        # The first part of a batch's id as callers see it; the second, a number, starts anew with every load.
        self.batch_id_prefix = secrets.token_hex(4)
        # The most rows of a request; a batch may have fewer.
        self.max_request_rows = _MAX_PARTS * self.max_batch_rows if loaded.plan.splits else self.max_batch_rows
        silent = self.remote and not (self.spec.inputs and self.spec.outputs)
        self.codec: ModelCodec | UndeclaredCodec = (
            UndeclaredCodec(self.name, self.version, self.max_request_rows)
            if silent
            else codec_for(self.name, self.version, self.spec, self.max_request_rows, loaded.labels, regions)
        )
        generations = loaded.opened.totals if isinstance(loaded.opened, Generates) else None
        self.statistics = VersionStatistics(tuple(length.name for length in self.spec.lengths), generations)
        # What is kept of answers; None if nothing is.
        self.responses: KeptResponses | None = None
        if response_pool is not None and loaded.plan.keeps_responses:
            self.responses = KeptResponses(
                response_pool,
                self.statistics,
                shared_limits or SharedQueueLimits(0, 0),
                by_rows=self.spec.batched and self.spec.by_rows,
                preserves_ordering=loaded.plan.policy.preserve_ordering,
            )
        self._partial: set[asyncio.Task[object] | asyncio.Future[None]] = set()

        leaves_states = may_leave_states(loaded.instances)

        def execute_of(instance: ModelInstance) -> ExecuteInputs:
            if self.open_requests is not None:
                return handing_over(instance, self.spec)
            room = room_on(instance, self.spec)
            # The plain `execute` if nothing can be in shared memory: then nobody pays for looking.
            execute = (
                over_shared_memory(instance, self.spec.executed, room)
                if regions is not None or room is not None
                else cast("ExecuteInputs", instance.execute)
            )
            if self.spec.sequence is None:
                return execute
            limits = loaded.plan.policy.sequences
            steps = executing_steps(execute, self.name, self.spec, limits.max_state_bytes if limits else 0)
            if leaves_states:
                steps = with_states_at_hand(steps, self.spec, gpu_of(instance))
            return cast("ExecuteInputs", steps)  # what `StepMaker` makes of inputs

        self.instances = ModelInstances(loaded, execute_of, self.statistics, on_change)
        # The statistics alone if batches aren't traced: then nobody pays for looking.
        observer: Observer = self.statistics
        if tracer is not None and tracer.spans is not None:
            observer = tracer.spans.observer(self.name, self.version, self.batch_id_prefix, self.statistics)
        batcher: Callable[..., AnyBatcher] = Batcher
        if self.spec.sequence is not None:
            make_step: MakeStep = StepMaker(self.spec) if not self.remote else _pass_on
            if self.open_requests is not None:
                make_step = OpenStepMaker(self.spec)
            batcher = partial(
                SequenceBatcher,
                self.name,
                make_step,
                failed_note=self._failed_note,
                on_over=self._on_over,
                are_lost=are_lost,
            )
        self.batcher = batcher(
            loaded.plan.policy,
            list(self.instances.runners),
            observer=observer,
            blames=_blame_for,
            replacer=self.instances,
            shared_limits=shared_limits,
            instance_of=self.instances.instance_of,
        )
        self.instances.batcher = self.batcher
        if self.batcher.sequences is not None:
            self.statistics.ended_sequences = self.batcher.sequences.ended
        self._metrics = metrics
        self._shown = VersionMetrics(
            self.name,
            self.version,
            self.statistics,
            self.batcher,
            priority_levels=loaded.plan.policy.priority_levels,
            load_ns=self.load_ns,
            tags=loaded.plan.metric_tags,
            open_requests=self.open_requests,
            keeps_responses=self.responses is not None,
            generations=generations,
        )

    def _failed_note(self, request: AnyRequest, error: BaseException | None) -> str:
        """What becomes of a step's sequence if its execution fails. Of what a model keeps itself, nobody knows."""
        if request.step is not None and request.step.end:
            return "; its sequence has ended, as this was to be its last step"
        sequence, policy = self.spec.sequence, self.batcher.policy.sequences
        assert sequence is not None
        assert policy is not None
        ends_it = isinstance(error, InstanceLost if policy.places else DeviceLost)
        return f"; {STATE_STAYS}" if sequence.states and not ends_it else ""

    def _on_over(self, runner: Runner, over: Over) -> None:
        """Tell the instance that has held a sequence. Triton doesn't tell its models."""
        instance = self.instances.runners.get(runner)
        if isinstance(instance, HoldsSequences) and not self.for_triton:
            assert self.spec.sequence is not None
            instance.sequence_over(shown_id(self.spec.sequence, self.spec, over.sequence), over.why.label)

    def replaces(self, before: ServedModel) -> None:
        """This version is found from now on by who has found `before`, whose sequences it knows nothing of."""
        if self.batcher.sequences is not None and before.batcher.sequences is not None:
            self.batcher.sequences.remember(before.batcher.sequences.ids)

    def start(self) -> None:
        """Accept requests, on the running event loop, and appear in the metrics."""
        self.batcher.start()
        self.instances.start()
        for model in self._needed:
            model._held += 1
        self._metrics.add(self._shown)

    def in_parts(self, whole: asyncio.Task[object] | asyncio.Future[None]) -> None:
        """For a request that enters the batcher in parts, or later: until `whole` is done, `stop` still lets the rest
        in."""
        self._partial.add(whole)
        whole.add_done_callback(self._partial.discard)

    async def stop(self) -> None:
        """Execute what is queued, then close the instances. If this is cancelled while waiting: use `abandon`."""
        if self.responses is not None:
            self.responses.close()
        self.batcher.flush()
        while self._held:
            self._let_go.clear()
            await self._let_go.wait()
        while self._partial:
            await asyncio.wait(self._partial)
        if self.iterates and self.open_requests is not None:
            await self.open_requests.until_none()  # they come back to the batcher until then
        await self.batcher.drain()
        if self.open_requests is not None:
            await self.open_requests.until_none()
        self.batcher.close()
        self._let_models_go()
        self._metrics.remove(self._shown)
        # Closing a session may take as long as a load.
        await self.instances.close()

    def abandon(self) -> None:
        """Answer all waiting requests with BatcherClosed. Instances that execute keep their memory until the process
        ends."""
        if self.responses is not None:
            self.responses.close()
        self.batcher.close()
        self._let_models_go()
        if self.open_requests is not None:
            self.open_requests.close()
        self._metrics.remove(self._shown)

    def _let_models_go(self) -> None:
        needed, self._needed = self._needed, ()
        for model in needed:
            model._held -= 1
            model._let_go.set()


def _pass_on(request: AnyRequest, sequence: AnySequence) -> None:
    """A step for another server needs nothing from here, and leaves nothing here."""


def _blame_for(error: BaseException) -> Blame:
    if isinstance(error, (OutOfMemory, MemoryError)):
        return Blame.SIZE
    if isinstance(error, (ProcessEndedBeforeBatch, StalePlan)):
        return Blame.INSTANCE_BEFORE
    if isinstance(error, InstanceLost):
        return Blame.FATAL if isinstance(error, ProcessError) else Blame.INSTANCE
    return Blame.NOBODY if isinstance(error, InstanceError) or not isinstance(error, Exception) else Blame.REQUESTS
