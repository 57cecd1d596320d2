"""An instance of a Python model: batches go to its process, and it ends with that.

Lives here: a batch and its answer, in the process's terms. Must not: the messages (`process`), or replacing the
process, which is up to the owner of the instances. The rule: if the process ends during a batch, the batch's error says
whether the batch may have caused that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.backends.base import Execution
from paceline.backends.errors import DeviceLost, ProcessEndedBeforeBatch, ProcessError
from paceline.backends.python.process import ModelProcess
from paceline.backends.python.protocol import RUN, TRY
from paceline.backends.ragged import batch_input_tensors, batch_runner
from paceline.backends.spec import Array, ModelSpec, Tensors
from paceline.protos.datatypes import by_name

__all__ = ["PythonInstance"]


class PythonInstance:
    """`ModelInstance` in `process`, which has the model loaded."""

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

    @property
    def pads(self) -> bool:
        return False

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
        process = self._process
        if process is None:
            raise ProcessEndedBeforeBatch("the instance is closed")
        try:
            outputs = process.execute(inputs, self._inputs, self._outputs, self._kind)
        except ProcessEndedBeforeBatch:
            raise
        except DeviceLost as error:
            # Only that process has lost it: another one may get it back, and needs what this one still holds of it.
            process.kill()
            raise ProcessError(str(error)) from error
        except ProcessError as error:
            raise ProcessError(f"{error} while it executed this batch") from None
        self.has_executed = True
        return outputs

    def _on_end(self, process: ModelProcess, call: Callable[[BaseException], None]) -> None:
        if self._process is not None:
            call(ProcessError(f"the model's process {process.end}"))
