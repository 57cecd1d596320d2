"""The settings of the server that this one stands in front of, and the flags that give them.

Lives here: these flags, their checks, the settings made of them. Must not: call that server.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from paceline.server.addresses import socket_path
from paceline.server.flags import POSITIVE_AMOUNT, TEXT, Decorator, Given, Section, Serve, Value, flag, path_flag

if TYPE_CHECKING:
    from paceline.clients.connection import Tls

TRACING_HEADERS = (
    "traceparent", "tracestate", "x-request-id",
    "b3", "x-b3-traceid", "x-b3-spanid", "x-b3-parentspanid", "x-b3-sampled", "x-b3-flags",
)  # fmt: skip
"""W3C's, Zipkin's, and the one that proxies such as Envoy give each request."""

# All that gRPC allows in the name of a header, in either case; one with another name never arrives.
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_PORT = re.compile(r"[0-9]{1,5}")


@dataclass(frozen=True, slots=True)
class UpstreamSettings:
    """The server at `target`, HOST:PORT or unix:PATH. `models` are those to serve, none: all that it lists; requests
    for `unbatched` ones are sent one by one. Up to `batches` are in flight at a time for a model that is batched,
    `calls` for one that isn't, over `connections`; none takes longer than `timeout_secs`. Every `health_secs` the
    server is polled. Requests take `headers` along, which keep them apart, and `tracing_headers`, which don't. Without
    `tls`, connections are plain text; every call has the token in `token_file`, if there is one."""

    target: str
    models: tuple[str, ...] = ()
    unbatched: tuple[str, ...] = ()
    batches: int = 2
    calls: int = 32
    connections: int = 1
    timeout_secs: float = 300.0
    health_secs: float = 1.0
    headers: tuple[str, ...] = ("authorization",)
    tracing_headers: tuple[str, ...] = TRACING_HEADERS
    tls: Tls | None = None
    token_file: Path | None = None


_flag, _file = partial(flag, Section.UPSTREAM), partial(path_flag, Section.UPSTREAM)


def _several(name: str, what: str, default: tuple[str, ...] = (), type: object = None) -> Decorator:
    return _flag(name, default, what, metavar="NAME", type=type, multiple=True)


_DEFAULTS = UpstreamSettings("")
_FLAGS = (
    _flag(
        "upstream", None, "Batch requests for this server instead of serving models.", metavar="HOST:PORT", type=TEXT
    ),
    _several("upstream-model", "A model of the upstream to serve; by default all that it lists as ready.", type=TEXT),
    _several("upstream-unbatched", "A model whose requests are passed on one by one.", type=TEXT),
    _flag("upstream-batches", _DEFAULTS.batches, "Batches of a model in flight.", type=click.IntRange(1, 1024)),
    _flag("upstream-calls", _DEFAULTS.calls, "Requests in flight without batching.", type=click.IntRange(1, 1024)),
    _flag("upstream-connections", _DEFAULTS.connections, "Connections to the upstream.", type=click.IntRange(1, 64)),
    _flag(
        "upstream-timeout-secs", _DEFAULTS.timeout_secs, "Longest time of a call to the upstream.", type=POSITIVE_AMOUNT
    ),
    _flag(
        "upstream-health-secs",
        _DEFAULTS.health_secs,
        "How often to poll the upstream for its models.",
        type=POSITIVE_AMOUNT,
    ),
    _several(
        "upstream-header",
        "A header to pass on; requests that differ in it share no batch. Only '': none. By default authorization, "
        "or none with --grpc-token-file or --upstream-token-file.",
    ),
    _several(
        "upstream-trace-header",
        "A header to pass on if all requests of a batch have the same. Only '': none.",
        _DEFAULTS.tracing_headers,
    ),
    _flag("upstream-use-ssl", False, "Whether to speak TLS to the upstream."),
    _file("upstream-root-cert", "CAs that sign the upstream's certificate, PEM; by default gRPC's."),
    _file("upstream-client-cert", "Certificate to present to the upstream, PEM."),
    _file("upstream-client-key", "Key of that certificate, PEM, without a password."),
    _flag(
        "upstream-server-name",
        None,
        "Name in the upstream's certificate; by default the host.",
        metavar="NAME",
        type=TEXT,
    ),
    _file("upstream-token-file", "File with only the token to send to the upstream."),
)


def upstream_flags(command: Serve) -> Serve:
    """Add the flags to `command`; it gets `upstream`, UpstreamSettings or None."""

    @wraps(command)
    def serve(**given: Value) -> None:
        own = {name: given.pop(name) for name in [key for key in given if key.startswith("upstream")]}
        command(upstream=_settings(own, has_tokens=given["grpc_token_file"] is not None), **given)

    flagged: Serve = serve
    for one in reversed(_FLAGS):
        flagged = one(flagged)
    return flagged


def _settings(given: Given, *, has_tokens: bool) -> UpstreamSettings | None:
    if given["upstream"] is None:
        # Otherwise models would be served that nobody has asked for, or without what was meant to protect them.
        source_of = click.get_current_context().get_parameter_source
        for name in given:
            if source_of(name) in (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT):
                raise click.UsageError(f"--{name.replace('_', '-')} needs --upstream")
        return None
    same = ("unbatched", "batches", "calls", "connections", "timeout_secs", "health_secs", "token_file")
    settings = UpstreamSettings(
        target=given["upstream"],
        models=given["upstream_model"],
        headers=_headers(given["upstream_header"], has_tokens, given["upstream_token_file"]),
        tracing_headers=_names("upstream-trace-header", given["upstream_trace_header"]),
        tls=_tls(given),
        **{name: given[f"upstream_{name}"] for name in same},
    )
    _check_target(settings.target)
    return settings


def _check_target(target: str) -> None:
    """Raises click.UsageError unless it is HOST:PORT or unix:PATH. gRPC would take 80000 for 14464, `::1:80` for an
    address without a port, and `http://…` for a name."""
    if socket_path(target):
        return
    host, _, port = target.rpartition(":")
    bare = ":" in host and not host.startswith(("[", "dns:", "ipv4:", "ipv6:"))
    if not host or bare or not (_PORT.fullmatch(port) and 0 < int(port) < 2**16):
        hint = ", an IPv6 address in brackets" if bare and "/" not in host else ""
        raise click.UsageError(f"--upstream: expected HOST:PORT{hint}, or unix:PATH, got '{target}'")


def _headers(given: tuple[str, ...], has_tokens: bool, token_file: Path | None) -> tuple[str, ...]:
    """The headers to pass on. A token that is valid here is passed on to another server only if a flag says so."""
    if not given:
        return () if has_tokens or token_file is not None else _DEFAULTS.headers
    names = _names("upstream-header", given)
    if token_file is not None and "authorization" in map(str.lower, names):
        raise click.UsageError("--upstream-header authorization and --upstream-token-file: expected one, got both")
    return names


def _tls(given: Given) -> Tls | None:
    from paceline.clients.connection import Tls  # fronts read settings too, and do without it

    used = given["upstream_use_ssl"]
    ca, name = given["upstream_root_cert"], given["upstream_server_name"]
    certificate, key = given["upstream_client_cert"], given["upstream_client_key"]
    if not used and (ca or name or certificate or key):
        raise click.UsageError("the upstream's certificates need --upstream-use-ssl true")
    if (certificate is None) != (key is None):
        raise click.UsageError("--upstream-client-cert and --upstream-client-key: expected both, got one")
    return Tls(ca, certificate, key, name) if used else None


def _names(flag: str, given: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(name for name in given if name)
    for name in names:
        if not _NAME.fullmatch(name):
            raise click.UsageError(f"--{flag}: expected letters, digits, '_', '.' and '-', got '{name}'")
    return names
