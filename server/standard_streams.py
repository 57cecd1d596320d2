"""Descriptors 0, 1 and 2, which supervisors and shells may leave closed (`<&-`).

Lives here: making sure that they are open. Must not: decide where anything is written (`log_output`).
"""

from __future__ import annotations

import os

__all__ = ["open_standard_streams"]


def open_standard_streams() -> None:
    """Open `/dev/null` as each of them that is closed, before anything else is opened. Otherwise that would get the
    number, and what native code writes to stderr would go to a client. libuv aborts when it closes such a socket."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # Opening takes the lowest free number, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
