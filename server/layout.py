"""What lies on disk: model repositories, single models, bare files.

Lives here: finding models and their versions, and nothing is opened. Must not: read configurations or load. Layout as
Triton's: `<repository>/<model>/config.pbtxt`, `<repository>/<model>/<version>/model.onnx`.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path

from server.errors import StartError

__all__ = ["CONFIG_FILE", "DEFAULT_MODEL_FILE", "ModelFolder", "find_models"]

CONFIG_FILE = "config.pbtxt"
DEFAULT_MODEL_FILE = "model.onnx"

_VERSION = re.compile(r"0|[1-9][0-9]*")
_log = logging.getLogger("paceline.server.layout")


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """One model on disk. `versions` maps version numbers to the folders that hold their files; a bare file or a folder
    with the model file right inside is version 1. `file` is set for a bare file only."""

    name: str
    path: Path
    versions: dict[int, Path]
    file: Path | None = None

    @property
    def config(self) -> Path | None:
        """Its configuration, if there is one."""
        path = self.path / CONFIG_FILE
        return path if self.file is None and path.is_file() else None


def find_models(paths: list[Path]) -> list[ModelFolder]:
    """The models under `paths`, each a repository, one model's folder or a bare `.onnx` file; by name.

    Raises StartError if a path can't be read, holds no model, or two models share a name.
    """
    found: dict[str, ModelFolder] = {}
    for path in paths:
        for model in _models_at(path):
            if model.name in found:
                raise StartError(f"model '{model.name}' is in {found[model.name].path} and in {model.path}")
            found[model.name] = model
    return [found[name] for name in sorted(found)]


def _models_at(path: Path) -> list[ModelFolder]:
    try:
        if path.is_file():
            return [_bare_file(path)]
        entries = sorted(path.iterdir())
    except OSError as error:
        raise StartError(f"{path}: {error.strerror or error}") from None
    if _is_model(path, entries):
        return [_model(path.resolve())]
    models = [_model(entry) for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    if not models:
        raise StartError(
            f"{path}: no models here; expected a model repository (<model>/<version>/{DEFAULT_MODEL_FILE}), "
            "one model's folder or a .onnx file"
        )
    return models


def _bare_file(path: Path) -> ModelFolder:
    if path.suffix != ".onnx":
        raise StartError(f"{path}: expected a .onnx file or a folder")
    return ModelFolder(path.stem, path.parent, {1: path.parent}, file=path)


def _is_model(path: Path, entries: list[Path]) -> bool:
    """A folder is a model's own if it has a configuration, a model file, or a version folder with a model file."""
    names = {entry.name for entry in entries}
    return (
        CONFIG_FILE in names
        or DEFAULT_MODEL_FILE in names
        or any(_VERSION.fullmatch(name) and (path / name / DEFAULT_MODEL_FILE).exists() for name in names)
    )


def _model(path: Path) -> ModelFolder:
    """An unreadable folder is a model without versions: its load fails and says why, the others go on."""
    try:
        entries = list(path.iterdir())
    except OSError as error:
        _log.error("%s: %s", path, error.strerror or error)
        entries = []
    versions = {}
    for entry in entries:
        if _VERSION.fullmatch(entry.name) and entry.is_dir():
            versions[int(entry.name)] = entry
        elif entry.name.isdigit():
            _log.warning("%s is no version folder: expected a number without leading zeros", entry)
    if not versions and (path / DEFAULT_MODEL_FILE).exists():
        versions[1] = path
    return ModelFolder(path.name, path, versions)
