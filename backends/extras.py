"""What to install for what is optional.

Lives here: the advice in errors about missing packages. Must not: import any of these packages.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires

__all__ = ["how_to_install"]


def how_to_install(extra: str) -> str:
    """The command that installs the packages of one of paceline's extras. It names them, because no index has paceline
    itself; only where paceline isn't installed, and its requirements unknown, it is for a clone."""
    try:
        lines = requires("paceline") or []
    except PackageNotFoundError:
        return f"pip install '.[{extra}]' in a clone of paceline"
    needed = [line.partition(";")[0].strip() for line in lines if line.endswith(f"extra == '{extra}'")]
    return "pip install " + " ".join(f"'{each}'" for each in needed)
