"""From a model's configuration to the batcher's policy.

Lives here: the names and units of Triton's `ModelDynamicBatching` and `ModelQueuePolicy`, and of our own settings among
the `parameters` (prefix `paceline.`). Must not: tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from itertools import pairwise
from typing import Literal, NamedTuple, cast

from paceline.protos import model_config_pb2 as pb
from paceline.scheduler.policy import BatchPolicy, PolicyError, QueueLimits, QueuePolicy, TimeoutAction
from paceline.server.errors import ConfigError
from paceline.server.models.defaults import BatchDefaults, as_boolean

_PREFIX = "paceline."
_MAX_NUMBER = 2**63 - 1
"""The highest number of rows, bytes or milliseconds; the most milliseconds that a system timer can be set to."""
_ACTIONS = {pb.ModelQueuePolicy.REJECT: TimeoutAction.REJECT, pb.ModelQueuePolicy.DELAY: TimeoutAction.DELAY}
_PAD_AXIS = re.compile(r"(?P<input>.+)\[(?P<axis>[1-9][0-9]{0,3})\](\s*=\s*(?P<fill>\S+))?")


class PadAxis(NamedTuple):
    """An axis of an input along which requests are filled up; `fill` is None if the configuration gives none."""

    input: str
    axis: int
    fill: int | float | None = None


PadSizes = tuple[int, ...]
CalledModels = tuple[str, ...]
StateAxes = Mapping[str, int]
BatchGrowth = Literal["auto", "always"]


@dataclass(frozen=True, slots=True)
class OwnSettings:
    """The settings that `parameters` give under our prefix; defaults for the rest. `pad`: None if it is to be found
    out, empty if it is "off"."""

    batch_sizes: tuple[int, ...] = ()
    max_queue_rows: int = 0
    max_queue_bytes: int = 0
    isolate_failures: bool = True
    deadline_aware: bool = True
    await_returns: bool = False
    split_oversized: bool = False
    execution_timeout_ms: int | None = None
    pad: tuple[PadAxis, ...] | None = None
    pad_sizes: PadSizes = ()
    max_batch_elements: int = 0
    batch_growth: BatchGrowth = "auto"
    state_batch_axis: StateAxes = field(default_factory=dict)
    max_sequences: int | None = None
    sequence_backlog: int | None = None
    max_state_bytes: int | None = None
    max_open_requests: int = 1_024
    calls: CalledModels = ()


def own_settings(config: pb.ModelConfig) -> OwnSettings:
    """Read our settings. Raises ConfigError for a malformed value, and for an unknown key, which is a mistake."""
    given = {key: one.string_value for key, one in config.parameters.items() if key.startswith(_PREFIX)}
    if unknown := given.keys() - OWN_PARAMETERS:
        got = min(unknown)
        near = nearest(got.removeprefix(_PREFIX), [one.removeprefix(_PREFIX) for one in OWN_PARAMETERS])
        expected = f"{_PREFIX}{near}" if near else f"one of {sorted(OWN_PARAMETERS)}"
        raise ConfigError(f"parameters: expected {expected}, got '{got}'")
    values: dict[str, object] = {}
    for name, (read, expected) in _READERS.items():
        text = given.get(_PREFIX + name)
        try:
            values |= {} if text is None else {name: read(text)}
        except ValueError:
            raise ConfigError(f"{_PREFIX}{name}: expected {expected}, got '{text}'") from None
    return OwnSettings(**values)  # type: ignore[arg-type]


def backend_name(config: pb.ModelConfig) -> str:
    """The backend that the configuration names, directly or by platform; ONNX Runtime if it names none."""
    return config.backend or config.platform or "onnxruntime"


def called_models(config: pb.ModelConfig) -> CalledModels:
    """The models that its code calls, as it declares. Raises as `own_settings`."""
    return own_settings(config).calls


def nearest(name: str, known: Iterable[str]) -> str:
    """The one of the `known` names that `name` is most like; "" if it is like none."""
    return next(iter(get_close_matches(name, list(known), 1)), "")


def refuse(why: str, *settings: tuple[str, str, object]) -> None:
    """Raise ConfigError for the first of `settings` that was given: its name, what is expected, and its value."""
    for name, expected, got in settings:
        if got:
            raise ConfigError(f"{name}: expected {expected}, as {why}, got {got}")


def no_cache(model: str, what: str, why: str = "") -> ConfigError:
    """The error of a model that has `what` and asks for the response cache."""
    expected = f"expected response_cache.enable false{why and ', ' + why}, got true"
    text = f"Response Cache does not currently support model {model} with {what}. Please disable the response cache"
    return ConfigError(f"{text}: {expected}")


def batch_policy(
    config: pb.ModelConfig, max_rows: int, *, merges: bool, defaults: BatchDefaults | None, execution_limit_ns: int = 0
) -> BatchPolicy:
    """The policy for a model whose requests may have `max_rows` rows (0: it has no batch axis).

    `merges` says whether requests share batches; `defaults` are given if there is no configuration at all;
    `execution_limit_ns` holds where the configuration has no limit of its own. Raises ConfigError naming the field,
    what was expected and what was given.
    """
    batching, own = config.dynamic_batching, own_settings(config)
    delay_ns, timeout_ns = batching.max_queue_delay_microseconds * 1_000, 0
    if defaults is not None:
        delay_ns, timeout_ns = defaults.max_queue_delay_ns, defaults.queue_timeout_ns
    try:
        return BatchPolicy(
            max_batch_rows=max(1, max_rows),
            preferred_batch_rows=_preferred(batching, own, max_rows),
            max_queue_delay_ns=delay_ns if max_rows else 0,
            max_batch_requests=0 if merges else 1,
            priority_levels=batching.priority_levels,
            default_priority_level=batching.default_priority_level if batching.priority_levels else 0,
            queue=_queue_policy("default_queue_policy", batching.default_queue_policy, timeout_ns),
            priority_queue={
                level: _queue_policy(f"priority_queue_policy[{level}]", one)
                for level, one in batching.priority_queue_policy.items()
                if batching.priority_levels  # without any levels, Triton ignores their policies
            },
            limits=QueueLimits(own.max_queue_rows, own.max_queue_bytes),
            preserve_ordering=batching.preserve_ordering,
            batch_sizes=own.batch_sizes,
            isolate_failures=own.isolate_failures,
            deadline_aware=own.deadline_aware,
            await_returns=own.await_returns,
            max_batch_elements=own.max_batch_elements,
            grows_always=own.batch_growth == "always",
            execution_limit_ns=limit_of(config, execution_limit_ns),
        )
    except PolicyError as error:
        prefix = _PREFIX if error.field in _READERS else "dynamic_batching."
        raise ConfigError(f"{prefix}{error}") from None


def limit_of(config: pb.ModelConfig, default_ns: int) -> int:
    """How long an execution may take, in ns: the configuration's limit, else `default_ns`; 0: no limit. Raises
    ConfigError."""
    limit_ms = own_settings(config).execution_timeout_ms
    return default_ns if limit_ms is None else limit_ms * 1_000_000


def _preferred(batching: pb.ModelDynamicBatching, own: OwnSettings, max_rows: int) -> tuple[int, ...]:
    """The preferred sizes; none if only the largest is listed, which is preferred anyway. Triton reports a
    configuration without sizes like that, and it must mean the same when it is loaded again. Raises ConfigError for
    settings that only mean something with a batch axis if there is none."""
    sizes, preferred = tuple(batching.preferred_batch_size), "dynamic_batching.preferred_batch_size"
    if not max_rows:
        refuse(
            "the model has no batch axis (max_batch_size 0)",
            (preferred, "none", list(sizes)),
            ("paceline.batch_sizes", "none", list(own.batch_sizes)),
            ("paceline.split_oversized", "false", own.split_oversized and "true"),
        )
    for size in sizes:
        if not 0 < size <= max_rows:
            raise ConfigError(f"{preferred}: expected 1 to max_batch_size, {max_rows}, got {size}")
    return () if set(sizes) == {max_rows} else sizes


def _queue_policy(name: str, policy: pb.ModelQueuePolicy, timeout_ns: int = 0) -> QueuePolicy:
    if policy.timeout_action not in _ACTIONS:
        raise ConfigError(
            f"dynamic_batching.{name}.timeout_action: expected REJECT or DELAY, got {policy.timeout_action}"
        )
    return QueuePolicy(
        max_queue_size=policy.max_queue_size,
        default_timeout_ns=policy.default_timeout_microseconds * 1_000 or timeout_ns,
        allow_timeout_override=policy.allow_timeout_override,
        timeout_action=_ACTIONS[policy.timeout_action],
    )


def _count(text: str) -> int:
    value = int(text)
    if not 0 <= value <= _MAX_NUMBER:
        raise ValueError
    return value


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(","))


def _pad(text: str) -> tuple[PadAxis, ...]:
    if text.strip() == "off":
        return ()
    axes = [*map(_pad_axis, text.split(","))]
    fills = {(one.input, one.fill) for one in axes if one.fill is not None}
    if len({one[:2] for one in axes}) < len(axes) or len({name for name, _ in fills}) < len(fills):
        raise ValueError
    given: dict[str, int | float] = dict(fills)
    return tuple(one._replace(fill=given.get(one.input)) for one in axes)


def _pad_axis(text: str) -> PadAxis:
    found = _PAD_AXIS.fullmatch(text.strip())
    if found is None:
        raise ValueError
    name, axis, fill = found["input"].strip(), int(found["axis"]), found["fill"]
    if fill is None:
        return PadAxis(name, axis)
    try:
        return PadAxis(name, axis, int(fill))
    except ValueError:
        if (number := float(fill)) != number:
            raise
        return PadAxis(name, axis, number)


def _pad_sizes(text: str) -> PadSizes:
    sizes = _sizes(text)
    if not 0 < sizes[0] <= sizes[-1] <= _MAX_NUMBER or any(one >= other for one, other in pairwise(sizes)):
        raise ValueError
    return sizes


def _batch_growth(text: str) -> BatchGrowth:
    if text.strip() not in ("auto", "always"):
        raise ValueError
    return cast("BatchGrowth", text.strip())


def _called(text: str) -> CalledModels:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise ValueError
    return names


def _state_axes(text: str) -> StateAxes:
    pairs = [one.rpartition("=") for one in text.split(",")]
    axes = {name.strip(): int(axis) for name, _, axis in pairs}
    if len(axes) < len(pairs) or "" in axes or min(axes.values()) < 0:
        raise ValueError
    return axes


_COUNT = (_count, f"a whole number from 0 to {_MAX_NUMBER}")
_OF_TYPE: Mapping[object, tuple[Callable[[str], object], str]] = {
    "tuple[int, ...]": (_sizes, "numbers of rows with commas between them"),
    "int": _COUNT,
    "int | None": _COUNT,
    "bool": (lambda text: as_boolean(text.strip()), "true or false"),
    "tuple[PadAxis, ...] | None": (
        _pad,
        "off, or inputs with axes from 1 on, each once, and one fill for an input, as in "
        "input_ids[1]=0, attention_mask[1]=0",
    ),
    "PadSizes": (_pad_sizes, "sizes from 1 on in ascending order with commas between them"),
    "BatchGrowth": (_batch_growth, "auto or always"),
    "CalledModels": (_called, "names of models, each once, with commas between them"),
    "StateAxes": (_state_axes, "inputs of states, each once, with axes from 0 on, as in h=1, c=1"),
}
_READERS = {one.name: _OF_TYPE[one.type] for one in fields(OwnSettings)}
_OF_BACKENDS = {
    "execute_delay_per_row_us", "generate", "max_cache_bytes", "max_generations", "own_process", "prefill_tokens",
    "python_executable",
}  # fmt: skip
OWN_PARAMETERS = frozenset(_PREFIX + name for name in (*_READERS, *_OF_BACKENDS))
"""The keys of `parameters` that are ours."""
