"""A session of ONNX Runtime in another process, for inputs that nobody has vouched for.

Lives here: which process runs it, and that processes are used again. Must not: know what follows from it. What a model
does to inputs that it wasn't made for may be more than an exception: a division by zero in native code ends the
process, and a server would end with all of its models and callers.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Lock, Timer
from types import TracebackType

import numpy as np

from backends.apart.job import ANSWER, QUESTION, Job
from backends.base import Array, Device, ModelSource, Tensors
from backends.errors import BackendError, LoadError, ProcessError, SessionError
from backends.python.process import ModelProcess

__all__ = ["SessionApart"]

_SOURCE = ModelSource("a trial", Path(__file__).with_name("model.py"))
_IDLE_S = 10.0
"""For how long, or twice that, a process is kept for the next: models are loaded one after the other."""


class SessionApart:
    """Runs `job` there: a context, for one thread at a time. Weights that lie beside the model's file aren't copied."""

    def __init__(self, job: Job) -> None:
        # A pool that the server's sessions share isn't there; and weights that aren't rearranged stay the file's.
        entries = {**job.options.session_entries, "session.disable_prepacking": "1"}
        options = replace(job.options, shared_threads=False, session_entries=entries)
        self._job = replace(job, options=options)
        self._process: ModelProcess | None = None

    def __enter__(self) -> SessionApart:
        """Have a process; LoadError if there is none to be had."""
        self._process = _idle.take() or _started()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        assert self._process is not None
        if kind is not None:  # it may be executing still
            self._process.kill()
            return
        with suppress(ProcessError):
            self._ask(None)
            _idle.give(self._process)

    def run(self, inputs: Sequence[Array]) -> Tensors:
        """The outputs for `inputs`. Blocks; opens the model first. Raises as `OnnxInstance.run`, ProcessError if the
        process has ended, and SessionError if it can't open the model."""
        answer = self._ask((self._job, inputs))
        if isinstance(answer, LoadError):
            raise SessionError(str(answer))
        if isinstance(answer, BackendError):
            raise answer
        return answer

    def _ask(self, question: tuple[Job, Sequence[Array]] | None) -> Tensors | BackendError:
        process = self._process
        assert process is not None
        asked: Array = np.array([pickle.dumps(question, -1)], object)
        try:
            (answer,) = process.execute([asked], [QUESTION], [ANSWER])
        except ProcessError:
            process.wait_ended()
            raise ProcessError(f"the process in which it was run {process.end}, as the server would be") from None
        result: Tensors | BackendError = pickle.loads(answer.item())
        return result


class _Idle:
    """Processes that nobody uses, for a while."""

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
        """Look later. False if there can be no thread for that: then the next that is given is an occasion."""
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
        raise LoadError(f"{_SOURCE.name} has no process: {error}") from error
    return process
