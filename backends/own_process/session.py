"""A session of ONNX Runtime in another process: what that is asked, and trials of models there.

Lives here: questions; which models are tried, and how; processes for that, and their reuse. Must not: know what follows
from a trial, or how it goes (`backends.row_trial`). Inputs that a model wasn't made for may cause more than an
exception: a division by zero in native code ends the process; the server would go with all of its models and callers.
"""

from __future__ import annotations

import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock, Timer
from types import TracebackType
from typing import Protocol, TypeAlias

import numpy as np

from paceline.backends.base import Device, DeviceKind, ModelSource
from paceline.backends.errors import (
    BackendError,
    ExecutionError,
    InstanceError,
    LoadError,
    OutOfMemory,
    ProcessError,
    StalePlan,
)
from paceline.backends.length_trial import try_lengths, without_trial
from paceline.backends.made_up import GivenUp
from paceline.backends.onnx.options import OnnxOptions
from paceline.backends.onnx.spec import Found, why_not_passed
from paceline.backends.python.process import ModelProcess
from paceline.backends.ragged import turning
from paceline.backends.row_trial import try_rows
from paceline.backends.spec import Array, ModelSpec, Tensors
from paceline.backends.trials import LengthAxis, LengthTrial, Supervise, Trial, unsupervised

FILE = Path(__file__).with_name("model.py")
"""What runs there."""
_TRAINS = "its BatchNormalization is in training mode, and normalizes by all rows of a batch"


@dataclass(frozen=True, slots=True)
class Job:
    """The model in `path`, to be opened with `options` on `device`. `declared` as in `ModelSource`."""

    name: str
    path: Path
    options: OnnxOptions
    device: Device = field(default_factory=Device)
    declared: ModelSpec | None = None


@dataclass(frozen=True, slots=True)
class Trying:
    """The spec of a trial's batches. While they execute, the process may allocate `memory_bytes` more than it has."""

    spec: ModelSpec
    memory_bytes: int


Question: TypeAlias = Job | ModelSpec | Trying | None
"""A job: open it, and say what it is (`Found`). A spec: that of the batches to come. None: close the model."""


def ask(process: ModelProcess, question: Question) -> Found | None:
    """The answer of `process`. Blocks. Raises LoadError if the model can't be opened, ProcessError if the process has
    ended, and ExecutionError for any other failure."""
    result: Found | BackendError | None = pickle.loads(process.ask(pickle.dumps(question, -1)))
    if isinstance(result, BackendError):
        raise result
    return result


class Runs(Protocol):
    """Executes the made-up inputs of a trial; raises ExecutionError."""

    def run(self, inputs: Sequence[Array]) -> Tensors: ...


