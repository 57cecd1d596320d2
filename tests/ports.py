"""Ports on loopback for servers whose port is known before they start.

Lives here: finding free ones. Must not: start anything.
"""

from __future__ import annotations

import os
import random
import socket
from contextlib import ExitStack

__all__ = ["free_port"]

_NOT_EPHEMERAL = range(15_000, 32_000)
"""Below Linux's ephemeral ports, which other tests take and release while these stay free."""

_MOST = 8
"""The longest row that anybody needs: so many are left free between the shares of two processes."""

_given: set[int] = set()
"""Ports already returned: they look free until somebody listens there."""


def free_port(count: int = 1) -> int:
    """A port that is free now, the first of `count` in a row, and stays so between a server's end and its next
    start. Neither this process nor another of the same test run gets it again."""
    for port in random.sample(_own_ports(), 100):
        ports = range(port, port + count)
        if not _given.isdisjoint(ports):
            continue
        with ExitStack() as stack:
            try:
                for each in ports:
                    stack.enter_context(socket.create_server(("127.0.0.1", each)))
            except OSError:
                continue
            _given.update(ports)
            return port
    raise OSError("all ports that were tried are taken")


def _own_ports() -> range:
    """This test process's share of the ports, if tests are distributed over several."""
    size = len(_NOT_EPHEMERAL) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    first = size * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    return _NOT_EPHEMERAL[first : first + size - _MOST]
