"""The command `paceline`: from flags and environment to settings, from signals to an orderly end.

Lives here: the commands, and the flags of `serve` that no other module has.
Must not: import what only a running server needs before one starts.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import click
from click.core import ParameterSource

from paceline.backends.base import Backend
from paceline.server.addresses import socket_path
from paceline.server.config import ControlMode, Settings
from paceline.server.errors import StartError
from paceline.server.flags import (
    ADDRESS,
    AMOUNT,
    COUNT,
    GRPC_ADDRESS,
    MODE,
    NATURAL,
    NETWORK_FLAGS,
    PORT,
    POSITIVE_AMOUNT,
    TEXT,
    Decorator,
    Given,
    Section,
    SectionedCommand,
    Value,
    flag,
    network_settings,
    usage_errors,
    with_flags,
)
from paceline.server.model_flags import LOAD_FLAGS, MODEL_PATH, PATH_FLAGS, load_settings, model_paths, within_cpus
from paceline.server.models.load_request import remove_all
from paceline.server.models.upstream_settings import upstream_flags
from paceline.server.rpc.credentials import line_of, new_token
from paceline.server.telemetry import log
from paceline.server.telemetry.log_output import exit_now, take_stderr
from paceline.server.telemetry.trace_settings import TraceConfig, parse_trace_config
from paceline.server.tuning import SWITCH_INTERVAL_S, excluded_from_gc, keep_freed_memory, new_loop, take_descriptors

_log = logging.getLogger("paceline.server")

_BOOLEANS, _SLIP = ["true", "false"], 0.75
_LEVELS = ["none", "low", "medium", "high"]

_PORT_FAULT = "can't listen on"
_TAKEN = "; is another server running? --grpc-port and --metrics-port choose other ports"

_LAST_STEPS_S, _TRACES_END_S = 4.0, 6.0
"""How long the end takes at most once requests have had their time: the last answers, and writing the last traces. Each
step has bounds of its own, which add up to less."""


_ELSEWHERE = {
    "bulk": "server.bulk.command",
    "check": "server.check",
    "load": "clients.load.command",
    "top": "clients.top",
    "tune": "server.tune.command",
    **dict.fromkeys(("describe", "health", "infer", "models"), "clients.cli"),
}
"""Commands of other modules, which are imported only when they are used: a server does without."""


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_ELSEWHERE])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _ELSEWHERE:
            return super().get_command(ctx, cmd_name)
        command: click.Command = getattr(import_module(f"paceline.{_ELSEWHERE[cmd_name]}"), cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, with a suggestion for each command: click knows only those that are imported. And a boolean
        flag without a value is true: what follows it is its value only if it can be one, or looks like a slip."""
        name = args[0]
        if not name.startswith("-") and not ctx.resilient_parsing and self.get_command(ctx, name) is None:
            near = get_close_matches(name, self.list_commands(ctx), n=1)
            hint = f"did you mean '{near[0]}'?" if near else "see paceline --help"
            ctx.fail(f"no such command '{name}': {hint}")
        found, command, words = super().resolve_command(ctx, args)
        options = [one for one in command.params if isinstance(one, click.Option)] if command else []
        booleans = {name for one in options if one.type is click.BOOL and not one.is_flag for name in one.opts}

        def is_value(word: str) -> bool:
            return click.BOOL.str_to_bool(word) is not None or bool(get_close_matches(word, _BOOLEANS, 1, _SLIP))

        own = words[: words.index("--")] if "--" in words else words
        pairs = pairwise([*own, "--"])
        told = [f"{word}=true" if word in booleans and not is_value(after) else word for word, after in pairs]
        return found, command, [*told, *words[len(own) :]]

    def invoke(self, ctx: click.Context) -> object:
        """As click does, but Ctrl-C isn't the failure that exit code 1 stands for."""
        try:
            result: object = super().invoke(ctx)
        except KeyboardInterrupt:
            raise click.exceptions.Exit(128 + signal.SIGINT) from None
        return result


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="paceline", prog_name="paceline")
def main() -> None:
    """A gRPC inference server with dynamic batching."""


class _Serve(SectionedCommand):
    common = (
        "--model-name",
        "--model-control-mode",
        "--allow-python-models",
        "--max-batch-size",
        "--max-queue-delay-microseconds",
        "--grpc-address",
        "--grpc-port",
        "--metrics-port",
        "--frontends",
        "--log-level",
    )


_models = partial(flag, Section.MODELS)
_access, _requests = partial(flag, Section.ACCESS), partial(flag, Section.REQUESTS)
_frontends, _starting = partial(flag, Section.FRONTENDS), partial(flag, Section.STARTING)
_observing = partial(flag, Section.OBSERVING)


