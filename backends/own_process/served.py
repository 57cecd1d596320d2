"""An ONNX model each of whose instances is in a process of its own.

Lives here: opening it, and its instances. Must not: batches (`backends.python.instance`), or a session of ONNX Runtime:
whatever native code does with this model's requests, it does in the other process.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from paceline.backends.base import Device, Files, ModelSource
from paceline.backends.errors import ExecutionError, LoadError, ProcessError
from paceline.backends.onnx.model_files import files_changed
from paceline.backends.onnx.options import without_graphs
from paceline.backends.onnx.spec import Found, check_served
from paceline.backends.own_process.session import FILE, Job, ProcessRunner, TriedModel, ask
from paceline.backends.python.instance import OpenInProcesses, PythonInstance
from paceline.backends.python.process import ModelProcess
from paceline.backends.spec import ModelSpec

_log = logging.getLogger("paceline.backends.onnx")


class OwnProcessOnnxModel(OpenInProcesses[ModelProcess], TriedModel):
    """`OpenModel` of one ONNX file. Its sessions have threads of their own, even if the server's share theirs."""

    def __init__(self, job: Job, files: Files) -> None:
        """Blocks; raises LoadError."""
        if job.options.cuda_graphs:
            _log.warning("model '%s' runs without CUDA graphs, as it is in a process of its own", job.name)
        self._job = replace(job, options=replace(without_graphs(job.options), shared_threads=False))
        source = ModelSource(job.name, FILE)
        first = ModelProcess(source, job.device)
        found = _opened(first, self._job)
        OpenInProcesses.__init__(self, source, first)
        TriedModel.__init__(self, job.name, found, self._job.options, job.device, on_gpu=False)
        self._stamps = found.stamps
        files.keep()
        self.when_closed.callback(files.release)

    def instance(self, spec: ModelSpec, device: Device) -> PythonInstance:
        check_served(self._name, spec, self.spec)
        process = self._take(device)
        try:
            ask(process, spec)
        except ExecutionError as error:
            process.close()
            raise LoadError(f"model '{self._name}': {error}") from error
        return PythonInstance(spec, process)

    @contextmanager
    def _trying(self, spec: ModelSpec) -> Iterator[ProcessRunner]:
        """Try it in the process that will be the first instance's, so that nothing is opened twice. If that process
        ends, it was opened in vain, and another one is started later."""
        process = self._first
        assert process is not None  # trials precede instances
        try:
            yield ProcessRunner(process, spec)
        except BaseException:
            process.kill()  # it may be executing still
            raise

    def _load(self, process: ModelProcess) -> None:
        if _opened(process, replace(self._job, device=process.device)).stamps != self._stamps:
            process.close()
            raise files_changed(self._name)


def _opened(process: ModelProcess, job: Job) -> Found:
    """Have `process` open the model. Blocks. If it raises LoadError, the process has ended."""
    process.load()
    try:
        found = ask(process, job)
    except ProcessError:
        process.wait_ended()
        raise LoadError(f"model '{job.name}': its process {process.end} while it opened '{job.path}'") from None
    except (LoadError, ExecutionError) as error:
        process.close()
        raise error if isinstance(error, LoadError) else LoadError(f"model '{job.name}': {error}") from error
    assert found is not None
    return found
