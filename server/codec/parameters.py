"""What an inference request asks for besides its tensors: its `parameters`, checked, and what follows for its batch.

Lives here: which keys mean something, which are reserved, and of what type they must be. Everything else is accepted
as it is, as the protocol leaves parameters to each server. Source of names and types: Triton's "parameters" and
"schedule policy" and "sequence" extensions.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.backends.batching import Share
from paceline.backends.spec import MISSING, Array, ModelSpec
from paceline.protos.inference_pb2 import InferParameter
from paceline.protos.wire import LONGEST_SEQUENCE_ID_BYTES, STEP_KEYS
from paceline.scheduler.request import SequenceStep
from paceline.server.errors import InvalidRequest, NotSupported

UNORDERED = "paceline_unordered"
"""On a request of a stream: its answer need not wait for those before it."""
CANCEL = "paceline_cancel"
"""On a stream, instead of a request: requests with the same id are cancelled."""
EMPTY_FINAL = "triton_enable_empty_final_response"
"""On a request of a stream: if its last answer doesn't say so, a message without outputs is to follow that does."""
_DEADLINE = "paceline_deadline_us"

_MAX_PARAMETERS = 1_024
"""The most parameters of a request. A MB of them would keep the event loop busy for a fifth of a second."""

_SEQUENCE_ID, _SEQUENCE_START, _SEQUENCE_END = STEP_KEYS

_INTEGERS = ("int64_param", "uint64_param")
KNOWN: dict[str, tuple[str, ...]] = {
    "priority": _INTEGERS,
    "timeout": _INTEGERS,
    _SEQUENCE_ID: ("int64_param", "string_param", "uint64_param"),
    _SEQUENCE_START: ("bool_param",),
    _SEQUENCE_END: ("bool_param",),
    "binary_data_output": ("bool_param",),
    "paceline_batch_info": ("bool_param",),
    UNORDERED: ("bool_param",),
    CANCEL: ("bool_param",),
    _DEADLINE: _INTEGERS,
    EMPTY_FINAL: ("bool_param",),
}
"""The keys that mean something to the server, and the types that their values may have."""
_QUEUEING = ("priority", "timeout")
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

    def with_key(self, key: Hashable) -> RequestOptions:
        """The same with another key. A third of what `dataclasses.replace` takes."""
        return RequestOptions(
            self.rows, key, self.outputs, self.parameters, self.classes, self.spec, self.size_bytes, self.plain,
            self.sizes,
        )  # fmt: skip


def parse_parameters(parameters: Mapping[str, InferParameter]) -> RequestParameters:
    """Check and read `parameters`. Raises InvalidRequest, naming the key, what was expected and what came, and
    NotSupported for the id of a sequence that is too long. What `step_of` reads is only checked."""
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


def step_of(parameters: Mapping[str, InferParameter]) -> SequenceStep | None:
    """What checked `parameters` say of the request's sequence; None if nothing. An integer below 0 is the one without a
    sign that has the same 64 bits."""
    if not any(key in parameters for key in STEP_KEYS):
        return None
    sequence: int | str = 0
    if _SEQUENCE_ID in parameters:
        own = parameters[_SEQUENCE_ID]
        kind = own.WhichOneof("parameter_choice")
        sequence = own.string_param if kind == "string_param" else getattr(own, str(kind)) % (1 << 64)
    start, end = (key in parameters and parameters[key].bool_param for key in (_SEQUENCE_START, _SEQUENCE_END))
    return SequenceStep(sequence, start, end)


def passed_within(parameters: Mapping[str, InferParameter]) -> dict[str, InferParameter]:
    """Those of a request that also hold for what is asked of other models in its course: not those that say how its
    answer is to be, when its caller gives up, or where it is in a sequence."""
    return {key: one for key, one in parameters.items() if key in _QUEUEING or not is_reserved(key)}


def of_those_there(
    options: RequestOptions, outputs: Sequence[Array], known: RequestOptions | None = None
) -> RequestOptions:
    """`options` for an answer that may lack some of the outputs. `known`: those of another answer to the request."""
    arrays = outputs.outputs.arrays if type(outputs) is Share else outputs
    there = tuple([index for index in options.outputs if arrays[index] is not MISSING])
    if there == options.outputs:
        return options
    return known if known is not None and there == known.outputs else replace(options, outputs=there)


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
        raise InvalidRequest(
            f"invalid value type for '{key}' parameter, expected {' or '.join(KNOWN[key])}, got {kind}"
        )
    value = getattr(parameter, kind)
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest(f"parameter '{key}': expected a finite number, got {value}")
    if key == _SEQUENCE_ID and isinstance(value, str) and len(value.encode()) > LONGEST_SEQUENCE_ID_BYTES:
        what = f"string correlation ID cannot be longer than {LONGEST_SEQUENCE_ID_BYTES} characters"
        raise NotSupported(f"parameter '{key}': {what}, as bytes of UTF-8, got {len(value.encode())}")
    if key in _COUNTS and value < 0:
        raise InvalidRequest(f"parameter '{key}': expected >= 0, got {value}")
    return value
