"""What KServe tells a container that it starts, and which models to serve accordingly.

Lives here: pure functions of KServe's environment. Must not: look at files. KServe's storage initializer puts a model's
files directly into one folder, without a folder named after the model, and rewrites STORAGE_URI to that folder's path;
the model's name is that of the InferenceService, which every container gets as INFERENCE_SERVICE_NAME.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["MOUNT", "models_to_serve"]

MOUNT = Path("/mnt/models")
"""Where KServe puts models by default."""

_STORAGE, _SERVICE = "STORAGE_URI", "INFERENCE_SERVICE_NAME"


def models_to_serve(
    paths: Sequence[Path], model_name: str, environment: Mapping[str, str]
) -> tuple[tuple[Path, ...], str]:
    """The paths to serve, and the name of the one model there: as given, else as KServe says.

    Without `paths`: STORAGE_URI's folder, or MOUNT if an InferenceService is named; without KServe, none. Without
    `model_name`: the InferenceService's name for a model where KServe puts it; other folders have names of their own.
    Raises ValueError if STORAGE_URI is needed and isn't a folder's path, as where no storage initializer has run.
    """
    uri, service = environment.get(_STORAGE, ""), environment.get(_SERVICE, "")
    chosen = tuple(paths) or _storage(uri, service)
    storage = {_plain(MOUNT), _plain(Path(uri or MOUNT))}
    is_in_storage = len(chosen) == 1 and _plain(chosen[0]) in storage
    return chosen, model_name or (service if is_in_storage else "")


def _storage(uri: str, service: str) -> tuple[Path, ...]:
    if not uri:
        return (MOUNT,) if service else ()
    if not uri.startswith("/"):
        raise ValueError(
            f"{_STORAGE}: expected the folder into which KServe's storage initializer puts the model, got '{uri}'; "
            "where no storage initializer runs, give a PATH"
        )
    return (Path(uri),)


def _plain(path: Path) -> str:
    return os.path.normpath(path)
