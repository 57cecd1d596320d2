"""What is loaded at the start.

Lives here: which models these are, and whether a failure ends the start. Must not: load (`models.repository`), or know
of ports.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from paceline.server.config import ControlMode, Settings
from paceline.server.errors import StartError
from paceline.server.models.layout import Layout, ModelFolder
from paceline.server.models.poller import Poller
from paceline.server.models.repository import Repository

__all__ = ["load_first"]

_log = logging.getLogger("paceline.server")


async def load_first(settings: Settings, layout: Layout, repository: Repository, poller: Poller) -> None:
    """Load the models that are to serve from the start. Raises StartError if there is nothing to load from, or if a
    failure is to end the start."""
    mode = settings.model_control_mode
    layout.open(may_be_empty=mode is not ControlMode.NONE)
    try:
        if mode is ControlMode.POLL:
            await poller.start()
        else:
            folders = layout.models()
            repository.take_note(folders)
            await repository.load_all(_wanted(settings, layout, folders))
    except OSError as error:
        raise StartError(f"{error.filename}: {error.strerror}") from None
    failures = [f"model '{name}': {reason}" for name, reason in repository.failures.items()]
    none_serves = mode is ControlMode.NONE and not repository.models
    if failures and (settings.exit_on_error or none_serves):
        raise StartError(f"failed to load {'; '.join(failures)}")
    for failure in failures:
        _log.error("failed to load %s; the other models are served", failure)


def _wanted(settings: Settings, layout: Layout, folders: Sequence[ModelFolder]) -> Sequence[ModelFolder]:
    """All, or in mode EXPLICIT those whose names were given."""
    names = settings.load_models
    if settings.model_control_mode is ControlMode.NONE or names == ("*",):
        return folders
    there = {folder.name: folder for folder in folders}
    absent = f"no model of that name in {layout}"
    return [there.get(name) or ModelFolder(name, Path(name), {}, problem=absent) for name in dict.fromkeys(names)]
