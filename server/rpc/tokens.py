"""Tokens that callers send: which are valid.

Lives here: the file of hashes, and looking a header up in it. Must not: know RPCs. Neither tokens nor hashes are ever
logged or put into an error's text.

The file has a line for each token, NAME:SHA256, in which SHA256 is 64 hexadecimal digits; empty lines and those that
begin with # are ignored. A hash without salt and without delay is good enough for tokens that nobody can guess, such as
`paceline token` makes: they have 256 random bits.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from paceline.server.errors import StartError
from paceline.server.files import check_file

__all__ = ["Tokens", "line_of", "new_token"]

_log = logging.getLogger("paceline.server.tokens")

_LINE = re.compile(r"([\w.@/-]+):([0-9a-fA-F]{64})", re.ASCII)
_BEARER = re.compile(r"[Bb]earer +([\w.~+/-]+=*) *", re.ASCII)
_LOOK_EVERY_NS = 10**9
_LONGEST_TOKEN = 4096


def new_token() -> str:
    """A new token, which nobody has."""
    return secrets.token_urlsafe(32)


def line_of(name: str, token: str) -> str:
    """The file's line for `token`. Raises ValueError for a name that no line can have."""
    line = f"{name}:{hashlib.sha256(token.encode()).hexdigest()}"
    if not _LINE.fullmatch(line):
        raise ValueError(f"expected a name of letters, digits, '_', '.', '@', '/' and '-', got '{name}'")
    return line


class Tokens:
    """The tokens of the file at `path`. While requests come, it is checked for changes, at most once a second."""

    def __init__(self, path: Path, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._path = path
        self._now_ns = now_ns
        self._seen: object = None
        self._next_look_ns = 0
        self._names: Mapping[bytes, str] = {}
        # Headers that were found valid, so that later requests of the same caller aren't hashed again. As many as there
        # are tokens, or more, as the same token can be written in several ways.
        self._good: dict[str, str] = {}

    def open(self) -> None:
        """Read the file. Raises StartError."""
        try:
            self._seen = self._stamp()
            self._names = self._read()
            if not self._names:
                raise ValueError(f"{self._path}: expected at least one line, NAME:SHA256")
        except (OSError, ValueError) as error:
            raise StartError(f"--grpc-token-file: {self._why(error)}") from None
        self._next_look_ns = self._now_ns() + _LOOK_EVERY_NS

    # hot path for those who use it
    def name_of(self, header: str) -> str | None:
        """The name of the token in `header`, the value of a header `authorization`; None if it isn't valid."""
        if self._now_ns() >= self._next_look_ns:
            self._look_again()
        return self._good.get(header) or self._find(header)

    def _find(self, header: str) -> str | None:
        found = _BEARER.fullmatch(header) if len(header) <= _LONGEST_TOKEN else None
        if found is None:
            return None
        digest = hashlib.sha256(found[1].encode()).digest()
        # Compare all of them, so that the time taken tells nothing about how much of which one matches.
        names = [name for one, name in self._names.items() if hmac.compare_digest(one, digest)]
        if not names:
            return None
        if len(self._good) > 2 * len(self._names):
            self._good.clear()
        self._good[header] = names[0]
        return names[0]

    def _look_again(self) -> None:
        self._next_look_ns = self._now_ns() + _LOOK_EVERY_NS
        try:
            stamp = self._stamp()
            if stamp == self._seen:
                return
            self._seen = stamp
            self._names = self._read()
        except (OSError, ValueError) as error:
            if isinstance(error, OSError):
                # Nothing was read, for instance for lack of descriptors: try again. A bad file stays bad until it
                # changes.
                self._seen = None
            _log.error("the token file can't be reloaded, the old tokens stay valid: %s", self._why(error))
            return
        self._good.clear()
        if self._names:
            _log.info("%d tokens are valid now, read from %s", len(self._names), self._path)
        else:
            _log.error("no tokens are left in %s: calls that need one are refused", self._path)

    def _stamp(self) -> object:
        stat = self._path.stat()
        return stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino

    def _read(self) -> dict[bytes, str]:
        names: dict[bytes, str] = {}
        check_file(self._path)  # reading a pipe would hold everybody up
        text = self._path.read_bytes().decode("utf-8-sig", errors="replace")
        for number, line in enumerate(map(str.strip, text.splitlines()), 1):
            if not line or line.startswith("#"):
                continue
            found = _LINE.fullmatch(line)
            if found is None:
                # Don't quote the line: somebody may have put a token there.
                raise ValueError(f"{self._path}, line {number}: expected NAME:SHA256, 64 hexadecimal digits")
            names[bytes.fromhex(found[2])] = found[1]
        return names

    def _why(self, error: OSError | ValueError) -> str:
        return f"{self._path}: {error.strerror}" if isinstance(error, OSError) else str(error)
