"""What lies on disk: model repositories, single models, bare files.

Lives here: finding models and their versions, without opening anything. Must not: read configurations or load. Layout
as Triton's: `<repository>/<model>/config.pbtxt`, `<repository>/<model>/<version>/model.onnx`. A name that comes from
outside is only ever compared with the names found; no path is made of it.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from paceline.backends.base import Files
from paceline.backends.paths import exists, is_file, is_folder
from paceline.server.errors import ModelNotFound, ModelNotReady, StartError
from paceline.server.files import in_utf8

_log = logging.getLogger("paceline.server.layout")

CONFIG_FILE = "config.pbtxt"
CONFIGS_FOLDER = "configs"
EXPORT_CONFIG, EXPORT_FOLDER = "config.json", "onnx"
"""Where Hugging Face's exports have what describes the model, and its ONNX files."""
DEFAULT_MODEL_FILE = "model.onnx"
MERGED_DECODER_FILE = "decoder_model_merged.onnx"
"""What Hugging Face's exporters write instead for a decoder of two graphs in one, as that of an encoder is."""
PYTHON_MODEL_FILE = "model.py"
_MODEL_FILES = (DEFAULT_MODEL_FILE, MERGED_DECODER_FILE, PYTHON_MODEL_FILE)
_OTHER_FOLDERS = frozenset((CONFIGS_FOLDER, "warmup", "initial_state", "__pycache__"))
"""Folders in a model's folder that aren't versions: Triton's and Python's."""
_LEFT_BEHIND = frozenset(("lost+found", "__MACOSX"))
"""What file systems and archives put next to models, besides hidden files."""

_VERSION = re.compile(r"0|[1-9][0-9]*")


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """One model on disk. `versions` maps version numbers to the folders that hold their files; a bare file, a folder
    with the model file directly inside and an export are version 1. `file` is set for a bare file only. `renamed`:
    `name` is the user's choice, whatever its folder and its configuration call it. `problem` says why a folder can't be
    read: its load fails with that, and the other models go on. `duplicates` are all paths of a name that several
    repositories have; none of them can be loaded. `strays` look like versions, or lie where versions do, but aren't.
    `config_name` selects another configuration than `config.pbtxt`. `files` owns the files if they came with a client's
    request."""

    name: str
    path: Path
    versions: dict[int, Path]
    file: Path | None = None
    renamed: bool = False
    problem: str = ""
    duplicates: tuple[Path, ...] = ()
    strays: tuple[Path, ...] = ()
    config_name: str = ""
    files: Files | None = None

    @property
    def config(self) -> Path | None:
        """Its configuration, if there is one: `configs/<config_name>.pbtxt`, else `config.pbtxt`. Something of that
        name that is no file, or a dangling link, counts as a configuration that can't be read: without it, the model
        would be served in another way than whoever put it there meant."""
        if self.file is not None:
            return None
        named = [self.path / CONFIGS_FOLDER / f"{self.config_name}.pbtxt"] if self.config_name else []
        return next((path for path in (*named, self.path / CONFIG_FILE) if os.path.lexists(path)), None)


Fingerprint = frozenset[tuple[str, str, int, int, int]]
"""Of each file: path, the same with links resolved, times of modification and of any change in nanoseconds, and size.

Copying tools set the time of modification; nobody can set the other, which also changes with a new mode or link: a load
too many, once. The inode number would change with replacements only, but file systems in front of object storage give
out new ones as they like, and each would be a load.
"""


@dataclass(frozen=True, slots=True)
class Sight:
    """A model as it lay on disk at one time. It has changed if another look gives another sight."""

    folder: ModelFolder
    files: Fingerprint


class _Kind(Enum):
    REPOSITORY = "repository"
    MODEL = "model"
    VERSION = "version"
    FILE = "file"


