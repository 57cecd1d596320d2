"""What a load may do: settings that flags don't allow, and code that would run.

Lives here: the rules by which code in models gets to run, before any does, and what clients may not ask for. Must not:
what a model is.
"""

from __future__ import annotations

from paceline.backends.python import ENVIRONMENT, EXECUTABLE
from paceline.protos import model_config_pb2 as pb
from paceline.server.errors import ConfigError
from paceline.server.models.defaults import LoadDefaults
from paceline.server.models.layout import ModelFolder
from paceline.server.models.model_config import backend_name, is_complete, parse_config
from paceline.server.models.tensor_config import without_datatype

__all__ = ["check_allowed", "check_code"]


def check_allowed(config: pb.ModelConfig, defaults: LoadDefaults, *, from_client: bool) -> None:
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


def check_code(config: pb.ModelConfig, folder: ModelFolder, defaults: LoadDefaults, *, from_client: bool) -> None:
    """The same for the model's code: Python models, the program to run these with, and libraries of operators."""
    libraries = "model_operations.op_library_filename"
    if config.model_operations.op_library_filename:
        if from_client:
            raise ConfigError(f"{libraries}: clients may not upload code; put it into the repository")
        if not defaults.allow_op_libraries:
            raise ConfigError(
                f"{libraries}: the library's code would run in the server; start the server with "
                "--allow-op-libraries true if you trust everyone who can write to the model repository"
            )
    if backend_name(config) != "python":
        return
    if not defaults.allow_python_models:
        raise ConfigError(
            "backend 'python': the model's code would run with the server's rights; start the server with "
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
