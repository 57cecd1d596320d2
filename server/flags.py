"""How flags of `paceline serve` are made and shown, and those about who may call, how much, and over what connections.

Lives here: the sections of all flags and the help that shows them; these flags, and the settings made of them. Must
not: flags about models (`server.model_flags`).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from enum import StrEnum
from functools import partial, reduce
from pathlib import Path
from typing import Any

import click

from paceline.server.addresses import SOCKET_FOLDER_BYTES, SOCKET_PATH_BYTES, is_address, socket_path
from paceline.server.limits import LARGEST_MESSAGE_BYTES, Connections, Limits
from paceline.server.rpc.credentials import parse_restrictions
from paceline.server.rpc.tls import TlsFiles

Value = Any
"""Of a flag, or of a field of Settings that is made of some: each has a type of its own."""
Given = Mapping[str, Value]
"""Values by the names of flags' parameters, or of fields."""

Serve = Callable[..., None]
Decorator = Callable[[Serve], Serve]

_MANY = 2**31 - 1
_OCTAL = re.compile(r"0?[0-7]{3}")


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


class _Text(click.types.StringParamType):
    """Text for messages or for gRPC, which both take UTF-8 only; arguments may be any bytes."""

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text: str = super().convert(value, param, ctx)
        try:
            text.encode()
        except UnicodeEncodeError:
            self.fail(f"expected UTF-8, got {text!a}", param, ctx)
        return text


