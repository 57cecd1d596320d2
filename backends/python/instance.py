"""The processes of a Python model: those that are being loaded, and those that are an instance.

Lives here: a batch and its answer, in the process's terms. Must not: the messages (`process`), what is loaded, or
replacing the process, which is up to the owner of the instances. The rule: if the process ends during a batch, the
batch's error says whether the batch may have caused that, and the instance ends with it.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Generic, TypeVar

from paceline.backends.base import Device, Execution, ModelSource
from paceline.backends.errors import DeviceLost, ProcessEndedBeforeBatch, ProcessError
from paceline.backends.python.messages import RUN, TRY
from paceline.backends.python.process import ModelProcess
from paceline.backends.ragged import batch_input_tensors, batch_runner
from paceline.backends.spec import Array, ModelSpec, Tensors
from paceline.protos.datatypes import by_name

T = TypeVar("T")
ProcessT = TypeVar("ProcessT", bound=ModelProcess)


class OpenInProcesses(ABC, Generic[ProcessT]):
    """`OpenModel` and `Abandonable`, as far as it has a process for each instance. `first` has loaded the model
    already, and becomes that of the first instance on its device."""

    def __init__(self, source: ModelSource, first: ProcessT) -> None:
        self._source = source
        self._class = type(first)
        self._first: ProcessT | None = first
        self._lock = threading.Lock()
        self._loading: set[ProcessT] = set()
        self._is_abandoned = False
        self.when_closed = ExitStack()
        """What is done when it is closed."""

    @abstractmethod
    def _load(self, process: ProcessT) -> None:
        """Load the model in a further process. Blocks. If it raises LoadError, the process has ended."""

    def _take(self, device: Device) -> ProcessT:
        """A process that has the model loaded, now the caller's. Blocks; raises LoadError."""
        first = self._first
        if first is not None and first.device == device:
            self._first = None
            if not first.ended:
                return first
        process = self._class(self._source, device)
        with self._lock:
            self._loading.add(process)
            if self._is_abandoned:
                process.kill()
        try:
            self._load(process)
        finally:
            with self._lock:
                self._loading.discard(process)
        return process

    def abandon(self) -> None:
        """End the processes that are loading now, whatever they do: whoever waits for them gets a LoadError, and
        later loads fail too. On any thread."""
        with self._lock:
            self._is_abandoned = True
            for process in self._loading:
                process.kill()

    def close(self) -> None:
        """Close the first process, if nobody has taken it. Blocks."""
        first, self._first = self._first, None
        if first is not None:
            first.close()
        self.when_closed.close()


class PythonInstance:
    """`ModelInstance` in `process`, which has the model loaded."""

    pads = False

    def __init__(self, spec: ModelSpec, process: ModelProcess) -> None:
        self.device = process.device
        self._run_batch = batch_runner(spec)
        self._dtypes = tuple(by_name(tensor.datatype).dtype for tensor in spec.inputs)
        self._inputs = tuple(tensor.name for tensor in (*spec.inputs, *batch_input_tensors(spec)))
        self._outputs = tuple(tensor.name for tensor in spec.outputs)
        # None once it is closed: a process holds memory, and references to the instance may live on.
        self._process: ModelProcess | None = process
        self.has_executed = False
        self._kind = RUN

    @property
    def has_ended(self) -> bool:
        process = self._process
        return process is None or process.ended

    def execute(self, requests: Sequence[Tensors], padded_rows: int = 0) -> Execution:
        try:
            return self._run_batch(requests, self._run, padded_rows, self.buffer)
        finally:
            self.release_buffers()

    def execute_made_up(self, requests: Sequence[Tensors], padded_rows: int = 0) -> Execution:
        self._kind = TRY
        try:
            return self.execute(requests, padded_rows)
        finally:
            self._kind = RUN

    def buffer(self, index: int, shape: tuple[int, ...]) -> Array | None:
        """`ProvidesBuffers`: memory that the process sees."""
        process = self._process
        return None if process is None else process.buffer(index, self._dtypes[index], shape)

    def release_buffers(self) -> None:
        if (process := self._process) is not None:
            process.release_buffers()

    def when_lost(self, call: Callable[[BaseException], None]) -> None:
        self.has_executed = False
        if (process := self._process) is not None:
            process.when_ended(lambda: self._on_end(process, call))

    def sequence_over(self, sequence: int | str | bytes, why: str) -> None:
        """`HoldsSequences`."""
        if (process := self._process) is not None:
            process.sequence_over(sequence, why)

    def calls_as(self, caller: object) -> None:
        """`MakesCalls`."""
        if (process := self._process) is not None:
            process.calls_as(caller)

    def call_off(self) -> None:
        if (process := self._process) is not None:
            process.call_off()

    def abandon(self) -> None:
        """End the process now, whatever it does: what executes fails, and the instance is closed. On any thread."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def _run(self, inputs: list[Array]) -> Tensors:
        return self._call(lambda process: process.execute(inputs, self._inputs, self._outputs, self._kind))

    def _call(self, execute: Callable[[ModelProcess], T]) -> T:
        """What `execute` returns for the process. Raises as `ModelInstance.execute`."""
        process = self._process
        if process is None:
            raise ProcessEndedBeforeBatch("the instance is closed")
        try:
            result = execute(process)
        except ProcessEndedBeforeBatch:
            raise
        except DeviceLost as error:
            # Only that process has lost it: another one may get it back, and needs what this one still holds of it.
            process.kill()
            raise ProcessError(str(error)) from error
        except ProcessError as error:
            raise ProcessError(f"{error} while it executed this batch") from None
        self.has_executed = True
        return result

    def _on_end(self, process: ModelProcess, call: Callable[[BaseException], None]) -> None:
        if self._process is not None:
            call(ProcessError(f"the model's process {process.end}"))
