"""The `parameters` of an inference request, checked.

Lives here: which keys mean something, which are reserved, and of what type they must be. Everything else is accepted
and ignored, as the protocol leaves parameters to each server. Source of names and types: Triton's "parameters" and
"schedule policy" extensions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from protos.inference_pb2 import InferParameter
from server.errors import InvalidRequest

__all__ = ["NO_PARAMETERS", "RequestParameters", "parse_parameters"]

_INTEGERS = ("int64_param", "uint64_param")
_TYPES: dict[str, tuple[str, ...]] = {
    "priority": _INTEGERS,
    "timeout": _INTEGERS,
    "sequence_id": (*_INTEGERS, "string_param"),
    "sequence_start": ("bool_param",),
    "sequence_end": ("bool_param",),
    "binary_data_output": ("bool_param",),
    "paceline_batch_info": ("bool_param",),
    "triton_enable_empty_final_response": ("bool_param",),
}
_RESERVED_PREFIXES = ("triton_", "paceline_")


@dataclass(frozen=True, slots=True)
class RequestParameters:
    """What a request's parameters say: its queue timeout (0: none), its priority (0: the default), whether outputs are
    wanted in typed `contents`, and whether it wants to know about its batch."""

    timeout_ns: int = 0
    priority: int = 0
    typed_outputs: bool = False
    batch_info: bool = False


NO_PARAMETERS = RequestParameters()


def parse_parameters(parameters: Mapping[str, InferParameter]) -> RequestParameters:
    """Check and read; raises InvalidRequest naming the key, what was expected and what came."""
    values = {key: _checked(key, parameter) for key, parameter in parameters.items()}
    timeout_us, priority = values.get("timeout", 0), values.get("priority", 0)
    assert isinstance(timeout_us, int)
    assert isinstance(priority, int)
    return RequestParameters(
        timeout_ns=timeout_us * 1_000,
        priority=priority,
        typed_outputs=values.get("binary_data_output", True) is False,
        batch_info=values.get("paceline_batch_info", False) is True,
    )


def _checked(key: str, parameter: InferParameter) -> object:
    kind = parameter.WhichOneof("parameter_choice")
    if kind is None:
        raise InvalidRequest(f"parameter '{key}': expected a value, got none")
    if key not in _TYPES:
        for prefix in _RESERVED_PREFIXES:
            if key.startswith(prefix):
                known = sorted(name for name in _TYPES if name.startswith(prefix))
                raise InvalidRequest(f"parameter '{key}': keys starting with '{prefix}' are reserved; known: {known}")
    elif kind not in _TYPES[key]:
        raise InvalidRequest(f"parameter '{key}': expected {' or '.join(_TYPES[key])}, got {kind}")
    value = getattr(parameter, kind)
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest(f"parameter '{key}': expected a finite number, got {value}")
    if key in ("priority", "timeout") and value < 0:
        raise InvalidRequest(f"parameter '{key}': expected >= 0, got {value}")
    return value
