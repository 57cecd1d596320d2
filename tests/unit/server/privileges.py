"""File permissions in tests: they don't bind root, which temporarily becomes the user nobody."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["open_folder", "unprivileged"]

_NOBODY = 65534


@contextmanager
def unprivileged() -> Iterator[None]:
    """File permissions are enforced in this block."""
    if os.geteuid() != 0:
        yield
        return
    try:
        os.seteuid(_NOBODY)
    except OSError as error:
        pytest.skip(f"root here can't become anybody else: {error}")
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that anybody can reach, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder
        for path in folder.rglob("*"):
            if path.is_dir():
                path.chmod(0o755)
