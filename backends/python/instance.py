"""An instance of a Python model: batches go to its process, and another process is started when one ends.

Lives here: that there is a process. Must not: what is said to it. The rule: a batch under way when its process ends
fails, and isn't tried again, for it may be what ended it; the next one finds a process, or learns why there is none.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from backends.base import Array, Device, Execution, ModelSource, ModelSpec, Tensors
from backends.errors import BackendError, ExecutionError, LoadError, ProcessError
from backends.python.process import GoneBefore, ModelProcess
from backends.python.protocol import Declared
from backends.ragged import batch_input_tensors, batch_runner

__all__ = ["PythonInstance"]

_log = logging.getLogger("paceline.backends.python")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0
"""Between ends of processes and new ones, doubling; the first one comes at once, and so does that after a batch that
was answered."""


class PythonInstance:
    """`ModelInstance` in `process`, where the model is loaded and has declared `declared`."""

    def __init__(
        self,
        source: ModelSource,
        spec: ModelSpec,
        process: ModelProcess,
        declared: tuple[Declared | None, Declared | None],
    ) -> None:
        self._source = source
        self._device = process.device
        self._declared = declared
        self._run_batch = batch_runner(spec)
        self._inputs = tuple(tensor.name for tensor in (*spec.inputs, *batch_input_tensors(spec)))
        self._outputs = tuple(tensor.name for tensor in spec.outputs)
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._process: ModelProcess | None = process
        self._starting: ModelProcess | None = None
        self._failures = 0
        self._failure = ""
        self._pause_s = 0.0
        process.when_ended(self._start_again)

    @property
    def device(self) -> Device:
        return self._device

    def execute(self, requests: Sequence[Tensors], padded_rows: int = 0) -> Execution:
        """As `ModelInstance`; while a process is being started, for as long as that takes."""
        return self._run_batch(requests, self._run, padded_rows)

    def abandon(self) -> None:
        """End the process now, whatever it does: what executes fails, and the instance is closed. On any thread."""
        process = self._end()
        if process is not None:
            process.kill()

    def close(self) -> None:
        process = self._end()
        if process is not None:
            process.close()

    def _end(self) -> ModelProcess | None:
        """Have no more processes started; the one that there is, which isn't kept: it has memory, and whoever knows the
        instance may live on."""
        with self._changed:
            self._closing.set()
            process, starting = self._process, self._starting
            self._process = None
            self._changed.notify_all()
        if starting is not None:
            starting.kill()
        return process

    def _run(self, inputs: list[Array]) -> Tensors:
        while True:
            process = self._ready_process()
            try:
                outputs = process.execute(inputs, self._inputs, self._outputs)
            except GoneBefore:
                process.wait_ended()
                continue
            except ProcessError as error:
                raise ProcessError(f"{error} while it executed this batch") from None
            self._pause_s = 0.0
            return outputs

    def _ready_process(self) -> ModelProcess:
        with self._changed:
            failures = self._failures
            while (process := self._process) is None or process.ended:
                if self._closing.is_set():
                    raise ExecutionError("the instance is closed")
                if self._failures != failures:
                    raise ProcessError(f"the model's process ended and can't be started again: {self._failure}")
                self._changed.wait()
            if self._closing.is_set():
                raise ExecutionError("the instance is closed")
            return process

    def _start_again(self) -> None:
        """On a thread of its own, until there is a process or the instance is closed."""
        with self._changed:
            ended, self._process = self._process, None
        name = self._source.name
        if self._closing.is_set() or ended is None:
            return
        _log.error("model '%s': its process %d %s; another is started", name, ended.pid, ended.end)
        while not self._closing.wait(self._pause_s):
            self._pause_s = min(max(_FIRST_PAUSE_S, 2 * self._pause_s), _LONGEST_PAUSE_S)
            try:
                process = self._started()
            except (BackendError, OSError, RuntimeError, MemoryError) as error:  # no descriptors, no threads
                _log.error("model '%s': its process can't be started again: %s", name, error)
                with self._changed:
                    self._failures += 1
                    self._failure = str(error)
                    self._changed.notify_all()
                continue
            with self._changed:
                self._starting = None
                self._process = None if self._closing.is_set() else process
                self._changed.notify_all()
            if self._process is None:
                process.close()
            else:
                _log.info("model '%s': process %d takes its place", name, process.pid)
                process.when_ended(self._start_again)
            return

    def _started(self) -> ModelProcess:
        process = ModelProcess(self._source, self._device)
        with self._changed:
            self._starting = process
            closing = self._closing.is_set()
        if closing:
            process.kill()
        declared = process.load()
        if declared != self._declared:
            process.close()
            raise LoadError("its file declares other tensors now; load it again")
        return process
