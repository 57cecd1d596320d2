"""The server with a log handler whose end hangs, as foreign code may: `python -m tests.fault.hanging_end serve …`.

Lives here: the hang. Must not: assertions.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading

from paceline.server.cli import main

__all__ = ["KEEPS_INTERPRETER"]

KEEPS_INTERPRETER = "TESTS_KEEPS_INTERPRETER"
"""The environment variable that has the hang keep Python's interpreter lock, if it is set."""


class _Hanging(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        pass

    def flush(self) -> None:
        if KEEPS_INTERPRETER in os.environ:
            ctypes.PyDLL(None).pause()
        threading.Event().wait()


if __name__ == "__main__":
    logging.getLogger("paceline.tests").addHandler(_Hanging())
    main(prog_name="paceline")