_FLAGS: Sequence[Decorator] = (
    *PATH_FLAGS,
    _models("model-control-mode", "none",
        "Serve all models (none), follow changes on disk (poll), or load and unload by RPC (explicit).",
        type=click.Choice([mode.value for mode in ControlMode])),
    _models("repository-poll-secs", 15.0, "How often to scan the repositories, in mode poll.", type=POSITIVE_AMOUNT),
    _models("load-model", (), "A model to load at the start, in mode explicit; only '*': all.", multiple=True,
        metavar="NAME"),
    *LOAD_FLAGS,
    _access("grpc-address", "0.0.0.0", "Address to listen on for gRPC, or a Unix socket, unix:PATH.",
        type=GRPC_ADDRESS),
    _access("grpc-port", 8001, "Port for gRPC; 0 takes a free one.", type=PORT),
    _access("grpc-socket-mode", "600", "Permissions of the Unix socket, in octal.", type=MODE, metavar="MODE"),
    *NETWORK_FLAGS,
    _access("allow-remote-settings", False, "Whether RPCs may change log and trace settings."),
    _requests("grpc-max-stream-requests", 1024, "Unanswered requests per stream.", type=COUNT),
    _requests("grpc-message-timeout-secs", 300.0, "s until a call's one request has arrived; 0: no limit.",
        type=AMOUNT),
    _requests("grpc-header-forward-pattern", "", "Headers that become request parameters, as a regular expression."),
    _requests("grpc-infer-response-compression-level", "none", "How to compress responses.",
        type=click.Choice(_LEVELS)),
    _requests("allow-client-shm", False, "Whether clients may register shared memory."),
    _requests("max-client-shm-regions", 256, "Shared memory regions registered at the same time.", type=COUNT),
    _frontends("frontends", 1, "Processes that handle gRPC; 1: the one with the models does.",
        type=click.IntRange(1, 64)),
    _frontends("frontend-memory-mb", 1024,
        "MiB of tensors in transit from each frontend to the models, and as many on the way back.",
        type=click.IntRange(1, 1_048_576)),
    _frontends("frontend-timeout-secs", 30, "Silence after which a frontend is replaced; 0: never.", type=NATURAL),
    _starting("exit-on-error", False, "Exit if any model fails to load at the start, instead of serving the others."),
    _starting("strict-readiness", True, "Be ready only while every model that should serve is ready."),
    _starting("drain-grace-secs", 0.0, "How long to accept requests while stopping, after reporting not ready.",
        type=AMOUNT),
    _starting("exit-timeout-secs", 30.0, "How long accepted requests may take at the end.", type=AMOUNT),
    _starting("id", "paceline", "Server name in its metadata.", type=TEXT),
    _observing("allow-metrics", True, "Whether to open the metrics port, which has the HTTP probes too."),
    _observing("metrics-address", None, "Address for metrics; by default gRPC's, 127.0.0.1 if that is a socket.",
        type=ADDRESS),
    _observing("metrics-port", 8002, "Port for /metrics, /livez and /readyz; 0 takes a free one.", type=PORT),
    _observing("allow-gpu-metrics", True, "Whether metrics include the GPUs that models may use."),
    _observing("status-page", False, "Whether the metrics port has a page at /status with plots of the last minutes."),
    _observing("log-level", "info", "Lowest level to log.", type=click.Choice(["debug", "info", "warning", "error"])),
    _observing("log-format", "text", "Format of log lines.", type=click.Choice(["text", "json"])),
    _observing("trace-config", (),
        "What to trace, into which file (mode triton) or to which collector (opentelemetry).", multiple=True,
        metavar="[MODE,]KEY=VALUE"),
)  # fmt: skip


@main.command(cls=_Serve, context_settings={"auto_envvar_prefix": "PACELINE"})
@click.argument("paths", nargs=-1, type=MODEL_PATH)
@with_flags(_FLAGS)
@upstream_flags
def serve(paths: tuple[Path, ...], **given: Value) -> None:
    """Serve models over gRPC until SIGTERM or SIGINT.

    PATH is a model repository in Triton's layout, one model's folder, or a bare .onnx file; several may be given. In
    KServe it may be left out; with --upstream it must be.

    Each flag can also be set by a variable, such as --grpc-port by PACELINE_GRPC_PORT. docs/configuration.md says more
    about all of them.

    * applies to models without a config.pbtxt, and with --upstream.
    """
    _check_socket(given["grpc_address"], given["frontends"])
    settings = _settings(paths, given)
    take_stderr()
    log.configure(given["log_level"], given["log_format"])
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    keep_freed_memory()
    take_descriptors()
    settings = replace(settings, backend_config=within_cpus(settings.backend_config))
    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            # Callers of `main` can pass their own backends as click's `obj`, as tests do.
            runner.run(_serve(settings, click.get_current_context().obj))
    except StartError as error:
        is_taken = _PORT_FAULT in str(error) and str(error).endswith(os.strerror(errno.EADDRINUSE))
        raise click.ClickException(f"{error}{_TAKEN if is_taken else ''}") from None