class Layout:
    """The models at `paths`, each a repository, one model's folder, one of its versions, or a bare `.onnx` file.

    `config_name`: which file in a model's folder `configs` is its configuration. `model_name`: the name of the one
    model that isn't in a repository; models in repositories keep the names of their folders.

    `open` decides for good which of these each path is: a single model's folder that is just being replaced must not
    pass for a repository. After that, everything may be called on any thread; all of it blocks.
    """

    def __init__(self, paths: Sequence[Path], config_name: str = "", model_name: str = "") -> None:
        self._paths = tuple(paths)
        self._model_name = model_name
        self._config_name = config_name
        self._kinds: dict[Path, _Kind] = {}

    def __str__(self) -> str:
        return ", ".join(map(str, self._paths))

    def open(self, *, may_be_empty: bool = False) -> None:
        """Find out what the paths are. Raises StartError if one can't be read, or holds no model and `may_be_empty` is
        false. Once they are known, it does nothing."""
        if self._kinds:
            return
        for path in self._paths:
            try:
                place, kind = _settled(path)
                self._kinds[place] = kind
                if may_be_empty or _paths_at(place, kind):
                    continue
                if files := [entry.name for entry in _entries(path) if _is_onnx_file(entry)]:
                    expected = f"expected one .onnx file, or one called {DEFAULT_MODEL_FILE}, got {', '.join(files)}"
                    raise StartError(
                        f"{path}: {expected}; to load several, give each as a path of its own, or move it to "
                        f"{path}/<model>/<version>/{DEFAULT_MODEL_FILE}"
                    )
                raise StartError(
                    f"{path}: no models here; expected a model repository "
                    f"(<model>/<version>/{DEFAULT_MODEL_FILE}), one model's folder or a .onnx file"
                )
            except OSError as error:
                raise StartError(_problem(path, error)) from None
        single = [str(place) for place, kind in self._kinds.items() if kind is not _Kind.REPOSITORY]
        if self._model_name and len(single) > 1:
            raise StartError(f"--model-name {self._model_name}: expected one model, got {', '.join(single)}")
        if self._model_name and not single:
            text = (
                "no model is named '%s', as --model-name or INFERENCE_SERVICE_NAME says: models in repositories "
                "keep the names of their folders, and %s is one"
            )
            _log.warning(text, self._model_name, self)

    def models(self, only: str | None = None) -> list[ModelFolder]:
        """The models there are now, by name; with `only`, that one alone. Raises OSError if a repository can't be
        listed."""
        found: dict[str, list[Path]] = {}
        for place, kind in self._kinds.items():
            for name, path in _paths_at(place, kind, self._model_name, only).items():
                found.setdefault(name, []).append(path)
        return [self._folder(name, paths) for name, paths in sorted(found.items())]

    def model(self, name: str) -> ModelFolder | None:
        """The model of that name, or None. Raises OSError if a repository can't be listed."""
        return next(iter(self.models(name)), None)

    def find(self, name: str) -> AbstractContextManager[ModelFolder]:
        """The folder of a model that is to be loaded, as it is now. Raises ModelNotFound if there is none, and
        ModelNotReady if a repository can't be listed."""
        try:
            folder = self.model(name)
        except OSError as error:
            raise ModelNotReady(f"failed to load '{name}', failed to poll from model repository: {error}") from None
        if folder is None:
            why = f"no model of that name in {self}"
            raise ModelNotFound(f"failed to load '{name}', failed to poll from model repository: {why}")
        return nullcontext(folder)

    def _folder(self, name: str, paths: Sequence[Path]) -> ModelFolder:
        path = paths[0]
        kind = self._kinds.get(path, _Kind.REPOSITORY)
        if len(paths) > 1:
            folder = ModelFolder(name, path, {}, duplicates=tuple(paths))
        elif (shown := in_utf8(name)) != name:
            # Messages and configurations can't carry such a name, so nobody could ask for the model.
            folder = ModelFolder(name, path, {}, problem=f"expected a name in UTF-8, got '{shown}'")
        elif kind is _Kind.FILE:
            folder = ModelFolder(name, path.parent, {1: path.parent}, file=path)
        elif kind is _Kind.VERSION:
            folder = ModelFolder(name, path.parent, {int(path.name): path})
        else:
            folder = model_folder(name, path)
        renamed = bool(self._model_name) and kind is not _Kind.REPOSITORY
        return replace(folder, config_name=self._config_name, renamed=renamed)


def _paths_at(place: Path, kind: _Kind, model_name: str = "", only: str | None = None) -> dict[str, Path]:
    """The models at one of the paths, by name, which is `model_name` for one that isn't in a repository; with `only`,
    that one alone."""
    if kind is _Kind.REPOSITORY:
        names = [name for name in os.listdir(place) if only in (None, name) and not is_ignored(name)]
        return {name: place / name for name in names if _is_folder(place / name)}
    name = model_name or {_Kind.FILE: place.stem, _Kind.VERSION: place.parent.name}.get(kind, place.name)
    return {name: place} if only in (None, name) and exists(place) else {}


def model_folder(name: str, path: Path) -> ModelFolder:
    """The model `name` in the folder `path`."""
    try:
        entries = _entries(path)
        versions = {int(entry.name): entry for entry in entries if _VERSION.fullmatch(entry.name) and is_folder(entry)}
        taken, has_versions = set(versions.values()), bool(versions)
        if not has_versions and (_has_model_file(path) or any(map(_is_onnx_file, entries))):
            versions = {1: path}
        elif not has_versions and _is_export(path):
            versions = {1: path / EXPORT_FOLDER}
    except OSError as error:
        return ModelFolder(name, path, {}, problem=_problem(path, error))
    among_versions = has_versions or not versions
    strays = tuple(entry for entry in entries if entry not in taken and _is_stray(entry, among_versions))
    return ModelFolder(name, path, versions, strays=strays)


