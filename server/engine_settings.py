"""What an engine may be told, checked: nothing that it doesn't know is passed over, and no value is taken for another.

Lives here: the settings' names, types and bounds, and how they become the server's. Must not: start anything.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Final, TypedDict

import numpy as np

from paceline.server.config import Settings
from paceline.server.limits import Limits
from paceline.server.model_flags import within_cpus
from paceline.server.models.defaults import BackendConfig, BatchDefaults, Offline


class EngineSettings(TypedDict, total=False):
    """What an engine may be told. `model_name`: of a single model that isn't in a repository. `max_batch_size` (rows,
    by default 32) and `max_queue_delay_us` (0) are for models without a `config.pbtxt`. `intra_op_threads`: threads of
    a session whose model doesn't say; 0: ONNX Runtime decides. `execution_timeout_s`: the longest execution before its
    instance is replaced; 0: no limit. `allow_python_models`: whether models may be Python code, which runs in processes
    of its own. `offline`: each request is an execution by itself, so that its result doesn't depend on others."""

    model_name: str
    max_batch_size: int
    max_queue_delay_us: int
    intra_op_threads: int
    execution_timeout_s: float
    allow_python_models: bool
    offline: Offline


_NUMBERS: Final[Mapping[str, tuple[type, str, int]]] = {
    "max_batch_size": (Integral, "a whole number", 2**31 - 1),
    "max_queue_delay_us": (Integral, "a whole number", 10**12),
    "intra_op_threads": (Integral, "a whole number", 1024),
    "execution_timeout_s": (Real, "a number", 10**6),
}
"""By name: of which type, in words, and the most. All begin at 0."""


def settings_of(paths: Sequence[str | os.PathLike[str]], given: EngineSettings) -> Settings:
    """The server's settings. Raises TypeError and ValueError, naming the argument, what was expected and what came."""
    if not paths:
        raise ValueError("expected at least one path: a model repository, a model's folder or a .onnx file")
    for path in paths:
        if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
            raise TypeError(f"expected paths as str or os.PathLike, got {path!r}")
        if not os.fspath(path):
            raise ValueError("expected a path, got ''")
    refuse_unknown("setting", given, EngineSettings.__optional_keys__)
    values: Mapping[str, object] = {**given}
    for number, (kind, what, most) in _NUMBERS.items():
        value = values.get(number, 0)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"{number}: expected {what}, got {value!r}")
        if not 0 <= value <= most:  # type: ignore[operator]
            raise ValueError(f"{number}: expected {what} from 0 to {most}, got {value!r}")
    name, is_python, offline = (
        given.get("model_name", ""),
        given.get("allow_python_models", False),
        given.get("offline"),
    )
    if not isinstance(name, str):
        raise TypeError(f"model_name: expected a str, got {name!r}")
    if not isinstance(is_python, bool | np.bool_):
        raise TypeError(f"allow_python_models: expected True or False, got {is_python!r}")
    if not isinstance(offline, Offline | None):
        raise TypeError(f"offline: expected Offline or None, got {offline!r}")
    rows = int(given.get("max_batch_size", BatchDefaults().max_batch_rows))
    return Settings(
        tuple(map(Path, paths)),
        metrics_port=None,
        exit_on_error=True,
        model_name=name,
        batching=BatchDefaults(rows, int(given.get("max_queue_delay_us", 0)) * 1_000),
        backend_config=within_cpus(BackendConfig(intra_op_threads=int(given.get("intra_op_threads", 0)))),
        execution_timeout_secs=float(given.get("execution_timeout_s", 0.0)),
        allow_python_models=bool(is_python),
        offline=offline,
        limits=Limits() if offline is None else Limits(queued_requests=0, queued_bytes=0),
    )


def refuse_unknown(what: str, given: Mapping[str, object], known: frozenset[str]) -> None:
    """Raise TypeError, as Python does for arguments, for names that would else be without effect."""
    if unknown := given.keys() - known:
        raise TypeError(f"unknown {what} '{min(unknown)}': expected one of {', '.join(sorted(known))}")
