"""What a request of a model that generates asks for.

Lives here: its tensors, its prompt and its parameters, checked. Must not: execute anything. Names and defaults are
those of Triton's vLLM backend, where it has the thing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import numpy as np

from paceline.backends.errors import ModelRefused
from paceline.backends.generation_totals import GenerationTotals
from paceline.backends.open_request import Parameters
from paceline.backends.sampling import Sampling
from paceline.backends.spec import MISSING, Array, ModelSpec, Tensors, TensorSpec
from paceline.backends.text import Tokenizer

_FLAGS: Final = (
    "stream", "exclude_input_in_output", "return_logprobs", "return_cumulative_logprob", "return_finish_reason",
    "return_num_input_tokens", "return_num_output_tokens",
)  # fmt: skip
"""Inputs of a bool, which may be parameters as well. A `return_` asks for an optional output."""
OPTIONAL_OUTPUTS: Final = tuple(
    TensorSpec(name, datatype, (1,), optional=True)
    for name, datatype in (
        ("logprobs", "BYTES"),
        ("cumulative_logprob", "FP32"),
        ("finish_reason", "BYTES"),
        ("num_input_tokens", "UINT32"),
        ("num_output_tokens", "UINT32"),
    )
)
"""Only there if they are asked for."""
SPEC: Final = ModelSpec(
    (TensorSpec("input_ids", "INT64", (-1,)),), (TensorSpec("output_ids", "INT64", (-1,)), *OPTIONAL_OUTPUTS)
)
"""What clients see of such a model."""
TEXT_SPEC: Final = ModelSpec(
    (
        TensorSpec("input_ids", "INT64", (-1,), optional=True),
        TensorSpec("text_input", "BYTES", (1,), optional=True),
        TensorSpec("sampling_parameters", "BYTES", (1,), optional=True),
        *(TensorSpec(name, "BOOL", (1,), optional=True) for name in _FLAGS),
    ),
    (*SPEC.outputs, TensorSpec("text_output", "BYTES", (1,))),
)
"""The same with a tokenizer."""

MAX_TOKENS: Final = 16
"""Of an answer, where neither its request nor its model says so; as in vLLM."""

_MOST = 2**63 - 1
_MOST_LOGPROBS = 20
SHORT = 256
"""Texts of so many characters have tokens in 150 us, no more than handing them to a thread and back costs."""
_MOST_STOPS, _LONGEST_STOP = 16, 256
"""Each token's text is searched for each."""

_SAMPLING: Final = (
    "ignore_eos", "logprobs", "max_tokens", "min_tokens", "repetition_penalty", "seed", "stop", "temperature", "top_k",
    "top_p",
)  # fmt: skip
PARAMETERS: Final = (*_SAMPLING, *_FLAGS)
"""Those of a request that mean something to such a model."""
UNSUPPORTED: Final[Mapping[str, object]] = {
    "best_of": 1,
    "frequency_penalty": 0,
    "include_stop_str_in_output": False,
    "min_p": 0,
    "n": 1,
    "presence_penalty": 0,
    "skip_special_tokens": True,
    "stop_token_ids": [],
}
"""Those of vLLM that may only have the value that changes nothing."""


@runtime_checkable
class Generates(Protocol):
    """A model whose answers grow token by token. Its instances answer openly (`open_request`). On any thread."""

    totals: GenerationTotals

    @property
    def in_words(self) -> str:
        """How, for the log."""

    @property
    def together(self) -> int:
        """How many requests an instance takes at a time."""

    def read(self, inputs: Tensors, parameters: Parameters) -> Wanted:
        """Raises ModelRefused for what can't be had. The prompt of a long text isn't there yet."""

    def with_prompt(self, wanted: Wanted) -> Wanted:
        """With a prompt made of its text. Blocks for as long as the text is long; raises ModelRefused."""


@dataclass(frozen=True, slots=True)
class GenerationLimits:
    """Of a model: the number of tokens that it knows, how many a prompt and its answer may have together, the tokens
    that end an answer, and how many it has if its request doesn't say; its tokenizer, if it has one."""

    vocabulary: int
    most_tokens: int
    end_tokens: tuple[int, ...] = ()
    max_tokens: int = MAX_TOKENS
    tokenizer: Tokenizer | None = None

    @property
    def spec(self) -> ModelSpec:
        return SPEC if self.tokenizer is None else TEXT_SPEC


