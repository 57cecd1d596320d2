"""How a process ended, in words for logs and errors."""

from __future__ import annotations

import signal

__all__ = ["how_ended"]


def how_ended(status: int) -> str:
    """The end of a process with this status, as `subprocess` has it: negative if a signal killed it."""
    return f"was killed by {_signal_name(-status)}" if status < 0 else f"ended with exit status {status}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
