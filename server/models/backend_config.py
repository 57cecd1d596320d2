"""`--backend-config BACKEND,KEY=VALUE`: what the command line tells a backend about all of its models.

Lives here: the keys of Triton's ONNX Runtime backend, two of our own, and the refusal of others. Must not: models.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.backends.onnx.options import CACHE_DIRECTORY, OWN_PROCESS

__all__ = ["BackendConfig", "parse_backend_config"]

_BACKEND = "onnxruntime"
_ROWS = "default-max-batch-size"
_SHARED = "enable-global-threadpool"
_INTRA, _INTER = "intra_op_thread_count", "inter_op_thread_count"
_CACHE = "cache-directory"
_OWN_PROCESS = "own-process"
_KEYS = (_ROWS, _SHARED, _INTRA, _INTER, _CACHE, _OWN_PROCESS)
_MAX_NUMBER = 2**31 - 1
_MAX_DIGITS = 40
_MAX_THREADS = 1_024
"""More than machines have cores. ONNX Runtime starts all threads of a shared pool before it returns; some thousands
take minutes, in which no signal ends the server."""
_SWITCH = {"0": False, "1": True, "false": False, "true": True}


@dataclass(frozen=True, slots=True)
class BackendConfig:
    """Settings of ONNX Runtime. `max_batch_rows`: rows of a batch where a model leaves them open (None: not given).
    `intra_op_threads` and `inter_op_threads`: threads of a session whose model doesn't say (0: ONNX Runtime decides);
    with `shared_threads`, those of one pool that all sessions share. `cache_directory`: where sessions keep what the
    next start can use ("": below the user's). `own_process`: whether models that don't say execute in processes of
    their own (None: not given)."""

    max_batch_rows: int | None = None
    intra_op_threads: int = 0
    inter_op_threads: int = 0
    shared_threads: bool = False
    cache_directory: str = ""
    own_process: bool | None = None

    @property
    def parameters(self) -> dict[str, str]:
        """Defaults for what a model's own `parameters` don't say."""
        threads = {_INTRA: self.intra_op_threads, _INTER: self.inter_op_threads}
        counts = {} if self.shared_threads else {key: str(count) for key, count in threads.items() if count}
        cache = {CACHE_DIRECTORY: self.cache_directory} if self.cache_directory else {}
        process = {} if self.own_process is None else {OWN_PROCESS: str(self.own_process).lower()}
        return counts | cache | process


def parse_backend_config(given: Iterable[str]) -> BackendConfig:
    """Read each flag's value. Raises ValueError saying what was expected and what was given."""
    values = dict(map(_split, given))
    rows = values.get(_ROWS)
    return BackendConfig(
        max_batch_rows=None if rows is None else _count(_ROWS, rows),
        intra_op_threads=_count(_INTRA, values.get(_INTRA, "0"), _MAX_THREADS),
        inter_op_threads=_count(_INTER, values.get(_INTER, "0"), _MAX_THREADS),
        shared_threads=_switch(_SHARED, values.get(_SHARED, "0")),
        cache_directory=values.get(_CACHE, ""),
        own_process=_switch(_OWN_PROCESS, values[_OWN_PROCESS]) if _OWN_PROCESS in values else None,
    )


def _split(text: str) -> tuple[str, str]:
    backend, comma, setting = text.partition(",")
    key, equals, value = setting.partition("=")
    if not (comma and equals):
        raise ValueError(f"expected BACKEND,KEY=VALUE, got '{text}'")
    if backend != _BACKEND:
        raise ValueError(f"expected backend {_BACKEND}, the only one with such settings, got '{backend}'")
    if key not in _KEYS:
        raise ValueError(f"expected one of {', '.join(_KEYS)}, got '{key}', which this build doesn't have")
    return key, value


def _count(key: str, text: str, most: int = _MAX_NUMBER) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS and int(text) <= most):
        raise ValueError(f"{key}: expected a whole number from 0 to {most}, got '{text}'")
    return int(text)


def _switch(key: str, text: str) -> bool:
    if text.lower() not in _SWITCH:
        raise ValueError(f"{key}: expected 0 or 1, got '{text}'")
    return _SWITCH[text.lower()]
