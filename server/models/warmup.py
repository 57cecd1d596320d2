"""Executions before a model is ready, so that the first caller doesn't pay for what is done once.

Lives here: running the samples of `model_warmup`, within bounds, and the modest default: one batch of one row of zeros
where all dimensions are known. Instances with slots are on devices, which prepare for each shape and allocate for the
largest: each of their slots runs batches of all sizes. Also the time limit of each execution, trials included. Must
not: count as inference; warm-up calls instances directly, past batcher and metrics. The rule: nothing can interrupt
native code, so a hanging execution stays on its thread, nothing waits for it, and what it uses isn't closed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from pathlib import Path
from threading import TIMEOUT_MAX
from typing import TypeVar

from paceline.backends.base import ExecutesMadeUp, HoldsSequences, ModelInstance, Slotted
from paceline.backends.errors import (
    BackendError,
    DeviceLost,
    InstanceError,
    InstanceLost,
    LoadError,
    OutOfMemory,
    Unequipped,
    UnfitOutputs,
)
from paceline.backends.spec import ControlKind, ModelSpec, Tensors
from paceline.backends.trials import Supervise, unsupervised
from paceline.backends.worker_thread import WorkerThread
from paceline.protos import model_config_pb2 as pb
from paceline.protos.tensors import TensorError
from paceline.scheduler.sequence import SequenceEnd
from paceline.server.errors import ConfigError, LoadHangs
from paceline.server.models.model_config import ServingPlan
from paceline.server.models.warmup_samples import read_samples, size_bytes, text_of, uniform

T = TypeVar("T")
Run = Callable[[Sequence[Tensors], int], object]

_MIN_LIMIT_NS = 60 * 10**9
"""First executions take longer than any that follow: memory is allocated, algorithms are chosen, code is compiled."""
_LOOKS = 8
"""Waits per limit. While the whole process is stopped, at most one of them expires; the others are still to come."""

_DEFAULT_BYTES = 2**28
"""For the default sample, which nobody has asked for."""

_MAX_REPEATS = 1_000
_REPEATING_NS = 10 * 10**9
"""A load may run samples again as often, and begin to do so for as long. Other loads wait meanwhile."""
_LONGEST_NS = 600 * 10**9
"""From then on nothing is begun. A server that starts has as long, by the manifests in `deploy`."""

_log = logging.getLogger("paceline.server.warmup")


class Supervisor:
    """Runs functions one after the other, each for at most `limit_ns`, or a minute if that is more; 0: without limit,
    on the caller's thread.

    All functions of a load share one thread, as runtimes keep something for each thread that executes.
    """

    def __init__(self, limit_ns: int) -> None:
        self._limit_ns = max(limit_ns, _MIN_LIMIT_NS) if limit_ns else 0
        self._home = WorkerThread()

    def __call__(self, function: Callable[[], T]) -> T:
        """What `function` returns or raises. Blocks; raises LoadHangs if it takes too long, and then runs no more."""
        if not self._limit_ns:
            return function()
        future = self._home.submit(function)
        look_s = min(self._limit_ns / _LOOKS / 1e9, TIMEOUT_MAX)
        if not any(wait([future], look_s).done for _ in range(_LOOKS)):
            raise LoadHangs(self._limit_ns, future)
        return future.result()

    def close(self) -> None:
        """End the thread once it has run what it was given."""
        self._home.close()


class WarmUp:
    """What instances of the model that `config` describes execute before they serve, whether they are loaded with the
    model or replace others later: so samples, and the files that they name, are read once and kept.

    Raises ConfigError for a configured sample that doesn't fit, or is too large. `folder` is the model's.
    """

    def __init__(
        self, config: pb.ModelConfig, plan: ServingPlan, folder: Path, now_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._name = config.name
        self._plan = plan
        self._now_ns = now_ns
        self._has_samples = bool(config.model_warmup)
        self._samples = list(read_samples(config.model_warmup, plan, folder))
        self.in_words = ""
        """What has run, or why nothing."""

    def run(self, instances: Sequence[ModelInstance], supervise: Supervise = unsupervised) -> None:
        """Run the configured samples on each of `instances`, or the default one if there are none; `supervise` runs
        each execution. Ends early, with a log line, if that takes too long.

        Blocks. Raises ConfigError if a configured sample fails: a model that can't do what its author says it does
        isn't ready. A failing default sample is only logged, since nobody promised that zeros are good input; but
        LoadError is raised if it failed whatever its values: the device is lost or refuses, or the runtime lacks what
        any input would need; and ConfigError if the outputs can't be what clients are told.
        """
        bounds = _Bounds(self._name, self._plan.spec, self._now_ns, supervise)
        if self._has_samples:
            names = ", ".join(sample.name for sample, _ in self._samples)
            self.in_words = f"model_warmup: {names}" if names else "none, as each model_warmup has a batch_size of 0"
        elif self._plan.for_triton:
            self.in_words = "none, as a model written for Triton is only given what model_warmup says"
        for instance in instances:
            # Of a model written for Triton, nobody has promised that it takes more than its callers send.
            if not (self._has_samples or self._plan.for_triton):
                self._run_default(instance, bounds)
            for sample, requests in self._samples:
                for run in _runs_of(instance):
                    self._run_sample(sample, requests, run, _sizes(instance, self._plan), bounds)
            # What was executed were first steps, of sequences that it would hold for ever.
            while bounds.sequences:
                sequence = bounds.sequences.pop()
                if isinstance(instance, HoldsSequences) and not self._plan.for_triton:
                    instance.sequence_over(sequence, SequenceEnd.END.label)

    def _run_sample(
        self, sample: pb.ModelWarmup, requests: Sequence[Tensors], run: Run, sizes: Sequence[int], bounds: _Bounds
    ) -> None:
        for iteration in range(1, max(1, sample.count) + 1):
            if iteration > 1 and not bounds.allow(iteration):
                return
            _log.debug("model '%s' is running warmup sample '%s' for iteration %d", self._name, sample.name, iteration)
            try:
                self._run_sizes(run, requests, sizes if iteration == 1 else [0], bounds)
            except (BackendError, MemoryError) as error:
                raise ConfigError(f"failed to run warmup sample '{sample.name}': {text_of(error)}") from error

    def _run_default(self, instance: ModelInstance, bounds: _Bounds) -> None:
        """Run one batch of one row of zeros, and batches of other sizes where they are worth it, if the model's
        dimensions are known."""
        spec = self._plan.spec
        needed = [tensor for tensor in spec.inputs if not tensor.optional]
        if any(tensor.shape_tensor or tensor.any_rank or min(tensor.dims, default=0) < 0 for tensor in needed):
            why = "not all its dims are known; set model_warmup"
            self._stay_cold(why, logging.INFO if isinstance(instance, Slotted) and not self.in_words else logging.DEBUG)
            return
        if spec.batched and not needed:
            self.in_words = "none, as all inputs are optional"
            return
        size = sum(size_bytes(tensor, tensor.model_dims) for tensor in needed)
        size += sum(state.initial.nbytes for state in spec.sequence.states) if spec.sequence else 0
        if size > _DEFAULT_BYTES:
            self._stay_cold(f"a row has {size} bytes, more than {_DEFAULT_BYTES}; set model_warmup")
            return
        try:
            zeros = uniform(spec, 1, 0)
            for run in _made_up_runs_of(instance):
                self._run_sizes(run, [zeros], _sizes(instance, self._plan), bounds)
            self.in_words = "zeros"
        except (OutOfMemory, MemoryError) as error:
            self._stay_cold(f"there is too little memory: {text_of(error)}")
        except (BackendError, TensorError) as error:
            # Zeros aren't why an instance failed, except that they may be why a process ended.
            of_any_input = isinstance(error, InstanceError) and not isinstance(error, InstanceLost)
            if of_any_input or isinstance(error, DeviceLost):
                raise LoadError(f"its warm-up failed: {error}") from error
            if isinstance(error, UnfitOutputs) and not self._may_fit_others(instance, bounds):
                raise ConfigError(f"the model's outputs aren't as declared, whatever its input: {error}") from error
            self._stay_cold(
                f"it failed on zeros, maybe on any input; model_warmup can give it others: {text_of(error)}"
            )

    def _stay_cold(self, why: str, level: int = logging.WARNING) -> None:
        self.in_words = f"none, as {why}"
        _log.log(level, "model '%s' is served without warm-up, as %s", self._name, why)

    def _may_fit_others(self, instance: ModelInstance, bounds: _Bounds) -> bool:
        """Whether the outputs for other inputs than a row of zeros may be as declared: of ones, as shapes may depend on
        values, and of two rows, as some models drop all axes of size 1."""
        spec, run = self._plan.spec, _made_up_runs_of(instance)[0]
        for rows, digit in [(1, 1), (2, 0)] if self._plan.max_batch_rows > 1 else [(1, 1)]:
            try:
                bounds.execute(run, [uniform(spec, rows, digit)], 0)
            except UnfitOutputs:
                continue
            except (BackendError, MemoryError):  # which tells nothing about outputs
                pass
            return True
        return False

    def _run_sizes(self, run: Run, requests: Sequence[Tensors], sizes: Sequence[int], bounds: _Bounds) -> None:
        """Run the sample in each size, as long as it may. Sizes that there isn't enough memory for, or that fail
        whatever their values, are left out; InstanceError if all are."""
        # A sample larger than a size isn't padded to it: that would only run the sample as it is once more.
        rows = sum(len(request[0]) for request in requests) if max(sizes) else 0
        fitting = [size for size in sizes if size >= rows]
        done = False
        for size in fitting:
            if not bounds.allow(1):
                return
            try:
                bounds.execute(run, requests, size)
                done = True
            except InstanceError as error:
                if isinstance(error, (InstanceLost, Unequipped)) or (size == fitting[-1] and not done):
                    raise
                what = "doesn't fit into the device's memory" if isinstance(error, OutOfMemory) else "fails"
                _log.warning("model '%s': warm-up: a batch of %d rows %s: %s", self._name, size, what, error)


class _Bounds:
    """How much the warm-up of a load may execute, and for how long each execution may take (`supervise`)."""

    def __init__(self, name: str, spec: ModelSpec, now_ns: Callable[[], int], supervise: Supervise) -> None:
        self._name = name
        self._spec = spec
        self._now_ns = now_ns
        self._supervise = supervise
        self._began_ns = now_ns()
        self._repeats = 0
        self._told = set[str]()
        self.sequences = set[int | bytes]()
        """The ids, as the model sees them, of those that steps were executed of and whose end it wasn't told."""

    def execute(self, run: Run, requests: Sequence[Tensors], padded_rows: int) -> None:
        if self._spec.sequence is not None:
            kinds = [control.kind for control in self._spec.sequence.controls]
            if ControlKind.CORRID in kinds:
                place = len(self._spec.inputs) + kinds.index(ControlKind.CORRID)
                self.sequences |= {request[place].item(0) for request in requests}
            else:
                self.sequences.add(0)
        self._supervise(lambda: run(requests, padded_rows))

    def allow(self, iteration: int) -> bool:
        """Whether a sample may run for this iteration, from 1. Logs the first refusal of each kind."""
        took_ns = self._now_ns() - self._began_ns
        what = "repeats no more samples"
        if took_ns > _LONGEST_NS:
            what, when = "ends", f"after {_LONGEST_NS // 10**9} s"
        elif iteration == 1:
            return True
        elif took_ns > _REPEATING_NS:
            when = f"after {_REPEATING_NS // 10**9} s"
        elif self._repeats == _MAX_REPEATS:
            when = f"after {_MAX_REPEATS} repeats"
        else:
            self._repeats += 1
            return True
        if what not in self._told:
            self._told.add(what)
            _log.warning("model '%s': its warm-up %s %s, and is not complete", self._name, what, when)
        return False


def _runs_of(instance: ModelInstance) -> Sequence[Run]:
    """What must run a sample for all of `instance` to be warm."""
    return [slot.prepare for slot in instance.slots] if isinstance(instance, Slotted) else [instance.execute]


def _made_up_runs_of(instance: ModelInstance) -> Sequence[Run]:
    """The same for what nobody has sent: its errors are told once, here."""
    return [instance.execute_made_up] if isinstance(instance, ExecutesMadeUp) else _runs_of(instance)


def _sizes(instance: ModelInstance, plan: ServingPlan) -> Sequence[int]:
    """The rows that warm-up batches are padded to, largest first, so that what is allocated for one suffices for the
    next; 0: no padding. Where any size is allowed, powers of two and the largest stand for all."""
    if not (isinstance(instance, Slotted) and plan.spec.batched and plan.spec.paddable):
        return [0]
    most = max(1, plan.max_batch_rows)
    sizes = plan.policy.batch_sizes or (*(1 << power for power in range(most.bit_length())), most)
    return sorted(set(sizes), reverse=True)
