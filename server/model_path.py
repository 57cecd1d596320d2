"""Where models are: PATH on the command line, and what KServe tells a container that it starts.

Lives here: the type of that argument, what to do about those that aren't paths, and pure functions of KServe's
environment. Must not: look at files (the layout does). KServe's storage initializer puts a model's files directly into
one folder, without a folder named after the model, and rewrites STORAGE_URI to that folder's path; the model's name is
that of the InferenceService, which every container gets as INFERENCE_SERVICE_NAME.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

import click

_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://(.*)", re.DOTALL)
_DOWNLOADS = {
    "hf": "hf download {place} --local-dir {name}",
    "s3": "aws s3 cp --recursive {url} {name}",
    "gs": "gcloud storage cp --recursive {url} {name}",
    "http": "curl -fLO {url}",
    "https": "curl -fLO {url}",
}

MOUNT = Path("/mnt/models")
"""Where KServe puts models by default."""

_STORAGE, _SERVICE = "STORAGE_URI", "INFERENCE_SERVICE_NAME"


class ModelPath(click.Path):
    """Where models are, as a `Path`. Refused are URLs, and an empty path, as from an empty variable or a stray colon:
    it would mean the folder that the server is started in. One that can't be read is refused by whoever opens it, like
    one that is missing."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, readable=False)

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        if not str(value):
            self.fail("expected a path, got ''", param, ctx)
        if isinstance(value, str) and (found := _URL.fullmatch(value)):
            expected = "expected a path on this machine, as URLs aren't supported"
            what_to_do = _what_to_do(value, found[1].lower(), found[2])
            self.fail(f"{expected}, got '{value}'; {what_to_do}", param, ctx)
        return super().convert(value, param, ctx)

    def split_envvar_value(self, rv: str) -> Sequence[str]:
        """At colons, but not at those of URLs, so that these are recognised."""
        return re.split(":(?!//)", rv)


def _what_to_do(url: str, scheme: str, place: str) -> str:
    if scheme == "file":
        return f"give the path alone: {place}"
    if scheme in _DOWNLOADS:
        url, place = (shlex.quote(text.rstrip("/")) for text in (url, place))
        command = _DOWNLOADS[scheme].format(url=url, place=place, name=shlex.quote(PurePosixPath(place).name))
        first = f"download it, as with `{command}`, and give the path of what that leaves"
    elif scheme == "pvc":
        first = "mount the volume, and give the path of its folder"
    else:
        first = "copy the files here, and give the path of their folder"
    return f"{first}; in KServe, give no PATH, and the URL as storageUri"


def models_to_serve(
    paths: Sequence[Path], model_name: str, environment: Mapping[str, str]
) -> tuple[tuple[Path, ...], str]:
    """The paths to serve, and the name of the one model there: as given, else as KServe says.

    Without `paths`: STORAGE_URI's folder, or MOUNT if an InferenceService is named; without KServe, none. Without
    `model_name`: the InferenceService's name for a model where KServe puts it; other folders have names of their own.
    Raises ValueError if STORAGE_URI is needed and isn't a folder's path, as where no storage initializer has run.
    """
    uri, service = environment.get(_STORAGE, ""), environment.get(_SERVICE, "")
    chosen = tuple(paths)
    if not chosen and uri:
        if not uri.startswith("/"):
            raise ValueError(
                f"{_STORAGE}: expected the folder into which KServe's storage initializer puts the model, got '{uri}'; "
                "where no storage initializer runs, give a PATH"
            )
        chosen = (Path(uri),)
    elif not chosen and service:
        chosen = (MOUNT,)
    storage = {os.path.normpath(MOUNT), os.path.normpath(uri or MOUNT)}
    is_in_storage = len(chosen) == 1 and os.path.normpath(chosen[0]) in storage
    return chosen, model_name or (service if is_in_storage else "")
