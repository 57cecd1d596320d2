"""Descriptors 0, 1 and 2, which supervisors and shells may leave closed (`<&-`).

Lives here: seeing to it that they are open. Must not: say where anything is written (`log_output`).
"""

from __future__ import annotations

import os

__all__ = ["open_standard_streams"]


def open_standard_streams() -> None:
    """Have each of them be `/dev/null` if it is closed, before anything else is opened: that would get its number, and
    what native code writes to stderr would go to a client. libuv aborts when it closes a socket of such a number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
