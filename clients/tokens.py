"""Tokens that identify callers: what can be one, and the header that carries it.

Lives here: checking and reading them. Must not: put a token into the text of an error.
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["authorization", "read_token"]

# RFC 6750, section 2.1. For characters that a header can't have, gRPC's own error would contain the token.
_TOKEN = re.compile(r"[\w.~+/-]+=*", re.ASCII)


def authorization(token: str) -> tuple[str, str]:
    """The header, as key and value. Raises TypeError and ValueError for what isn't a token."""
    if not isinstance(token, str):
        raise TypeError(f"token: expected a str, got {type(token).__name__}")
    if not _TOKEN.fullmatch(token):
        raise ValueError("token: expected letters, digits, '-', '.', '_', '~', '+', '/', and '=' at the end")
    return "authorization", f"Bearer {token}"


def read_token(path: Path) -> str:
    """The token that a file holds, without white space around it. Raises OSError, and ValueError if it isn't a
    token."""
    token = path.read_bytes().decode("utf-8-sig", errors="replace").strip()
    if not _TOKEN.fullmatch(token):
        raise ValueError(f"{path}: expected a token and nothing else")
    return token
