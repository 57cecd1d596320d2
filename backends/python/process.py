"""The server's side of a process that runs a Python model.

Lives here: starting it, asking it, ending it, and logging its output line by line. Must not: start another in its
place. The rule: however the process ends, it is reaped, what it has started ends with it, and whoever waits for its
answer gets one.
"""

from __future__ import annotations

import codecs
import logging
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from paceline.backends.base import Device, ModelSource
from paceline.backends.errors import (
    WITH_STATUS,
    DeviceLost,
    ExecutionError,
    InstanceError,
    LoadError,
    OutOfMemory,
    ProcessEndedBeforeBatch,
    ProcessError,
    StalePlan,
    Unequipped,
    UnfitOutputs,
)
from paceline.backends.python import ENVIRONMENT, EXECUTABLE
from paceline.backends.python.messages import ANSWERED, ASK, BATCHES, CLOSE, DONE, FAILED, OVER, RUN, START, Declared
from paceline.backends.spec import Array, Tensors
from paceline.backends.transport.blocking_link import BlockingLink
from paceline.backends.transport.parcel import Message


def how_ended(status: int) -> str:
    """The end of a process with this status, as `subprocess` has it: negative if a signal killed it."""
    if status >= 0:
        return f"ended with exit status {status}"
    known = {one.value: one.name for one in signal.Signals}
    return f"was killed by {known.get(-status, f'signal {-status}')}"


_log = logging.getLogger("paceline.models")

_REGION_BYTES = 2**30
"""Shared memory for tensors, in each direction. A bound that costs nothing by itself; what exceeds it is sent in
messages, at some cost."""
_LONGEST_LINE_BYTES = 8 * 1024
_OUTPUT_GRACE_S = 1.0
"""For reading the rest of its output, if something that it has started still has the pipe open."""
_SETTINGS = "PACELINE_"
_WITH_STATUS = {one.__name__: one for one in WITH_STATUS}
_ERRORS = {one.__name__: one for one in (DeviceLost, Unequipped, OutOfMemory, InstanceError, StalePlan, UnfitOutputs)}
_REAP_S = 10.0
"""For a killed process to end, which swapping may delay; a tenth of it for one whose connection has ended to end by
itself."""

# A package that has this product's modules but doesn't put its parent folder on the path: another interpreter must not
# find the server's numpy. Nor are its arguments the model's, whose code may parse those that it finds.
_BOOTSTRAP = """
import sys, types
sys.path[:] = [path for path in sys.path if path]
package = sys.modules["paceline"] = types.ModuleType("paceline")
package.__path__ = [sys.argv[1]]
from paceline.backends.python.worker import main
arguments = sys.argv[2:]
del sys.argv[1:]
main(arguments)
"""
_PACKAGE = str(Path(__file__).parents[2])


