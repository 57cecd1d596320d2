"""The server with one more backend, `faulty`, whose model misbehaves as its requests ask: `python -m tests.fault.faulty
serve …`, which is the usual command otherwise.

Lives here: the faults. Must not: assertions.
"""

from __future__ import annotations

import ctypes
import linecache
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from paceline.backends import registry
from paceline.backends.base import Backend
from paceline.backends.spec import ModelSpec, Tensors, TensorSpec
from paceline.server.cli import main
from tests.memory_models import MemoryBackend, MemoryModel, change_datatype, lose_output, lose_row

__all__ = [
    "DIES",
    "FAULTS",
    "HANGS",
    "HANGS_A_WHILE",
    "HANGS_UNTIL_TOLD",
    "end_hang",
    "pipe_for_hangs",
    "write_faulty",
]

_log = logging.getLogger("paceline.tests")

_A_WHILE_S = 2.5
_PIPE = "TESTS_PIPE"
"""The environment variable with the path of a named pipe."""


def _raise(inputs: Tensors) -> Tensors:
    raise ValueError("as I was told")


def _exit(inputs: Tensors) -> Tensors:
    raise SystemExit(1)


def _take_all_memory(inputs: Tensors) -> Tensors:
    return [np.ones(2**50, np.uint8)]


def _hang(inputs: Tensors) -> Tensors:
    _log.warning("the execution will hang")
    threading.Event().wait()
    return inputs


def _hang_a_while(inputs: Tensors) -> Tensors:
    threading.Event().wait(_A_WHILE_S)
    return inputs


def _hang_until_told(inputs: Tensors) -> Tensors:
    Path(os.environ[_PIPE]).read_bytes()
    return inputs


def _die(inputs: Tensors) -> Tensors:
    """Answer, and raise an exception in the thread as soon as it waits for more work."""
    threading.Thread(target=_kill_idle, args=(threading.get_ident(),), daemon=True).start()
    return inputs


def _kill_idle(thread: int) -> None:
    """At the line where it waits: at a later one, what it has computed isn't told yet."""
    line = ""
    until_s = time.monotonic() + 15
    while "self._work.get()" not in line:
        if time.monotonic() > until_s:
            _log.error("the thread never waits, but is at: %s", line)
            return
        time.sleep(0.001)
        frame = sys._current_frames()[thread]
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(SystemExit))
    _log.warning("the thread will die")


FAULTS: dict[int, tuple[Callable[[Tensors], Tensors], str]] = {
    -1: (_raise, "as I was told"),
    -2: (_exit, "1"),
    -3: (_take_all_memory, "Unable to allocate"),
    -4: (lose_output, "expected 1 outputs, got 0"),
    -5: (lose_row, "output 'OUTPUT0': expected shape [1, 16], got [0, 16]"),
    -6: (change_datatype, "output 'OUTPUT0': expected FP32, got numpy's complex64"),
}
"""The fault that the first element of a row asks for, and the error text that results."""
HANGS, DIES, HANGS_A_WHILE, HANGS_UNTIL_TOLD = -7, -8, -9, -10

_ALL = {code: fault for code, (fault, _) in FAULTS.items()} | {
    HANGS: _hang,
    DIES: _die,
    HANGS_A_WHILE: _hang_a_while,
    HANGS_UNTIL_TOLD: _hang_until_told,
}


def _compute(inputs: Tensors) -> Tensors:
    for code in inputs[0][:, 0].astype(int).tolist():
        if code in _ALL:
            return _ALL[code](inputs)
    return inputs


def _backend(name: str) -> Backend:
    if name != "faulty":
        return registry.backend(name)
    spec = partial(TensorSpec, datatype="FP32", dims=(-1, 16))
    model = MemoryModel(ModelSpec((spec("INPUT0"),), (spec("OUTPUT0"),)), _compute)
    return MemoryBackend({"echo": model})


def write_faulty(repository: Path, extra: str = "") -> Path:
    """Write the model `echo`, which returns its input unless asked for a fault; `extra` is more configuration."""
    folder = repository / "echo"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(f"""
        backend: "faulty" max_batch_size: 4 dynamic_batching {{ }}
        input {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ 16 ] }}
        output {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 16 ] }}
        {extra}
    """)
    return folder


def pipe_for_hangs(folder: Path) -> dict[str, str]:
    """The environment of a server whose executions may hang until `end_hang(folder)`."""
    os.mkfifo(folder / "pipe")
    return {_PIPE: str(folder / "pipe")}


def end_hang(folder: Path) -> None:
    """End the execution that hangs until told."""
    (folder / "pipe").write_bytes(b"")


if __name__ == "__main__":
    main(obj=_backend, prog_name="paceline")
