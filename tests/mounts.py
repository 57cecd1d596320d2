"""Folders that only another process sees.

Lives here: mounting one in a mount namespace, for as long as a test wants it. Must not: assertions about behaviour.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["seen_through_a_process"]

_SCRIPT = 'mount --bind "$1" "$2" && cd "$2" && echo mounted && exec cat'


@contextmanager
def seen_through_a_process(folder: Path, mountpoint: Path) -> Iterator[Path]:
    """A path of `folder` below `/proc`, which the kernel follows to `mountpoint` as a process with mounts of its own
    sees it. To everybody else, `mountpoint` is an empty folder. Skips the test where that can't be had."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare: mounts a folder where only another process sees it")
    mountpoint.mkdir()
    command = ["unshare", "--mount", "sh", "-c", _SCRIPT, "sh", str(folder), str(mountpoint)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if process.stdout.readline() != b"mounted\n":
                pytest.skip("needs the right to mount")
            assert list(mountpoint.iterdir()) == []
            yield Path(f"/proc/{process.pid}/cwd")
        finally:
            process.stdin.close()
