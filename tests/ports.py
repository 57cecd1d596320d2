"""Ports on loopback for servers whose port is known before they start.

Lives here: finding free ones. Must not: start anything.
"""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack

__all__ = ["free_port"]

_NOT_EPHEMERAL = range(15_000, 32_000)
"""Below Linux's ephemeral ports, which other tests take and release while these stay free."""


def free_port(count: int = 1) -> int:
    """A port that is free now, the first of `count` in a row, and stays so between a server's end and its next
    start."""
    for port in random.sample(_NOT_EPHEMERAL, 100):
        with ExitStack() as stack:
            try:
                for each in range(port, port + count):
                    stack.enter_context(socket.create_server(("127.0.0.1", each)))
            except OSError:
                continue
            return port
    raise OSError("all ports that were tried are taken")
