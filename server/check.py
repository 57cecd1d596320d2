"""The command `check`: loads models as `serve` would, and says what was found, without serving.

Lives here: its flags, the loads, the report. Must not: load in another way than a server does; that there is no other
way is what makes the report worth reading.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import click

from paceline.backends.base import Backend
from paceline.clients.description import ModelDescription, described, metadata_of
from paceline.clients.options import one_line
from paceline.clients.overview import description_lines
from paceline.server.config import Settings
from paceline.server.errors import StartError
from paceline.server.flags import Given, Section, SectionedCommand, Value, flag, with_flags
from paceline.server.model_flags import LOAD_FLAGS, MODEL_PATH, PATH_FLAGS, load_settings, model_paths, within_cpus
from paceline.server.telemetry import log
from paceline.server.telemetry.log_output import exit_now
from paceline.server.tuning import new_loop

_END_S = 10.0
"""How long models may take to be closed; what hangs then doesn't keep the command from ending."""


class _Check(SectionedCommand):
    common = (
        "--model-name",
        "--allow-python-models",
        "--max-batch-size",
        "--model-load-thread-count",
        "--json",
        "--log-level",
    )


_FLAGS = (
    *PATH_FLAGS,
    *LOAD_FLAGS,
    flag(Section.OBSERVING, "json", False, "Print JSON.", is_flag=True),
    flag(
        Section.OBSERVING,
        "log-level",
        "warning",
        "Lowest level to log to stderr.",
        type=click.Choice(["debug", "info", "warning", "error"]),
    ),
)


@dataclass(frozen=True, slots=True)
class _Checked:
    """A version of a model, or a model without any: loaded unless there is a `reason`. `found` and `warm_up` are in
    words: how requests share batches, or why they don't; what has been executed, or why nothing."""

    name: str
    version: str
    reason: str
    load_s: float = 0.0
    found: str = ""
    warm_up: str = ""
    description: ModelDescription | None = None


@click.command(cls=_Check, context_settings={"auto_envvar_prefix": "PACELINE"})
@click.argument("paths", nargs=-1, type=MODEL_PATH)
@with_flags(_FLAGS)
def check(paths: tuple[Path, ...], **given: Value) -> None:
    """Load the models at PATH, try them, and say what was found, without serving.

    PATH, flags and variables are those of `paceline serve`. Exits with 0 if all models load, with 1 if any fails, with
    2 if a flag can't be used.
    """
    settings = _settings(paths, given)
    log.configure(given["log_level"], "text")
    settings = replace(settings, backend_config=within_cpus(settings.backend_config))
    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            # Callers of `main` can pass their own backends as click's `obj`, as tests do.
            checked, hangs = runner.run(_checked(settings, click.get_current_context().obj))
    except StartError as error:
        raise click.ClickException(one_line(str(error))) from None
    click.echo(_json(checked) if given["json"] else _text(checked))
    status = int(any(one.reason for one in checked))
    if hangs:
        exit_now(status)  # Python would wait for threads that execute native code, or crash in them
    raise click.exceptions.Exit(status)


def _settings(paths: Sequence[Path], given: Given) -> Settings:
    """Raises click.UsageError."""
    named = {field.name: given[field.name] for field in fields(Settings) if field.name in given}
    return Settings(**{**named, **model_paths(paths, given), **load_settings(given)})


async def _checked(settings: Settings, backend_of: Callable[[str], Backend] | None) -> tuple[list[_Checked], bool]:
    """What became of each version, and whether something hangs. Raises StartError."""
    from paceline.server.app import Server  # heavy: `paceline --help` does without

    server, checked = Server(settings, backend_of), list[_Checked]()
    try:
        await server.load()
        served = {(model.name, model.version): model for model in server.repository.models}
        for line in server.repository.index():
            model = served.get((line.name, line.version))
            if model is None:
                checked.append(_Checked(line.name, line.version, line.reason or "not loaded"))
                continue
            description = described(metadata_of(model.config, [model.version]), model.config)
            words = model.found.batching, model.found.warm_up
            checked.append(_Checked(model.name, model.version, "", round(model.load_ns / 1e9, 3), *words, description))
    finally:
        has_ended = await server.unload(_END_S)
    return checked, not has_ended


def _json(checked: Sequence[_Checked]) -> str:
    return json.dumps({"ok": not any(one.reason for one in checked), "models": [asdict(one) for one in checked]})


def _text(checked: Sequence[_Checked]) -> str:
    parts = []
    for one in checked:
        if one.description is None:
            what = f"{one.name} version {one.version}" if one.version else one.name
            parts.append(f"FAILED  {one_line(f'{what}: {one.reason}')}")
            continue
        found = {"batching": one.found, "warm-up": one.warm_up, "load": f"{one.load_s:.2f} s"}
        parts.append(f"ok      {chr(10).join(description_lines(one.description, found))}")
    failed = sum(bool(one.reason) for one in checked)
    unanswered = sum(one.warm_up.startswith("none") for one in checked)
    text = f"{failed} of {len(checked)} failed" if failed else f"all {len(checked)} loaded"
    parts.append(f"{text}; {unanswered} without an answer in warm-up" if unanswered else text)
    return "\n\n".join(parts)
