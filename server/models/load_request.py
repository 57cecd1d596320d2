"""The contents of a load request: a model's name, a configuration, files.

Lives here: checks, and the scratch folders that the files are in until nothing needs them, or until the process ends.
Must not: load, or touch files outside those folders. Source of names and types: Triton's "model repository" extension.
"""

from __future__ import annotations

import errno
import logging
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from google.protobuf import json_format

from paceline.protos import model_config_pb2 as config_pb
from paceline.protos.inference_pb2 import ModelRepositoryParameter
from paceline.server.errors import InvalidRequest, ModelNotReady
from paceline.server.models.layout import ModelFolder, model_folder

_log = logging.getLogger("paceline.server.scratch")

_FILE = "file:"
_MAX_NAME_BYTES = 1_024
"""The names of failed loads stay in the index for a while."""
_SHOWN = 64
_OF_NAMES = (errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ)
Parameters = Mapping[str, ModelRepositoryParameter]

_there: set[Scratch] | None = set()
"""None once the process is about to end."""
_lock = threading.Lock()
_PATIENCE_S = 1.0


@dataclass(frozen=True, slots=True)
class Override:
    """What a load request brings: a configuration in place of the folder's own, and files in place of those on disk, by
    path inside the model's folder; without any, those on disk stay."""

    config: config_pb.ModelConfig
    files: Mapping[PurePosixPath, bytes]


def checked_name(name: str) -> str:
    """`name`, if it can be a model's. Raises InvalidRequest."""
    if not name:
        raise InvalidRequest("model name cannot be empty: expected the name of a model")
    if "/" in name or "\\" in name or "\0" in name or name in (".", ".."):
        raise InvalidRequest(
            f"invalid model name {name!r}: model name must not contain path traversal characters; expected the name "
            "of a folder"
        )
    if len(name.encode()) > _MAX_NAME_BYTES:
        raise InvalidRequest(
            f"invalid model name '{name[:_SHOWN]}…': expected at most {_MAX_NAME_BYTES} bytes, got {len(name.encode())}"
        )
    return name


def parse_load_parameters(name: str, parameters: Parameters) -> Override | None:
    """The override in the parameters of a load of model `name`; None if there are no parameters. Raises InvalidRequest
    naming the parameter."""
    try:
        files: dict[PurePosixPath, bytes] = {}
        for key, parameter in parameters.items():
            if key.startswith(_FILE):
                text = key.removeprefix(_FILE)
                path = PurePosixPath(text)
                if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in text or "\\" in text:
                    raise InvalidRequest(f"load parameter {key!r}: expected a path inside the model's folder")
                if path in files:
                    raise InvalidRequest(f"load parameter {key!r}: expected each file once, got '{path}' twice")
                _check_type("load", key, parameter, "bytes_param")
                files[path] = parameter.bytes_param
            elif key == "config":
                _check_type("load", key, parameter, "string_param")
            else:
                raise InvalidRequest(f"unrecognized load parameter {key!r}: expected 'config' or 'file:<path>'")
        if "config" not in parameters:
            if files:
                raise InvalidRequest("load parameter 'config': expected one together with 'file:...', got none")
            return None
        expected, text = "load parameter 'config': expected a ModelConfig as JSON", parameters["config"].string_param
        # protobuf accepts an empty list or text as an object without fields.
        if not text.lstrip().startswith("{"):
            raise InvalidRequest(f"{expected}, an object, got {text[:20]!r}")
        try:
            return Override(json_format.Parse(text, config_pb.ModelConfig()), files)
        except (json_format.ParseError, RecursionError) as error:
            raise InvalidRequest(f"{expected}: {error}") from None
    except InvalidRequest as error:
        raise _refused(name, str(error)) from None


def parse_unload_parameters(parameters: Parameters) -> bool:
    """Whether models that depend on the unloaded one are to go too. Raises InvalidRequest naming the parameter."""
    for key, parameter in parameters.items():
        if key != "unload_dependents":
            raise InvalidRequest(f"unrecognized unload parameter {key!r}: expected 'unload_dependents'")
        _check_type("unload", key, parameter, "bool_param")
    return "unload_dependents" in parameters and parameters["unload_dependents"].bool_param


