"""The command `tune`: its flags, and where what was found goes.

Lives here: reading flags, printing, exit codes. Must not: import what only tuning needs before it begins.
"""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import TextIO

import click

from paceline.clients.inputs import InputError
from paceline.clients.load.mixture import MixedShape, parse_mixed_shape
from paceline.clients.load.recording import RecordError
from paceline.clients.options import Unusable, one_line
from paceline.server.flags import Value

__all__ = ["tune"]

_UNITS_NS = {"us": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
_COUNT = click.IntRange(min=1)


def _duration(context: click.Context, parameter: click.Parameter, text: str | None) -> int:
    """A time such as "20ms", in nanoseconds; 0 for none."""
    if text is None:
        return 0
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(us|ms|s)", text.strip())
    if found is None or not float(found[1]):
        raise click.BadParameter(f"expected a time such as 20ms, 0.5s or 800us, got '{text}'", context, parameter)
    return max(1, round(float(found[1]) * _UNITS_NS[found[2]]))


def _shapes(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> dict[str, MixedShape]:
    try:
        return dict(map(parse_mixed_shape, texts))
    except InputError as error:
        raise click.BadParameter(one_line(str(error)), context, parameter) from None


@click.command(context_settings={"auto_envvar_prefix": "PACELINE_TUNE"})
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--rate", type=click.FloatRange(min=0, min_open=True), help="So many requests a second, which come at random."
)
@click.option("--clients", type=_COUNT, help="So many clients, each with one request under way.")
@click.option(
    "--arrivals", type=click.File(encoding="utf-8-sig"), metavar="FILE",
    help="Requests come as they came once: what `paceline load --arrivals` takes.",
)  # fmt: skip
@click.option("--p99", "p99_ns", callback=_duration, metavar="TIME", help="99 % are to be answered within, say, 20ms.")
@click.option("--rows", type=_COUNT, help="Rows of a request, where no shape says them.  [default: 1]")
@click.option("--shape", "shapes", multiple=True, callback=_shapes, metavar="NAME=SHAPE",
    help="Shape of an input that the model leaves open, with its rows in front: 1,128 or, at random, 1,16..512 or, "
    "with weights, 1,16*3|1,512. Repeatable.")  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="For all that is random.")
@click.option("-o", "--out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="Write the configuration there, as config.pbtxt.")  # fmt: skip
@click.option(
    "--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Output format."
)
@click.option("--progress/--no-progress", default=True, help="Say on stderr how far it is.")
@click.option("--allow-python-models", is_flag=True, help="Whether the model may be Python code.")
def tune(
    model: Path,
    rate: float | None,
    clients: int | None,
    arrivals: TextIO | None,
    out: Path | None,
    form: str,
    progress: bool,
    **given: Value,
) -> None:
    """Find the settings with which MODEL serves a load best on this machine.

    MODEL is a model's folder or a .onnx file. How long its executions take is measured, by rows, and with several
    layouts of instances and threads; then the load is simulated with many settings.

    Exits with 0 if the load can be served as asked for, with 1 if it can't, or the model can't be tuned; with 2 if a
    flag can't be used.
    """
    if [rate, clients, arrivals].count(None) != 2:
        raise click.UsageError("expected one of --rate, --clients and --arrivals")
    if out is not None and not os.access(out if out.exists() else out.absolute().parent, os.W_OK):
        raise click.UsageError(f"--out {out}: expected a file that can be written, in an existing folder")
    # Heavy: `paceline tune --help` does without.
    from paceline.server.telemetry import log
    from paceline.server.tune.choosing import Goal
    from paceline.server.tune.job import Asked, tune_model
    from paceline.server.tune.measuring import TuneError
    from paceline.server.tuning import new_loop

    log.configure("warning", "text")
    goal = Goal(rate or 0.0, clients or 0, given["p99_ns"])
    asked = Asked(
        model, goal, given["shapes"], given["rows"], (arrivals and arrivals.readlines()) or (), given["seed"],
        given["allow_python_models"],
    )  # fmt: skip

    def say(text: str) -> None:
        if progress:
            click.echo(text, err=True)

    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            # Callers of `main` can pass their own backends as click's `obj`, as tests do.
            tuned, config = runner.run(tune_model(asked, say, click.get_current_context().obj))
    except (InputError, RecordError) as error:
        raise Unusable(one_line(str(error))) from None
    except TuneError as error:
        raise click.ClickException(one_line(str(error))) from None
    if out is not None:
        out.write_text(config, encoding="utf-8")
    click.echo(tuned.as_json() if form == "json" else tuned.text())
    if out is None and form == "text":
        click.echo(f"\nas config.pbtxt (--out writes it):\n\n{config}".rstrip())
    raise click.exceptions.Exit(int(not tuned.is_met))
