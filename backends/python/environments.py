"""The Python that a model brings along, as Triton has it: a folder, or an archive of one as conda-pack makes it.

Lives here: finding it, unpacking it, and removing what was unpacked. Must not: run anything. The rule: nothing of an
archive lands outside of its folder, and there is an end to how much of it is unpacked.
"""

from __future__ import annotations

import shutil
import tarfile
import tempfile
import zlib
from contextlib import ExitStack
from lzma import LZMAError
from pathlib import Path

from paceline.backends.base import ModelSource
from paceline.backends.errors import LoadError
from paceline.backends.paths import exists, is_folder
from paceline.backends.python import ENVIRONMENT, EXECUTABLE

_MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"
_MOST_BYTES = 64 * 2**30
_MOST_ENTRIES = 1_000_000
"""Of an archive. Environments with everything that a GPU needs have some 20 GiB, and a tenth as many entries."""


def interpreter_of(source: ModelSource, undo: ExitStack) -> str:
    """The interpreter of the environment that the model's parameters name, "" if they name none. What has to be removed
    when the model is closed is added to `undo`. Blocks; raises LoadError."""
    given = source.parameters.get(ENVIRONMENT, "")
    if not given:
        return ""
    where = f"model '{source.name}': {ENVIRONMENT}"
    if source.parameters.get(EXECUTABLE):
        raise LoadError(f"{where}: expected none, as {EXECUTABLE} names an interpreter, got '{given}'")
    version = source.path.parent
    path = Path(given.replace(_MODEL_DIRECTORY, str(version.parent if version.name.isdecimal() else version)))
    if not path.is_absolute():
        what = f"an absolute path, or one that begins with {_MODEL_DIRECTORY}"
        raise LoadError(f"{where}: expected {what}, got '{given}'")
    try:
        folder = path
        if not is_folder(path):
            folder = Path(tempfile.mkdtemp(prefix="paceline-environment-"))
            undo.callback(shutil.rmtree, folder, ignore_errors=True)
            unpack(path, folder)
        interpreter = folder / "bin" / "python"
        if not exists(interpreter):
            raise LoadError(f"{where}: expected bin/python in {path}, found none")
    except (OSError, EOFError, tarfile.TarError, zlib.error, LZMAError) as error:
        raise LoadError(f"{where}: {path} can't be used: {error}") from None
    return str(interpreter)


def unpack(archive: Path, folder: Path, most_bytes: int = _MOST_BYTES, most_entries: int = _MOST_ENTRIES) -> None:
    """Unpack `archive`, compressed or not, into `folder`. Raises LoadError if it is too large, OSError or TarError for
    what is no archive, or has entries that belong elsewhere."""
    if not hasattr(tarfile, "data_filter"):
        raise LoadError(f"{archive} can't be unpacked safely by this Python: expected 3.11.4 or newer")
    size_bytes = 0
    with tarfile.open(archive) as packed:
        for number, entry in enumerate(packed):
            size_bytes += entry.size
            if number >= most_entries or size_bytes > most_bytes:
                raise LoadError(
                    f"{archive}: expected at most {most_entries} entries and {most_bytes} bytes, got more; unpack it, "
                    "and name the folder"
                )
            packed.extract(entry, folder, filter="data")
