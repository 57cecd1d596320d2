"""A real browser, without a screen: Debian's Chromium, as it is installed, or as `make witness-browser` unpacked it.

Lives here: finding and starting it. Must not: assertions about pages.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from tests.harness import REPO

__all__ = ["Seen", "browser", "look", "picture"]


@dataclass(frozen=True, slots=True)
class Seen:
    """A page after it was loaded: its document as text, what was written to the console, and of which hosts, with their
    ports, it asked something."""

    document: str
    console: Sequence[str]
    hosts: frozenset[str]


def browser() -> str | None:
    """The program; None if there is none."""
    unpacked = REPO / ".witness" / "browser" / "chromium"
    return str(unpacked) if unpacked.exists() else shutil.which("chromium")


def look(url: str) -> Seen:
    """Open the page."""
    with tempfile.TemporaryDirectory() as folder:
        net_log = Path(folder) / "net.json"
        done = _run(url, "--dump-dom", f"--log-net-log={net_log}", "--enable-logging=stderr")
        events = json.loads(net_log.read_text(encoding="utf-8"))["events"]
    page = urlsplit(url)
    # Chromium's own requests belong to no page.
    of_page = [
        urlsplit(params["url"])
        for event in events
        if (params := event.get("params", {}))
        .get("network_isolation_key", "")
        .startswith(f"{page.scheme}://{page.hostname} ")
    ]
    hosts = frozenset(one.netloc for one in of_page)
    return Seen(done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line], hosts)


def picture(url: str, file: Path, width: int, height: int, *more: str) -> None:
    """Write what the page looks like as PNG."""
    _run(url, f"--screenshot={file.absolute()}", f"--window-size={width},{height}", "--hide-scrollbars", *more)


def _run(url: str, *more: str) -> subprocess.CompletedProcess[str]:
    program = browser()
    assert program is not None, "no Chromium: make witness-browser"
    with tempfile.TemporaryDirectory() as profile:
        command = [
            program,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            f"--user-data-dir={profile}",
            *more,
            url,
        ]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
