"""What the command line sets for models that don't set it themselves.

Lives here: these defaults; `--backend-config BACKEND,KEY=VALUE`: the keys of Triton's ONNX Runtime backend, two of our
own, and the refusal of others; and `--cache-config CACHE,KEY=VALUE`. Must not: models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from paceline.backends.model_call import OnCall
from paceline.backends.onnx.options import CACHE_DIRECTORY, OWN_PROCESS

_BACKEND = "onnxruntime"
_CACHE = "local"
INTRA, _INTER = "intra_op_thread_count", "inter_op_thread_count"
ALLOW_SPINNING = "session.intra_op.allow_spinning"
_MAX_NUMBER = 2**31 - 1
_MAX_DIGITS = 40
_MAX_THREADS = 1_024
"""More than machines have cores. ONNX Runtime starts all threads of a shared pool before it returns; some thousands
take minutes, in which no signal ends the server."""
_SWITCH = {"0": False, "1": True, "false": False, "true": True}


@dataclass(frozen=True, slots=True)
class BatchDefaults:
    """How a model without any configuration is batched, if it can be: rows of a batch (Triton's default is 4), longest
    wait for more requests, longest time in the queue (0: no limit). `flags` are those that were given for this, each
    with the field of a configuration that says the same."""

    max_batch_rows: int = 32
    max_queue_delay_ns: int = 0
    queue_timeout_ns: int = 0
    flags: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Offline:
    """For work whose results mustn't depend on what else is asked at the time: each request is an execution by itself,
    and none is refused or ends since too many wait, or for too long. `instances` and `intra_op_threads` are those of
    each model, on each of its devices, whatever its configuration says; 0: as that says."""

    instances: int = 0
    intra_op_threads: int = 0


@dataclass(frozen=True, slots=True)
class LoadDefaults:
    """`batching` is for models without any configuration. `max_batch_rows` is for those whose configuration leaves
    `max_batch_size` to the model; `parameters` are defaults for the configuration's own. Without `auto_complete`, a
    configuration has to spell out its tensors; without `allow_op_libraries`, models can't bring libraries of operators,
    and without `allow_python_models`, none may be Python code. `execution_limit_ns` limits executions of models that
    set no limit; 0: none. `on_call` takes the calls that models make. `keeps_responses`: the server has a response
    cache, for models that ask for one. `offline`: models are for work of that kind."""

    batching: BatchDefaults = field(default_factory=BatchDefaults)
    max_batch_rows: int = BatchDefaults().max_batch_rows
    parameters: Mapping[str, str] = field(default_factory=dict)
    auto_complete: bool = True
    allow_op_libraries: bool = False
    execution_limit_ns: int = 0
    allow_python_models: bool = False
    on_call: OnCall | None = None
    keeps_responses: bool = False
    offline: Offline | None = None


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
        threads = {INTRA: self.intra_op_threads, _INTER: self.inter_op_threads}
        counts = {} if self.shared_threads else {key: str(count) for key, count in threads.items() if count}
        cache = {CACHE_DIRECTORY: self.cache_directory} if self.cache_directory else {}
        process = {} if self.own_process is None else {OWN_PROCESS: str(self.own_process).lower()}
        return counts | cache | process


def parse_backend_config(given: Iterable[str]) -> BackendConfig:
    """Read each flag's value. Raises ValueError saying what was expected and what was given."""
    texts: dict[str, str] = {}
    for text in given:
        backend, comma, setting = text.partition(",")
        key, equals, value = setting.partition("=")
        if not (comma and equals):
            raise ValueError(f"expected BACKEND,KEY=VALUE, got '{text}'")
        if backend != _BACKEND:
            raise ValueError(f"expected backend {_BACKEND}, the only one with such settings, got '{backend}'")
        if key not in _KEYS:
            raise ValueError(f"expected one of {', '.join(_KEYS)}, got '{key}', which this build doesn't have")
        texts[key] = value
    values: dict[str, object] = {}
    for key, text in texts.items():
        name, read, expected = _KEYS[key]
        try:
            values[name] = read(text)
        except ValueError:
            raise ValueError(f"{key}: expected {expected}, got '{text}'") from None
    return BackendConfig(**values)  # type: ignore[arg-type]


def parse_cache_config(given: Iterable[str]) -> int:
    """The bytes of the response cache, from each flag's value; 0: there is none. Raises ValueError saying what was
    expected and what was given."""
    size_bytes = 0
    for text in given:
        cache, comma, settings = text.partition(",")
        if cache != _CACHE:
            raise ValueError(f"expected cache '{_CACHE}', the only one in this build, got '{cache}'")
        for setting in settings.split(",") if comma else ():
            key, _, value = setting.partition("=")
            if key != "size":
                raise ValueError(f"{_CACHE}: expected size=BYTES, got '{setting}'")
            try:
                size_bytes = _MEMORY[0](value)
            except ValueError:
                raise ValueError(f"{_CACHE}: size: expected {_MEMORY[1]}, got '{value}'") from None
        if not size_bytes:
            raise ValueError(f"{_CACHE}: expected a size of at least 1, as in {_CACHE},size=104857600, got '{text}'")
    return size_bytes


def as_boolean(text: str) -> bool:
    """Raises ValueError."""
    if text.lower() not in _SWITCH:
        raise ValueError
    return _SWITCH[text.lower()]


def _count(most: int) -> tuple[Callable[[str], int], str]:
    def read(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS and int(text) <= most):
            raise ValueError
        return int(text)

    return read, f"a whole number from 0 to {most}"


_MEMORY = _count(2**60)

_KEYS: Mapping[str, tuple[str, Callable[[str], object], str]] = {
    "default-max-batch-size": ("max_batch_rows", *_count(_MAX_NUMBER)),
    "enable-global-threadpool": ("shared_threads", as_boolean, "0 or 1"),
    INTRA: ("intra_op_threads", *_count(_MAX_THREADS)),
    _INTER: ("inter_op_threads", *_count(_MAX_THREADS)),
    "cache-directory": ("cache_directory", str, "a path"),
    "own-process": ("own_process", as_boolean, "0 or 1"),
}
"""For each key, the field of BackendConfig, how its text is read, and what is expected."""