def _is_stray(entry: Path, among_versions: bool) -> bool:
    """Whether `entry` may be meant as a version: its name is a number, or it is a folder among those of versions that
    has no other use. If it can't be examined it is none, as only a warning depends on that."""
    if entry.name.isdigit():
        return True
    with suppress(OSError):
        return among_versions and entry.name not in _OTHER_FOLDERS and is_folder(entry)
    return False


def _settled(path: Path) -> tuple[Path, _Kind]:
    """The place and the kind of a path: a folder that holds one .onnx file, of any name, stands for that file, and the
    folder of an export's ONNX files for the export."""
    if is_file(path):
        if path.suffix != ".onnx":
            raise StartError(f"{path}: expected a .onnx file or a folder")
        return path, _Kind.FILE
    entries = _entries(path)
    names = {entry.name for entry in entries}
    # Absolute, as "." has no name; links aren't followed, as the user named this path.
    place = Path(os.path.abspath(path))
    if CONFIG_FILE not in names:
        if _is_version_of_a_model(place):
            return place, _Kind.VERSION
        if place.name == EXPORT_FOLDER and _is_export(place.parent):
            return place.parent, _Kind.MODEL
    # A single model has a configuration, a model file, or a version folder with a model file.
    if (
        not names.isdisjoint((CONFIG_FILE, *_MODEL_FILES))
        or any(_VERSION.fullmatch(name) and _has_any_model_file(path / name) for name in names)
        or _is_export(path)
    ):
        return place, _Kind.MODEL
    files = [entry for entry in entries if _is_onnx_file(entry)]
    if len(files) == 1 and not any(map(_is_folder, entries)):
        return files[0], _Kind.FILE
    return path, _Kind.REPOSITORY


def _is_onnx_file(entry: Path) -> bool:
    return entry.suffix == ".onnx" and is_file(entry)


def _is_export(path: Path) -> bool:
    """Whether a folder is as Hugging Face has them. Without the first file, it may be a repository whose model is
    called `onnx`."""
    return exists(path / EXPORT_CONFIG) and _has_any_model_file(path / EXPORT_FOLDER)


def _is_version_of_a_model(place: Path) -> bool:
    """Whether `place`, a folder without a configuration, is a version of the model that its parent is: it is named like
    one and has a model file, which may have any name if the parent's configuration can say so."""
    if not (_VERSION.fullmatch(place.name) and place.parent.name):
        return False
    return _has_model_file(place) or (exists(place.parent / CONFIG_FILE) and _has_any_model_file(place))


def _has_any_model_file(folder: Path) -> bool:
    """Of any name, if it is ONNX."""
    return _has_model_file(folder) or (is_folder(folder) and any(map(_is_onnx_file, _entries(folder))))


def _has_model_file(folder: Path) -> bool:
    return any(exists(folder / name) for name in _MODEL_FILES)


def _is_folder(entry: Path) -> bool:
    """Whether `entry` is a folder. A dangling link counts as one, so that the absence is reported, not overlooked."""
    return is_folder(entry) or (entry.is_symlink() and not exists(entry))


def _problem(path: Path, error: OSError) -> str:
    return f"{path}: {error.strerror or error}"


def _entries(folder: Path) -> list[Path]:
    """What lies in `folder`, by name, without what is ignored."""
    return sorted(entry for entry in folder.iterdir() if not is_ignored(entry.name))


def look_at(folder: ModelFolder) -> Sight:
    """A model with all its files, except hidden ones. Links are followed. Blocks."""
    return Sight(folder, frozenset(map(_file, _files(folder.path) if folder.file is None else [folder.file])))


def _files(top: Path) -> Iterator[Path]:
    seen: set[tuple[int, int]] = set()
    for where, folders, files in os.walk(top, followlinks=True):
        try:
            about = os.stat(where)
        except OSError:  # it was removed meanwhile
            continue
        if (about.st_dev, about.st_ino) in seen:
            folders.clear()  # a link that leads back
            continue
        seen.add((about.st_dev, about.st_ino))
        folders[:] = [folder for folder in folders if not is_ignored(folder)]
        yield from (Path(where, file) for file in files if not is_ignored(file))


def _file(path: Path) -> tuple[str, str, int, int, int]:
    try:
        about = path.stat()
        place = os.path.realpath(path)
    except OSError:  # it was removed meanwhile, or is a dangling link
        return str(path), "", -1, -1, -1
    return str(path), place, about.st_mtime_ns, about.st_ctime_ns, about.st_size


def is_ignored(name: str) -> bool:
    """Whether a file or folder of this name is nobody's model and no part of one: hidden ones, which macOS and editors
    leave beside others, and those of file systems and archives."""
    return name.startswith(".") or name in _LEFT_BEHIND
