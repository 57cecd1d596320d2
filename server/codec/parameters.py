"""What an inference request asks for besides its tensors: its `parameters`, checked, and what follows for its batch.

Lives here: which keys mean something, which are reserved, and of what type they must be. Everything else is accepted
as it is, as the protocol leaves parameters to each server. Source of names and types: Triton's "parameters" and
"schedule policy" extensions.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.backends.spec import ModelSpec
from paceline.protos.inference_pb2 import InferParameter
from paceline.server.errors import InvalidRequest

__all__ = [
    "CANCEL",
    "KNOWN",
    "NO_PARAMETERS",
    "UNORDERED",
    "RequestOptions",
    "RequestParameters",
    "is_reserved",
    "parse_parameters",
]

UNORDERED = "paceline_unordered"
"""On a request of a stream: its answer need not wait for those before it."""
CANCEL = "paceline_cancel"
"""On a stream, instead of a request: requests with the same id are cancelled."""
_DEADLINE = "paceline_deadline_us"

_MAX_PARAMETERS = 1_024
"""The most parameters of a request. A MB of them would keep the event loop busy for a fifth of a second."""

_INTEGERS = ("int64_param", "uint64_param")
KNOWN: dict[str, tuple[str, ...]] = {
    "priority": _INTEGERS,
    "timeout": _INTEGERS,
    "sequence_id": (*_INTEGERS, "string_param"),
    "sequence_start": ("bool_param",),
    "sequence_end": ("bool_param",),
    "binary_data_output": ("bool_param",),
    "paceline_batch_info": ("bool_param",),
    UNORDERED: ("bool_param",),
    CANCEL: ("bool_param",),
    _DEADLINE: _INTEGERS,
    "triton_enable_empty_final_response": ("bool_param",),
}
"""The keys that mean something to the server, and the types that their values may have."""
_COUNTS = ("priority", "timeout", _DEADLINE)
_RESERVED_PREFIXES = ("triton_", "paceline_")
_RESERVED = frozenset((*KNOWN, "headers"))


@dataclass(frozen=True, slots=True)
class RequestParameters:
    """What a request's parameters say: its queue timeout (0: none), how soon its caller gives up (0: not said), its
    priority (0: the default), whether outputs are wanted in typed `contents`, and whether it wants to know about its
    batch."""

    timeout_ns: int = 0
    deadline_ns: int = 0
    priority: int = 0
    typed_outputs: bool = False
    batch_info: bool = False


NO_PARAMETERS = RequestParameters()


@dataclass(slots=True)
class RequestOptions:
    """What a request asks for, apart from its tensors. Requests of equal `key` may share a batch. `outputs` are the
    indices of the wanted outputs, in the order asked for; `classes` has, by index, those of which only some classes are
    wanted, and how many. `spec` describes the request's tensors if its model doesn't. `size_bytes` is the size of all
    its inputs, -1 if that has to be counted. `plain`: nothing but raw outputs is wanted. `sizes`: those in the model's
    lengths, which `key` leaves out."""

    rows: int
    key: Hashable
    outputs: tuple[int, ...]
    parameters: RequestParameters
    classes: Mapping[int, int] | None = None
    spec: ModelSpec | None = None
    size_bytes: int = -1
    plain: bool = True
    sizes: tuple[int, ...] = ()


def parse_parameters(parameters: Mapping[str, InferParameter]) -> RequestParameters:
    """Check and read `parameters`. Raises InvalidRequest, naming the key, what was expected and what came."""
    if len(parameters) > _MAX_PARAMETERS:
        raise InvalidRequest(f"expected at most {_MAX_PARAMETERS} parameters, got {len(parameters)}")
    values = {key: _checked(key, parameter) for key, parameter in parameters.items()}
    timeout_us, deadline_us, priority = (values.get(key, 0) for key in ("timeout", _DEADLINE, "priority"))
    return RequestParameters(
        timeout_ns=timeout_us * 1_000,
        deadline_ns=deadline_us * 1_000,
        priority=priority,
        typed_outputs=values.get("binary_data_output", True) is False,
        batch_info=values.get("paceline_batch_info", False) is True,
    )


def is_reserved(key: str) -> bool:
    """Whether `key` means something to the server, or may one day."""
    return key in _RESERVED or key.startswith(_RESERVED_PREFIXES)


def _checked(key: str, parameter: InferParameter) -> Any:
    kind = parameter.WhichOneof("parameter_choice")
    if kind is None:
        raise InvalidRequest(f"parameter '{key}': expected a value, got none")
    if key not in KNOWN:
        for prefix in _RESERVED_PREFIXES:
            if key.startswith(prefix):
                known = sorted(name for name in KNOWN if name.startswith(prefix))
                raise InvalidRequest(f"parameter '{key}': keys starting with '{prefix}' are reserved; known: {known}")
    elif kind not in KNOWN[key]:
        raise InvalidRequest(f"parameter '{key}': expected {' or '.join(KNOWN[key])}, got {kind}")
    value = getattr(parameter, kind)
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest(f"parameter '{key}': expected a finite number, got {value}")
    if key in _COUNTS and value < 0:
        raise InvalidRequest(f"parameter '{key}': expected >= 0, got {value}")
    return value
