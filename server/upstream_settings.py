"""The settings of the server that this one stands in front of, and the flags that give them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any

import click

__all__ = ["TRACING_HEADERS", "UpstreamSettings", "upstream_flags"]

TRACING_HEADERS = (
    "traceparent", "tracestate", "x-request-id",
    "b3", "x-b3-traceid", "x-b3-spanid", "x-b3-parentspanid", "x-b3-sampled", "x-b3-flags",
)  # fmt: skip
"""W3C's, Zipkin's, and what proxies such as Envoy give each request of their own."""


@dataclass(frozen=True, slots=True)
class UpstreamSettings:
    """The server at `target`, HOST:PORT. `models` are those to serve, none: all that it tells of; `unbatched` those of
    which each request travels alone. `batches` are under way at the same time for a model that batches, `calls` for
    one that doesn't, over `connections`; none takes longer than `timeout_secs`. Every `health_secs` it is asked how it
    is. Requests take `headers` along, which keep them apart, and `tracing_headers`, which don't."""

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


def _flag(name: str, default: Any, what: str, **more: Any) -> Callable[[Any], Any]:
    shown = default not in (None, ())
    return click.option(f"--{name}", default=default, show_default=shown, show_envvar=True, help=what, **more)


_SECONDS = click.FloatRange(0, 1_000_000, min_open=True)
_DEFAULTS = UpstreamSettings("")
_FLAGS = (
    _flag("upstream", None, "Batch for the server there instead of serving models.", metavar="HOST:PORT"),
    _flag("upstream-model", (), "A model of its; by default all that it tells of.", multiple=True, metavar="NAME"),
    _flag("upstream-unbatched", (), "A model to pass requests on one by one for.", multiple=True, metavar="NAME"),
    _flag("upstream-batches", _DEFAULTS.batches, "Batches of a model under way.", type=click.IntRange(1, 1024)),
    _flag("upstream-calls", _DEFAULTS.calls, "The same where nothing is batched.", type=click.IntRange(1, 1024)),
    _flag("upstream-connections", _DEFAULTS.connections, "Connections to it.", type=click.IntRange(1, 64)),
    _flag("upstream-timeout-secs", _DEFAULTS.timeout_secs, "Longest time that it may take.", type=_SECONDS),
    _flag("upstream-health-secs", _DEFAULTS.health_secs, "How often to ask how it is.", type=_SECONDS),
    _flag(
        "upstream-header",
        _DEFAULTS.headers,
        "A header to pass on; requests that differ in it share no batch. '' alone: none.",
        multiple=True,
        metavar="NAME",
    ),
    _flag(
        "upstream-trace-header",
        _DEFAULTS.tracing_headers,
        "A header to pass on where all of a batch have the same. '' alone: none.",
        multiple=True,
        metavar="NAME",
    ),
)


def upstream_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command` the flags; it gets `upstream`, UpstreamSettings or None."""

    @wraps(command)
    def serve(**given: Any) -> None:
        own = {name: given.pop(name) for name in [key for key in given if key.startswith("upstream")]}
        command(upstream=_settings(own), **given)

    for flag in reversed(_FLAGS):
        serve = flag(serve)
    return serve


def _settings(given: dict[str, Any]) -> UpstreamSettings | None:
    target = given.pop("upstream")
    given["upstream_models"] = given.pop("upstream_model")
    given["upstream_headers"] = _names(given.pop("upstream_header"))
    given["upstream_tracing_headers"] = _names(given.pop("upstream_trace_header"))
    if target is None:
        return None
    host, _, port = target.rpartition(":")
    if not host or not port.isdecimal():
        raise click.UsageError(f"--upstream: expected HOST:PORT, got '{target}'")
    for name in ("upstream_timeout_secs", "upstream_health_secs"):
        if math.isnan(given[name]):  # within every range
            raise click.UsageError(f"--{name.replace('_', '-')}: expected a number, got nan")
    known = {field.name for field in fields(UpstreamSettings)}
    values = {name.removeprefix("upstream_"): value for name, value in given.items()}
    assert values.keys() <= known
    return UpstreamSettings(target, **values)


def _names(given: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in given if name)
