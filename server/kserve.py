"""What KServe tells a container that it starts, and what follows for the models to serve.

Lives here: the reading of KServe's environment, pure. Must not: look at files. KServe's storage initializer puts a
model's files right into one folder, under no name, and rewrites STORAGE_URI to that folder's path; the name is that of
the InferenceService, which every container gets as INFERENCE_SERVICE_NAME.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["MOUNT", "models_to_serve"]

MOUNT = Path("/mnt/models")
"""Where KServe puts models when nobody says otherwise."""

_STORAGE, _SERVICE = "STORAGE_URI", "INFERENCE_SERVICE_NAME"


def models_to_serve(
    paths: Sequence[Path], model_name: str, environment: Mapping[str, str]
) -> tuple[tuple[Path, ...], str]:
    """The paths to serve, and the name of the one model there: as given, else as KServe has it.

    No path: the storage's, or MOUNT if an InferenceService is named. No name: the InferenceService's, for a model that
    lies where KServe puts it; other folders have names of their own. No paths and no KServe: none. Raises ValueError if
    STORAGE_URI is needed and is not a folder's path, as it is where no storage initializer has run.
    """
    uri, service = environment.get(_STORAGE, ""), environment.get(_SERVICE, "")
    chosen = tuple(paths) or _storage(uri, service)
    storage = {_plain(MOUNT), _plain(Path(uri or MOUNT))}
    lies_in_storage = len(chosen) == 1 and _plain(chosen[0]) in storage
    return chosen, model_name or (service if lies_in_storage else "")


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
