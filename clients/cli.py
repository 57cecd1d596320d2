"""The command `infer`: one request, or many, to any server of the protocol. `paceline` mounts it.

Lives here: options and exit codes. Must not live here: reading inputs (inputs.py), printing (report.py), calling
(sync.py), connecting to the server (connection_options.py). Exit code 1 when the server or the connection fails, 2 when
what the user gave can't be used; either way one line on stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import click

from paceline.clients.base import DEFAULT_TIMEOUT_S
from paceline.clients.connection_options import ConnectionOptions, Seconds, Server, access_options, one_line_errors
from paceline.clients.inputs import InputError, RandomInputs, parse_shape, prepare, read_inputs
from paceline.clients.messages import InferResult, ParameterValue
from paceline.clients.repeat import Outcome, run_repeated
from paceline.clients.report import outcome_json, outcome_text, progress_line, result_json, result_text, save_npz
from paceline.clients.sync import InferenceClient

__all__ = ["infer"]


@click.command()
@click.argument("model")
@click.option(
    "--server",
    type=Server(),
    default="127.0.0.1:8001",
    show_default=True,
    metavar="HOST[:PORT]",
    help="Server address, by default with port 8001; or unix:PATH.",
)
@click.option("--version", default="", help="Version of the model; by default the server chooses.")
@click.option(
    "--input",
    "inputs",
    multiple=True,
    metavar="INPUT",
    help="NAME=FILE.npy, NAME=FILE.json, NAME=JSON (nested lists), FILE.npz, or FILE.json "
    "({name: nested lists} or the v2 REST form). Repeatable.",
)
@click.option("--random", "make_up", is_flag=True, help="Generate the inputs that aren't given.")
@click.option("--rows", type=click.IntRange(min=1), help="With --random: size of a free first dimension.  [default: 1]")
@click.option(
    "--shape", "shapes", multiple=True, metavar="NAME=1,2,3", help="With --random: the whole shape. Repeatable."
)
@click.option("--seed", type=click.IntRange(min=0), help="With --random: the same seed gives the same inputs.")
@click.option("--output", "outputs", multiple=True, metavar="NAME", help="Ask for this output only. Repeatable.")
@click.option(
    "--timeout",
    "timeout_s",
    type=Seconds(min=0, min_open=True),
    default=DEFAULT_TIMEOUT_S,
    show_default=True,
    metavar="SECONDS",
    help="Longest wait for each answer.",
)
@click.option("--parameter", "parameters", multiple=True, metavar="KEY=VALUE", help="Request parameter. Repeatable.")
@click.option(
    "--repeat", type=click.IntRange(min=1), default=1, help="Send the request this many times and print a summary."
)
@click.option("--concurrency", type=click.IntRange(min=1), default=1, help="With --repeat: this many at the same time.")
@click.option(
    "--format", "form", type=click.Choice(["table", "json"]), default="table", show_default=True, help="Output format."
)
@click.option("--full", is_flag=True, help="Print all values of large outputs.")
@click.option("--save", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE.npz", help="Save the outputs.")
@access_options
def infer(
    model: str,
    server: str,
    version: str,
    inputs: tuple[str, ...],
    make_up: bool,
    rows: int | None,
    shapes: tuple[str, ...],
    seed: int | None,
    outputs: tuple[str, ...],
    timeout_s: float,
    parameters: tuple[str, ...],
    repeat: int,
    concurrency: int,
    form: str,
    full: bool,
    save: Path | None,
    access: ConnectionOptions,
) -> None:
    """Run MODEL on a server and print the answer.

    Numbers are converted to the model's datatypes, as long as no value is lost.
    """
    tls = access.tls or False
    with (
        one_line_errors(access),
        InferenceClient(server, timeout_s=timeout_s, tls=tls, token=access.token) as client,
    ):
        _refuse_contradictions(repeat, concurrency, save)
        random = _random_inputs(make_up, rows, shapes, seed)
        given = read_inputs(inputs)
        options = dict(_parameter(text) for text in parameters)
        metadata = client.model_metadata(model, version)
        if metadata.inputs and not given and random is None:
            raise InputError("no input: give --input or --random")
        ready = prepare(metadata, given, random)
        call = partial(
            client.infer,
            model,
            ready.arrays,
            version=version,
            outputs=outputs,
            parameters=options,
            datatypes=ready.datatypes,
        )
        if repeat > 1:
            with progress_line(sys.stderr, repeat) as report:
                outcome = run_repeated(call, report, repeat=repeat, concurrency=concurrency)
            _print_outcome(outcome, form)
        else:
            text_of = partial(result_text, most_values=sys.maxsize) if full else result_text
            _print_result(call(), result_json if form == "json" else text_of, save)


def _refuse_contradictions(repeat: int, concurrency: int, save: Path | None) -> None:
    if repeat > 1 and save is not None:
        raise InputError("--save can't be combined with --repeat: it saves a single answer")
    if repeat == 1 and concurrency > 1:
        raise InputError("--concurrency needs --repeat")
    if save is not None and save.suffix != ".npz":
        raise InputError(f"--save {save}: expected a name that ends in .npz, the one format there is")
    # Checked before the model computes anything. If writing fails after all, that is reported later.
    if save is not None and not os.access(save if save.exists() else save.absolute().parent, os.W_OK):
        raise InputError(f"--save {save}: expected a file that can be written, in an existing folder")


def _random_inputs(make_up: bool, rows: int | None, shapes: Sequence[str], seed: int | None) -> RandomInputs | None:
    if make_up:
        return RandomInputs(rows, dict(parse_shape(text) for text in shapes), seed)
    if rows is not None or shapes or seed is not None:
        raise InputError("--rows, --shape and --seed need --random")
    return None


def _parameter(text: str) -> tuple[str, ParameterValue]:
    """KEY=VALUE as key and value: JSON booleans, numbers and strings are parsed, everything else is text."""
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise InputError(f"--parameter {text!r}: expected KEY=VALUE")
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return key, value
    return key, parsed if isinstance(parsed, bool | int | float | str) else value


def _print_result(result: InferResult, text_of: Callable[[InferResult], str], save: Path | None) -> None:
    click.echo(text_of(result))
    if save is not None:
        save_npz(save, result.outputs)


def _print_outcome(outcome: Outcome, form: str) -> None:
    click.echo(outcome_json(outcome) if form == "json" else outcome_text(outcome))
    if outcome.errors:
        raise click.exceptions.Exit(click.ClickException.exit_code)
