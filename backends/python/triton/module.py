"""The module `triton_python_backend_utils`, as models import it.

Lives here: its names, put together; logs; and what Triton has and this build lacks, which says so when it is used. Must
not: implement anything else. The rule: importing the module works wherever a model's file runs, so that one that never
uses what is missing is served.
"""

from __future__ import annotations

import sys
from enum import IntEnum
from types import ModuleType
from typing import Any, NoReturn

from paceline.backends.python.triton import config, errors, requests, responses, tensors

__all__ = ["MODULES", "install"]

MODULES = ("triton_python_backend_utils", "c_python_backend_utils")


class _Level(IntEnum):
    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3


class Logger:
    """Prints, which goes to the server's log."""

    LogLevel = _Level
    INFO, WARNING, ERROR, VERBOSE = _Level
    is_verbose = False

    @staticmethod
    def log(message: str, level: _Level = _Level.INFO) -> None:
        if level is not _Level.VERBOSE or Logger.is_verbose:
            prefix = "" if level is _Level.INFO else f"{_Level(level).name}: "
            print(f"{prefix}{message}", flush=True)

    @staticmethod
    def log_info(message: str) -> None:
        Logger.log(message)

    @staticmethod
    def log_warn(message: str) -> None:
        Logger.log(message, _Level.WARNING)

    @staticmethod
    def log_error(message: str) -> None:
        Logger.log(message, _Level.ERROR)

    @staticmethod
    def log_verbose(message: str) -> None:
        Logger.log(message, _Level.VERBOSE)


def install(model_dir: str, *, is_verbose: bool = False) -> None:
    """Have `import triton_python_backend_utils` find it. `model_dir`: the folder of the model's file."""
    Logger.is_verbose = is_verbose
    made = ModuleType(MODULES[0], __doc__)
    for source in (config, errors, requests, responses, tensors):
        for name in source.__all__:
            setattr(made, name, getattr(source, name))
    made.Logger = Logger  # type: ignore[attr-defined]
    made.LogLevel = _Level  # type: ignore[attr-defined]
    made.get_model_dir = lambda: model_dir  # type: ignore[attr-defined]
    made.TRITON_STRING_TO_NUMPY = tensors.BY_NAME  # type: ignore[attr-defined]
    for name, value in {
        "REQUEST_FLAG_SEQUENCE_START": requests.SEQUENCE_START,
        "REQUEST_FLAG_SEQUENCE_END": requests.SEQUENCE_END,
        "RESPONSE_COMPLETE_FINAL": responses.RESPONSE_FINAL,
        "REQUEST_RELEASE_ALL": requests.RELEASE_ALL,
        "REQUEST_RELEASE_RESCHEDULE": requests.RELEASE_RESCHEDULE,
        **{one.name.removeprefix("TRITONSERVER_"): one for one in requests.MemoryType},
    }.items():
        setattr(made, f"TRITONSERVER_{name}", value)
    for name in ("MetricFamily", "Metric", "MetricKind", "load_model", "unload_model", "is_model_ready"):
        setattr(made, name, _Missing(name))
    for name in MODULES:
        sys.modules[name] = made


class _Missing:
    """In place of what this build lacks."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise errors.TritonModelException(f"{MODULES[0]}.{self._name} is not supported by this build")

    def __getattr__(self, name: str) -> _Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self._name}.{name}")
