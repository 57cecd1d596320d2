"""What commands share: the options for TLS and tokens, and errors in one line.

Lives here: these options, their environment variables, exit codes. Must not: call anything. The rule: no option takes a
token itself, because all users of a machine can read the arguments of its processes. Exit code 1 when the server or the
connection fails, 2 when what the user gave can't be used.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import click

from paceline.clients.errors import ClientError
from paceline.clients.printable import printable
from paceline.clients.targets import checked_target
from paceline.clients.tls import Tls
from paceline.clients.tokens import authorization, read_token

__all__ = ["ConnectionOptions", "Seconds", "Server", "Unusable", "access_options", "one_line_errors"]

_HTTP_MARKS = ("Expected SETTINGS frame as the first frame", "Trying to connect an http1.x server")
"""What gRPC says of an answer in HTTP/1."""
_TOKEN_VARIABLE = "PACELINE_CLIENT_TOKEN"


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """How to connect to a server: without `tls` in plain text, without `token` anonymously."""

    tls: Tls | None = None
    token: str | None = field(default=None, repr=False)


class Unusable(click.ClickException):
    """What the user gave can't be used."""

    exit_code = 2


class Seconds(click.FloatRange):
    """A range of seconds that refuses NaN, which any other `FloatRange` accepts."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            raise Unusable(f"{param.opts[0] if param else 'time'}: expected a number of seconds, got nan")
        return number


class Server(click.types.StringParamType):
    """Where a server is, with a port."""

    name = "server"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return checked_target(super().convert(value, param, ctx), "--tls")
        except ValueError as error:
            raise Unusable(_one_line(f"--server: {error}")) from None


@contextmanager
def one_line_errors(access: ConnectionOptions) -> Iterator[None]:
    """Ends the command with one line for whatever clients raise, and for what can't be written or held in memory."""
    try:
        yield
    except ClientError as error:
        raise click.ClickException(_one_line(f"{error}{_hint(str(error), access)}")) from error
    except BrokenPipeError:
        raise  # the reader has read enough; click ends without a message
    except (ValueError, OSError, MemoryError) as error:
        raise Unusable(_one_line(str(error) or "out of memory")) from error


def access_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command` the options; it gets `access`. Raises Unusable for values that can't be used."""

    @wraps(command)
    def run(**given: Any) -> None:
        own = {name: given.pop(name) for name in [*(key for key in given if key.startswith("tls")), "token_file"]}
        try:
            access = _access(own, os.environ)
        except (ValueError, OSError) as error:
            raise Unusable(_one_line(str(error))) from error
        command(access=access, **given)

    for option in reversed(_OPTIONS):
        run = option(run)
    return run


def _option(name: str, what: str, **more: Any) -> Callable[[Any], Any]:
    variable = f"PACELINE_CLIENT_{name.upper().replace('-', '_')}"
    return click.option(f"--{name}", envvar=variable, show_envvar=True, help=what, **more)


_FILE = {"type": click.Path(path_type=Path), "metavar": "FILE"}
_OPTIONS = (
    _option("tls", "Speak TLS; implied by the --tls-... options.", is_flag=True),
    _option("tls-ca", "CAs that sign the server's certificate, PEM; by default public ones.", **_FILE),
    _option("tls-cert", "Certificate to present to the server, PEM.", **_FILE),
    _option("tls-key", "Key of that certificate, PEM, without a password.", **_FILE),
    _option("tls-server-name", "Name in the server's certificate; by default the host.", metavar="NAME"),
    _option(
        "token-file",
        f"File with only the token to send; by default the token in ${_TOKEN_VARIABLE}. "
        "No option takes the token itself: all users of a machine can read arguments.",
        **_FILE,
    ),
)


def _access(given: Mapping[str, Any], environment: Mapping[str, str]) -> ConnectionOptions:
    """Raises ValueError and OSError."""
    ca, certificate, key = given["tls_ca"], given["tls_cert"], given["tls_key"]
    name = given["tls_server_name"]
    if (certificate is None) != (key is None):
        raise ValueError("--tls-cert and --tls-key: expected both, got one")
    tls = Tls(ca, certificate, key, name) if given["tls"] or ca or certificate or name else None
    if tls is not None:
        tls.context()
    return ConnectionOptions(tls, _token(given["token_file"], environment))


def _token(file: Path | None, environment: Mapping[str, str]) -> str | None:
    if file is not None:
        try:
            return read_token(file)
        except OSError as error:
            raise ValueError(f"--token-file {file}: {error.strerror}") from None
    token = environment.get(_TOKEN_VARIABLE) or None
    if token is not None:
        try:
            authorization(token)
        except ValueError as error:
            raise ValueError(f"{_TOKEN_VARIABLE}: {error}") from None
    return token


def _hint(said: str, access: ConnectionOptions) -> str:
    """The likely cause, where gRPC's text says little."""
    if any(mark in said for mark in _HTTP_MARKS):
        return " (this looks like an HTTP port; gRPC is usually on 8001)"
    if access.tls is not None and "WRONG_VERSION_NUMBER" in said:
        return " (the server doesn't speak TLS)"
    if "failed to connect" not in said or "Socket closed" not in said:
        return ""
    if access.tls is None:
        return " (does the server speak TLS? --tls, --tls-ca)"
    # With TLS 1.3, the client has finished its handshake before the server looks at its certificate.
    return " (does the server require another client certificate? --tls-cert, --tls-key)"


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))
