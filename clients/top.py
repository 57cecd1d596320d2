"""The command `top`: what a running server does, in a terminal or as a page. `paceline` mounts it.

Lives here: options, asking for metrics, the loop, the terminal. Must not: what metrics mean (snapshots.py), or what is
shown (top_table.py, status_page.py). With `--once`, the exit code is 1 when the server doesn't answer, with `--html`
when it doesn't at first; else the error is shown and the server asked again.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TextIO

import click

from paceline.clients.connection import authorization, with_port
from paceline.clients.errors import ClientError
from paceline.clients.load.recording import recorded_line
from paceline.clients.options import (
    LONGEST_S,
    ConnectionOptions,
    Seconds,
    Unusable,
    access_options,
    check_writable,
    one_line_errors,
    printable,
    write_file,
)
from paceline.clients.snapshots import Interval, Snapshot, between, ended, parse
from paceline.clients.status_page import status_page
from paceline.clients.top_table import table

_PORT = 8002
_TIMEOUT_S = 5.0
_MAX_BYTES = 64 * 2**20
# Terminal sequences: to the alternate screen without cursor, and back; to the corner; erase to the end of line and
# screen.
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _END_LINE, _END_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


@click.command()
@click.option(
    "--metrics",
    default="127.0.0.1:8002",
    show_default=True,
    metavar="HOST[:PORT]",
    help="Address of the server's metrics, by default with port 8002; or a whole URL.",
)
@click.option(
    "--interval",
    "interval_s",
    type=Seconds(0.1, LONGEST_S),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="How often to refresh.",
)
@click.option("--once", is_flag=True, help="Print one table, of one interval, and exit.")
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write a page with plots over time, after --count intervals or Ctrl-C, and exit.",
)
@click.option(
    "--record",
    type=click.File("w", encoding="utf-8", lazy=True),
    metavar="FILE",
    help="Write how many requests came in each interval, as `paceline load` and `paceline tune` take it (--arrivals).",
)
@click.option("--count", type=click.IntRange(1, 1000), metavar="N", help="Intervals on that page, by default 30.")
@access_options
def top(
    metrics: str,
    interval_s: float,
    once: bool,
    html: Path | None,
    count: int | None,
    record: TextIO | None,
    access: ConnectionOptions,
) -> None:
    """Show requests, batches, waits and latencies of each model of a running server, until Ctrl-C.

    Times are the 50th and 99th percentile of the last interval; COMPUTE is a mean. A server's own metrics need neither
    TLS nor a token; a proxy in front of them may.
    """
    if once and html is not None:
        raise click.UsageError("--once can't be combined with --html: --count says how many intervals the page has")
    if count is not None and html is None:
        raise click.UsageError("--count needs --html FILE")
    check_writable("--html", html)
    if metrics.startswith("unix:"):
        raise Unusable(f"--metrics: expected HOST:PORT, as metrics are never on a Unix socket, got '{metrics}'")
    whole = f"{'https' if access.tls else 'http'}://{with_port(metrics, _PORT)}/metrics"
    url = metrics if "://" in metrics else whole
    if not url.startswith(("http://", "https://")):
        raise click.UsageError(f"--metrics: expected HOST:PORT or the URL of an HTTP server, got '{metrics}'")
    if access.tls and not url.startswith("https://"):
        raise Unusable(f"--metrics: expected an https URL, as --tls asks for, got '{metrics}'")
    if sys.stdout is None:
        raise Unusable("standard output is closed, so nothing can be shown")
    with one_line_errors(access):
        handlers = [] if access.tls is None else [urllib.request.HTTPSHandler(context=access.tls.context())]
        scrape = partial(_scrape, urllib.request.build_opener(*handlers), url, access.token)
        if once:
            before = scrape()
            time.sleep(interval_s)
            now = scrape()
            _record(record, before, now, before.taken_s)
            click.echo(table(between(before, now)))
            return
        if html is not None:
            before = scrape()
            intervals = _intervals(scrape, before, interval_s, count or 30, record)
            write_file("--html", html, status_page(intervals, url, time.strftime("%Y-%m-%d %H:%M:%S %Z")))
            return
        with contextlib.suppress(KeyboardInterrupt), _screen(sys.stdout):
            _watch(scrape, url, interval_s, sys.stdout, record)


class _ScrapeError(ClientError):
    """No metrics could be read; the message says why."""


def _scrape(opener: urllib.request.OpenerDirector, url: str, token: str | None) -> Snapshot:
    """The metrics at `url` now. Raises _ScrapeError."""
    request = urllib.request.Request(url)
    if token is not None:
        # If the server redirects elsewhere, the token must not go there.
        request.add_unredirected_header(*authorization(token))
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as response:
            text = response.read(_MAX_BYTES).decode()
        return parse(text, time.monotonic())
    except urllib.error.HTTPError as error:
        with error:
            raise _ScrapeError(f"no metrics at {url}: HTTP status {error.code}") from None
    except urllib.error.URLError as error:
        raise _ScrapeError(f"no answer from {url}: {error.reason}") from None
    except (OSError, http.client.HTTPException) as error:
        what = printable(str(error)) or type(error).__name__
        if isinstance(error, http.client.BadStatusLine) and str(error).startswith("\0"):  # as HTTP/2 does
            what = "this looks like a gRPC port; metrics are usually on 8002"
        raise _ScrapeError(f"no answer from {url}: {what}") from None
    except ValueError as error:
        raise _ScrapeError(f"no metrics at {url}: {printable(str(error))}") from None


def _intervals(
    scrape: Callable[[], Snapshot], before: Snapshot, interval_s: float, count: int, record: TextIO | None
) -> list[Interval]:
    """Up to `count`, fewer after Ctrl-C. An interval goes on while the server doesn't answer."""
    found: list[Interval] = []
    first_s = next_s = before.taken_s
    with contextlib.suppress(KeyboardInterrupt):
        for _ in range(count):
            # What wasn't looked at in time isn't made up for: intervals would be too short to say anything.
            next_s = max(next_s + interval_s, time.monotonic())
            time.sleep(max(0.0, next_s - time.monotonic()))
            with contextlib.suppress(_ScrapeError):
                now = scrape()
                _record(record, before, now, first_s)
                found.append(between(before, now))
                before = now
    return found


