"""The command `tune`: its flags, and where what was found goes.

Lives here: reading flags, printing, exit codes. Must not: import what only tuning needs before it begins.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TextIO

import click

from paceline.clients.connection import checked_target
from paceline.clients.inputs import InputError
from paceline.clients.load.mixture import MixedShape, parse_mixed_shape
from paceline.clients.options import (
    CLIENTS,
    LONGEST_S,
    RATE,
    ConnectionOptions,
    Seconds,
    Unusable,
    access_options,
    check_writable,
    one_line,
    one_line_errors,
    write_file,
)
from paceline.server.flags import Value

__all__ = ["tune"]

_UNITS_NS = {"us": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
_COUNT = click.IntRange(min=1)
_BAR = 30
_LONGEST = 1e9


def _duration(context: click.Context, parameter: click.Parameter, text: str | None) -> int:
    """A time such as "20ms", in nanoseconds; 0 for none."""
    if text is None:
        return 0
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(us|ms|s)", text.strip())
    if found is None or not 0 < float(found[1]) <= _LONGEST:
        raise click.BadParameter(f"expected a time such as 20ms, 0.5s or 800us, got '{text}'", context, parameter)
    return max(1, round(float(found[1]) * _UNITS_NS[found[2]]))


def _server(context: click.Context, parameter: click.Parameter, text: str | None) -> str | None:
    try:
        return None if text is None else checked_target("--from-server", text, "--tls")
    except ValueError as error:
        raise click.BadParameter(one_line(str(error)), context, parameter) from None


def _shapes(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> dict[str, MixedShape]:
    try:
        return dict(map(parse_mixed_shape, texts))
    except InputError as error:
        raise click.BadParameter(one_line(str(error)), context, parameter) from None


class Progress:
    """How far it is: on a terminal as a bar, in a line that is gone at the end; elsewhere a line for each thing that is
    begun; without `out`, nothing."""

    def __init__(self, out: TextIO | None) -> None:
        self._out, self._said = out, ""
        self._draws = out is not None and out.isatty() and os.environ.get("TERM") != "dumb"

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._draws:
            self._write("\r\x1b[K")

    def say(self, doing: str, share: float) -> None:
        """`share`: how much of all is done, from 0 to 1."""
        if self._draws:
            bar = "#" * round(_BAR * share)
            self._write(f"\r[{bar:<{_BAR}}] {share:4.0%}  {doing}\x1b[K")
        elif doing != self._said:
            self._write(f"{doing}\n")
        self._said = doing

    def _write(self, text: str) -> None:
        if self._out is not None:
            self._out.write(text)
            self._out.flush()


@click.command(context_settings={"auto_envvar_prefix": "PACELINE_TUNE"})
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--rate", type=RATE,
    help="So many requests a second, which come at random.")  # fmt: skip
@click.option("--clients", type=CLIENTS, help="So many clients, each with one request under way.")
@click.option(
    "--arrivals", type=click.File(encoding="utf-8-sig"), metavar="FILE",
    help="Requests come as they came once: what `paceline load --arrivals` takes.",
)  # fmt: skip
@click.option(
    "--from-server", callback=_server, metavar="HOST[:PORT]",
    help="As many requests a second as come to a server that serves the model now, with as many rows.",
)  # fmt: skip
@click.option("--max-throughput", "most", is_flag=True, help="As many as can be served.")
@click.option("--p99", "p99_ns", callback=_duration, metavar="TIME", help="99 % are to be answered within, say, 20ms.")
@click.option("--rows", type=_COUNT, help="Rows of a request, where no shape says them.  [default: 1]")
@click.option("--shape", "shapes", multiple=True, callback=_shapes, metavar="NAME=SHAPE",
    help="Shape of an input that the model leaves open, with its rows in front: 1,128 or, at random, 1,16..512 or, "
    "with weights, 1,16*3|1,512. Repeatable.")  # fmt: skip
@click.option("--requests", type=click.IntRange(100, 10_000_000), default=8_000, show_default=True,
    help="How many are simulated with the best settings; with the others a fourth of them.")  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="For all that is random.")
@click.option("-o", "--out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="Write the configuration there, as config.pbtxt.")  # fmt: skip
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="Also write a page with plots.")  # fmt: skip
@click.option(
    "--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Output format."
)
@click.option("--progress/--no-progress", default=True, help="Say on stderr how far it is.")
@click.option("--verify/--no-verify", default=True, show_default=True,
    help="Whether the best settings are tried, on servers.")  # fmt: skip
@click.option(
    "--seconds", type=Seconds(0.2, LONGEST_S), default=5.0, show_default=True, help="How long they are tried each."
)
@click.option(
    "--allow-python-models", type=bool, default=False, metavar="[BOOLEAN]", help="Whether the model may be Python code."
)
@access_options
def tune(
    model: Path,
    rate: float | None,
    clients: int | None,
    arrivals: TextIO | None,
    from_server: str | None,
    most: bool,
    access: ConnectionOptions,
    out: Path | None,
    html: Path | None,
    form: str,
    progress: bool,
    **given: Value,
) -> None:
    """Find the settings with which MODEL serves a load best on this machine.

    MODEL is a model's folder or a .onnx file. How long its executions take is measured, by rows, and with several
    layouts of instances and threads; then the load is simulated with many settings, and the best are tried on servers.

    Exits with 0 if the load can be served as asked for, with 1 if it can't, with 2 if MODEL or a flag can't be used.
    """
    if [rate, clients, arrivals, from_server, most or None].count(None) != 4:
        raise click.UsageError("expected one of --rate, --clients, --arrivals, --from-server and --max-throughput")
    for flag, file in (("--out", out), ("--html", html)):
        check_writable(flag, file)
    # Heavy: `paceline tune --help` does without.
    from paceline.server.models.layout import DEFAULT_MODEL_FILE
    from paceline.server.telemetry import log
    from paceline.server.tune.choosing import Goal
    from paceline.server.tune.job import Asked, tune_model
    from paceline.server.tune.observing import observed
    from paceline.server.tune.own_model import own_model
    from paceline.server.tune.page import page

    log.configure("warning", "text")
    rows = given["rows"]
    # An unmet load alone is a failure: whoever asks whether it can be served gets an answer.
    with Progress(sys.stderr if progress else None) as show, one_line_errors(access, Unusable):
        if from_server is not None:
            show.say(f"looking at {from_server}", 0.0)
            seen = observed(from_server, access, own_model(model).name)
            rate, rows = seen.per_s, rows or seen.rows
        goal = Goal(rate or 0.0, clients or 0, given["p99_ns"], is_most=most)
        asked = Asked(
            model, goal, given["shapes"], rows, arrivals.readlines() if arrivals is not None else None,
            given["seed"], given["allow_python_models"], given["seconds"] if given["verify"] else 0.0,
            html is not None, given["requests"],
        )  # fmt: skip
        # Callers of `main` can pass their own backends as click's `obj`, as tests do.
        tuned, config = tune_model(asked, show.say, click.get_current_context().obj)
    try:
        click.echo(tuned.as_json() if form == "json" else tuned.text())
    finally:  # also if nobody reads the output
        try:
            if out is not None:
                write_file("--out", out, config)
        finally:
            if html is not None:
                write_file("--html", html, page(tuned, config))
    if out is None and form == "text":
        place = f", beside the model as {DEFAULT_MODEL_FILE} in a folder that is then served" if model.is_file() else ""
        click.echo(f"\nas config.pbtxt{place} (--out writes it):\n\n{config}".rstrip())
    raise click.exceptions.Exit(int(not tuned.is_met))
