"""What lies on disk: model repositories, single models, bare files.

Lives here: finding models and their versions, and nothing is opened. Must not: read configurations or load. Layout as
Triton's: `<repository>/<model>/config.pbtxt`, `<repository>/<model>/<version>/model.onnx`.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from server.errors import StartError

__all__ = ["CONFIG_FILE", "DEFAULT_MODEL_FILE", "ModelFolder", "find_models", "inside"]

CONFIG_FILE = "config.pbtxt"
CONFIGS_FOLDER = "configs"
DEFAULT_MODEL_FILE = "model.onnx"

_VERSION = re.compile(r"0|[1-9][0-9]*")
_log = logging.getLogger("paceline.server.layout")


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """One model on disk. `versions` maps version numbers to the folders that hold their files; a bare file or a folder
    with the model file right inside is version 1. `file` is set for a bare file only. `problem` says why a folder can't
    be read: its load fails with that, and the other models go on. `config_name` picks another configuration than
    `config.pbtxt`."""

    name: str
    path: Path
    versions: dict[int, Path]
    file: Path | None = None
    problem: str = ""
    config_name: str = ""

    @property
    def config(self) -> Path | None:
        """Its configuration, if there is one: `configs/<config_name>.pbtxt`, else `config.pbtxt`."""
        if self.file is not None:
            return None
        named = [self.path / CONFIGS_FOLDER / f"{self.config_name}.pbtxt"] if self.config_name else []
        return next((path for path in (*named, self.path / CONFIG_FILE) if path.is_file()), None)


def find_models(paths: list[Path], config_name: str = "") -> list[ModelFolder]:
    """The models under `paths`, each a repository, one model's folder or a bare `.onnx` file; by name.

    `config_name`: of the files in a model's folder `configs`, the one that is its configuration.

    Raises StartError if a path can't be read, holds no model, or two models share a name.
    """
    found: dict[str, ModelFolder] = {}
    for path in paths:
        for model in (replace(model, config_name=config_name) for model in _models_at(path)):
            if model.name in found:
                raise StartError(f"model '{model.name}' is in {found[model.name].path} and in {model.path}")
            found[model.name] = model
    return [found[name] for name in sorted(found)]


def inside(folder: Path, name: str) -> Path | None:
    """The path that a configuration means with `name`, if it lies in `folder`, links followed."""
    home = Path(os.path.realpath(folder))
    try:
        path = Path(os.path.realpath(home / name))
    except ValueError:  # a NUL
        return None
    return path if path.is_relative_to(home) else None


def _models_at(path: Path) -> list[ModelFolder]:
    try:
        if path.is_file():
            return [_bare_file(path)]
        entries = sorted(path.iterdir())
        if _is_model(path, entries):
            # Absolute, for "." has no name; links not followed, for the user named this one.
            return [_model(Path(os.path.abspath(path)))]
        folders = [entry for entry in entries if not _is_not_ours(entry.name) and _is_folder(entry)]
    except OSError as error:
        raise StartError(_problem(path, error)) from None
    models = [_model(folder) for folder in folders]
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


def _is_folder(entry: Path) -> bool:
    """A link to nowhere counts as one, so that its absence is told and not overlooked."""
    return entry.is_dir() or (entry.is_symlink() and not entry.exists())


def _model(path: Path) -> ModelFolder:
    try:
        return ModelFolder(path.name, path, _versions(path))
    except OSError as error:
        return ModelFolder(path.name, path, {}, problem=_problem(path, error))


def _versions(path: Path) -> dict[int, Path]:
    versions = {}
    for entry in path.iterdir():
        if _VERSION.fullmatch(entry.name) and entry.is_dir():
            versions[int(entry.name)] = entry
        elif entry.name.isdigit():
            _log.warning("%s is no version folder: expected a number without leading zeros", entry)
    if not versions and (path / DEFAULT_MODEL_FILE).exists():
        versions[1] = path
    return versions


def _problem(path: Path, error: OSError) -> str:
    return f"{path}: {error.strerror or error}"


def _is_not_ours(name: str) -> bool:
    """Folders that file systems and tools put next to models."""
    return name.startswith(".") or name == "lost+found"
