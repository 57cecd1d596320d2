"""What a request of a model that generates asks for.

Lives here: its prompt and parameters, checked. Must not: execute anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, runtime_checkable

import numpy as np

from paceline.backends.errors import ModelRefused
from paceline.backends.generation_totals import GenerationTotals
from paceline.backends.open_request import Parameters
from paceline.backends.sampling import Sampling
from paceline.backends.spec import Array, ModelSpec, Tensors, TensorSpec

__all__ = [
    "LATER",
    "MAX_TOKENS",
    "PARAMETERS",
    "SPEC",
    "Generates",
    "GenerationLimits",
    "Wanted",
    "read_request",
]

SPEC: Final = ModelSpec((TensorSpec("input_ids", "INT64", (-1,)),), (TensorSpec("output_ids", "INT64", (-1,)),))
"""What clients see of such a model."""


MAX_TOKENS: Final = 16
"""Of an answer, where neither its request nor its model says so; as in vLLM."""


@runtime_checkable
class Generates(Protocol):
    """A model whose answers grow token by token. Its instances answer openly (`backends.open_request`)."""

    totals: GenerationTotals

    @property
    def in_words(self) -> str:
        """How, for the log."""

    def check(self, inputs: Tensors, parameters: Parameters) -> None:
        """Raise ModelRefused for what can't be had, without executing anything. Callable on any thread."""


@dataclass(frozen=True, slots=True)
class GenerationLimits:
    """Of a model: the number of tokens that it knows, how many a prompt and its answer may have together, the tokens
    that end an answer, and how many it has if its request doesn't say."""

    vocabulary: int
    most_tokens: int
    end_tokens: tuple[int, ...] = ()
    max_tokens: int = MAX_TOKENS


class Wanted(NamedTuple):
    """A prompt, how to choose what follows, and how many tokens that is, at least and at most."""

    prompt: Array
    sampling: Sampling
    min_tokens: int
    max_tokens: int


_MOST = 2**63 - 1
PARAMETERS: Final = (
    "max_tokens", "min_tokens", "repetition_penalty", "seed", "temperature", "top_k", "top_p",
)  # fmt: skip
"""Those of a request that mean something to such a model."""
LATER: Final = (
    "exclude_input_in_output", "logprobs", "return_finish_reason", "sampling_parameters", "stop", "stream",
)  # fmt: skip
"""Those that will."""


def read_request(inputs: Tensors, parameters: Parameters, limits: GenerationLimits) -> Wanted:
    """Raises ModelRefused, naming the input or parameter, what was expected and what came."""
    prompt = inputs[0]
    if not prompt.size:
        raise _refused("input 'input_ids': expected at least one token, got none")
    least, largest = int(prompt.min()), int(prompt.max())
    if least < 0 or largest >= limits.vocabulary:
        got = least if least < 0 else largest
        raise _refused(f"input 'input_ids': expected tokens from 0 to {limits.vocabulary - 1}, got {got}")
    if prompt.size >= limits.most_tokens:
        raise _refused(
            f"input 'input_ids': expected at most {limits.most_tokens - 1} tokens, so that there is room for one "
            f"more, got {prompt.size}"
        )
    for name in LATER:
        if name in parameters:
            raise ModelRefused("UNIMPLEMENTED", f"parameter '{name}' is not supported by this build")
    seed = parameters.get("seed")
    sampling = Sampling(
        _number(parameters, "temperature", 0.0, lambda value: value >= 0, "a number from 0 on"),
        max(0, _integer(parameters, "top_k", 0, least=-1)),
        _number(parameters, "top_p", 1.0, lambda value: 0 < value <= 1, "a number above 0 up to 1"),
        _number(parameters, "repetition_penalty", 1.0, lambda value: value > 0, "a number above 0"),
        None if seed is None else _integer(parameters, "seed", 0),
    )
    max_tokens = _integer(parameters, "max_tokens", limits.max_tokens, least=1)
    min_tokens = _integer(parameters, "min_tokens", 0)
    if min_tokens > max_tokens:
        raise _refused(f"parameter 'min_tokens': expected at most max_tokens, {max_tokens}, got {min_tokens}")
    room = limits.most_tokens - prompt.size
    return Wanted(prompt.astype(np.int64), sampling, min_tokens, min(max_tokens, room))


def _integer(parameters: Parameters, name: str, default: int, least: int = 0) -> int:
    value = parameters.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
        raise _refused(f"parameter '{name}': expected an integer from {least} to {_MOST}, got {value!r}")
    return value


def _number(parameters: Parameters, name: str, default: float, allows: Callable[[float], bool], expected: str) -> float:
    value = parameters.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and allows(value)):
        raise _refused(f"parameter '{name}': expected {expected}, got {value!r}")
    return float(value)


def _refused(text: str) -> ModelRefused:
    return ModelRefused("INVALID_ARGUMENT", text)
