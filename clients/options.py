"""What commands share: the options for TLS and tokens, errors in one line, text that is safe to print.

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
from tempfile import TemporaryFile
from typing import Any, Final, TextIO

import click

from paceline.clients.connection import Tls, authorization, checked_target, read_token
from paceline.clients.errors import ClientError

_HTTP_MARKS = ("Expected SETTINGS frame as the first frame", "Trying to connect an http1.x server")
"""What gRPC says of an answer in HTTP/1."""
_TOKEN_VARIABLE = "PACELINE_CLIENT_TOKEN"


def printable(text: str) -> str:
    """`text` with a question mark for each character that isn't printable: what a server says must not move the cursor,
    change colours or begin lines."""
    return text if text.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in text)


def one_line(text: str) -> str:
    """`text` without breaks, safe to print."""
    return printable(" ".join(text.split()))


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """How to connect to a server: without `tls` in plain text, without `token` anonymously."""

    tls: Tls | None = None
    token: str | None = field(default=None, repr=False)


class Unusable(click.ClickException):
    """What the user gave can't be used."""

    exit_code = 2


class Number(click.FloatRange):
    """A range that refuses NaN, which any other `FloatRange` accepts."""

    what = "a number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            raise Unusable(f"{param.opts[0] if param else 'option'}: expected {self.what}, got nan")
        return number


class Seconds(Number):
    what = "a number of seconds"


RATE: Final = Number(1e-6, 1e6)
"""Requests a second. Times between those of lower rates are beyond those of clocks."""
CLIENTS: Final = click.IntRange(1, 100_000)
"""Of a closed loop."""
LONGEST_S: Final = 3_600.0
"""Of what somebody waits for: a look, or a trial."""


def server_option(**more: Any) -> Callable[[Any], Any]:
    """The option with the server's address."""

    def checked(context: click.Context, parameter: click.Parameter, server: str) -> str:
        try:
            return checked_target("--server", server, "--tls")
        except ValueError as error:
            raise Unusable(one_line(str(error))) from None

    return click.option(
        "--server",
        callback=checked,
        default="127.0.0.1:8001",
        show_default=True,
        metavar="HOST[:PORT]",
        help="Server address, by default with port 8001; or unix:PATH.",
        **more,
    )


def timeout_option(default_s: float, what: str) -> Callable[[Any], Any]:
    """The option of seconds to wait."""
    seconds = Seconds(min=0, min_open=True)
    return click.option(
        "--timeout", "timeout_s", type=seconds, default=default_s, show_default=True, metavar="SECONDS", help=what
    )


def check_writable(option: str, path: Path | None) -> None:
    """Before anything is computed, and without a trace. If writing fails after all, that is reported later. Raises
    Unusable."""
    try:
        if path is None or path.is_fifo():  # whose reader would take an end for that of the file
            return
        if path.exists():
            path.open("ab").close()
        else:  # permissions don't tell: /proc takes no files
            TemporaryFile(dir=path.parent).close()
    except OSError:
        expected = "expected a file that can be written, in an existing folder"
        raise Unusable(one_line(f"{option} {path}: {expected}")) from None


def write_file(option: str, path: Path, text: str) -> None:
    """Raises Unusable."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Unusable(one_line(f"{option} {path} can't be written: {error.strerror}")) from error


@contextmanager
def terminal_line(out: TextIO | None) -> Iterator[Callable[[str], None]]:
    """Yields what shows a text on the terminal `out`, in a line that is gone at the end. If `out` is no terminal,
    nothing is shown."""

    def write(text: str) -> None:
        if out is not None and out.isatty():
            out.write(f"\r{text}\x1b[K")
            out.flush()

    try:
        yield write
    finally:
        write("")


@contextmanager
def one_line_errors(
    access: ConnectionOptions,
    failure: type[click.ClickException] = click.ClickException,
    hints: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """Ends the command with one line for whatever clients raise, as a `failure`, and for what can't be written or held
    in memory. `hints` are what to do, by words of errors."""
    try:
        yield
    except ClientError as error:
        hint = "".join(f" ({what})" for words, what in (hints or {}).items() if words in str(error))
        raise failure(one_line(f"{error}{hint or _hint(str(error), access)}")) from error
    except BrokenPipeError:
        raise  # the reader has read enough; click ends without a message
    except click.FileError as error:  # of a file that is opened when it is needed
        raise Unusable(one_line(error.format_message())) from error
    except UnicodeDecodeError as error:
        raise Unusable(f"expected a file of text in UTF-8: {error}") from error
    except (ValueError, OSError, MemoryError) as error:
        raise Unusable(one_line(str(error) or "out of memory")) from error


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


def access_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command` the options; it gets `access`. Raises Unusable for values that can't be used."""

    @wraps(command)
    def run(
        *,
        tls: bool,
        tls_ca: Path | None,
        tls_cert: Path | None,
        tls_key: Path | None,
        tls_server_name: str | None,
        token_file: Path | None,
        **given: Any,
    ) -> None:
        try:
            if (tls_cert is None) != (tls_key is None):
                raise ValueError("--tls-cert and --tls-key: expected both, got one")
            settings = None
            if tls or tls_ca or tls_cert or tls_server_name:
                settings = Tls(tls_ca, tls_cert, tls_key, tls_server_name)
                settings.context()
            access = ConnectionOptions(settings, _token(token_file))
        except (ValueError, OSError) as error:
            raise Unusable(one_line(str(error))) from error
        command(access=access, **given)

    for option in reversed(_OPTIONS):
        run = option(run)
    return run


def _token(file: Path | None) -> str | None:
    """Raises ValueError."""
    if file is not None:
        try:
            return read_token(file)
        except OSError as error:
            raise ValueError(f"--token-file {file}: {error.strerror}") from None
    token = os.environ.get(_TOKEN_VARIABLE) or None
    try:
        if token is not None:
            authorization(token)
    except ValueError as error:
        raise ValueError(f"{_TOKEN_VARIABLE}: {error}") from None
    return token
