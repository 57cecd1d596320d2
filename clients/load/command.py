"""The command `load`: a load on a server, and what became of it. `paceline` mounts it.

Lives here: options, from these to a load, where its outcome goes, exit codes. Must not: send, or compute figures. Exit
code 1 when an assertion, all requests, the server or the connection fail; 2 when what the user gave can't be used.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TextIO

import click

from paceline.clients.answers import enable_empty_final
from paceline.clients.errors import NO_SEQUENCE
from paceline.clients.generations import GenerationRequest, generation_request
from paceline.clients.inputs import InputError, TypedInputs, parse_parameter, read_inputs, read_steps
from paceline.clients.load.arrivals import Arrivals, Constant, Poisson
from paceline.clients.load.assertions import parse_assertion
from paceline.clients.load.control import ControlClient, Served
from paceline.clients.load.extent import Everything, Extent, FixedTime, UntilStable
from paceline.clients.load.measuring import measure
from paceline.clients.load.mixture import mixed, parse_mixed_shape, recorded
from paceline.clients.load.outcome import Outcome
from paceline.clients.load.page import page
from paceline.clients.load.printing import outcome_json, outcome_text, written_reason, written_time
from paceline.clients.load.recording import Recording, read_recording
from paceline.clients.load.regions import in_shared_memory
from paceline.clients.load.tally import Counts, merged
from paceline.clients.load.worker import Load
from paceline.clients.messages import ModelMetadata, ParameterValue, infer_request
from paceline.clients.options import (
    CLIENTS,
    RATE,
    ConnectionOptions,
    Number,
    Seconds,
    access_options,
    check_writable,
    one_line_errors,
    server_option,
    terminal_line,
    timeout_option,
    write_file,
)

_WARMUP_S: Final = 1.0
_DISTINCT: Final = 64
_METADATA_S: Final = 10.0
_LONGEST_S: Final = 1e9
"""Deadlines that are later lie in the past: gRPC's times are 64-bit nanoseconds."""
_LENGTH: Final = Seconds(0.01, 1e6)
"""Figures are kept by slices, of which a shorter time would have more than can be told."""
_COUNT: Final = click.IntRange(min=1)
_FEW_WORDS: Final = 5
"""What gRPC's libraries say of a handler that failed with an unknown key, for example, which is its name."""


@dataclass(frozen=True, slots=True)
class _Options:
    """The command line, apart from the model and how to connect."""

    server: str
    version: str
    clients: int | None
    rate: float | None
    constant: bool
    arrivals: TextIO | None
    speed: float
    processes: int
    connections: int
    inputs: tuple[str, ...]
    requests: TextIO | None
    rows: int | None
    shapes: tuple[str, ...]
    distinct: int
    seed: int
    texts: tuple[str, ...]
    parameters: tuple[str, ...]
    outputs: tuple[str, ...]
    stream: bool
    sequence_length: tuple[int, int] | None
    shared_memory: bool
    warmup_s: float | None
    window_s: float
    tolerance: float
    max_windows: int
    seconds: float | None
    count: int | None
    timeout_s: float
    form: str
    html: Path | None
    assertions: tuple[str, ...]

    @property
    def is_open(self) -> bool:
        return self.rate is not None or self.arrivals is not None


