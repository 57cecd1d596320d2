"""What runs in the process apart: sessions of ONNX Runtime, one at a time.

Lives here: that side of it, in the form of a Python model. Must not: hold a session that nobody asks any more. Errors
are answers, so that they keep their class.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

# The server's own modules, wherever they were imported from: they aren't on this interpreter's path by themselves.
sys.path.insert(1, str(Path(__file__).parents[2]))

import numpy as np

from backends.apart.job import ANSWER, QUESTION, Job
from backends.base import Array, Device, Tensors
from backends.errors import BackendError
from backends.onnx_instance import OnnxInstance
from backends.onnx_sessions import open_session

__all__ = ["Model"]


class Model:
    """Answers a pickled `(Job, inputs)` with the pickled outputs or error; None is the end of the last job."""

    def __init__(self) -> None:
        self._job: Job | None = None
        self._instance: OnnxInstance | None = None

    def execute(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        (question,) = inputs[QUESTION].tolist()
        return {ANSWER: np.array([pickle.dumps(self._answer(pickle.loads(question)), -1)], object)}

    def _answer(self, question: tuple[Job, Sequence[Array]] | None) -> Tensors | BackendError | None:
        if question is None:
            self._close()
            return None
        job, inputs = question
        try:
            return self._opened(job).run(inputs)
        except BackendError as error:
            return error.with_traceback(None)

    def _opened(self, job: Job) -> OnnxInstance:
        if self._instance is None or job != self._job:
            self._close()
            device = Device()
            session = open_session(job.name, job.path, job.options, device)
            self._job, self._instance = job, OnnxInstance(session, job.spec, device, job.options)
        return self._instance

    def _close(self) -> None:
        if self._instance is not None:
            self._instance.close()  # else the session, and all weights, would stay until garbage is collected
        self._job = self._instance = None
