"""Flags that may be given several times, and how environment variables hold several values.

Lives here: the option's class. Must not: flags themselves.
"""

from __future__ import annotations

from typing import Any

import click

from paceline.server.sections import Flag

__all__ = ["Repeatable"]


class Repeatable(Flag):
    """An option that may be repeated. Its environment variable separates values as click does, by spaces, or by colons
    for paths; or it has one per line, since secrets and file names may contain spaces."""

    def __init__(self, *names: Any, **more: Any) -> None:
        what = more.get("help", "").removesuffix(".")
        super().__init__(*names, **more | {"multiple": True, "help": f"{what}. Repeatable."})

    def value_from_envvar(self, ctx: click.Context) -> Any:
        given = self.resolve_envvar_value(ctx)
        if given is None or "\n" not in given:
            return super().value_from_envvar(ctx)
        return tuple(line.strip() for line in given.split("\n") if line.strip()) or None
