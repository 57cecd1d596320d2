"""Command lines in manifests and guides, checked by the command's own parser.

Lives here: the commands, and the arguments that they accept. Must not: run anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
from click.testing import CliRunner

from paceline.server.cli import main

__all__ = ["accepted", "all_commands", "flags_of"]


def all_commands() -> dict[str, click.Command]:
    """All commands of `paceline`, by name."""
    context = click.Context(main)
    return {name: main.get_command(context, name) for name in main.list_commands(context)}


def accepted(words: Sequence[str]) -> dict[str, Any]:
    """The parameters that `paceline WORDS` would run with. Raises click.UsageError for what it would refuse."""
    command = all_commands()[words[0]]
    runner = CliRunner()
    with runner.isolation():
        return command.make_context(words[0], list(words[1:])).params


def flags_of(command: str) -> set[str]:
    """Every spelling of every flag of a command."""
    options = (each for each in all_commands()[command].params if each.param_type_name == "option")
    return {"--help", *(name for each in options for name in (*each.opts, *each.secondary_opts))}
