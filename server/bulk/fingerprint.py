"""By what a job is recognised as the one that was begun: everything that its output depends on, but for its input.

Lives here: which facts these are. Must not: compare them (`differences.py`), or list files. The rule: contents of a
model's files count, and not where they are or when they were changed, so that a copy of it continues the job.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from paceline.server.bulk.differences import Plain
from paceline.server.bulk.models import model_paths
from paceline.server.bulk.settings import BulkSettings
from paceline.server.bulk.values import BulkError

__all__ = ["fingerprint"]


def fingerprint(settings: BulkSettings) -> Mapping[str, Plain]:
    """Blocks while it reads the model's files. Raises BulkError if they can't be read."""
    if settings.server:
        # Which model a server has may change at any time, so that a job there promises rows, and not their bytes.
        model: Mapping[str, Plain] = {"server's": settings.model}
    else:
        paths = model_paths(Path(settings.model))
        # Of models that a pipeline needs besides, the names of their folders tell which they are.
        model = {f"{path.name}/{name}" if number else name: digest
                 for number, path in enumerate(paths) for name, digest in _digests(path)}  # fmt: skip
    return {"model": model, **settings.asked}


def _digests(path: Path) -> Iterator[tuple[str, str]]:
    """A digest of each file of the model: of its folder, or the `.onnx` file and those beside it that begin with its
    name, as its weights' do."""
    if path.is_dir():
        found = [Path(folder, name) for folder, _, names in os.walk(path, followlinks=True) for name in names]
        root = path
    else:
        found = [one for one in path.parent.glob("*") if one.name.startswith(path.name) and one.is_file()]
        root = path.parent
    if not found:
        raise BulkError(f"expected a model's folder or a .onnx file, found nothing at {path}")
    for one in sorted(found):
        if "__pycache__" in one.parts:
            continue
        try:
            with one.open("rb") as file:
                yield str(one.relative_to(root)), hashlib.file_digest(file, "blake2b").hexdigest()[:32]
        except OSError as error:
            raise BulkError(f"{one} can't be read: {error.strerror}") from None
