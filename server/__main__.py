"""The command `paceline`."""

import os
import sys

from paceline.server.process_one import leave_process_one
from paceline.server.standard_streams import open_standard_streams

__all__ = ["main"]


def main() -> None:
    """Run the command."""
    leave_process_one()
    # Before anything else: even importing ctypes may open a file for good: libffi 3.8 keeps its own library open.
    open_standard_streams()
    from paceline.server.memory import huge_pages
    from paceline.server.tuning import excluded_from_gc

    if sys.argv[1:2] == ["serve"]:
        huge_pages.ask()
        from paceline.server.cpus import usable_cpus

        # For the libraries of Python models, and numpy's here, which read it when they are imported.
        if (cpus := usable_cpus()).limited_by:
            os.environ.setdefault("OMP_NUM_THREADS", str(cpus.count))
    # gRPC writes to stderr directly, past the log's format and bounds, and blocks if nobody reads it. At its default
    # verbosity it logs every failed handshake, and even at ERROR malformed headers: anybody could make it write a lot.
    # It reads the variable when it is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    with excluded_from_gc():
        from paceline.server.cli import main as command

    command(prog_name="paceline")