class _Amount(click.FloatRange):
    """A number up to a million: the event loop's timers have a maximum. NaN, which is in every range, is refused."""

    def __init__(self, *, min_open: bool = False) -> None:
        super().__init__(0, 1_000_000, min_open=min_open)

    def convert(self, value: float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail("expected a number, got nan", param, ctx)
        return number


class _Address(_Text):
    """Where to listen. An address with one of gRPC's schemes or a port would be taken for a name, and looked up."""

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = super().convert(value, param, ctx)
        if not is_address(text):
            self.fail(f"expected a host name or an IP address, without scheme or port, got '{text}'", param, ctx)
        return text


class _GrpcAddress(_Address):
    """An address, or a Unix socket in the file system. Abstract ones have no permissions: any process in the network
    namespace could connect, of whichever user."""

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = _Text.convert(self, value, param, ctx)
        if text.startswith("unix-abstract:"):
            self.fail(f"expected unix:PATH, as abstract sockets have no permissions, got '{text}'", param, ctx)
        path = socket_path(text)
        if path is None:
            return super().convert(value, param, ctx)
        if not os.path.basename(path) or "\0" in path or (text.startswith("unix://") and not os.path.isabs(path)):
            self.fail(f"expected unix:PATH, the path of a file, got '{text}'", param, ctx)
        if len(os.fsencode(path)) > SOCKET_PATH_BYTES or len(os.fsencode(os.path.dirname(path))) > SOCKET_FOLDER_BYTES:
            self.fail(
                f"expected a socket's path of at most {SOCKET_PATH_BYTES} bytes, in a folder of at most "
                f"{SOCKET_FOLDER_BYTES}, got '{path}'",
                param,
                ctx,
            )
        return text


class _Mode(click.ParamType):  # type: ignore[type-arg]  # generic in newer clicks alone
    """Permissions of a file, in octal as for chmod; an int."""

    name = "text"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if not _OCTAL.fullmatch(value):
            self.fail(f"expected permissions in octal, from 000 to 777, got {value!a}", param, ctx)
        return int(value, 8)


TEXT, ADDRESS, GRPC_ADDRESS, MODE = _Text(), _Address(), _GrpcAddress(), _Mode()
AMOUNT, POSITIVE_AMOUNT = _Amount(), _Amount(min_open=True)
COUNT, NATURAL, PORT = click.IntRange(1), click.IntRange(0), click.IntRange(0, 65535)


def flag(
    section: Section,
    name: str,
    default: object,
    what: str,
    *,
    also: str | None = None,
    type: object = None,
    metavar: str | None = None,
    is_flag: bool | None = None,
    multiple: bool = False,
) -> Decorator:
    """An option whose default is shown in the help, and says what type it has if `type` doesn't. What isn't explained
    here is click's."""
    is_boolean = isinstance(default, bool) and not is_flag
    return click.option(
        f"--{name}",
        *([also] if also else []),
        cls=Flag,
        section=section,
        default=default,
        show_default=default != "",
        help=f"{what.removesuffix('.')}. Repeatable." if multiple else what,
        type=bool if is_boolean else type,
        metavar="[BOOLEAN]" if is_boolean else metavar,
        is_flag=is_flag,
        multiple=multiple,
    )


def with_flags(flags: Sequence[Decorator]) -> Decorator:
    """Gives a command all of these, in this order."""
    return lambda command: reduce(lambda given, one: one(given), reversed(flags), command)


@contextmanager
def usage_errors(flag: str = "") -> Iterator[None]:
    """Whatever raises ValueError here is a usage error, of `flag` if there is one."""
    try:
        yield
    except ValueError as error:
        raise click.UsageError(f"{flag}: {error}" if flag else str(error)) from None


def path_flag(section: Section, name: str, what: str) -> Decorator:
    """An option that names a file, by default none."""
    return flag(section, name, None, what, type=click.Path(path_type=Path))


_BOUNDS: Mapping[Section, Sequence[tuple[str, str, int, int, str]]] = {
    Section.MODELS: [("models", "max-models", 1, _MANY, "Models that serve or load at the same time.")],
    Section.REQUESTS: [
        ("message_bytes", "grpc-max-message-bytes", 1, LARGEST_MESSAGE_BYTES, "Largest request, in bytes."),
        ("request_elements", "max-request-elements", 1, _MANY, "Elements of BYTES (text) in a request."),
        ("metadata_bytes", "grpc-max-metadata-bytes", 1024, _MANY, "Largest headers of a call, in bytes."),
        ("rpcs", "grpc-max-concurrent-rpcs", 1, _MANY, "Calls in progress, except streams."),
        ("streams", "grpc-max-streams", 1, _MANY, "Open streams of each streaming RPC."),
        ("queued_requests", "max-queued-requests", 1, _MANY, "Requests in all queues."),
        ("queued_bytes", "max-queued-bytes", 1, 2**60, "Bytes of the tensors of these requests."),
    ],
    Section.CONNECTIONS: [
        ("connections", "grpc-max-connections", 1, _MANY,
         "Open connections; never more than file descriptors suffice for."),
        ("connection_calls", "grpc-max-connection-calls", 1, _MANY, "Open calls per connection; others wait."),
        ("max_idle_ms", "grpc-max-connection-idle", 0, _MANY,
         "ms without a call until a connection is closed; 0: never."),
        ("max_age_ms", "grpc-max-connection-age", 0, _MANY, "ms until a connection is told to go; 0: never."),
        ("max_age_grace_ms", "grpc-max-connection-age-grace", 0, _MANY,
         "ms after that for its calls to end; 0: no limit."),
        ("keepalive_time_ms", "grpc-keepalive-time", 1, _MANY, "ms of silence before the server pings."),
        ("keepalive_timeout_ms", "grpc-keepalive-timeout", 1, _MANY, "ms that clients have to answer a ping."),
        ("keepalive_permit_without_calls", "grpc-keepalive-permit-without-calls", 0, 1,
         "Whether to ping, and let clients ping, while no call is in progress."),
        ("min_recv_ping_interval_without_data_ms", "grpc-http2-min-recv-ping-interval-without-data", 0, _MANY,
         "ms that clients must leave between pings during calls; without calls 2 h, unless permitted."),
        ("max_ping_strikes", "grpc-http2-max-ping-strikes", 0, _MANY,
         "Pings that may come too early; the next one closes the connection. 0: any number."),
        ("max_pings_without_data", "grpc-http2-max-pings-without-data", 0, _MANY,
         "No effect: gRPC's servers send any number."),
    ],
}  # fmt: skip
"""Flags with bounds, by section: the field of `Limits` or `Connections`, the flag, the least, the most, what it is."""
_DEFAULTS = asdict(Limits()) | asdict(Connections())


def _bounds(section: Section) -> Iterator[Decorator]:
    for field, name, low, high, what in _BOUNDS[section]:
        yield flag(section, name, _DEFAULTS[field], what, type=click.IntRange(low, high))


_access, _access_file = partial(flag, Section.ACCESS), partial(path_flag, Section.ACCESS)

NETWORK_FLAGS: tuple[Decorator, ...] = (
    *_bounds(Section.MODELS),
    _access("grpc-use-ssl", False, "Whether to speak TLS."),
    _access("grpc-use-ssl-mutual", False, "Speak TLS, and require a certificate from clients."),
    _access_file("grpc-server-cert", "The server's certificate, PEM; reread when it changes."),
    _access_file("grpc-server-key", "Its key, PEM, without a password."),
    _access_file("grpc-root-cert", "CAs that sign clients' certificates, PEM."),
    _access_file("grpc-token-file", "Hashes of callers' tokens, one NAME:SHA256 per line; see `paceline token`."),
    _access(
        "grpc-restricted-protocol",
        (),
        "RPCs only for callers with the header triton-grpc-protocol-KEY: VALUE.",
        multiple=True,
        metavar="GROUP,GROUP:KEY=VALUE",
    ),
    *_bounds(Section.REQUESTS),
    *_bounds(Section.CONNECTIONS),
)


def network_settings(given: Given) -> Given:
    """Fields of Settings, from the flags' values. Raises click.UsageError."""
    with usage_errors("--grpc-restricted-protocol"):
        restrictions = parse_restrictions(given["grpc_restricted_protocol"])
    bounds = (bound for of_section in _BOUNDS.values() for bound in of_section)
    values = {field: given[name.replace("-", "_")] for field, name, *_ in bounds}
    return {
        "tls": _tls(given),
        "token_file": given["grpc_token_file"],
        "restrictions": restrictions,
        "limits": Limits(**{one.name: values[one.name] for one in fields(Limits)}),
        "connections": Connections(**{one.name: values[one.name] for one in fields(Connections)}),
    }


def _tls(given: Given) -> TlsFiles | None:
    """The TLS files; None if TLS is off. Triton accepts certificates without `--grpc-use-ssl` and then speaks plain
    text; here they are refused, to avoid that surprise."""
    mutual = given["grpc_use_ssl_mutual"]
    certificate, key, roots = given["grpc_server_cert"], given["grpc_server_key"], given["grpc_root_cert"]
    if not (given["grpc_use_ssl"] or mutual):
        if certificate or key or roots:
            raise click.UsageError("certificates need --grpc-use-ssl true, or --grpc-use-ssl-mutual true")
        return None
    if not certificate or not key:
        raise click.UsageError("TLS needs --grpc-server-cert and --grpc-server-key")
    if mutual and not roots:
        raise click.UsageError("--grpc-use-ssl-mutual needs --grpc-root-cert")
    return TlsFiles(certificate, key, roots, mutual)
