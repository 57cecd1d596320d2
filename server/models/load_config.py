"""The configuration that a model is loaded with: read, named, and whether a load may do what it asks for.

Lives here: which configuration and which versions, the rules by which code in models gets to run, before any does, and
what clients may not ask for. Must not: open models, or what a configuration means.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from copy import deepcopy
from difflib import get_close_matches

from paceline.backends.paths import exists
from paceline.backends.python import ENVIRONMENT, EXECUTABLE
from paceline.protos import model_config_pb2 as pb
from paceline.server.errors import ConfigError
from paceline.server.models.batch_policy import backend_name
from paceline.server.models.config_text import parse_config
from paceline.server.models.defaults import LoadDefaults
from paceline.server.models.layout import CONFIG_FILE, DEFAULT_MODEL_FILE, PYTHON_MODEL_FILE, ModelFolder, is_ignored
from paceline.server.models.model_config import check_supported, is_complete
from paceline.server.models.model_record import DUPLICATE_NAME
from paceline.server.models.tensor_config import without_datatype

_log = logging.getLogger("paceline.server.loader")

PYTHON = "python"
"""The backend's name in configurations."""


def load_config(folder: ModelFolder, override: pb.ModelConfig | None, defaults: LoadDefaults) -> pb.ModelConfig:
    """The configuration to load the model with, its name filled in: `override`, or the folder's own. Raises ConfigError
    for what can't be loaded, or may not."""
    if folder.problem:
        raise ConfigError(folder.problem)
    if folder.duplicates:
        raise ConfigError(f"{DUPLICATE_NAME}: {', '.join(map(str, folder.duplicates))}")
    for stray in folder.strays:
        _log.warning("%s is ignored: expected a version folder, named by a number without leading zeros", stray)
    for place in folder.versions.values():
        try:
            exists(place / "..")  # which takes the right to enter it, and nothing else
        except OSError as error:
            raise ConfigError(f"{place}: {error.strerror}; expected a folder that this process may enter") from None
    config = deepcopy(override) if override is not None else pb.ModelConfig()
    if override is None and folder.config:
        config = parse_config(folder.config)
    elif override is None:
        _tell_misplaced(folder)
    if config.name not in ("", folder.name) and not folder.renamed:
        raise ConfigError(f"name: expected '{folder.name}', the name of its folder, got '{config.name}'")
    config.name = folder.name
    if is_python(config, folder):
        config.backend = PYTHON
    check_supported(config)
    _check_allowed(config, folder, defaults, from_client=override is not None)
    return config


def _tell_misplaced(folder: ModelFolder) -> None:
    """Log what looks like the configuration of a model that has none."""
    with suppress(OSError):  # only a warning depends on it
        if folder.file is not None:
            if exists(beside := folder.file.parent / CONFIG_FILE):
                how = f"serve a folder with it and the model as {DEFAULT_MODEL_FILE}"
                _log.warning("%s is ignored, as a model that is a file has no configuration: %s", beside, how)
            return
        for place in sorted({folder.path, *folder.versions.values()}):
            names = [name for name in os.listdir(place) if not is_ignored(name)]
            for name in get_close_matches(CONFIG_FILE, names, cutoff=0.8):
                expected = folder.path / CONFIG_FILE
                _log.warning("%s is ignored: expected the model's configuration to be %s", place / name, expected)


def is_python(config: pb.ModelConfig, folder: ModelFolder) -> bool:
    """Whether `config` asks for the backend, or leaves it open for a folder that has Python models and nothing else."""
    if config.backend or config.platform:
        return backend_name(config) == PYTHON
    if config.default_model_filename or folder.file is not None or not folder.versions:
        return False
    return all(
        exists(path / PYTHON_MODEL_FILE) and not exists(path / DEFAULT_MODEL_FILE) for path in folder.versions.values()
    )


def wanted_versions(config: pb.ModelConfig, folder: ModelFolder) -> list[int]:
    """The versions that `version_policy` picks from those on disk; by default the latest one."""
    policy, present = config.version_policy, sorted(folder.versions)
    if not present:
        text = f"no version to load: expected folders named by version numbers in {folder.path}, found none"
        if folder.name.isdigit():
            files = f"{DEFAULT_MODEL_FILE} or {PYTHON_MODEL_FILE}"
            text += f"; if it is a version of {folder.path.absolute().parent.name} itself, expected {files} in it"
        raise ConfigError(text)
    if policy.HasField("all"):
        return present
    if not policy.HasField("specific"):
        return present[-max(1, policy.latest.num_versions) :]
    asked = sorted(set(policy.specific.versions))
    wanted = [version for version in asked if version in folder.versions]
    if not wanted:
        raise ConfigError(f"no version to load: version_policy asks for {asked}, found {present} in {folder.path}")
    for version in asked:
        if version not in folder.versions:
            _log.warning("model '%s': version %d of its version_policy is not in %s", folder.name, version, folder.path)
    return wanted


def _check_allowed(config: pb.ModelConfig, folder: ModelFolder, defaults: LoadDefaults, *, from_client: bool) -> None:
    """Raise ConfigError for what the flags don't allow, or what a configuration `from_client` may not have."""
    if not (defaults.auto_complete or is_complete(config)):
        raise ConfigError("expected input and output in its configuration, as --disable-auto-complete-config is given")
    states = [one.input_name for one in config.sequence_batching.state if not one.data_type]
    if not defaults.auto_complete and (names := without_datatype(config) + states):
        raise ConfigError(f"'{names[0]}': expected a data_type, as --disable-auto-complete-config is given")
    accelerators = config.optimization.execution_accelerators
    for one in (*accelerators.gpu_execution_accelerator, *accelerators.cpu_execution_accelerator):
        for key in sorted(one.parameters):
            if from_client and (key.endswith(("_path", "_dir")) or "_dump_" in key):
                setting = f"execution accelerator '{one.name}': {key}"
                raise ConfigError(
                    f"{setting}: clients may not choose where the server writes files; set it in the repository"
                )
    # Code: Python models, the program to run these with, and libraries of operators.
    libraries = "model_operations.op_library_filename"
    if config.model_operations.op_library_filename:
        if from_client:
            raise ConfigError(f"{libraries}: clients may not upload code; put it into the repository")
        if not defaults.allow_op_libraries:
            raise ConfigError(
                f"{libraries}: the library's code would run in this process; `paceline serve` and `check` allow it "
                "with --allow-op-libraries true, if you trust everyone who can write to the model repository"
            )
    if backend_name(config) != PYTHON:
        return
    if not defaults.allow_python_models:
        raise ConfigError(
            "backend 'python': the model's code would run with this process's rights; allow it with "
            "--allow-python-models true if you trust everyone who can write to the model repository"
        )
    if folder.files is not None:
        raise ConfigError("backend 'python': clients may not upload code; put it into the repository")
    own = parse_config(folder.config) if from_client and folder.config else pb.ModelConfig()
    for key in (EXECUTABLE, ENVIRONMENT) if from_client else ():
        if (chosen := _parameter(config, key)) and chosen != _parameter(own, key):
            raise ConfigError(f"parameters: {key}: clients may not choose a program to run; set it in the repository")


def _parameter(config: pb.ModelConfig, key: str) -> str:
    return config.parameters[key].string_value if key in config.parameters else ""
