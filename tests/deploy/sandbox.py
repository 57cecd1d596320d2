"""A process as in a container: it can write to one folder only, and has no privileges.

Lives here: the words to put in front of a command. They are replaced by that command, so that signals reach it.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

__all__ = ["read_only_as_nobody", "why_not"]

# Every mount becomes read-only; what is mounted over the one folder afterwards is not.
_SCRIPT = """
while read -r _ _ _ _ place _; do mount -o remount,bind,ro "$place" 2>/dev/null || true; done </proc/self/mountinfo
if [ -n "$1" ]; then mount -t tmpfs -o mode=1777 tmpfs "$1"; fi
if touch /tmp/.writable /var/tmp/.writable 2>/dev/null && [ -z "$1" ]; then echo 'still writable' >&2; exit 3; fi
shift
exec setpriv --reuid 1000 --regid 1000 --clear-groups --no-new-privs --inh-caps=-all --bounding-set=-all "$@"
"""


def read_only_as_nobody(writable: Path | None = None) -> tuple[str, ...]:
    """A prefix that runs a command as user 1000 where nothing is writable but `writable`, an empty folder."""
    return ("unshare", "--mount", "--propagation", "private", "sh", "-euc", _SCRIPT, "sh", str(writable or ""))


def why_not() -> str:
    """Why this machine can't do that; empty if it can."""
    if not (shutil.which("unshare") and shutil.which("setpriv")):
        return "there is no unshare or no setpriv"
    done = subprocess.run([*read_only_as_nobody(), "true"], capture_output=True, text=True, timeout=20, check=False)
    return "" if done.returncode == 0 else f"no read-only root: {done.stderr.strip()}"