def _length(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    low, dots, high = text.partition("..")
    try:
        bounds = int(low), int(high if dots else low)
    except ValueError:
        bounds = 0, 0
    if not 1 <= bounds[0] <= bounds[1]:
        raise click.BadParameter(f"expected a number like 10, or a range like 5..20, got {text!r}", context, parameter)
    return bounds


@click.command()
@click.argument("model")
@server_option()
@click.option("--version", default="", help="Version of the model; by default the server chooses.")
@click.option(
    "--clients",
    type=CLIENTS,
    help="Closed loop: so many clients, each with one request under way.  [default: 1]",
)
@click.option("--rate", type=RATE, help="Open loop: so many requests a second, at random.")
@click.option("--constant", is_flag=True, help="With --rate: at regular intervals.")
@click.option(
    "--arrivals",
    type=click.File(encoding="utf-8-sig"),
    metavar="FILE.jsonl",
    help='Open loop: when requests came once: {"at_s": 0.25, "shapes": {"x": [1, 37]}} on each line, shapes if known; '
    "what `paceline top --record` has written; or a server's file of traces.",
)
@click.option(
    "--speed", type=Number(1e-6, 1e6), default=1.0, show_default=True,
    help="With --arrivals: so many times as fast.",
)  # fmt: skip
@click.option(
    "--processes", type=click.IntRange(1, 1_024), default=1, show_default=True, help="Processes that send, together."
)
@click.option(
    "--connections", type=click.IntRange(1, 10_000), default=1, show_default=True, help="Connections of each process."
)
@click.option(
    "--input",
    "inputs",
    multiple=True,
    metavar="INPUT",
    help="As for `paceline infer`: NAME=FILE.npy, NAME=FILE.json, NAME=JSON, FILE.npz or FILE.json. Repeatable. "
    "Inputs that aren't given are made up.",
)
@click.option(
    "--requests",
    type=click.File(encoding="utf-8-sig"),
    metavar="FILE.jsonl",
    help="Requests to send in turn: each line has inputs, {name: nested lists} or the v2 REST form; '-' is stdin.",
)
@click.option("--rows", type=_COUNT, help="Size of a free first dimension of made-up inputs.  [default: 1]")
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    metavar="NAME=SHAPE",
    help="Shape of a made-up input: 1,128 or, at random, 1,16..512 or, with weights, 1,16*3|1,512. Repeatable.",
)
@click.option(
    "--distinct",
    type=click.IntRange(1, 1_000_000),
    default=_DISTINCT,
    show_default=True,
    help="How many requests to make up.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="For all that is random.")
@click.option("--text", "texts", multiple=True, metavar="TEXT", help="Generate what follows this text. Repeatable.")
@click.option("--parameter", "parameters", multiple=True, metavar="KEY=VALUE", help="Request parameter. Repeatable.")
@click.option("--output", "outputs", multiple=True, metavar="NAME", help="Ask for this output only. Repeatable.")
@click.option("--stream", is_flag=True, help="Send over streams, one request at a time on each.")
@click.option(
    "--sequence-length", callback=_length, metavar="N", help="Send sequences of so many requests, N or FROM..TO."
)
@click.option("--shared-memory", is_flag=True, help="Tensors in system shared memory, of a server on this machine.")
@click.option("--warmup", "warmup_s", type=Seconds(0, 1e6), metavar="SECONDS", help="Not counted.  [default: 1]")
@click.option(
    "--window", "window_s", type=_LENGTH, default=5.0, show_default=True, metavar="SECONDS",
    help="Measure until three windows of this length in a row agree.",
)  # fmt: skip
@click.option(
    "--tolerance", type=Number(0, 1, min_open=True), default=0.1, show_default=True,
    help="By how much throughput and mean latency of windows that agree differ from their mean, as a share.",
)  # fmt: skip
@click.option(
    "--max-windows", type=click.IntRange(min=3), default=10, show_default=True, help="So many windows at most."
)
@click.option("--seconds", type=_LENGTH, metavar="SECONDS", help="Measure for this time instead.")
@click.option("--count", type=_COUNT, help="Send this many requests, or sequences, instead, all of which count.")
@timeout_option(10.0, "Deadline of each request, from when it is due.")
@click.option(
    "--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Output format."
)
@click.option(
    "--html", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Also write a page with plots."
)
@click.option(
    "--assert",
    "assertions",
    multiple=True,
    metavar="ASSERTION",
    help="Exit with status 1 unless it holds: 'p99<20ms', 'throughput>500', 'errors==0'. Repeatable.",
)
@access_options
def load(model: str, access: ConnectionOptions, **given: Any) -> None:
    """Load MODEL on a server, and print how fast it answers: throughput, percentiles, errors, its own figures.

    Clients in a closed loop wait for their answers; requests of an open loop (--rate, --arrivals) are sent when they
    are due, and count from then.
    """
    options = _Options(**given)
    with one_line_errors(access):
        _refuse_contradictions(options)
        assertions = [parse_assertion(text) for text in options.assertions]
        recording = None
        if options.arrivals is not None:
            recording = read_recording(options.arrivals, model, options.seed)
        with (
            ControlClient(options.server, tls=access.tls or False, token=access.token) as client,
            _messages(client, model, options, recording) as messages,
        ):
            outcome = _measured(client, model, options, _load_of(options, access, messages, recording))
        verdicts = [(one, outcome.value(one.name)) for one in assertions]
        about = {"model": model, "version": options.version, "server": options.server, "load": _described(options)}
        heading = f"{model} on {options.server}: {_described(options)}"
        is_json = options.form == "json"
        try:
            click.echo(outcome_json(outcome, about, verdicts) if is_json else outcome_text(outcome, heading, verdicts))
        finally:  # also if nobody reads the output
            if options.html is not None:
                write_file("--html", options.html, page(outcome, f"Load on {model}", heading, verdicts))
        if (total := outcome.total).failed and not total.latencies.count:
            why = "; ".join(f"{status}: {written_reason(total.reasons[status])}" for status in total.errors)
            if (options.stream or options.texts) and [*total.errors] == ["UNIMPLEMENTED"]:
                why = "the server has no ModelStreamInfer, which --stream and --text need"
            hint = " (send sequences, as with --sequence-length 5..20)" if NO_SEQUENCE in why else ""
            if options.stream and 0 < len(total.reasons.get("UNKNOWN", "").split()) <= _FEW_WORDS:
                hint = " (over streams, some servers say no more than that: try without --stream)"
            raise click.ClickException(f"every request failed: {why}{hint}")
        if not all(one.holds(value) for one, value in verdicts):
            raise click.exceptions.Exit(click.ClickException.exit_code)


def _refuse_contradictions(options: _Options) -> None:
    loops = [options.clients is not None, options.rate is not None, options.arrivals is not None]
    if sum(loops) > 1:
        raise InputError("--clients, --rate and --arrivals: expected one of them")
    if options.constant and options.rate is None:
        raise InputError("--constant needs --rate")
    if options.speed != 1 and options.arrivals is None:
        raise InputError("--speed needs --arrivals")
    if options.seconds is not None and options.count is not None:
        raise InputError("--seconds can't be combined with --count")
    if options.warmup_s is not None and (options.count is not None or options.arrivals is not None):
        raise InputError("--warmup can't be combined with --count or --arrivals, where everything counts")
    if not options.is_open and options.processes > (options.clients or 1):
        raise InputError(f"--processes {options.processes}: expected at most as many as there are clients")
    if options.requests is not None and (options.shapes or options.arrivals is not None):
        raise InputError("--requests can't be combined with --shape or --arrivals, which are for made-up inputs")
    if options.texts and (options.inputs or options.requests or options.shapes or options.sequence_length):
        raise InputError("--text can't be combined with --input, --requests, --shape or --sequence-length")
    if options.shared_memory and (options.texts or options.sequence_length):
        raise InputError("--shared-memory can't be combined with --text or --sequence-length")
    check_writable("--html", options.html)


@contextmanager
def _messages(
    client: ControlClient, model: str, options: _Options, recording: Recording | None
) -> Iterator[tuple[bytes, ...]]:
    """What is sent, in turn; shared memory that it is in exists as long as the context lasts. Raises InputError."""
    metadata = client.model_metadata(model, options.version, timeout_s=_METADATA_S)
    if options.texts:
        known = {tensor.name: tensor.datatype for tensor in metadata.inputs}
        # Models of a server that names no inputs may have any.
        if known and "text_input" not in known:
            raise InputError(f"--text: model {model!r} has no input 'text_input'; it has {', '.join(known)}")
        asked = dict(parse_parameter(one, ParameterValue | list) for one in options.parameters)
        contents = (generation_request(text, asked, known) for text in options.texts)
    else:
        parameters = dict(map(parse_parameter, options.parameters))
        found = _inputs(metadata, options, recording)
        contents = (GenerationRequest(one.arrays, one.datatypes, parameters) for one in found)
    requests = []
    with terminal_line(sys.stderr) as write:  # a million take a minute
        for one in contents:
            requests.append(infer_request(model, version=options.version, outputs=options.outputs, **one._asdict()))
            if len(requests) % 1_000 == 0:
                write(f"{len(requests)} requests prepared")
    for request in requests if options.stream or options.texts else ():
        enable_empty_final(request)
    placing = in_shared_memory(client, requests, options.stream) if options.shared_memory else nullcontext(requests)
    with placing as placed:
        yield tuple(request.SerializeToString() for request in placed)


def _inputs(metadata: ModelMetadata, options: _Options, recording: Recording | None) -> Iterable[TypedInputs]:
    given = read_inputs(options.inputs)
    shapes = dict(map(parse_mixed_shape, options.shapes))
    if not metadata.inputs and not given and options.requests is None:
        raise InputError(f"the server names no inputs of model {metadata.name!r}: give --input or --requests")
    if recording is not None and recording.has_shapes:
        if shapes:
            raise InputError("--shape can't be combined with --arrivals that have shapes")
        return recorded(metadata, given, recording, options.rows, options.seed)
    requests = [given]
    if options.requests is not None:
        requests = [one for _, one in read_steps(options.requests, given, "--requests")]
        if not requests:
            raise InputError("--requests: no requests")
    is_made_up = any(tensor.name not in one for one in requests for tensor in metadata.inputs)
    distinct = max(len(requests), options.distinct) if is_made_up else len(requests)
    return mixed(metadata, requests, shapes=shapes, rows=options.rows, distinct=distinct, seed=options.seed)


def _load_of(
    options: _Options, access: ConnectionOptions, messages: tuple[bytes, ...], recording: Recording | None
) -> Load:
    arrivals: Arrivals | None = None
    if recording is not None:
        arrivals = recording.arrivals(options.speed)
    elif options.rate is not None:
        arrivals = Constant(options.rate) if options.constant else Poisson(options.rate, options.seed)
    return Load(
        target=options.server,
        messages=messages,
        timeout_s=min(options.timeout_s, _LONGEST_S),
        clients=options.clients or 1,
        arrivals=arrivals,
        count=options.count,
        is_stream=options.stream or bool(options.texts),
        steps=options.sequence_length,
        connections=options.connections,
        seed=options.seed,
        # Not from the seed: sequences of an earlier load may be alive in the server.
        first_sequence_id=1 + secrets.randbits(62),
        tls=access.tls,
        token=access.token,
    )


def _measured(client: ControlClient, model: str, options: _Options, load: Load) -> Outcome:
    def show(slices: Sequence[Counts], slice_s: float) -> None:
        """The last second."""
        last = max(1, round(1 / slice_s))
        recent = merged(slices[-last:])
        rate = recent.answered / (last * slice_s)
        p99 = written_time(recent.latencies.percentile_ns(99))
        write(f"{len(slices) * slice_s:.0f} s  {rate:.1f} requests/s  p99 {p99}  {recent.failed} errors")

    with terminal_line(sys.stderr) as write:
        measured = measure(
            load,
            _extent(options, load.arrivals),
            lambda: client.statistics(model, options.version),
            processes=options.processes,
            show=show,
        )
    served = Served.between(measured.before, measured.after)
    return Outcome(measured, served, options.processes, options.is_open, options.sequence_length is not None)


def _extent(options: _Options, arrivals: Arrivals | None) -> Extent:
    recorded_s = arrivals.seconds if arrivals is not None else None
    if options.count is not None:
        return Everything()
    if recorded_s is not None:
        is_whole = options.seconds is None or options.seconds >= recorded_s
        return Everything(max(0.1, recorded_s / 20)) if is_whole else FixedTime(0.0, options.seconds or 0.0)
    warmup_s = _WARMUP_S if options.warmup_s is None else options.warmup_s
    if options.seconds is not None:
        return FixedTime(warmup_s, options.seconds)
    return UntilStable(warmup_s, options.window_s, options.tolerance, options.max_windows)


def _described(options: _Options) -> str:
    """The load in a few words."""
    if options.rate is not None:
        what = f"{options.rate:g} requests/s, {'constant' if options.constant else 'Poisson'}"
    elif options.arrivals is not None:
        what = f"arrivals of {options.arrivals.name}" + (
            f", {options.speed:g} times as fast" if options.speed != 1 else ""
        )
    else:
        what = f"{options.clients or 1} client{'s' if (options.clients or 1) > 1 else ''}"
    kinds = {
        "over streams": options.stream or options.texts,
        "sequences": options.sequence_length,
        "in shared memory": options.shared_memory,
    }
    return ", ".join([what, *(kind for kind, is_so in kinds.items() if is_so)])
