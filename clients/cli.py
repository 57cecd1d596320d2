"""The commands `infer` and `health`: calls to any server of the protocol, from a shell. `paceline` mounts them.

`health` is for places where only a command can ask, such as a container's HEALTHCHECK, and for Kubernetes if the server
speaks TLS, which its own gRPC probes don't. The server's address, TLS and the token can also come from the environment,
because a HEALTHCHECK's command is fixed.

Lives here: options and exit codes. Must not live here: reading inputs (inputs.py), printing (report.py), calling
(sync.py), connecting to the server (options.py). Exit code 1 when the server or the connection fails, 2 when what the
user gave can't be used; either way one line on stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TextIO, TypeVar

import click

from paceline.clients import overview, report
from paceline.clients.base import DEFAULT_TIMEOUT_S
from paceline.clients.errors import NO_SEQUENCE, InferenceError, Unimplemented, inference_error
from paceline.clients.generations import GenerationChunk
from paceline.clients.inputs import (
    InputError,
    RandomInputs,
    TypedInputs,
    input_options,
    parse_parameter,
    parse_shape,
    prepare,
    read_inputs,
    read_steps,
)
from paceline.clients.messages import InferResult, ParameterValue
from paceline.clients.options import (
    ConnectionOptions,
    access_options,
    check_writable,
    one_line,
    one_line_errors,
    server_option,
    timeout_option,
)
from paceline.clients.sequences import InferenceSequence
from paceline.clients.sync import InferenceClient

T = TypeVar("T")

_SERVING = "SERVING"
_MOST_REASONS = 20
_NOT_FOR_TEXT = "--input, --random, --output, --sequence, --repeat or --save"
_DECOUPLED = "decoupled"
"""In what servers say of a call to a model that may answer any number of times."""
_NO_ROWS = "expected a leading batch dimension"
"""In what servers say of an input that is a single value."""


@contextmanager
def _connected(
    server: str, timeout_s: float, access: ConnectionOptions, hints: Mapping[str, str] | None = None
) -> Iterator[InferenceClient]:
    with (
        one_line_errors(access, hints=hints),
        InferenceClient(server, timeout_s=timeout_s, tls=access.tls or False, token=access.token) as client,
    ):
        yield client


@click.command()
@click.argument("model")
@server_option()
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
@click.option("--text", metavar="TEXT", help="Generate what follows this text, and print it.")
@click.option("--stream", is_flag=True, help="Print each answer as it comes; with --text, the text.")
@click.option("--output", "outputs", multiple=True, metavar="NAME", help="Ask for this output only. Repeatable.")
@timeout_option(DEFAULT_TIMEOUT_S, "Longest wait for each answer.")
@click.option("--parameter", "parameters", multiple=True, metavar="KEY=VALUE", help="Request parameter. Repeatable.")
@click.option(
    "--sequence",
    "steps",
    type=click.File(encoding="utf-8-sig"),
    metavar="FILE.jsonl",
    help="Send a sequence: a step for each line, {name: nested lists} or the v2 REST form; '-' is stdin. What --input "
    "and --random give comes with every step. A step is sent once the next line, or the end, has been read.",
)
@click.option("--sequence-id", metavar="ID", help="With --sequence: its id, digits for a number.  [default: random]")
@click.option(
    "--repeat", type=click.IntRange(min=1), default=1, help="Send the request this many times and print a summary."
)
@click.option(
    "--concurrency", type=click.IntRange(1, 1000), default=1, help="With --repeat: this many at the same time."
)
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
    text: str | None,
    stream: bool,
    outputs: tuple[str, ...],
    timeout_s: float,
    parameters: tuple[str, ...],
    steps: TextIO | None,
    sequence_id: str | None,
    repeat: int,
    concurrency: int,
    form: str,
    full: bool,
    save: Path | None,
    access: ConnectionOptions,
) -> None:
    """Run MODEL on a server and print the answer; of a decoupled model, each answer as it comes.

    Numbers are converted to the model's datatypes, as long as no value is lost. Parameters of --text may be JSON lists.
    """
    hints = {NO_SEQUENCE: "give the steps of a sequence with --sequence FILE.jsonl"}
    with _connected(server, timeout_s, access, hints) as client:
        _refuse_contradictions(repeat, concurrency, save, steps is not None, stream)
        if text is not None:
            if inputs or make_up or outputs or steps is not None or repeat > 1 or save is not None:
                raise InputError(f"--text can't be combined with {_NOT_FOR_TEXT}")
            asked = dict(parse_parameter(one, ParameterValue | list) for one in parameters)
            try:
                chunks = client.generate(model, text, version=version, **asked)
                _print_generation(chunks, stream=stream, as_json=form == "json")
            except TypeError as error:
                raise InputError(f"--parameter: {error}") from error
            return
        if sequence_id is not None and steps is None:
            raise InputError("--sequence-id needs --sequence")
        if not make_up and (rows is not None or shapes or seed is not None):
            raise InputError("--rows, --shape and --seed need --random")
        random = RandomInputs(rows, dict(map(parse_shape, shapes)), seed) if make_up else None
        given = read_inputs(inputs)
        options = dict(map(parse_parameter, parameters))
        metadata = client.model_metadata(model, version)
        most_values = sys.maxsize if full else report.FEW_VALUES
        written = report.result_json if form == "json" else partial(report.result_text, most_values=most_values)
        if steps is not None:
            own_id = int(sequence_id) if sequence_id is not None and sequence_id.isdecimal() else sequence_id
            ready_steps = ((where, prepare(metadata, step, random)) for where, step in read_steps(steps, given))
            with client.sequence(model, own_id, version=version, outputs=outputs, parameters=options) as sequence:
                for answer in _step_answers(sequence, ready_steps):
                    click.echo(written(answer))
            return
        example = input_options(metadata)
        if metadata.inputs and not given and random is None:
            takes = ", ".join(f"{one.name} {one.datatype} {[*one.shape]}" for one in metadata.inputs)
            raise InputError(f"no input: give --input or --random; model {model!r} takes {takes}, as in {example}")
        hints[_NO_ROWS] = f"as in {example}"
        ready = prepare(metadata, given, random)

        def call(method: Callable[..., T]) -> T:
            more = {"outputs": outputs, "parameters": options, "datatypes": ready.datatypes}
            return method(model, ready.arrays, version=version, **more)

        if repeat > 1:
            with report.progress_line(sys.stderr, repeat) as show:
                outcome = report.run_repeated(partial(call, client.infer), show, repeat=repeat, concurrency=concurrency)
            click.echo(report.outcome_json(outcome) if form == "json" else report.outcome_text(outcome))
            if outcome.errors:
                raise click.exceptions.Exit(click.ClickException.exit_code)
            return
        try:
            answers: Iterable[InferResult] = call(client.stream_infer) if stream else [call(client.infer)]
        except Unimplemented as error:
            # Nothing was executed: the server says so before it looks at the request.
            if _DECOUPLED not in error.message or save is not None:
                raise
            answers = call(client.stream_infer)
        for answer in answers:
            click.echo(written(answer))
            if save is not None:
                report.save_npz(save, answer.outputs)


def _print_generation(chunks: Iterable[GenerationChunk], *, stream: bool, as_json: bool) -> None:
    """The text as it comes, or all of it; in JSON, a line for each."""
    is_open = False
    try:
        for some in ([chunk] for chunk in chunks) if stream else [[*chunks]]:
            click.echo(report.generation_json(some) if as_json else report.generation_text(some), nl=as_json)
            is_open = not as_json
    finally:
        if is_open:
            click.echo()


def _step_answers(sequence: InferenceSequence, steps: Iterator[tuple[str, TypedInputs]]) -> Iterator[InferResult]:
    """The answer to each step; the last of them ends the sequence. Those before one that can't be read are sent. Errors
    name the line."""
    step, unreadable = next(steps, None), None
    while step is not None:
        where, ready = step
        try:
            step = next(steps, None)
        except ValueError as error:
            step, unreadable = None, error
        try:
            yield sequence.infer(ready.arrays, last=step is None and unreadable is None, datatypes=ready.datatypes)
        except InferenceError as error:
            raise inference_error(error.status, f"{where}: {error.message}") from error
    if unreadable is not None:
        raise unreadable


def _refuse_contradictions(
    repeat: int, concurrency: int, save: Path | None, is_sequence: bool, is_stream: bool
) -> None:
    if repeat > 1 and save is not None:
        raise InputError("--save can't be combined with --repeat: it saves a single answer")
    if is_sequence and (repeat > 1 or save is not None):
        raise InputError("--sequence can't be combined with --repeat or --save")
    if is_stream and (is_sequence or repeat > 1 or save is not None):
        raise InputError("--stream can't be combined with --sequence, --repeat or --save")
    if repeat == 1 and concurrency > 1:
        raise InputError("--concurrency needs --repeat")
    if save is not None and save.suffix != ".npz":
        raise InputError(f"--save {save}: expected a name that ends in .npz, the one format there is")
    check_writable("--save", save)


_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.command()
@click.argument("model")
@server_option()
@click.option("--version", default="", help="Version of the model; by default the server chooses.")
@_JSON
@timeout_option(10.0, "Longest wait for the answer.")
@access_options
def describe(model: str, server: str, version: str, as_json: bool, timeout_s: float, access: ConnectionOptions) -> None:
    """Print what MODEL takes and returns, how it is batched, where it runs and, of a pipeline, its steps.

    Of a server without Triton's ModelConfig, only inputs and outputs are known.
    """
    with _connected(server, timeout_s, access) as client:
        found = client.describe(model, version)
    click.echo(overview.description_json(found) if as_json else "\n".join(overview.description_lines(found)))


@click.command()
@server_option()
@click.option("--ready", "ready_only", is_flag=True, help="Only versions that serve.")
@_JSON
@timeout_option(10.0, "Longest wait for the answer.")
@access_options
def models(server: str, ready_only: bool, as_json: bool, timeout_s: float, access: ConnectionOptions) -> None:
    """List a server's models: each version with its state, and the reason if it doesn't serve."""
    with _connected(server, timeout_s, access) as client:
        found = client.models(ready_only=ready_only)
    click.echo(overview.models_json(found) if as_json else overview.models_text(found))


@click.command()
@server_option(show_envvar=True, envvar="PACELINE_HEALTH_SERVER")
@click.option("--service", default="", help="'liveness'; by default the server: whether it is ready.")
@timeout_option(3.0, "Longest wait for the answer.")
@access_options
def health(server: str, service: str, timeout_s: float, access: ConnectionOptions) -> None:
    """Ask a server's health service; exit with 0 if it says SERVING, 2 if an option can't be used, else 1.

    No token is needed, except to learn why a server that requires tokens isn't ready: that is on stderr, a line for
    each model.
    """
    with _connected(server, timeout_s, access) as client:
        status = client.health(service)
        click.echo(status)
        if status != _SERVING:
            for reason in _reasons(client, service):
                click.echo(one_line(reason), err=True)
    if status != _SERVING:
        raise click.exceptions.Exit(click.ClickException.exit_code)


def _reasons(client: InferenceClient, service: str) -> list[str]:
    """Why the server isn't ready, as its index of models tells it. `/readyz` alone has what isn't about one model."""
    if service == "liveness":
        return ["only a restart helps; /livez on the metrics port says why"]
    try:
        entries = client.repository_index()
    except InferenceError as error:
        return [f"the states of its models are unknown: {error}"]
    serving = {entry.name for entry in entries if entry.state == "READY"}
    reasons = [
        f"model '{entry.name}'{entry.version and f' version {entry.version}'} is {entry.state}"
        f"{entry.reason and f': {entry.reason}'}"
        for entry in entries
        if entry.name not in serving and entry.state and entry.reason != "unloaded"
    ]
    if not reasons:
        return ["no model is to blame: it may be starting or stopping; /readyz on the metrics port says why"]
    more = len(reasons) - _MOST_REASONS
    return reasons[:_MOST_REASONS] + ([f"and {more} more"] if more > 0 else [])
