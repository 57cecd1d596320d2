"""The model that is tuned, as it lies on disk.

Lives here: its name and its own configuration, found as the engine finds them. Must not: load, or change anything.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from paceline.protos import model_config_pb2 as pb
from paceline.server.errors import ConfigError, StartError
from paceline.server.models.batch_policy import backend_name
from paceline.server.models.config_text import parse_config
from paceline.server.models.layout import Layout
from paceline.server.models.load_config import is_python
from paceline.server.tune.measuring import TuneError

__all__ = ["OwnModel", "own_model"]


class OwnModel(NamedTuple):
    """What the model is called, and what its own configuration says; no more than its backend if it has none."""

    name: str
    config: pb.ModelConfig


def own_model(path: Path) -> OwnModel:
    """The only model at `path`, a file, a folder of any kind or a repository. Raises TuneError, also if there
    are several."""
    layout = Layout([path])
    try:
        layout.open()
        folders = layout.models()
        if len(folders) != 1:
            raise TuneError(f"{path}: expected one model, got {', '.join(one.name for one in folders)}")
        (folder,) = folders
        config = parse_config(folder.config) if folder.config else pb.ModelConfig()
    except StartError as error:  # names the path
        raise TuneError(str(error)) from error
    except (ConfigError, OSError) as error:
        raise TuneError(f"{path}: {error}") from error
    # A configuration that is written says which backend it is for.
    if is_python(config, folder):
        config.backend = "python"
    elif not config.platform:
        config.backend = backend_name(config)
    return OwnModel(folder.name, config)
