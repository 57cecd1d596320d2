"""PATH on the command line: where models are.

Lives here: the type of that argument, and what to do about those that aren't paths. Must not: look at files (the
layout does).
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import click

__all__ = ["ModelPath"]

_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://(.*)", re.DOTALL)
_DOWNLOADS = {
    "hf": "hf download {place} --local-dir {name}",
    "s3": "aws s3 cp --recursive {url} {name}",
    "gs": "gcloud storage cp --recursive {url} {name}",
    "http": "curl -fLO {url}",
    "https": "curl -fLO {url}",
}


class ModelPath(click.Path):
    """Where models are, as a `Path`. Refused are URLs, and an empty path, as from an empty variable or a stray colon:
    it would mean the folder that the server is started in."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

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
