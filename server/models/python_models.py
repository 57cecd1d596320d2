"""Models that are Python code: which ones are, and whether they may be.

Lives here: the rules by which code gets to run, before any does. Must not: load.
"""

from __future__ import annotations

from paceline.backends.paths import exists
from paceline.backends.python import EXECUTABLE
from paceline.protos import model_config_pb2 as pb
from paceline.server.errors import ConfigError
from paceline.server.models.layout import DEFAULT_MODEL_FILE, PYTHON_MODEL_FILE, ModelFolder
from paceline.server.models.model_config import backend_name, parse_config

__all__ = ["PYTHON", "check_python_allowed", "is_python"]

PYTHON = "python"
"""The backend's name in configurations."""


def is_python(config: pb.ModelConfig, folder: ModelFolder) -> bool:
    """Whether `config` asks for the backend, or leaves it open for a folder that has Python models and nothing else."""
    if config.backend or config.platform:
        return backend_name(config) == PYTHON
    if config.default_model_filename or folder.file is not None or not folder.versions:
        return False
    return all(
        exists(path / PYTHON_MODEL_FILE) and not exists(path / DEFAULT_MODEL_FILE) for path in folder.versions.values()
    )


def check_python_allowed(config: pb.ModelConfig, folder: ModelFolder, *, allowed: bool, from_client: bool) -> None:
    """Raise ConfigError unless the server allows such models, and for what no client may decide: code and, in a
    `config` that is `from_client`, the program to run it with."""
    if not allowed:
        raise ConfigError(
            "backend 'python': the model's code would run with the server's rights; start the server with "
            "--allow-python-models true if you trust everyone who can write to the model repository"
        )
    if folder.files is not None:
        raise ConfigError("backend 'python': clients may not upload code; put it into the repository")
    if from_client and _executable(config) not in (
        "",
        _executable(parse_config(folder.config)) if folder.config else "",
    ):
        raise ConfigError(
            f"parameters: {EXECUTABLE}: clients may not choose a program to run; set it in the repository"
        )


def _executable(config: pb.ModelConfig) -> str:
    return config.parameters[EXECUTABLE].string_value if EXECUTABLE in config.parameters else ""
