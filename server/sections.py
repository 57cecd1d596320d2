"""The sections of `paceline serve`'s flags, and the help that shows them.

Lives here: which sections there are, the option that has one, the command that prints them. Must not: flags themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import click

__all__ = ["Flag", "Section", "SectionedCommand"]


class Section(StrEnum):
    """What a flag is about, in the order of `--help-all` and of docs/configuration.md."""

    MODELS = "Repositories and models"
    BATCHING = "Batching and executions"
    ACCESS = "Addresses, TLS and access"
    REQUESTS = "Requests and their limits"
    CONNECTIONS = "Connections"
    FRONTENDS = "Processes that speak gRPC"
    STARTING = "Start and stop"
    OBSERVING = "Metrics, logs and traces"
    UPSTREAM = "In front of another server"


class Flag(click.Option):
    """An option of a section. The environment variable of one that may be repeated separates values as click does, by
    spaces, or by colons for paths; or it has one per line, since secrets and file names may contain spaces."""

    def __init__(self, names: Sequence[str], *, section: Section, **more: Any) -> None:  # click's own arguments
        super().__init__(names, **more)
        self.section = section

    def value_from_envvar(self, ctx: click.Context) -> str | Sequence[str] | None:
        given = self.resolve_envvar_value(ctx) if self.multiple else None
        if given is not None and "\n" in given:
            return tuple(line.strip() for line in given.split("\n") if line.strip()) or None
        value: str | Sequence[str] | None = super().value_from_envvar(ctx)
        return value


class SectionedCommand(click.Command):
    """A command with more flags than anybody reads at once: `--help` shows the flags named in `common`, in that order,
    and `--help-all` shows all of them by section."""

    common: tuple[str, ...]

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """As click adds `--help`: shown, completed and parsed, but not one of `params`, which have settings."""
        return [*super().get_params(ctx), _HELP_ALL]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        flags = {each.opts[0]: each for each in self.params if isinstance(each, Flag)}
        helps = [each for each in self.get_params(ctx) if each not in self.params]
        if ctx.meta.get(_ALL):
            groups = {title: [each for each in flags.values() if each.section is title] for title in Section}
            parts: dict[str, list[click.Parameter]] = {str(title): [*each] for title, each in groups.items()}
        else:
            parts = {"Common flags": [flags[name] for name in self.common]}
        for title, parameters in {**parts, "Help": helps}.items():
            with formatter.section(title):
                formatter.write_dl([row for each in parameters if (row := each.get_help_record(ctx))])


_ALL = "paceline.server.sections.all"


def _show_all(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


_HELP_ALL = click.Option(
    ["--help-all"],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    allow_from_autoenv=False,
    help="Show all flags, by subject, and exit.",
    callback=_show_all,
)