@contextmanager
def scratch_folder(name: str, files: Mapping[PurePosixPath, bytes]) -> Iterator[ModelFolder]:
    """Model `name` made of `files`, in a new folder that is removed after the block unless the model keeps it. Blocks.
    Raises InvalidRequest if a path is both file and folder, or the file system can't have it, and ModelNotReady if
    nothing can be written there."""
    unwritable = f"failed to load '{name}', its files can't be written below '{_parent()}' (TMPDIR)"
    try:
        scratch = Scratch()
    except OSError as error:
        raise ModelNotReady(f"{unwritable}: {error.strerror}") from None
    try:
        for path, content in files.items():
            try:
                scratch.write(path, content)
            except (FileExistsError, NotADirectoryError, IsADirectoryError):
                raise _refused(name, f"load parameter 'file:{path}': it conflicts with another file") from None
            except OSError as error:
                if error.errno not in _OF_NAMES:
                    raise ModelNotReady(f"{unwritable}: {error.strerror}") from None
                why = f"load parameter 'file:{path}' can't be written: {error.strerror}"
                raise _refused(name, why) from None
        yield replace(model_folder(name, scratch.path), files=scratch)
    finally:
        scratch.release()


class Scratch:
    """A new folder in `TMPDIR`, or in `/tmp` if that isn't set. It is needed by whoever made it, and by whoever keeps
    it (`backends.base.Files`), until they let go; then it is removed. Raises OSError."""

    def __init__(self) -> None:
        with _lock:
            if _there is None:
                raise _ending()
            self._folder = tempfile.TemporaryDirectory(prefix="paceline-", dir=_parent(), ignore_cleanup_errors=True)
            _there.add(self)
        self.path = Path(self._folder.name)
        self._needed = 1
        self._writing = threading.Lock()
        self._is_gone = False

    def write(self, path: PurePosixPath, content: bytes) -> None:
        """Create a file, and the folders that it is in. Raises OSError."""
        with self._writing:
            if self._is_gone:
                raise _ending()
            (self.path / path).parent.mkdir(parents=True, exist_ok=True)
            # Exclusive: nothing in a new folder is overwritten, whatever names the file system considers equal.
            with (self.path / path).open("xb") as file:
                file.write(content)

    def keep(self) -> None:
        with _lock:
            self._needed += 1

    def release(self) -> None:
        with _lock:
            self._needed -= 1
            if self._needed:
                return
            if _there is not None:
                _there.discard(self)
        self.remove()

    def remove(self) -> None:
        """Remove it, whoever needs it. Waits for a file that is being written, but not for ever."""
        self._is_gone = True
        waited = self._writing.acquire(timeout=_PATIENCE_S)
        try:
            self._folder.cleanup()
        finally:
            if waited:
                self._writing.release()


def remove_all() -> None:
    """Remove all scratch folders, at the end of the process, which may end without closing its models."""
    global _there
    with _lock:
        left, _there = _there or (), None
    for scratch in left:
        try:
            scratch.remove()
        except Exception:  # noqa: BLE001 - the other folders must be removed, and the process end
            _log.exception("temporary folder %s can't be removed", scratch.path)


def _parent() -> str:
    """`tempfile` by itself would take another folder without a word if this one is missing or full."""
    return os.environ.get("TMPDIR") or "/tmp"


def _ending() -> OSError:
    return OSError(errno.ECANCELED, "the server is ending")


def _refused(name: str, why: str) -> InvalidRequest:
    # Words that Triton's clients look for.
    return InvalidRequest(f"failed to load '{name}', {why}")


def _check_type(what: str, key: str, parameter: ModelRepositoryParameter, expected: str) -> None:
    got = parameter.WhichOneof("parameter_choice")
    if got != expected:
        raise InvalidRequest(f"invalid value type for {what} parameter {key!r}, expected {expected}, got {got}")
