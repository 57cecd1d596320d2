"""What callers have to send: tokens, and headers for groups of RPCs that are restricted, as in Triton.

Lives here: the file of hashes, and looking a header up in it; which RPC belongs to which group, and reading
`--grpc-restricted-protocol`. Must not: look at calls. No secret and no hash is ever logged or put into an error's text.

The file of hashes has a line for each token, NAME:SHA256, in which SHA256 is 64 hexadecimal digits; empty lines and
those that begin with # are ignored. A hash without salt and without delay is good enough for tokens that nobody can
guess, such as `paceline token` makes: they have 256 random bits.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.server.errors import StartError
from paceline.server.files import WatchedFiles, check_file, why

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
        self._watched = WatchedFiles(path)
        self._next_look_ns = 0
        self._names: Mapping[bytes, str] = {}
        # Headers that were found valid, so that later requests of the same caller aren't hashed again. As many as there
        # are tokens, or more, as the same token can be written in several ways.
        self._good: dict[str, str] = {}

    def open(self) -> None:
        """Read the file. Raises StartError."""
        try:
            self._watched.have_changed()
            self._names = self._read()
            if not self._names:
                raise ValueError(f"{self._path}: expected at least one line, NAME:SHA256")
        except (OSError, ValueError) as error:
            raise StartError(f"--grpc-token-file: {why(error)}") from None
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
            if not self._watched.have_changed():
                return
            self._names = self._read()
        except (OSError, ValueError) as error:
            self._watched.look_again(error)
            _log.error("the token file can't be reloaded, the old tokens stay valid: %s", why(error))
            return
        self._good.clear()
        if self._names:
            _log.info("%d tokens are valid now, read from %s", len(self._names), self._path)
        else:
            _log.error("no tokens are left in %s: calls that need one are refused", self._path)

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


HEADER_PREFIX = "triton-grpc-protocol-"

_RPCS: Mapping[str, Sequence[str]] = {
    "health": ("ServerLive", "ServerReady", "ModelReady"),
    "metadata": ("ServerMetadata", "ModelMetadata"),
    "inference": ("ModelInfer", "ModelStreamInfer"),
    "shared-memory": [
        f"{kind}SharedMemory{what}" for kind in ("System", "Cuda") for what in ("Status", "Register", "Unregister")
    ],
    "model-config": ("ModelConfig",),
    "model-repository": ("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"),
    "statistics": ("ModelStatistics",),
    "trace": ("TraceSetting",),
    "logging": ("LogSettings",),
}
GROUPS = {name: frozenset(f"/inference.GRPCInferenceService/{rpc}" for rpc in rpcs) for name, rpcs in _RPCS.items()}
"""The paths of each group's RPCs, as gRPC has them, by the group's name. Reflection, which Triton lacks, is in none."""
GROUPS["health"] |= {f"/grpc.health.v1.Health/{rpc}" for rpc in ("Check", "List", "Watch")}

GROUP_OF = {path: name for name, paths in GROUPS.items() for path in paths}
"""The group of each RPC that is in one, by its path."""
_KEY = re.compile(r"[a-z0-9_.-]+")
# What gRPC's clients can send in a header that isn't binary: any other value would lock everybody out.
_VALUE = re.compile(r"[ -~]+")


@dataclass(frozen=True, slots=True)
class Restriction:
    """What callers of a group of RPCs have to send: the header `triton-grpc-protocol-KEY` with `value`."""

    header: str
    value: str = field(repr=False)


def parse_restrictions(given: Sequence[str]) -> dict[str, Restriction]:
    """Restrictions by group, read from values `GROUP,GROUP:KEY=VALUE`.

    Raises ValueError; its text contains no VALUE, since those are secrets.
    """
    found: dict[str, Restriction] = {}
    for one in given:
        groups, colon, rest = one.partition(":")
        key, equals, value = rest.partition("=")
        if not colon or not equals or not value:
            raise ValueError("expected GROUP,GROUP,...:KEY=VALUE")
        if not _KEY.fullmatch(key) or key.endswith("-bin"):
            raise ValueError(f"expected a key of lower case letters, digits, '_', '.' and '-', got '{key}'")
        if not _VALUE.fullmatch(value):
            raise ValueError(f"expected a value of printable ASCII characters for key '{key}'")
        for group in groups.split(","):
            if group not in GROUPS:
                raise ValueError(f"expected groups among {', '.join(GROUPS)}, got '{group}'")
            if group in found:
                raise ValueError(f"expected group '{group}' once, got it several times")
            found[group] = Restriction(HEADER_PREFIX + key, value)
    return found
