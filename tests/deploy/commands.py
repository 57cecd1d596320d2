"""Command lines in manifests and guides, put to the command's own parser.

Lives here: `accepted`. Must not: run anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from click.testing import CliRunner

from server.cli import main

__all__ = ["accepted", "flags_of"]


def accepted(words: Sequence[str]) -> dict[str, Any]:
    """The parameters that `paceline WORDS` would run with. Raises click.UsageError for what it would refuse."""
    command = main.commands[words[0]]
    runner = CliRunner()
    with runner.isolation():
        return command.make_context(words[0], list(words[1:])).params


def flags_of(command: str) -> set[str]:
    """Every spelling of every flag of a command."""
    options = (each for each in main.commands[command].params if each.param_type_name == "option")
    return {"--help", *(name for each in options for name in each.opts)}