@contextlib.contextmanager
def _screen(out: TextIO) -> Iterator[None]:
    """The terminal's alternate screen, if `out` is a terminal. The old screen comes back at the end, also after
    SIGTERM, and while the process is stopped by Ctrl-Z."""
    if not out.isatty():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        # Not through `out`, which this handler may have interrupted in the middle of a write.
        os.write(out.fileno(), _LEAVE.encode())
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
        # The process continues here when it is resumed.
        signal.signal(number, stop)
        os.write(out.fileno(), _ENTER.encode())

    before = signal.signal(signal.SIGTSTP, stop)
    out.write(_ENTER)
    try:
        yield
    finally:
        out.write(_LEAVE)
        out.flush()
        signal.signal(signal.SIGTSTP, before)


def _record(file: TextIO | None, before: Snapshot, now: Snapshot, first_s: float) -> None:
    """Requests count when they have ended: a server's counters don't tell when they came."""
    if file is not None:
        for name, requests in ended(before, now).items():
            at_s, seconds = before.taken_s - first_s, now.taken_s - before.taken_s
            file.write(recorded_line(name, at_s, seconds, requests) + "\n")
        file.flush()


def _watch(scrape: Callable[[], Snapshot], url: str, interval_s: float, out: TextIO, record: TextIO | None) -> None:
    """Look again and again. Where `out` is no terminal, tables follow each other."""
    before: Snapshot | None = None
    first_s: float | None = None
    while True:
        began_s = time.monotonic()
        try:
            now = scrape()
            first_s = now.taken_s if first_s is None else first_s
            if before is not None:
                _record(record, before, now, first_s)
            what, before = table(between(before, now)), now
        except _ScrapeError as error:
            what = f"{error}; trying again every {interval_s:g} s"
        text = f"{time.strftime('%H:%M:%S')}  {url}\n{what}"
        if out.isatty():
            columns, lines = shutil.get_terminal_size()
            shown = [line[:columns] for line in text.splitlines()[: lines - 1]]
            text = _HOME + "".join(f"{line}{_END_LINE}\n" for line in shown) + _END_SCREEN
        else:
            text += "\n\n"
        out.write(text)
        out.flush()
        time.sleep(max(0.0, began_s + interval_s - time.monotonic()))
