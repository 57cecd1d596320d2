"""The command `bulk`: its flags, and the settings that they give.

Lives here: reading them. Must not: import what only a job needs before one begins.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

import click

from paceline.backends.installed import how_to_install
from paceline.clients.connection import checked_target
from paceline.clients.options import Number, Seconds, access_options, check_writable, one_line
from paceline.server.bulk.settings import BulkSettings, Parameters, parse_max_bad, parse_memory, parse_shard
from paceline.server.flags import Value
from paceline.server.telemetry.log_output import exit_now
from paceline.server.tuning import excluded_from_gc

__all__ = ["bulk"]

_MOST = 2**31 - 1


def _read(parse: Callable[[str], object]) -> Callable[[click.Context, click.Parameter, str], object]:
    def read(context: click.Context, parameter: click.Parameter, text: str) -> object:
        try:
            return parse(text)
        except ValueError as error:
            raise click.BadParameter(str(error), context, parameter) from None

    return read


def _pairs(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> Mapping[str, str]:
    """Texts such as "input_ids=tokens". Each left side once."""
    pairs: dict[str, str] = {}
    for text in texts:
        left, equals, right = text.partition("=")
        if not (left and equals and right):
            raise click.BadParameter(f"expected {parameter.metavar}, got '{text}'", context, parameter)
        if left in pairs:
            raise click.BadParameter(f"expected '{left}' once, got it twice", context, parameter)
        pairs[left] = right
    return pairs


def _names(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> tuple[str, ...]:
    """Names, given one by one or with commas between them; each once. One with a comma is in double quotes."""
    try:
        names = [name.strip() for text in texts
                 for line in csv.reader([text], skipinitialspace=True, strict=True) for name in line]  # fmt: skip
    except csv.Error as error:
        text = f"expected names with commas between them, those with a comma in double quotes: {error}"
        raise click.BadParameter(text, context, parameter) from None
    return tuple(dict.fromkeys(filter(None, names)))


class _AutoOr(click.ParamType):  # type: ignore[type-arg]  # generic in newer clicks alone
    """A number from 1 on, or "auto", which is 0."""

    name = "auto or number"

    def convert(self, value: Value, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if value in ("auto", 0):
            return 0
        number: int = click.IntRange(1, _MOST).convert(value, param, ctx)
        return number


def _target(context: click.Context, parameter: click.Parameter, server: str) -> str:
    if not server:
        return ""
    try:
        return checked_target("--server", server, "--tls")
    except ValueError as error:
        raise click.BadParameter(one_line(str(error)), context, parameter) from None


def _parameters(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> Parameters:
    """Booleans and numbers as JSON has them; everything else is text."""
    parameters: dict[str, bool | int | float | str] = {}
    for name, text in _pairs(context, parameter, texts).items():
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = text
        parameters[name] = value if isinstance(value, bool | int | float | str) else text
    return parameters


def _flag(*names: str, **more: Value) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """An option, which a variable of its name gives as well."""
    long = next(name for name in names if name.startswith("--")).partition("/")[0]
    return click.option(*names, envvar="PACELINE_BULK_" + long[2:].replace("-", "_").upper(), **more)


_OPTIONS = (
    _flag("-i", "--input", "inputs", multiple=True, required=True, metavar="PATTERN",
        help="Files, folders, globs or URLs with rows. Repeatable."),
    _flag("-o", "--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="Output folder."),
    _flag("--map", "columns", multiple=True, callback=_pairs, metavar="INPUT=COLUMN",
        help="Which column feeds an input of the model; by default the one of its name. Repeatable."),
    _flag("--keep", multiple=True, callback=_names, metavar="COLUMN,…", help="Columns to copy to the output."),
    _flag("--output", "outputs", multiple=True, callback=_pairs, metavar="COLUMN=OUTPUT",
        help="Write only this output of the model, as this column. Repeatable."),
    _flag("--binary", multiple=True, callback=_names, metavar="OUTPUT,…",
        help="Outputs with text that may be any bytes."),
    _flag("--parameter", "parameters", multiple=True, callback=_parameters, metavar="NAME=VALUE",
        help="Parameter of each request, such as max_tokens=64. Repeatable."),
    _flag("--format", type=click.Choice(["parquet", "arrow", "csv", "jsonl", "npy", "files"]),
        help="Of the input; by default the files' names tell."),
    _flag("--output-format", default="parquet", show_default=True,
        type=click.Choice(["parquet", "jsonl", "npy"]), help="Of the output."),
    _flag("--batch", "batch_rows", default="auto", show_default=True, type=_AutoOr(), metavar="auto|ROWS",
        help="Rows of an execution."),
    _flag("--instances", default="auto", show_default=True, type=_AutoOr(), metavar="auto|N",
        help="Copies of the model that execute at the same time."),
    _flag("--rows-per-part", "unit_rows", default="auto", show_default=True, type=_AutoOr(), metavar="auto|ROWS",
        help="Most rows of an output file. One is done again as a whole if it wasn't finished."),
    _flag("--memory", "memory_bytes", default="2GiB", show_default=True, callback=_read(parse_memory),
        metavar="BYTES", help="Most memory for rows, beyond the loaded model."),
    _flag("--sort-by-length", is_flag=True,
        help="Batch rows of similar length; the output keeps the input's order."),
    _flag("--shard", callback=_read(parse_shard), metavar="K/N",
        help="Do only the K-th of N shards of the job, from 0; by default Kubernetes' JOB_COMPLETION_INDEX."),
    _flag("--server", default="", callback=_target, metavar="HOST[:PORT]",
        help="Let this server compute; MODEL is then the name of its model."),
    _flag("--ray", default="", metavar="ADDRESS",
        help="Do the job on this Ray cluster, in actors with an engine each; auto: the one that this machine is in."),
    _flag("--ray-actors", default="auto", show_default=True, type=_AutoOr(), metavar="auto|N",
        help="How many actors."),
    _flag("--ray-actor-cpus", default="auto", show_default=True, type=_AutoOr(), metavar="auto|N",
        help="CPUs of an actor."),
    _flag("--ray-actor-gpus", default=0.0, show_default=True, type=Number(0, 1024), metavar="N",
        help="GPUs of an actor, or a share of one."),
    _flag("--on-bad-row", default="record", show_default=True, type=click.Choice(["record", "fail"]),
        help="Record a row at fault and go on, or fail."),
    _flag("--max-bad", default="1%", show_default=True, callback=_read(parse_max_bad), metavar="SHARE|ROWS",
        help="Fail with more rows at fault than that."),
    _flag("--retry-bad", "retries_bad", is_flag=True, help="Do finished parts with rows at fault again."),
    _flag("--resume/--no-resume", "resumes", default=True,
        help="Go on with a job that was begun, or begin anew."),
    _flag("--allow-python-models", type=bool, default=False, metavar="[BOOLEAN]",
        help="Whether the model may be Python code."),
    _flag("--execution-timeout-secs", "execution_timeout_s", default=0.0, type=Seconds(min=0), metavar="SECONDS",
        help="Longest execution before its instance is replaced; 0: no limit."),
    _flag("--dry-run", is_flag=True, help="Say what would be done and how long it would take, and do nothing."),
    _flag("--progress", default="auto", show_default=True,
        type=click.Choice(["auto", "bar", "lines", "json", "none"]), help="How to show, on stderr, how far it is."),
    _flag("--summary", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
        help="Write the summary there, as JSON."),
)  # fmt: skip


def _flagged(command: Callable[..., None]) -> Callable[..., None]:
    for one in reversed(_OPTIONS):
        command = one(command)
    return command


@click.command()
@click.argument("model")
@_flagged
@access_options
def bulk(on_bad_row: str, dry_run: bool, progress: str, summary: Path | None, **given: Value) -> None:
    """Take the rows of files through MODEL, and write its outputs to files.

    MODEL is a model's folder or a .onnx file, or with --server its name there. Each part of the output is written
    whole or not at all. Started again after whatever has ended it, the job goes on with the parts that are missing.

    Exits with 0 when all is done, also if some rows are at fault, which are in the folder _bad; with 1 if the job
    fails, with 2 if a flag can't be used.
    """
    if missing := [package for package in ("pyarrow", "rich") if find_spec(package) is None]:
        raise click.ClickException(f"bulk needs {' and '.join(missing)}: {how_to_install('bulk')}")
    if given["ray"] and find_spec("ray") is None:
        raise click.ClickException(f"--ray needs ray: {how_to_install('ray')}")
    check_writable("--summary", summary)
    settings = BulkSettings(fails_on_bad=on_bad_row == "fail", format=given.pop("format") or "", **given)
    # Arrow's own allocators keep more of what was freed than malloc does, 100 MiB of it where rows have 32 KiB, and are
    # no faster. Arrow reads this once, when it is loaded.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    # Heavy: `paceline bulk --help` does without.
    with excluded_from_gc():
        from paceline.server.bulk.foreground import dry_run_in_foreground, run_in_foreground

    backends = click.get_current_context().obj  # callers of `main` can pass their own, as tests do
    if dry_run:
        exit_now(dry_run_in_foreground(settings, progress, backends))
    exit_now(run_in_foreground(settings, progress, summary, backends))