class Wanted(NamedTuple):
    """A prompt, how to choose what follows, and how many tokens that is, at least and at most. A prompt that came as
    `text` is None until that has tokens; None: it came as tokens.

    `stop`: texts before which the answer ends. `outputs`: which of those that are optional. `logprobs`: of how many of
    the likeliest tokens, besides the one chosen; None: of none. `streams`: whether there is an answer for each token,
    if its caller takes that. `excludes_input`: whether the prompt is left out of the text; None if it doesn't say.
    `source`: what goes into the model's encoder, if it has one; a text until that has tokens."""

    prompt: Array | None
    sampling: Sampling
    min_tokens: int
    max_tokens: int
    text: str | None = None
    stop: tuple[str, ...] = ()
    outputs: frozenset[str] = frozenset()
    logprobs: int | None = None
    streams: bool = True
    excludes_input: bool | None = None
    ignores_ends: bool = False
    source: Array | str | None = None


def read_request(inputs: Tensors, parameters: Parameters, limits: GenerationLimits) -> Wanted:
    """A request of a model of `limits.spec`, without tokens if its text is long. ModelRefused names what is wrong."""
    ids, text, sampling, *flags = inputs if len(inputs) > 1 else (inputs[0], MISSING, MISSING)
    if (ids is MISSING) == (text is MISSING):
        came = "neither" if ids is MISSING else "both"
        raise _refused(f"expected either input 'input_ids' or input 'text_input', got {came}")
    said: dict[str, Any] = {**parameters}
    if sampling is not MISSING:
        said |= _sampling_parameters(sampling[0])
    said |= {name: bool(flag[0]) for name, flag in zip(_FLAGS, flags, strict=False) if flag is not MISSING}
    for name in UNSUPPORTED.keys() & said.keys():
        changes_nothing = UNSUPPORTED[name]
        value = said[name] if isinstance(changes_nothing, (bool, list)) else _plain(said[name], float)
        if value != changes_nothing:
            raise ModelRefused("UNIMPLEMENTED", f"parameter '{name}' is not supported by this build")
    # vLLM's backend has an output of its own for them; who doesn't speak its language wants them if he asks for them.
    implied = {"return_logprobs": True} if sampling is MISSING and "logprobs" in said else {}
    wanted = _wanted(implied | said, None if text is MISSING else text_of(text[0], limits), limits)
    if wanted.text is None:
        return with_tokens(wanted, ids, limits)
    return with_prompt(wanted, limits) if len(wanted.text) <= SHORT else wanted


def with_tokens(wanted: Wanted, tokens: Array, limits: GenerationLimits) -> Wanted:
    """With `tokens` for its prompt. Raises ModelRefused."""
    name = "input_ids" if wanted.text is None else "text_input"
    if not tokens.size:
        raise _refused(f"input '{name}': expected at least one token, got none")
    least, largest = int(tokens.min()), int(tokens.max())
    if least < 0 or largest >= limits.vocabulary:
        got = least if least < 0 else largest
        raise _refused(f"input '{name}': expected tokens from 0 to {limits.vocabulary - 1}, got {got}")
    if tokens.size >= limits.most_tokens:
        raise _refused(
            f"input '{name}': expected at most {limits.most_tokens - 1} tokens, so that there is room for one more, "
            f"got {tokens.size}"
        )
    room = limits.most_tokens - tokens.size
    return wanted._replace(prompt=tokens.astype(np.int64), max_tokens=min(wanted.max_tokens, room))


def with_prompt(wanted: Wanted, limits: GenerationLimits) -> Wanted:
    """With a prompt made of its text, if it hasn't one. Blocks for as long as the text is long; raises ModelRefused."""
    if wanted.prompt is not None:
        return wanted
    assert limits.tokenizer is not None
    assert wanted.text is not None
    return with_tokens(wanted, np.array(limits.tokenizer.encode(wanted.text), np.int64), limits)


