"""A Python model that does what its requests ask, for tests of what happens then.

Lives here: its source, and numbers for what it can do. Must not: assertions.
"""

from __future__ import annotations

from pathlib import Path

__all__ = [
    "EXIT", "GRAB", "HANG", "MEMORY", "MISSING_OUTPUT", "NOT_A_DICT", "PID", "PRINT", "RAISE", "ROWS", "SEGFAULT",
    "TYPE", "write_puppet",
]  # fmt: skip

PID, PRINT, RAISE, MEMORY, EXIT, SEGFAULT, HANG, GRAB, ROWS, TYPE, NOT_A_DICT, MISSING_OUTPUT = range(-1, -13, -1)
"""Elements of INPUT0 that select what to do: answer with the process's id, print, raise, …, hang, hang without
releasing the GIL, answer with other rows, another type, no dict, no output."""

_SOURCE = """
import ctypes, os, pathlib, threading

HERE = pathlib.Path(__file__).parent
if (HERE / "broken").exists():
    raise RuntimeError("it is broken")


class Model:
    inputs = {"INPUT0": ("INT64", [-1, 1])}
    outputs = {"OUTPUT0": ("INT64", [-1, 1])}

    def load(self, context):
        with open(HERE / "loads", "a") as file:
            print(os.getpid(), context.name, context.device, context.device_index, file=file)

    def execute(self, inputs):
        x = inputs["INPUT0"]
        what = set(x.ravel().tolist())
        if -1 in what:
            return {"OUTPUT0": x * 0 + os.getpid()}
        if -2 in what:
            print("these are\\nits words")
        if -3 in what:
            raise ValueError("this is\\nno good")
        if -4 in what:
            raise MemoryError("all gone")
        if -5 in what:
            os._exit(3)
        if -6 in what:
            ctypes.string_at(0)
        if -7 in what:
            (HERE / "hangs").touch()
            threading.Event().wait()
        if -8 in what:
            (HERE / "hangs").touch()
            ctypes.PyDLL(None).pause()
        if -9 in what:
            return {"OUTPUT0": x[:0]}
        if -10 in what:
            return {"OUTPUT0": x * 1.5}
        if -11 in what:
            return [x]
        if -12 in what:
            return {"OUTPUT1": x}
        return {"OUTPUT0": x * 10}

    def close(self):
        (HERE / "closed").touch()
"""


def write_puppet(folder: Path) -> Path:
    """Write `model.py` into `folder`, which is made; its path. The model appends a line to the file `loads` beside it
    each time it is loaded, can't be loaded while there is a file `broken`, makes a file `hangs` before it hangs, and
    `closed` at its end."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.py"
    path.write_text(_SOURCE)
    return path