@main.command()
@click.argument("name")
def token(name: str) -> None:
    """Create a token for NAME, and the line of --grpc-token-file that makes it valid."""
    secret = new_token()
    with usage_errors():
        line = line_of(name, secret)
    click.echo(f"token, only for its user: {secret}\nline for the token file: {line}")


def _settings(paths: Sequence[Path], given: Given) -> Settings:
    """The settings that the flags give, many under the flags' own names. Raises click.UsageError."""
    mode, upstream = ControlMode(given["model_control_mode"]), given["upstream"]
    found = {"paths": (), "model_name": ""} if upstream else model_paths(paths, given)
    more = paths or given["model_repository"] or mode is not ControlMode.NONE or given["allow_client_shm"]
    if upstream is not None and more:
        raise click.UsageError("--upstream can't be combined with a PATH, --model-control-mode or --allow-client-shm")
    if given["status_page"] and not given["allow_metrics"]:
        raise click.UsageError("--status-page true needs the metrics port, which --allow-metrics false leaves closed")
    names, pattern = given["load_model"], given["grpc_header_forward_pattern"]
    if names and mode is not ControlMode.EXPLICIT:
        raise click.UsageError("--load-model needs --model-control-mode explicit")
    if "*" in names and len(names) > 1:
        raise click.UsageError("--load-model: expected '*' alone, or names, got both")
    try:
        re.compile(pattern)
    except re.error as error:
        expected = f"expected a regular expression, got '{pattern}': {error}"
        raise click.UsageError(f"--grpc-header-forward-pattern: {expected}") from None
    if upstream is not None and given["cache_config"]:
        raise click.UsageError("--cache-config can't be combined with --upstream: that server's answers aren't kept")
    with usage_errors("--trace-config"):
        trace = parse_trace_config(given["trace_config"])
    others = {
        "model_control_mode": mode,
        "load_models": given["load_model"],
        "metrics_port": given["metrics_port"] if given["allow_metrics"] else None,
        "server_id": given["id"],
        "trace": trace,
        **found,
        **load_settings(given),
        **network_settings(given),
    }
    return Settings(**{field.name: given[field.name] for field in fields(Settings) if field.name in given} | others)


def _check_socket(address: str, frontends: int) -> None:
    """Raises click.UsageError for flags that would be without effect: of the port, or of the socket."""
    given = click.get_current_context().get_parameter_source
    explicit = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
    if socket_path(address) is None:
        if given("grpc_socket_mode") in explicit:
            raise click.UsageError("--grpc-socket-mode needs --grpc-address unix:PATH")
        return
    if given("grpc_port") in explicit:
        raise click.UsageError(f"--grpc-port can't be combined with --grpc-address {address}, which has no port")
    if frontends > 1:
        raise click.UsageError(
            f"--frontends {frontends} needs a TCP port, which processes can share, unlike --grpc-address {address}"
        )


async def _serve(settings: Settings, backend_of: Callable[[str], Backend] | None) -> None:
    with excluded_from_gc():
        from paceline.server.app import Server  # heavy: `paceline --help` and `paceline infer` do without

    stopping = asyncio.Event()
    # How long an orderly end may take: the user's times, and what the steps after them need at most.
    traces_s = _TRACES_END_S if settings.trace != TraceConfig() else 0
    _on_signals(stopping, settings.drain_grace_secs + settings.exit_timeout_secs + _LAST_STEPS_S + traces_s)
    server = Server(settings, backend_of)
    starting = asyncio.create_task(server.start())
    stop_asked = asyncio.create_task(stopping.wait())
    await asyncio.wait((starting, stop_asked), return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.wait((starting,))
    if starting.cancelled():
        _log.info("stopped while loading")
        _end(0)  # a model that is being loaded can't be interrupted, and Python would wait for its thread
    try:
        starting.result()
        await stopping.wait()
        await server.stop()
        # Finalizing Python isn't safe while a thread executes native code, and takes longer than the rest of the end.
        _end(0)
    finally:
        stop_asked.cancel()


def _end(status: int) -> NoReturn:
    try:
        remove_all()
    finally:
        exit_now(status)


def _on_signals(stopping: asyncio.Event, longest_end_s: float) -> None:
    """The first SIGTERM or SIGINT asks for an orderly end, the second one ends the process at once."""

    def on_signal(number: int) -> None:
        if stopping.is_set():
            _end(128 + number)
        stopping.set()
        _bound_end(longest_end_s)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)


def _bound_end(longest_s: float) -> None:
    """End the process after `longest_s`, whatever step of the end hangs then, even one that keeps the interpreter: the
    thread says which, if it can, and the kernel ends the process, as nothing here handles SIGALRM."""

    def tell() -> None:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        where = traceback.format_stack(frame, 1)[0].strip() if frame else "unknown"
        _log.error("the end hangs after %g s, and the process is killed. The main thread is at: %s", longest_s, where)

    teller = threading.Timer(longest_s, tell)
    teller.daemon = True
    teller.start()
    signal.setitimer(signal.ITIMER_REAL, longest_s + 1)