def _wanted(said: Mapping[str, Any], text: str | None, limits: GenerationLimits) -> Wanted:
    """What it says, and the default for what it doesn't."""
    seed, logprobs = said.get("seed"), said.get("logprobs")
    sampling = Sampling(
        _number(said, "temperature", 0.0, lambda value: value >= 0, "a number from 0 on"),
        max(0, _integer(said, "top_k", 0, least=-1)),
        _number(said, "top_p", 1.0, lambda value: 0 < value <= 1, "a number above 0 up to 1"),
        _number(said, "repetition_penalty", 1.0, lambda value: value > 0, "a number above 0"),
        None if seed is None else _integer(said, "seed", 0),
    )
    max_tokens = _integer(said, "max_tokens", limits.max_tokens, least=1)
    min_tokens = _integer(said, "min_tokens", 0)
    if min_tokens > max_tokens:
        raise _refused(f"parameter 'min_tokens': expected at most max_tokens, {max_tokens}, got {min_tokens}")
    stop = _stop(said.get("stop", []))
    if stop and limits.tokenizer is None:
        raise _refused("parameter 'stop': expected none, as the model has no tokenizer")
    streams = _flag(said, "stream", text is None)
    excludes_input = _flag(said, "exclude_input_in_output", None)
    if excludes_input is False and (streams or text is None):
        why = "the prompt is no text" if text is None else "false is not allowed when streaming"
        raise _refused(f"'exclude_input_in_output': expected true, got false: {why}")
    return Wanted(
        None,
        sampling,
        min_tokens,
        max_tokens,
        text,
        stop,
        frozenset(one.name for one in OPTIONAL_OUTPUTS if _flag(said, f"return_{one.name}", False)),
        None if logprobs is None else _integer(said, "logprobs", 0, most=_MOST_LOGPROBS),
        bool(streams),
        excludes_input,
        bool(_flag(said, "ignore_eos", False)),
    )


def text_of(text: bytes, limits: GenerationLimits) -> str:
    """A prompt's text. Raises ModelRefused."""
    assert limits.tokenizer is not None
    most = limits.most_tokens * limits.tokenizer.most_bytes
    if len(text) > most:  # whatever its tokens are, they are too many
        raise _refused(
            f"input 'text_input': expected at most {most} bytes, as the model has room for {limits.most_tokens} tokens "
            f"of up to {limits.tokenizer.most_bytes} bytes, got {len(text)}"
        )
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise _refused(f"input 'text_input': expected UTF-8, got {error}") from None


def _sampling_parameters(text: bytes) -> dict[str, Any]:
    try:
        said = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refused(f"input 'sampling_parameters': expected a JSON object: {error}") from None
    if not isinstance(said, dict):
        raise _refused("input 'sampling_parameters': expected a JSON object, got another value")
    if others := said.keys() - {*_SAMPLING, *UNSUPPORTED}:
        raise _refused(f"input 'sampling_parameters': expected some of {list(_SAMPLING)}, got '{min(others)}'")
    return {name: value for name, value in said.items() if value is not None}


def _stop(said: object) -> tuple[str, ...]:
    """A text; several as a list, which may itself be JSON in a text. A text that is no such list is literal."""
    texts = said
    if isinstance(said, str):
        texts = [said]
        with suppress(ValueError, RecursionError):
            if isinstance(several := json.loads(said), list):
                texts = several
    if not (isinstance(texts, list) and all(isinstance(one, str) and 0 < len(one) <= _LONGEST_STOP for one in texts)):
        raise _refused(f"parameter 'stop': expected texts of 1 to {_LONGEST_STOP} characters, got {said!r}")
    if len(texts) > _MOST_STOPS:
        raise _refused(f"parameter 'stop': expected at most {_MOST_STOPS} texts, got {len(texts)}")
    return tuple(texts)


def _flag(said: Mapping[str, Any], name: str, default: bool | None) -> bool | None:
    value = said.get(name, default)
    if value is not None and not isinstance(value, bool):
        raise _refused(f"parameter '{name}': expected true or false, got {value!r}")
    return value


def _integer(said: Mapping[str, Any], name: str, default: int, least: int = 0, most: int = _MOST) -> int:
    value = _plain(said.get(name, default), int)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise _refused(f"parameter '{name}': expected an integer from {least} to {most}, got {value!r}")
    return value


def _number(
    said: Mapping[str, Any], name: str, default: float, allows: Callable[[float], bool], expected: str
) -> float:
    value = _plain(said.get(name, default), float)
    if isinstance(value, int) and not isinstance(value, bool):
        with suppress(OverflowError):  # a whole number that is too large is none that is allowed
            value = float(value)
    if not isinstance(value, float) or not (math.isfinite(value) and allows(value)):
        raise _refused(f"parameter '{name}': expected {expected}, got {value!r}")
    return value


def _plain(value: object, kind: Callable[[str], object]) -> object:
    """A number that came as a text, as clients of vLLM's backend send them."""
    if isinstance(value, str):
        with suppress(ValueError):
            return kind(value)
    return value


def _refused(text: str) -> ModelRefused:
    return ModelRefused("INVALID_ARGUMENT", text)