class ModelProcess:
    """A process that runs the model of `source`; `load` comes first."""

    _mode = BATCHES

    def __init__(self, source: ModelSource, device: Device) -> None:
        """Start it. Raises LoadError if that fails."""
        self._source = source
        self.device = device
        self._last_line = ""
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self._ended = threading.Event()
        self._on_end: Callable[[], None] = _nothing
        # Sequences that are over, and weren't told of yet.
        self._over: deque[tuple[int | str | bytes, str]] = deque()
        self._telling = threading.Lock()
        # What is to be said while nobody waits for it, by a thread that begins with the first of it.
        self._unsaid: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._is_saying = False
        try:
            self._link, remote = BlockingLink.pair(_REGION_BYTES)
        except OSError as error:
            raise LoadError(f"model '{source.name}': no connection to its process: {error.strerror}") from None
        arguments = [*map(str, remote), self._mode]
        try:
            self._popen = subprocess.Popen(
                [_executable(source), "-Bu", "-c", _BOOTSTRAP, _PACKAGE, *arguments, f"paceline:{source.name}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=remote,
                env=_environment(source),
                start_new_session=True,
            )
        except (OSError, ValueError) as error:  # a NUL in its path
            self._link.close()
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise LoadError(f"model '{source.name}': {_executable(source)} can't be run: {why}") from None
        finally:
            remote.close()
        self._output = threading.Thread(target=self._log_output, name=f"output of {source.name}", daemon=True)
        self._watch()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    @property
    def end(self) -> str:
        """How it ended, as part of a sentence."""
        status = self._popen.returncode
        return "is being killed" if status is None else how_ended(status)

    @property
    def was_killed(self) -> bool:
        """Whether it was ended by SIGKILL: by `kill`, or by the system, as when memory runs out."""
        return self._popen.returncode == -signal.SIGKILL

    def load(self) -> tuple[Declared | None, Declared | None]:
        """Have the model loaded. Returns what it declares of its inputs and outputs. Blocks. If it raises LoadError,
        the process has ended."""
        answer = self._loaded_by(START, *self._start())
        return answer[1], answer[2]

    def _start(self) -> tuple[object, ...]:
        source, device = self._source, self.device
        parameters = tuple(source.parameters.items())
        return source.name, str(source.path), device.kind.value, device.index, parameters, source.calls

    def _loaded_by(self, kind: int, *content: object) -> Message:
        """The answer to a message by which the model is loaded. Blocks. If it raises LoadError, the process has
        ended."""
        source = self._source
        try:
            with self._asking:
                answer = self._asked(kind, *content)
        except ProcessError:
            self.wait_ended()
            suffix = f": {self._last_line}" if self._last_line else ""
            raise LoadError(f"model '{source.name}': its process {self.end} while loading{suffix}") from None
        if answer[0] == FAILED:
            self.close()
            raise LoadError(f"model '{source.name}': {answer[1]}")
        return answer

    def buffer(self, number: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array | None:
        """Memory where array `number` of those executed next may be made, so that it needn't be copied there; None:
        there is none. On the thread that executes."""
        return self._link.buffer(number, dtype, shape)

    def release_buffers(self) -> None:
        """What was made in buffers won't be executed. On the thread that executes."""
        self._link.release_buffers()

    def execute(self, arrays: Sequence[Array], names: Sequence[str], wanted: Sequence[str], kind: int = RUN) -> Tensors:
        """The outputs that the model computes from `arrays`: views of memory that is free again once they are dropped.
        `kind`: RUN or TRY.

        Blocks. Raises ExecutionError with the model's own words, OutOfMemory if it ran out of memory, another of
        `_ERRORS` if it reports that, ProcessError, or ProcessEndedBeforeBatch.
        """
        with self._asking:
            self._tell_over()
            try:
                parcel = self._link.pack(arrays)
                answer = self._asked(kind, parcel, names, wanted)
            except (TypeError, ValueError) as error:
                raise ExecutionError(f"inputs can't be handed to the model's process: {error}") from error
            if answer[0] == DONE:
                return self._link.unpack(answer[1])
        raise error_of(*answer[1:])

    def ask(self, question: bytes) -> bytes:
        """The answer of a model that is part of the server. Blocks. Raises as `execute`."""
        with self._asking:
            answer = self._asked(ASK, question)
        if answer[0] == ANSWERED:
            reply: bytes = answer[1]
            return reply
        raise error_of(*answer[1:])

    def sequence_over(self, sequence: int | str | bytes, why: str) -> None:
        """Tell the model that a sequence is over: soon, and before it executes anything that is handed over later.
        Doesn't block; for one thread at a time."""
        self._over.append((sequence, why))
        self._tell_over_soon()

    def calls_as(self, caller: object) -> None:
        """Of a model that calls others: calls have this `caller` from now on."""

    def call_off(self) -> None:
        """Nobody waits for the execution any more that goes on: calls that belong to it fail. On any thread."""

    def when_ended(self, call: Callable[[], None]) -> None:
        """Call `call` once the process has ended, unless `close` is called first. On a thread of its own; if it has
        ended already, on this one, as there may be no other."""
        with self._lock:
            if not self.ended:
                self._on_end = call
                return
        call()

    def close(self) -> None:
        """Have the model closed and the process end. Nothing may be executing. Blocks for some seconds at most."""
        with self._lock:
            self._on_end = _nothing
        self._say_close()
        name, close_s = self._source.name, self._source.close_s
        if not self._ended.wait(close_s):
            _log.warning("model '%s': its process didn't end within %g s and is killed", name, close_s)
            self.kill()
            self._ended.wait(_REAP_S)

    def kill(self) -> None:
        """End it now, with everything that it has started. On any thread; what executes fails."""
        with self._lock:
            if self._popen.returncode is None:
                self._kill_group()

    def wait_ended(self) -> None:
        """Wait until the process, which is about to end, has ended; if it doesn't, it is killed. Blocks."""
        if not self._ended.wait(_REAP_S / 10):
            self.kill()
            self._ended.wait(_REAP_S)

    def _asked(self, kind: int, *content: object) -> Message:
        """The answer. Only where `_asking` is held. Raises as `_answered`."""
        return self._answered(not self.ended and self._link.send(kind, *content))

    def _answered(self, is_sent: bool) -> Message:
        """The answer to what was sent, if that `is_sent`. Raises ProcessError if there is none, as the process has
        ended, or has closed its end of the link and is useless."""
        answer = self._answer() if is_sent else None
        if answer is not None:
            return answer
        self.wait_ended()
        if is_sent and self._has_begun():
            raise ProcessError(f"the model's process {self.end}")
        raise ProcessEndedBeforeBatch(f"the model's process {self.end}, before it had begun this batch")

    def _answer(self) -> Message | None:
        """The answer to what was sent; None once the process has gone. Blocks."""
        return self._link.receive()

    def _has_begun(self) -> bool:
        """Whether the process, which has ended, had begun what it was sent last."""
        return not self._link.unread

    def _tell_over_soon(self) -> None:
        def tell_over() -> None:
            # Between executions: what is unread when the process ends was sent before it had begun the batch.
            with self._asking:
                self._tell_over()

        self._unsaid.put(tell_over)
        self._start_saying()

    def _start_saying(self) -> None:
        if not self._is_saying:
            threading.Thread(target=self._say, name=f"to {self._source.name}", daemon=True).start()
            self._is_saying = True

    def _say(self) -> None:
        """Say what is `_unsaid`, until the process goes."""
        while (say := self._unsaid.get()) is not None:
            say()
            del say  # the next may be long in coming, and it holds what was said

    def _tell_over(self) -> None:
        """Only where the link is free to be sent on. The order is that of the ends, whoever tells of them."""
        with self._telling:
            over = []
            while self._over:
                over.append(self._over.popleft())
            if over and not self.ended:
                self._link.send(OVER, tuple(over))

    def _say_close(self) -> None:
        with self._asking:
            self._tell_over()
            if not self.ended:
                self._link.send(CLOSE)

    def _watch(self) -> None:
        """Start the threads that wait for its output and its end. If none can be started, LoadError is raised and the
        process has ended."""
        name = self._source.name
        try:
            self._output.start()
            threading.Thread(target=self._reap, name=f"end of {name}", daemon=True).start()
        except RuntimeError as error:
            self.kill()
            self._reap()
            raise LoadError(f"model '{name}': its process can't be watched: {error}") from None

    def _log_output(self) -> None:
        assert self._popen.stdout is not None
        # A long line is read in parts, which may end within a character.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        with self._popen.stdout as output:
            while line := output.readline(_LONGEST_LINE_BYTES):
                if text := decoder.decode(line, line.endswith(b"\n")).rstrip():
                    self._last_line = text
                    _log.info("model '%s': %s", self._source.name, text)

    def _reap(self) -> None:
        """Wait for the end, and clean up."""
        os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            # Kill what it has started and left behind, before its pid can be reused.
            self._kill_group()
            self._popen.wait()
        if self._output.ident is not None:
            self._output.join(_OUTPUT_GRACE_S)
        else:  # its thread couldn't be started
            assert self._popen.stdout is not None
            self._popen.stdout.close()
        self._link.hang_up()
        with self._lock:
            self._ended.set()
            self._unsaid.put(None)
            # It may refer back to this object.
            on_end, self._on_end = self._on_end, _nothing
        self._close_link()
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        on_end()

    def _close_link(self) -> None:
        """The process has ended, and what waits for it returns."""
        with self._asking:
            self._link.close()

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)


def error_of(text: str, kind: str, *status: str) -> ExecutionError:
    """The exception that a process means by what FAILED says."""
    if status:
        return _WITH_STATUS[kind](status[0], text)
    return _ERRORS.get(kind, ExecutionError)(text)


def _executable(source: ModelSource) -> str:
    """The interpreter: the server's own, or a path that may be relative to the version's folder. Links aren't resolved,
    since a virtual environment is recognized by its link."""
    given = source.parameters.get(EXECUTABLE, "")
    return str(source.path.parent / given) if given else sys.executable


def _environment(source: ModelSource) -> dict[str, str]:
    """The server's environment without its settings, some of which are secrets that must not reach what prints or
    reports its environment. For another interpreter, also without what is meant for this one."""
    own = {"PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV"} if source.parameters.get(EXECUTABLE) else set()
    kept = {key: value for key, value in os.environ.items() if key not in own and not key.startswith(_SETTINGS)}
    if source.parameters.get(ENVIRONMENT):
        # As its own script to activate it does, which programs rely on that the model starts.
        folder = Path(_executable(source)).parent
        kept["PATH"] = f"{folder}{os.pathsep}{kept.get('PATH', os.defpath)}"
        kept["CONDA_PREFIX"] = str(folder.parent)
    return kept


def _nothing() -> None:
    pass