class TriedModel(ABC):
    """`OpenModel`, `Triable` and `TriesLengths` of an ONNX file, as far as it doesn't matter where it is executed.
    `on_gpu`: as for `try_lengths`."""

    platform = "onnxruntime_onnx"

    def __init__(self, name: str, found: Found, options: OnnxOptions, device: Device, *, on_gpu: bool) -> None:
        found.tell(name)
        self.spec = found.spec
        self.rounds_by = found.rounds_by
        self._trains = found.trains
        self._name = name
        self._options = options
        self._on_gpu = on_gpu
        # It may compute in less than single precision, as GPUs do where they multiply matrices.
        self._coarse = found.halves or device.kind is DeviceKind.GPU

    @abstractmethod
    def _trying(self, spec: ModelSpec) -> AbstractContextManager[Runs]:
        """What executes inputs of `spec`, which it may not survive."""

    @contextmanager
    def _supervised(self, spec: ModelSpec, supervise: Supervise) -> Iterator[Callable[[Sequence[Array]], Tensors]]:
        with self._trying(spec) as runs:

            def run(inputs: Sequence[Array]) -> Tensors:
                try:
                    return supervise(lambda: runs.run(inputs))
                except StalePlan as error:
                    # An earlier execution of that shape failed, as this one would; the trial goes on with others.
                    raise ExecutionError(str(error)) from error

            yield run

    def _is_tried(self, spec: ModelSpec) -> bool:
        """TensorRT and OpenVINO build an engine for each new shape, which may take minutes. What can't be executed is
        refused once it is to be."""
        return self._options.tensorrt is None and self._options.openvino is None and not why_not_passed(spec)

    def try_rows(self, supervise: Supervise = unsupervised) -> Trial:
        tried = Trial(self.spec)
        if self._is_tried(self.spec):
            needed = replace(self.spec, inputs=tuple(one for one in self.spec.inputs if not one.optional))
            with self._supervised(needed, supervise) as run:
                tried = try_rows(needed, run)
            tried = replace(tried, spec=replace(tried.spec, inputs=self.spec.inputs))
        if self._trains and not tried.deadly:
            # ONNX Runtime has it learn from each execution, so its results look random. A crash counts all the same.
            return replace(tried, why_not=_TRAINS, fixed_rows=0)
        return tried

    def try_lengths(
        self, spec: ModelSpec, asked: Sequence[LengthAxis] | None, supervise: Supervise = unsupervised
    ) -> LengthTrial:
        if self._trains or not self._is_tried(spec):  # padding is tried by nobody, or as asked
            return without_trial(spec, asked, _TRAINS if self._trains else "")
        fixed = max((one.dims[0] for one in self.spec.inputs if one.dims), default=-1)
        with self._supervised(spec.executed, supervise) as run_as_it_is:
            run = turning(spec.executed)(run_as_it_is)

            def run_fixed(inputs: Sequence[Array]) -> Tensors:
                rows = len(inputs[0])
                places = [[min(row, rows - 1) for row in range(at, at + fixed)] for at in range(0, rows, fixed)]
                parts = [run([one[place] for one in inputs]) for place in places]
                return [np.concatenate(column)[:rows] for column in zip(*parts, strict=True)]

            return try_lengths(spec, asked, run_fixed if fixed > 1 else run, self._coarse, self._on_gpu)


_SOURCE = ModelSource("a trial", FILE)
_IDLE_S = 10.0
"""How long, or at most twice as long, an idle process is kept for the next model: models are loaded one after the
other."""
_MEMORY_BYTES = 2**29
"""For what a trial's executions allocate, beyond the opened model: made-up rows may take much more than one request."""
_HANGS_S = 120.0
"""From when on an execution hangs, unless the model's own limit is shorter."""


class ProcessRunner:
    """Runs a model, which is open in `process`, with inputs of `spec`. Memory and time are limited: allocations fail,
    and the process is killed. For one thread at a time."""

    def __init__(self, process: ModelProcess, spec: ModelSpec) -> None:
        self._process = process
        self._spec = spec
        self._inputs = tuple(tensor.name for tensor in spec.inputs)
        self._outputs = tuple(tensor.name for tensor in spec.outputs)
        self._has_spec = self._hangs = False

    def run(self, inputs: Sequence[Array]) -> Tensors:
        """The outputs for `inputs`. Blocks. Raises as `OnnxInstance.run`, ProcessError if the process has ended, and
        GivenUp if it hung."""
        process, alarm = self._process, Timer(_HANGS_S, self._end_hanging)
        alarm.daemon = True
        with suppress(RuntimeError):  # no thread can be started, and it runs without a limit
            alarm.start()
        try:
            if not self._has_spec:
                ask(process, Trying(self._spec, _MEMORY_BYTES))
                self._has_spec = True
            return process.execute(inputs, self._inputs, self._outputs)
        except ProcessError:
            process.wait_ended()
            if self._hangs:
                raise GivenUp(f"an execution took longer than {_HANGS_S:g} s") from None
            raise ProcessError(f"the process that ran it {process.end}") from None
        finally:
            alarm.cancel()

    def _end_hanging(self) -> None:
        self._hangs = True
        self._process.kill()


