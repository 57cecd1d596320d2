"""What runs in the separate process: one session of ONNX Runtime at a time.

Lives here: that side of it, in the form of a Python model. Must not: hold a session that nobody uses any more. The
error of a model that can't be opened is sent as an answer, which preserves its class.
"""

from __future__ import annotations

import pickle
import resource
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from paceline.backends.cuda.accelerator import accelerator_of
from paceline.backends.errors import DeviceError, InstanceError, LoadError, StalePlan
from paceline.backends.onnx.instance import OnnxInstance
from paceline.backends.onnx.sessions import OpenSession, open_session
from paceline.backends.onnx.spec import Found, find_spec
from paceline.backends.own_process.session import Job, Question, Trying
from paceline.backends.spec import MISSING, Array, ModelSpec


class Model:
    """Answers questions, and executes batches of the last spec that it was told."""

    def __init__(self) -> None:
        self._job: Job | None = None
        self._session: OpenSession | None = None
        self._spec: ModelSpec | None = None
        self._instance: OnnxInstance | None = None
        self._own_limit = resource.getrlimit(resource.RLIMIT_DATA)

    def answer(self, question: bytes) -> bytes:
        """Question and answer are pickles: only the server asks, and callers' tensors don't come here."""
        return pickle.dumps(self._answer(pickle.loads(question)), -1)

    def execute(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        instance, spec = self._instance, self._spec
        if instance is None or spec is None:
            raise InstanceError("no model is open")
        given = [inputs.get(name, MISSING) for name in instance.input_names]
        try:
            outputs = instance.run(given)
        except StalePlan:
            if not (spec.batched and spec.by_rows) or spec.fixed_rows:
                raise
            # Plans depend on the number of rows.
            longer = [np.concatenate([array, array[-1:]]) for array in given]
            outputs = [output[:-1] for output in instance.run(longer)]
        return dict(zip(instance.output_names, outputs, strict=True))

    def close(self) -> None:
        """Otherwise the session, with all weights, would stay until garbage is collected."""
        if self._instance is not None:
            self._instance.close()
        self._job = self._session = self._spec = self._instance = None

    def _answer(self, question: Question) -> Found | LoadError | None:
        resource.setrlimit(resource.RLIMIT_DATA, self._own_limit)  # until a trial lowers it again
        if question is None:
            self.close()
        elif isinstance(question, Job):
            try:
                return self._open(question)
            except LoadError as error:
                return LoadError(str(error))
        else:
            assert self._job is not None
            assert self._session is not None
            self._spec = question.spec if isinstance(question, Trying) else question
            self._instance = OnnxInstance(self._session, self._spec, self._job.device, self._job.options)
            if isinstance(question, Trying):
                self._limit_memory(question.memory_bytes)
        return None

    def _limit_memory(self, more_bytes: int) -> None:
        """Have allocations fail once the process has `more_bytes` more than now: an error of that execution, where the
        system would kill processes. Memory that is only reserved or shared with the server doesn't count."""
        soft, hard = self._own_limit
        pages = int(Path("/proc/self/statm").read_text().split()[5])
        limit = pages * resource.getpagesize() + more_bytes
        if pages and (soft == resource.RLIM_INFINITY or soft > limit):
            resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))

    def _open(self, job: Job) -> Found:
        self.close()
        try:
            accelerator = accelerator_of(job.device)
        except DeviceError as error:
            raise LoadError(f"model '{job.name}': onnxruntime couldn't use GPU {job.device.index}: {error}") from error
        session = open_session(job.name, job.path, job.options, job.device, accelerator)
        found = find_spec(job.name, session.session, session.facts, job.declared)
        self._job, self._session = job, session
        return found
