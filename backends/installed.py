"""Which packages are installed: ONNX Runtime, once and whole; and what to install for what is optional.

Lives here: what can be said of packages before one is imported. Must not: anything of their API.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distributions, requires

from paceline.backends.errors import LoadError


def how_to_install(extra: str) -> str:
    """The command that installs the packages of one of paceline's extras. It names them, because no index has paceline
    itself; only where paceline isn't installed, and its requirements unknown, it is for a clone."""
    try:
        lines = requires("paceline") or []
    except PackageNotFoundError:
        return f"pip install '.[{extra}]' in a clone of paceline"
    needed = [line.partition(";")[0].strip() for line in lines if line.endswith(f"extra == '{extra}'")]
    return "pip install " + " ".join(f"'{each}'" for each in needed)


_log = logging.getLogger("paceline.backends.onnx")

_PACKAGES = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-training", "onnxruntime-migraphx")
"""All with the import package `onnxruntime`."""


def check_installed() -> None:
    """Log a warning that says which package to remove if there are several: they install the same folder, the last one
    wins, and uninstalling any of them breaks the others. Raises LoadError if none can be used."""
    found = packages()
    if len(found) > 1:
        _log.warning(
            "%s are installed in the same folder, and removing one breaks the others. Keep one: %s",
            " and ".join(found),
            _how_to_mend(found),
        )
    try:
        problem = "" if hasattr(import_module("onnxruntime"), "InferenceSession") else "parts of it are missing"
    except ImportError as error:
        problem = str(error)
    if problem:
        have = " and ".join(found) or "no package of it"
        raise LoadError(f"onnxruntime can't be used: {problem}. Installed: {have}. Try: {_how_to_mend(found)}")


def packages(path: Sequence[str] = sys.path) -> list[str]:
    """The packages in the folders of `path` that have ONNX Runtime, as `NAME==VERSION`; the one to keep comes last."""
    found = (each for name in _PACKAGES for each in distributions(name=name, path=list(path)))
    return list(dict.fromkeys(f"{each.name}=={each.version}" for each in found))


def _how_to_mend(found: Sequence[str]) -> str:
    *others, kept = found or ["onnxruntime"]
    removal = "".join(f"pip uninstall {each.partition('==')[0]} && " for each in others)
    return f"{removal}pip install --force-reinstall --no-deps {kept}"