class OwnProcessSession:
    """Runs the model of `job` in such a process, with inputs of `spec`. A context manager, for one thread at a time.
    Weights stored beside the model's file aren't copied."""

    def __init__(self, job: Job, spec: ModelSpec) -> None:
        # The thread pool that the server's sessions share isn't there; and weights that aren't prepacked stay in their
        # file.
        entries = {**job.options.session_entries, "session.disable_prepacking": "1"}
        options = replace(job.options, shared_threads=False, session_entries=entries)
        self._job, self._spec = replace(job, options=options), spec
        self._process: ModelProcess | None = None
        self._trying: ProcessRunner | None = None
        self._is_over = False
        # A run that was given up continues on its thread.
        self._lock = Lock()

    def __enter__(self) -> OwnProcessSession:
        """Get a process; LoadError if none can be had."""
        used = _idle.take()
        self._process, self._is_fresh = used or _started(), used is None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with self._lock:
            process, self._is_over = self._process, True
        assert process is not None
        if kind is not None:  # it may still be executing
            process.kill()
            return
        try:
            ask(process, None)
        except ExecutionError:
            process.kill()
        else:
            _idle.give(process)

    def run(self, inputs: Sequence[Array]) -> Tensors:
        """The outputs for `inputs`. Blocks; opens the model first. Raises as `OnnxInstance.run`, ProcessError if the
        process has ended, OutOfMemory if it was killed, and InstanceError if it can't open the model."""
        try:
            return self._opened().run(inputs)
        except LoadError as error:
            raise InstanceError(str(error)) from error
        except ProcessError as error:
            assert self._process is not None
            if self._is_fresh and not self._is_over and self._process.was_killed:
                raise OutOfMemory(f"{error}, as the system does when memory runs out") from None
            if self._is_fresh or self._is_over:
                raise
        # A reused process may have ended for another reason, before it had this model or since.
        self._begin_anew()
        return self.run(inputs)

    def _begin_anew(self) -> None:
        """Continue with a new process. Raises InstanceError, or ProcessError if nobody waits any more."""
        try:
            process = _started()
        except LoadError as error:
            raise InstanceError(str(error)) from error
        with self._lock:
            if not self._is_over:
                self._process, self._is_fresh, self._trying = process, True, None
                return
        process.kill()
        raise ProcessError("nobody waits for the result any more")

    def _opened(self) -> ProcessRunner:
        if self._trying is None:
            assert self._process is not None
            try:
                ask(self._process, self._job)
            except ProcessError:
                self._process.wait_ended()
                raise ProcessError(f"the process that was to open it {self._process.end}") from None
            self._trying = ProcessRunner(self._process, self._spec)
        return self._trying


class _Idle:
    """Unused processes, kept for a while."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._since: dict[ModelProcess, float] = {}
        self._is_watched = False

    def take(self) -> ModelProcess | None:
        with self._lock:
            while self._since:
                process, _ = self._since.popitem()
                if not process.ended:
                    return process
        return None

    def give(self, process: ModelProcess) -> None:
        with self._lock:
            self._since[process] = time.monotonic()
            self._is_watched = self._is_watched or self._watch()

    def _watch(self) -> bool:
        """Check later. False if no thread can be started for that: then the next `give` tries again."""
        timer = Timer(_IDLE_S, self._end_idle)
        timer.daemon = True
        with suppress(RuntimeError):
            timer.start()
            return True
        return False

    def _end_idle(self) -> None:
        until = time.monotonic() - _IDLE_S
        with self._lock:
            idle = [process for process, since in self._since.items() if since <= until]
            for process in idle:
                del self._since[process]
            self._is_watched = bool(self._since) and self._watch()
        for process in idle:
            process.close()


_idle = _Idle()


def _started() -> ModelProcess:
    try:
        process = ModelProcess(_SOURCE, Device())
        process.load()
    except (OSError, RuntimeError, MemoryError) as error:  # no descriptors, no threads
        raise LoadError(f"no process can be started for {_SOURCE.name}: {error}") from error
    return process
